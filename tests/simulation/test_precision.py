"""Mixed precision changes the last digits of what is learned, and nothing that is kept, tested or handed out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pfedvem import Federation, Model, fit, tree
from pfedvem.algorithms import METHODS, FedAvg, PerFedAvg
from pfedvem.errors import UserError
from pfedvem.simulation.executors import Processes, Sequential, Vectorised
from pfedvem.simulation.rounds import State, start
from pfedvem.simulation.work import Job, Setup, perform, score_clients
from tests.conftest import blobs
from tests.simulation.test_executors import run

CLIENTS = (0, 1, 2)


def images() -> Federation:
    """Images of 6 x 6 with 48 channels, whose convolutions have weight gradients of their own."""
    draw = torch.Generator().manual_seed(0)
    parts = []
    for n in (30, 21, 9):
        y = torch.arange(2 * n) % 3
        x = torch.randn(2 * n, 48, 6, 6, generator=draw) + y.view(-1, 1, 1, 1) / 2
        parts.append((x[:n], y[:n], x[n:], y[n:]))
    return Federation.from_clients(parts)


def network(kind: str) -> Model:
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(48, 8, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
    ]
    if kind == "any":  # normalisation is no layer that is known to run a cohort at once
        layers.insert(1, nn.GroupNorm(2, 8))
    return Model(nn.Sequential(*layers, nn.Linear(16, 3)))


def weights(values: object) -> Tensor:
    """All numbers of a tree in one row."""
    return torch.cat([leaf.flatten() for leaf in tree.leaves(values)])


def learned(state: State) -> Tensor:
    return weights({"server": state.server, "clients": state.clients})


@pytest.mark.parametrize("kind", ["known", "any"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_learned_differs_by_rounding_alone_and_is_kept_in_full(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pfedvem.layers.PATCHES", True)  # whatever this processor is
    federation, model = images(), network(kind)
    model.check(federation.train.x[:2])
    setup = Setup(METHODS[name](), model, federation, 0)
    mixed = replace(setup, precision="bfloat16")
    full, rough = run(Vectorised(setup), 1), run(Vectorised(mixed), 1)
    leaves = [*tree.leaves(rough.server), *tree.leaves(rough.clients)]
    assert all(leaf.dtype == torch.float32 for leaf in leaves if leaf.is_floating_point())
    # Adam moves a weight by its gradient's sign more than by its size, and the sign of a small one is soon lost.
    most = 0.3 if name in ("local", "pfedbayes", "perfedavg") else 0.1
    begun, exact, near = (learned(state) for state in (start(setup), full, rough))
    assert 0 < (near - exact).norm() < most * (exact - begun).norm()


def test_cohorts_and_processes_give_the_numbers_of_clients_alone() -> None:
    model, federation = network("known"), images()
    setup = Setup(FedAvg(lr=0.03), model, federation, 0, precision="bfloat16")
    alone, together = run(Sequential(setup)), run(Vectorised(setup, 3))
    moved = weights(alone.server) - weights(start(setup).server)
    assert (weights(together.server) - weights(alone.server)).norm() < 0.05 * moved.norm()
    with Processes(setup, 2, 3) as place:
        assert torch.equal(weights(run(place).server), weights(together.server))


def test_a_head_is_trained_in_full_precision() -> None:
    model = Model(nn.Linear(4, 3))
    for name in METHODS:
        setup = Setup(METHODS[name](), model, blobs((20, 9, 14)), 0)
        full, mixed = (run(Vectorised(replace(setup, precision=kind))) for kind in ("float32", "bfloat16"))
        torch.testing.assert_close(learned(mixed), learned(full), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["pfedvem", "perfedavg", "fedper"])
def test_models_are_tested_in_full_precision(name: str) -> None:
    model, federation = network("known"), images()
    setup = Setup(METHODS[name](), model, federation, 0, precision="bfloat16")
    state = start(setup)
    job = Job(0, CLIENTS, upload=True, evaluate=True, take=True)
    done = perform(setup, setup.algorithm.down(state.server), tree.take(state.clients, CLIENTS), job)
    assert done.models is not None
    assert done.scores is not None
    assert torch.equal(done.scores.nll, score_clients(setup, done.models.mean, CLIENTS).nll)


def test_a_hessian_by_differences_is_computed_in_full_precision() -> None:
    """Rounding of a gradient, divided by delta, would be larger than the step; so is a kink, and there is none."""
    smooth = nn.Sequential(nn.Conv2d(48, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3))
    model, federation = Model(smooth), images()
    steep = PerFedAvg(alpha=0.05, beta=0.01, delta=1e-4, steps=3)
    steps = []
    for kind in ("float32", "bfloat16"):
        setup = Setup(steep, model, federation, 0, precision=kind)
        state = start(setup)
        job = Job(0, CLIENTS, upload=True)
        done = perform(setup, steep.down(state.server), tree.take(state.clients, CLIENTS), job)
        steps.append(weights(done.up.params) - weights(tree.expand(model.initial, 3)))
    assert (steps[1] - steps[0]).norm() < 0.2 * steps[0].norm()


def test_a_run_goes_on_in_its_own_precision_only(tmp_path: Path) -> None:
    model, federation = network("known"), images()
    fit(FedAvg(), model, federation, rounds=1, out=tmp_path, precision="bfloat16")
    with pytest.raises(UserError, match="precision"):
        fit(FedAvg(), model, federation, rounds=2, out=tmp_path, resume=True)
    result = fit(FedAvg(), model, federation, rounds=2, out=tmp_path, resume=True, precision="bfloat16")
    assert result.summary["rounds"] == 2


def test_a_precision_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="float32 or bfloat16, not 'half'"):
        fit(FedAvg(), network("known"), images(), precision="half")
