"""Numbers that are extreme but legal: every method trains to finite results, or says why it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms import METHODS
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.simulation.executors import executor
from pfedvem.simulation.fit import fit
from pfedvem.simulation.results import Result
from pfedvem.simulation.rounds import Progress, one_round, start
from pfedvem.simulation.work import Setup, score
from tests.conftest import blobs, small_network

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def changed(federation: Federation, change: Change) -> Federation:
    """The same clients with other data."""
    clients = []
    for j in range(len(federation)):
        train, test = federation.shards[j].train, federation.test_indices(j)
        x, y = change(federation.train.x[train], federation.train.y[train])
        clients.append((x, y, *change(federation.test.x[test], federation.test.y[test])))
    return Federation.from_clients(clients, classes=federation.classes, name="extreme")


CASES: dict[str, Callable[[], Federation]] = {
    "one class": lambda: changed(blobs((7, 12, 5)), lambda x, y: (x, torch.zeros_like(y))),
    "one sample each": lambda: blobs((1, 1, 1)),
    "one sample among many": lambda: blobs((1, 60, 60)),
    "constant features": lambda: changed(blobs((7, 12, 5)), lambda x, y: (torch.ones_like(x), y)),
    "blank features": lambda: changed(blobs((7, 12, 5)), lambda x, y: (torch.zeros_like(x), y)),
    "features times 1e6": lambda: changed(blobs((7, 12, 5)), lambda x, y: (1e6 * x, y)),
    "features times 1e-6": lambda: changed(blobs((7, 12, 5)), lambda x, y: (1e-6 * x, y)),
    "one sample copied": lambda: changed(blobs((7, 60, 5)), lambda x, y: (x[:1].expand_as(x), y[:1].expand_as(y))),
    "two clients": lambda: blobs((7, 12)),
    "one client": lambda: blobs((12,)),
}


SHORT = {"epochs": 2, "head_epochs": 2, "base_epochs": 2, "steps": 3, "inner_steps": 2, "samples": 2}


class Heard(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def trained(method: str, federation: Federation) -> tuple[Result | None, list[str]]:
    """A short training, and what it has to say."""
    heard = Heard()
    try:
        result = fit(
            METHODS[method].model_validate({key: SHORT[key] for key in SHORT if key in METHODS[method].model_fields}),
            small_network(),
            federation,
            rounds=3,
            participation=1.0,
            eval_every=1,
            executor="vectorised",
            progress=heard,
        )
    except UserError as error:
        return None, [str(error)]
    return result, heard.notes + result.warnings


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_training_ends_in_finite_numbers_or_says_why_not(method: str, case: str) -> None:
    result, said = trained(method, CASES[case]())
    if result is None:
        assert said
        return
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(result.state.server))
    assert bool(tree.finite(result.state.clients).all())
    last, algorithm = result.history[-1], result.setup.algorithm
    for model, there in (("pm", algorithm.personalised), ("gm", algorithm.global_model)):
        if there:
            assert all(last[f"{model}{score}"] is not None for score in ("", "_loss", "_ece", "_brier")) or said
            assert 0 <= (last[model] or 0) <= 100


@pytest.mark.parametrize("method", ["local", "fedper"])
def test_a_client_that_overflows_keeps_what_it_had_and_is_named(method: str) -> None:
    wild = METHODS[method].model_validate({"lr": 1e4})
    federation = changed(blobs((7, 12, 5)), lambda x, y: (1e6 * x if len(x) == 12 else x / 1e6, y))
    setup = Setup(wild, small_network(), federation, 0)
    before = start(setup)
    heard = Heard()
    with executor(setup, "vectorised") as place:
        after = one_round(before, 1.0, False, place, heard)
    assert "Round 1: client 1 has overflowed in training and keeps what it had." in heard.notes
    for old, new in zip(tree.leaves(before.clients), tree.leaves(after.clients), strict=True):
        assert torch.equal(old[1], new[1])
        assert bool(new.isfinite().all())


def test_a_prediction_that_is_no_number_is_not_right() -> None:
    federation = changed(blobs((7, 12, 5)), lambda x, y: (x, torch.zeros_like(y)))
    model = small_network()
    spoilt = tree.map(lambda leaf: leaf * torch.nan, tree.expand(model.initial, 1))
    found = score(Setup(METHODS["local"](), model, federation, 0), spoilt, federation.test_indices(0))
    assert found.accuracy == 0
