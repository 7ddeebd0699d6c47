"""The paper's networks, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pfedvem.errors import UserError
from pfedvem.models import Model
from pfedvem.rng import generator


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 100, for Fashion-MNIST."""
    inputs = int(torch.tensor(shape).prod())
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 100), nn.ReLU(), nn.Linear(100, classes))


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The LeNet-like network for CIFAR-10 and Digit-Five."""
    side = tuple(((s - 4) // 2 - 4) // 2 for s in shape[1:])
    if min(side) < 1:
        raise UserError(f"The network 'lenet' needs images of at least 16x16, not {shape[1]}x{shape[2]}.")
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5),
        nn.MaxPool2d(2),  # before the ReLU, which gives the same values for a quarter of its work
        nn.ReLU(),
        nn.Conv2d(16, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * side[0] * side[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def cnn6(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The six-layer network for CIFAR-100 and SUN397."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for width in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2, 2, padding=1), nn.ReLU()]
        channels = width
    layers += [nn.Conv2d(channels, 100, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(100, classes))


NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"mlp": mlp, "lenet": lenet, "cnn6": cnn6}


def build(name: str, shape: tuple[int, ...], classes: int, seed: int) -> Model:
    """One of the named networks, with PyTorch's own initialisation drawn from the seed."""
    if name not in NETWORKS:
        raise UserError(f"There is no network {name!r}; there are {', '.join(NETWORKS)}.")
    if name != "mlp" and len(shape) != 3:
        raise UserError(f"The network {name!r} needs images (channels, height, width), not inputs of shape {shape}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, "network").integers(2**63)))
        model = Model(NETWORKS[name](shape, classes))
    model.name = name
    return model
