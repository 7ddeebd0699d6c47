"""Layers for cohorts give what the network itself gives, client by client, gradients and all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfedvem.layers import PATCH_CHANNELS, cohort_layers, weight_gradient
from pfedvem.networks import cnn6, lenet, mlp


def body(network: nn.Module) -> nn.Sequential:
    """A network without its head."""
    return nn.Sequential(*list(network.children())[:-1])


with torch.random.fork_rng():
    torch.manual_seed(0)  # some weights bring a ReLU so near zero that rounding changes a gradient
    NETWORKS = {
        "mlp": (body(mlp((1, 6, 6), 3)), (1, 6, 6)),
        "lenet": (body(lenet((3, 16, 16), 3)), (3, 16, 16)),
        "cnn6": (body(cnn6((3, 16, 16), 3)), (3, 16, 16)),
        "no bias": (nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)), (5,)),
        "sequences": (nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 6)), (4, 8)),
        "sequences, no bias": (nn.Sequential(nn.Linear(8, 5, bias=False), nn.Tanh()), (3, 8)),
        "stride and groups": (
            nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.GELU(), nn.Flatten()),
            (4, 9, 9),
        ),
        "strided patches": (
            nn.Sequential(nn.Conv2d(PATCH_CHANNELS, 5, 3, stride=2, padding=1), nn.Flatten()),
            (48, 7, 6),
        ),
    }


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("cohort", [1, 3, 4])  # four is the batch size, too
@pytest.mark.parametrize("patches", [True, False])
def test_a_cohort_gets_what_each_client_gets_alone(
    name: str, cohort: int, patches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pfedvem.layers.PATCHES", patches)  # whatever this processor is
    base, shape = NETWORKS[name]
    rng = torch.Generator().manual_seed(0)
    theta = {
        key: (value + 0.1 * torch.randn(cohort, *value.shape, generator=rng)).detach().requires_grad_()
        for key, value in base.state_dict().items()
    }
    x = torch.randn(cohort, 4, *shape, generator=rng, requires_grad=True)
    alone = torch.cat([functional_call(base, {k: v[c] for k, v in theta.items()}, (x[c],)) for c in range(cohort)])
    layers = cohort_layers(base)
    assert layers is not None
    together = x.flatten(0, 1)
    if together.ndim == 4:
        together = together.contiguous(memory_format=torch.channels_last)
    for layer in layers:
        together = layer(theta, together)
    together = together.flatten(1)
    torch.testing.assert_close(together, alone.flatten(1), atol=1e-5, rtol=1e-4)

    def gradients(out: Tensor) -> list[Tensor]:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return list(torch.autograd.grad((out * weights).sum(), [x, *theta.values()]))

    for a, b in zip(gradients(together), gradients(alone.flatten(1)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (0, 0)), ((2, 1), (1, 0)), ((1, 3), (2, 1))])
def test_the_weight_gradient_by_patches_is_the_librarys(stride: tuple[int, int], padding: tuple[int, int]) -> None:
    x, w = torch.randn(3, 5, 9, 8), torch.randn(4, 5, 3, 2, requires_grad=True)
    out = nn.functional.conv2d(x, w, stride=stride, padding=padding)
    g = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, w, g)
    torch.testing.assert_close(weight_gradient(x, g, (3, 2), stride, padding), expected, atol=1e-4, rtol=1e-4)


def test_a_layer_that_comes_twice_is_computed_twice() -> None:
    act = nn.ReLU()
    layers = cohort_layers(nn.Sequential(act, nn.Linear(2, 2), act))
    assert layers is not None
    assert len(layers) == 3


def test_a_network_with_its_own_forward_is_no_plain_sequence() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * x

    assert cohort_layers(Scaled(nn.Linear(2, 2), nn.ReLU())) is None


def test_networks_with_other_layers_run_as_they_are() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert cohort_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    assert cohort_layers(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0))) is None
    assert cohort_layers(nn.Sequential(nn.Conv2d(1, 1, 3, padding="same"))) is None
    assert cohort_layers(Own()) is None
