"""Small federations whose answers are known, for all tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from pfedvem.data.federation import Federation
from pfedvem.models import Model

# Properties are tried on few examples in each run of the tests, and on many by --hypothesis-profile=thorough.
settings.register_profile(
    "few", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("thorough", settings.get_profile("few"), max_examples=3000)
settings.load_profile("few")


def blobs(sizes: tuple[int, ...], classes: int = 3, features: int = 4, seed: int = 0) -> Federation:
    """Clients of the given sizes that classify Gaussian blobs; the last client's labels are shifted by one."""
    rng = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, features, generator=rng)

    def draw(n: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(classes, (n,), generator=rng)
        return centres[y] + torch.randn(n, features, generator=rng), (y + shift) % classes

    shifts = [int(j == len(sizes) - 1 and j > 0) for j in range(len(sizes))]
    return Federation.from_clients(
        [(*draw(n, shift), *draw(20, shift)) for n, shift in zip(sizes, shifts, strict=True)],
        classes=[f"class {c}" for c in range(classes)],
        name="blobs",
    )


def small_network(features: int = 4, hidden: int = 5, classes: int = 3) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [torch.nn.Linear(features, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes)]
        return Model(torch.nn.Sequential(*layers))


@pytest.fixture
def federation() -> Federation:
    return blobs((7, 12, 1, 23))


@pytest.fixture
def model() -> Model:
    return small_network()
