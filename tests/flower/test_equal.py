"""The same seed and data give the same numbers in the simulator and on Flower, for every method."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from pfedvem import tree
from pfedvem.algorithms import METHODS, method
from pfedvem.flower.keeping import Keeping
from pfedvem.rng import START, Rng
from pfedvem.simulation.fit import fit
from tests.flower.conftest import SIZES, Place

# Fewer steps than by default, to save time.
QUICK = {"local": {"epochs": 2}, "perfedavg": {"steps": 3}, "pfedme": {"steps": 2}, "pfedbayes": {"epochs": 2}}


@pytest.mark.parametrize("name", [*METHODS, "examples.ditto:Ditto"])
def test_the_simulator_and_flower_end_with_the_same_server_clients_and_scores(
    name: str, place: Place, tmp_path: Path
) -> None:
    hyper = QUICK.get(name, {})
    place.config |= {"method": name, "gm": "average", **{f"algorithm.{key}": value for key, value in hyper.items()}}
    deployed = place.run()
    model = place.model
    simulated = fit(
        method(name)(**hyper),
        model,
        place.federation,
        rounds=3,
        participation=0.6,
        eval_every=2,
        executor="sequential",
        out=tmp_path / "simulated",
        gm="average",
    )
    models = [{"server": state.server, "average": state.average} for state in (deployed.state, simulated.state)]
    for a, b in zip(*map(tree.leaves, models), strict=True):
        torch.testing.assert_close(a, b)
    fresh = simulated.setup.algorithm.client_init(model, simulated.state.server, Rng(0, START, [0]))
    for j in range(len(SIZES)):
        kept, _ = Keeping(tmp_path / f"site-{j}", "test", j, simulated.setup.algorithm.name).load(3, fresh)
        expected = tree.take(simulated.state.clients, [j])
        # The simulator does not visit clients that have nothing to do; what they keep is what they started with.
        for a, b in zip(tree.leaves(fresh if kept is None else kept), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(deployed.state.scores.accuracy, simulated.state.scores.accuracy, equal_nan=True)
    for ours, theirs in zip(deployed.history, simulated.history, strict=True):
        for key in ("round", "pm", "gm", "pm_loss", "gm_loss"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-3)


def test_the_server_writes_the_files_of_the_simulator(place: Place, tmp_path: Path) -> None:
    place.run()
    fit(
        method("pfedvem")(),
        place.model,
        place.federation,
        rounds=3,
        participation=0.6,
        eval_every=2,
        out=tmp_path / "s",
    )

    def table(folder: str) -> list[dict[str, str]]:
        with open(tmp_path / folder / "clients.csv", newline="") as file:
            return list(csv.DictReader(file))

    assert table("out")[0].keys() == table("s")[0].keys()
    for ours, theirs in zip(table("out"), table("s"), strict=True):
        assert ours["client"] == f"site {theirs['client']}"
        assert ours["n_train"] == theirs["n_train"]
        assert float(ours["tau"]) == pytest.approx(float(theirs["tau"]), rel=1e-4)
    summaries = [json.loads((tmp_path / folder / "summary.json").read_text()) for folder in ("out", "s")]
    assert summaries[0].keys() == summaries[1].keys()
    assert summaries[0]["pm"] == pytest.approx(summaries[1]["pm"], abs=1e-3)
    assert (tmp_path / "out" / "config.toml").is_file()
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
