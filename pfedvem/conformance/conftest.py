"""The methods under test, and small federations whose answers are known."""

from __future__ import annotations

import pytest
import torch

from pfedvem.algorithms import METHODS, AnyAlgorithm, method
from pfedvem.data.federation import Federation
from pfedvem.models import Model


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "algorithm" in metafunc.fixturenames:
        names = metafunc.config.getoption("--method") or list(METHODS)
        metafunc.parametrize("algorithm", names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--method``, the tests of our own methods' maths run for the methods that are named."""
    names = config.getoption("--method")
    if names:
        kept = [i for i in items if i.path.name == "test_method.py" or any(name in i.nodeid.lower() for name in names)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture
def algorithm(request: pytest.FixtureRequest) -> AnyAlgorithm:
    return method(request.param)()


@pytest.fixture
def model() -> Model:
    return small_network()


def small_network() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))


@pytest.fixture
def federation() -> Federation:
    """Six clients of very different sizes, one of them with a single sample."""
    return drifting([7, 12, 1, 23, 5, 9])


def drifting(sizes: list[int], seed: int = 0) -> Federation:
    """Concept drift: all clients see the same inputs, but every other one calls each class by the next one's name."""
    rng = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(3, 4, generator=rng)

    def draw(n: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(3, (n,), generator=rng)
        return centres[y] + torch.randn(n, 4, generator=rng), (y + shift) % 3

    clients = [(*draw(n, j % 2), *draw(30, j % 2)) for j, n in enumerate(sizes)]
    return Federation.from_clients(clients, classes=("a", "b", "c"), name="drifting")
