"""The global model as an average over rounds: what it is, and that nothing is trained from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pfedvem import Federation, Model, fit, load, tree
from pfedvem.algorithms import METHODS, FedAvg, PFedVEM
from pfedvem.errors import UserError
from pfedvem.models import Params
from pfedvem.simulation.fit import Interrupted
from pfedvem.simulation.rounds import AVERAGED, Progress, State, averaged
from pfedvem.simulation.work import score_general

NETWORK = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class Follow(Progress):
    """Keeps the global model of every round, and may stop after one."""

    def __init__(self, stop: int | None = None) -> None:
        self.models: list[Any] = []
        self.stop = stop

    def round(self, state: State) -> None:
        self.models.append(state.server)
        if state.round == self.stop:
            raise KeyboardInterrupt


def value(number: float) -> Params:
    return Params({"base": torch.tensor([float(number)])}, torch.tensor([float(number)]))


def same(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def test_the_first_ten_models_count_alike_and_then_the_newest_counts_a_tenth() -> None:
    average: Params | None = value(100.0)  # the initial network, which counts nothing once there is a merged one
    for number in range(1, AVERAGED + 1):
        average = averaged(FedAvg(), average, value(number), number)
        assert average is not None
        assert average.w.item() == pytest.approx((number + 1) / 2)
    average = averaged(FedAvg(), average, value(25.5), AVERAGED + 1)
    assert average is not None
    assert average.w.item() == pytest.approx(0.9 * 5.5 + 0.1 * 25.5)
    assert average.theta["base"].item() == pytest.approx(7.5)


def test_it_is_the_mean_of_the_merged_models_and_is_what_is_tested(model: Model, federation: Federation) -> None:
    follow = Follow()
    result = fit(FedAvg(), model, federation, rounds=4, participation=0.5, progress=follow, gm="average")
    mean = tree.map(lambda *models: torch.stack(models).mean(0), *follow.models)
    assert result.state.average is not None
    for a, b in zip(tree.leaves(result.state.average), tree.leaves(mean), strict=True):
        torch.testing.assert_close(a, b)
    assert result.summary["gm"] == pytest.approx(100 * score_general(result.setup, mean).accuracy, abs=1e-3)
    assert result.summary["gm_nll"] == pytest.approx(score_general(result.setup, mean).nll, abs=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_training_and_personalised_models_are_the_same_with_it(name: str, model: Model, federation: Federation) -> None:
    results = [
        fit(METHODS[name](), model, federation, rounds=3, participation=0.5, gm=gm) for gm in ("last", "average")
    ]
    assert same(results[0].state.server, results[1].state.server)
    assert same(results[0].state.clients, results[1].state.clients)
    assert results[0].summary["pm"] == results[1].summary["pm"]
    if METHODS[name].global_model:
        assert results[0].summary["gm_nll"] != results[1].summary["gm_nll"]
    else:
        assert results[1].state.average is None
        assert results[1].summary["gm"] is None


def test_it_varies_less_than_what_is_merged() -> None:
    """Where merged models are noise around one, by a / (2 - a) of their variance for a share of a = 1/10."""
    draw, average, last = torch.Generator().manual_seed(0), value(0.0), []
    far: list[float] = []
    for number in range(1, 2001):
        merged = value(float(torch.randn((), generator=draw)))
        average = averaged(FedAvg(), average, merged, number) or average
        if number > 100:
            far.append(average.w.item())
            last.append(merged.w.item())
    ratio = Tensor(far).var() / Tensor(last).var()
    assert float(ratio) == pytest.approx(0.1 / 1.9, rel=0.25)


@pytest.mark.parametrize("stop", [1, 3])
def test_interrupted_and_resumed_is_bit_for_bit_the_straight_run(
    stop: int, model: Model, federation: Federation, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rounds": 5, "participation": 0.5, "gm": "average"}
    straight = fit(PFedVEM(), model, federation, **options)
    with pytest.raises(Interrupted):
        fit(PFedVEM(), model, federation, out=tmp_path, progress=Follow(stop), **options)
    resumed = fit(PFedVEM(), model, federation, out=tmp_path, resume=True, **options)
    assert same(straight.state.average, resumed.state.average)
    assert straight.summary["gm_nll"] == resumed.summary["gm_nll"]


def test_a_saved_model_is_the_average_and_the_next_run_there_leaves_nothing_of_it(
    federation: Federation, tmp_path: Path
) -> None:
    x = torch.randn(7, 4)
    result = fit(FedAvg(), NETWORK, federation, rounds=3, participation=0.5, gm="average")
    average, last = result.predict(None, x), load(result.save(tmp_path), model=NETWORK).predict(None, x)
    torch.testing.assert_close(average.probabilities, last.probabilities)
    stored = safetensors.torch.load_file(tmp_path / "model" / "general.safetensors")
    assert result.state.average is not None
    assert stored.keys() == tree.named(result.state.average).keys()

    plain = fit(FedAvg(), NETWORK, federation, rounds=3, participation=0.5)
    other = load(plain.save(tmp_path), model=NETWORK).predict(None, x)
    assert not (tmp_path / "model" / "general.safetensors").exists()
    torch.testing.assert_close(other.probabilities, plain.predict(None, x).probabilities)
    assert not torch.allclose(other.probabilities, average.probabilities)


def test_a_damaged_average_is_refused(federation: Federation, tmp_path: Path) -> None:
    fit(FedAvg(), NETWORK, federation, rounds=1, gm="average").save(tmp_path)
    (tmp_path / "model" / "general.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"general.safetensors is damaged"):
        load(tmp_path, model=NETWORK)


def test_a_run_goes_on_with_its_own_global_model_only(model: Model, federation: Federation, tmp_path: Path) -> None:
    fit(FedAvg(), model, federation, rounds=1, out=tmp_path)
    with pytest.raises(UserError, match=r"gm \(was None, now 'average'\)"):
        fit(FedAvg(), model, federation, rounds=2, out=tmp_path, resume=True, gm="average")


def test_a_checkpoint_of_a_version_without_averages_is_gone_on_from(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    fit(FedAvg(), model, federation, rounds=2, participation=0.5, out=tmp_path)
    for path in (tmp_path / "checkpoint").glob("*/state.safetensors"):
        tensors = safetensors.torch.load_file(path)
        kept = {name: leaf for name, leaf in tensors.items() if not name.startswith("average.")}
        assert len(kept) < len(tensors)
        path.write_bytes(safetensors.torch.save(kept))
        manifest = json.loads((path.parent / "manifest.json").read_text())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        del manifest["seal"]
        (path.parent / "manifest.json").write_text(json.dumps({**manifest, "format": 1, "sha256": digest}))
    result = fit(FedAvg(), model, federation, rounds=3, participation=0.5, out=tmp_path, resume=True)
    assert same(result.state.average, result.state.server)  # it begins anew, with the newest


def test_a_global_model_that_does_not_exist(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match="gm must be last or average, not 'best'"):
        fit(FedAvg(), model, federation, gm="best")
