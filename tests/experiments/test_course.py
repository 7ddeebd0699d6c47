"""What is watched between evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pfedvem import UserError, tree
from pfedvem.data import load_federation
from pfedvem.experiments.config import Config, load
from pfedvem.experiments.course import Probe, refuse_divergence
from pfedvem.experiments.run import train
from pfedvem.simulation.rounds import Progress, State

SMALL = {"rounds": 2, "eval_every": 1, "participation": 0.5, "executor": "vectorised", "alone": False}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))


def followed(method: str) -> tuple[Config, list[State], list[dict[str, Any]]]:
    """The states after each round, and what the run itself measured."""
    states: list[State] = []

    class Follow(Progress):
        def round(self, state: State) -> None:
            states.append(state)

    config = load(flags={**SMALL, "method": method, "data": {"clients": 4, "train_samples": 200}})
    return config, states, train(config, progress=Follow()).history


def test_the_global_model_scores_as_in_an_evaluation() -> None:
    config, states, history = followed("fedavg")
    probe = Probe(config, load_federation(config.data, config.seed))
    assert [probe.global_model(state) for state in states] == pytest.approx([record["gm"] for record in history])


def test_a_method_without_a_global_model_has_no_score() -> None:
    config, states, _ = followed("fedper")
    assert Probe(config, load_federation(config.data, config.seed)).global_model(states[-1]) is None


def test_a_server_that_is_not_finite_ends_the_run() -> None:
    _, states, _ = followed("fedavg")
    refuse_divergence(states[-1])
    broken = replace(states[-1], server=tree.map(lambda leaf: leaf * float("nan"), states[-1].server))
    with pytest.raises(UserError, match="diverged in round 2"):
        refuse_divergence(broken)
