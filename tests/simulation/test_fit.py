"""A run as a user has it: files, checkpoints, interruption, resuming."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import tomllib
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console

from pfedvem import FedAvg, Federation, Local, Model, PFedVEM, Progress, Result, UserError, fit
from pfedvem.report.run import summary_table
from pfedvem.simulation.fit import Interrupted
from pfedvem.simulation.rounds import State


def train(model: Model, federation: Federation, out: Path | None, rounds: int = 6, **options: Any) -> Result:
    algorithm = options.pop("algorithm", PFedVEM(lr_head=0.01, lr_base=0.02, base_epochs=2))
    return fit(algorithm, model, federation, rounds=rounds, participation=0.5, eval_every=2, out=out, **options)


class StopAfter(Progress):
    """Presses Ctrl-C in the middle of the round that follows the given one."""

    def __init__(self, round: int) -> None:
        self.left = round

    def client(self, done: int, clients: int) -> None:
        if self.left == 0 and done == 2:
            raise KeyboardInterrupt

    def round(self, state: State) -> None:
        self.left -= 1


class Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "model").iterdir())}


def summary(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    del values["seconds"]
    return values


def test_a_run_leaves_all_its_files(model: Model, federation: Federation, tmp_path: Path) -> None:
    result = train(model, federation, tmp_path / "run", alone=Local(lr=0.01))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [2, 4, 6]
    scores = {f"{model}_{name}" for model in ("pm", "gm") for name in ("loss", "ece", "brier")}
    assert set(lines[0]) == {"round", "pm", "gm", *scores, "seconds"}
    rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").read_text().splitlines()))
    assert [int(row["n_train"]) for row in rows] == [7, 12, 1, 23]
    for row in rows:
        assert float(row["tau"]) * (float(row["uncertainty"]) + float(row["deviation"])) == pytest.approx(1, rel=1e-4)
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved == result.summary
    assert saved["pm"] == pytest.approx(sum(float(row["pm"]) for row in rows) / 4, abs=1e-3)
    assert saved["small_clients_pm"] == float(rows[2]["pm"])
    assert saved["alone_pm"] == pytest.approx(sum(float(row["alone"]) for row in rows) / 4, abs=1e-3)
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["algorithm"]["lr_head"] == 0.01
    server = safetensors.torch.load_file(tmp_path / "run" / "model" / "server.safetensors")
    clients = safetensors.torch.load_file(tmp_path / "run" / "model" / "clients.safetensors")
    assert torch.equal(server["w"], result.state.server.w)
    assert {"theta.0.weight", "theta.0.bias"} < set(server)
    assert clients["mu"].shape == clients["sigma"].shape == (4, 3, 6)
    assert clients["tau"].shape == (4,)


def test_two_checkpoints_are_kept(model: Model, federation: Federation, tmp_path: Path) -> None:
    train(model, federation, tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["round-00005", "round-00006"]


def test_checkpoints_come_every_so_many_rounds_and_after_the_last(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    train(model, federation, tmp_path, rounds=5, checkpoint_every=3)
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["round-00003", "round-00005"]


def test_metrics_are_written_as_rounds_are_evaluated_whether_or_not_there_is_a_checkpoint(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    seen = []

    class Look(Progress):
        def round(self, state: State) -> None:
            seen.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))

    train(model, federation, tmp_path, checkpoint_every=5, progress=Look())
    assert seen == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
@pytest.mark.parametrize("every", [1, 4])
def test_interrupted_and_resumed_is_bit_for_bit_the_straight_run(
    model: Model, federation: Federation, tmp_path: Path, stop: int, every: int
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(model, federation, straight, checkpoint_every=every)
    with pytest.raises(Interrupted) as stopped:
        train(model, federation, broken, checkpoint_every=every, progress=StopAfter(stop))
    assert stopped.value.rounds == stop
    train(model, federation, broken, checkpoint_every=every, resume=True)
    assert files(straight) == files(broken)
    assert summary(straight) == summary(broken)
    assert (straight / "clients.csv").read_bytes() == (broken / "clients.csv").read_bytes()


def test_a_finished_run_can_be_given_more_rounds(model: Model, federation: Federation, tmp_path: Path) -> None:
    train(model, federation, tmp_path / "a", rounds=6)
    train(model, federation, tmp_path / "b", rounds=4)
    train(model, federation, tmp_path / "b", rounds=6, resume=True)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_resuming_a_finished_run_writes_its_files_again(model: Model, federation: Federation, tmp_path: Path) -> None:
    train(model, federation, tmp_path)
    before = files(tmp_path), summary(tmp_path)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "summary.json").unlink()
    train(model, federation, tmp_path, resume=True)
    assert (files(tmp_path), summary(tmp_path)) == before


def test_resuming_without_a_checkpoint_starts_anew_and_says_so(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    notes = Notes()
    train(model, federation, tmp_path / "new", resume=True, progress=notes)
    assert "starting from the first round" in notes.texts[0]
    assert (tmp_path / "new" / "summary.json").exists()


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    elif how == "no json":
        (path.parent / "manifest.json").write_text("{")
    elif how == "other version":
        manifest = json.loads((path.parent / "manifest.json").read_text())
        (path.parent / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "no json", "other version", "missing"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    model: Model, federation: Federation, tmp_path: Path, how: str
) -> None:
    train(model, federation, tmp_path)
    before, notes = files(tmp_path), Notes()
    damage(tmp_path / "checkpoint" / "round-00006" / "state.safetensors", how)
    train(model, federation, tmp_path, resume=True, progress=notes)
    assert "round-00006 is damaged" in notes.texts[0]
    assert "Going on after round 5" in notes.texts[1]
    assert files(tmp_path) == before


def test_if_all_checkpoints_are_damaged_nothing_is_overwritten(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    train(model, federation, tmp_path)
    for path in (tmp_path / "checkpoint").glob("*/state.safetensors"):
        damage(path, "flipped")
    with pytest.raises(UserError, match=r"checksum does not match.*another --out"):
        train(model, federation, tmp_path, resume=True)
    assert (tmp_path / "summary.json").exists()


def test_a_file_that_is_no_checkpoint_is_refused(model: Model, federation: Federation, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "holiday.jpg").write_bytes(b"beach")
    with pytest.raises(UserError, match=r"holiday.jpg is no checkpoint"):
        train(model, federation, tmp_path, resume=True)
    (tmp_path / "file").write_text("no run")
    with pytest.raises(UserError, match="is a file, not the folder of a run"):
        train(model, federation, tmp_path / "file", resume=True)


def test_other_settings_or_other_data_are_refused_by_name(model: Model, federation: Federation, tmp_path: Path) -> None:
    from tests.conftest import blobs

    train(model, federation, tmp_path)
    other = PFedVEM(lr_head=0.02, lr_base=0.02, base_epochs=2)
    differing = r"other settings: algorithm.lr_head \(was 0.01, now 0.02\), seed \(was 0, now 1\)"
    with pytest.raises(UserError, match=differing):
        train(model, federation, tmp_path, resume=True, algorithm=other, seed=1)
    with pytest.raises(UserError, match="data"):
        train(model, blobs((7, 12, 1, 23), seed=5), tmp_path, resume=True)
    with pytest.raises(UserError, match=r"method \(was 'pfedvem', now 'fedavg'\)"):
        train(model, federation, tmp_path, resume=True, algorithm=FedAvg())


def test_fewer_rounds_than_there_are_is_refused(model: Model, federation: Federation, tmp_path: Path) -> None:
    train(model, federation, tmp_path)
    for rounds in (3, 5):
        with pytest.raises(UserError, match="has 6 rounds already"):
            train(model, federation, tmp_path, rounds=rounds, resume=True)


def test_a_folder_that_holds_a_run_is_not_overwritten(model: Model, federation: Federation, tmp_path: Path) -> None:
    train(model, federation, tmp_path)
    with pytest.raises(UserError, match="holds a run already; go on with --resume"):
        train(model, federation, tmp_path)


def test_methods_without_a_personal_or_global_model_leave_a_null(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    averaged = train(model, federation, tmp_path / "fedavg", algorithm=FedAvg()).summary
    assert averaged["pm"] is averaged["pm_sem"] is None
    assert averaged["gm"] is not None
    alone = train(model, federation, tmp_path / "local", rounds=1, algorithm=Local()).summary
    assert alone["pm"] is not None
    assert alone["gm"] is None


def test_a_client_that_overflows_is_reported(model: Model, federation: Federation) -> None:
    federation.train.x[federation.shards[2].train] = 1e30
    notes = Notes()
    result = train(model, federation, None, rounds=1, progress=notes, seed=3)
    assert result.clients["discarded"].iloc[2] == 1
    assert "1 clients overflowed" in result.warnings[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": -1}, "rounds must be at least 1, not -1"),
        ({"eval_every": -1}, "eval_every must be at least 0"),
        ({"participation": 0.0}, "participation must be above 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"cohort": -3}, "cohort must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": None}, "seed must be a whole number, not None"),
        ({"rounds": 2.5}, "rounds must be a whole number, not 2.5"),
        ({"alone": True}, r"fit takes alone=Local\(\), not True"),
        ({"guard": "median"}, "fit takes a guard such as .* not 'median'"),
        ({"callbacks": print}, "fit takes a list of callbacks"),
        ({"algorithm": PFedVEM}, r"fit takes an algorithm such as PFedVEM\(\)"),
        ({"federation": {}}, "fit takes a federation"),
        ({"resume": True}, "say where they are by out="),
        ({"seed": 2**63}, r"seed must be below 2\*\*63"),
        ({"executor": "seqential"}, "executor must be auto, sequential, vectorised or processes, not 'seqential'"),
    ],
)
def test_arguments_out_of_range_are_refused(
    model: Model, federation: Federation, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fit(**{"algorithm": PFedVEM(), "model": model, "federation": federation, **options})


def test_arguments_may_be_numbers_of_numpy(model: Model, federation: Federation, tmp_path: Path) -> None:
    numbers = {"rounds": np.int64(1), "seed": np.int64(3), "participation": np.float32(0.5)}
    fit(PFedVEM(), model, federation, executor="vectorised", out=tmp_path / "run", **numbers).save(tmp_path / "saved")  # type: ignore[arg-type]
    assert json.loads((tmp_path / "saved/summary.json").read_text())["seed"] == 3


def test_a_place_that_cannot_be_written_is_said_in_a_sentence(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = fit(PFedVEM(), model, federation, rounds=1, executor="vectorised")
    with pytest.raises(UserError, match="could not be written"):
        result.save(tmp_path / "file" / "run")


def test_a_method_that_trains_once_does_so_unless_more_rounds_are_asked_for(
    model: Model, federation: Federation
) -> None:
    assert fit(Local(lr=0.01), model, federation, workers=1).state.round == 1


def test_a_method_may_have_a_setting_that_is_none(model: Model, federation: Federation, tmp_path: Path) -> None:
    class Optional(FedAvg):
        limit: float | None = None

    train(model, federation, tmp_path, rounds=1, algorithm=Optional())
    assert "limit" not in tomllib.loads((tmp_path / "config.toml").read_text())["algorithm"]


def test_a_score_of_an_earlier_round_is_not_in_a_later_mean(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"participation": 0.5, "eval_every": 1, "workers": 1, "algorithm": PFedVEM(lr_head=0.01)}
    fit(model=model, federation=federation, rounds=1, out=tmp_path, **options)
    some = fit(model=model, federation=federation, rounds=3, out=tmp_path, resume=True, eval_clients=2, **options)
    assert int((~some.state.scores.accuracy.isnan()).sum()) == 2


def test_clients_alone_are_tested_where_the_federation_is(model: Model, federation: Federation) -> None:
    result = fit(PFedVEM(), model, federation, rounds=1, eval_clients=2, alone=Local(lr=0.01), workers=1)
    assert result.alone is not None
    assert result.alone.accuracy.isnan().tolist() == result.state.scores.accuracy.isnan().tolist()
    shown = StringIO()
    Console(file=shown, width=120).print(summary_table(result))
    assert "of 2 clients gain by joining" in shown.getvalue()


def test_a_network_with_the_wrong_number_of_outputs_is_refused(federation: Federation) -> None:
    with pytest.raises(UserError, match="5 outputs for 3 classes"):
        fit(PFedVEM(), torch.nn.Linear(4, 5), federation)


def test_callbacks_hear_every_evaluated_round_and_one_can_end_the_training(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    heard: list[Any] = []

    def enough(record: Mapping[str, float | None]) -> bool:
        return record["round"] == 4

    result = train(model, federation, tmp_path, checkpoint_every=3, callbacks=[enough, heard.append])
    assert [record["round"] for record in heard] == [2, 4]
    assert heard == result.history
    assert result.summary["rounds"] == 4
    longer = train(model, federation, tmp_path, resume=True, checkpoint_every=3)
    straight = train(model, federation, None)
    assert longer.summary["rounds"] == 6
    assert torch.equal(longer.state.server.w, straight.state.server.w)


def test_a_bar_of_text_shows_rounds_and_scores(
    model: Model, federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    train(model, federation, None, alone=Local(lr=0.01), progress=True)
    shown = capsys.readouterr().err
    assert "pFedVEM: 100%" in shown
    assert "round 6/6" in shown
    assert "PM=" in shown


def test_a_checkpoint_of_a_version_with_fewer_scores_is_gone_on_from(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    train(model, federation, tmp_path, rounds=3)
    for path in (tmp_path / "checkpoint").glob("*/state.safetensors"):
        tensors = safetensors.torch.load_file(path)
        del tensors["scores.brier"]
        path.write_bytes(safetensors.torch.save(tensors))
        manifest = json.loads((path.parent / "manifest.json").read_text())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        del manifest["seal"]
        (path.parent / "manifest.json").write_text(json.dumps({**manifest, "format": 1, "sha256": digest}))
    assert train(model, federation, tmp_path, resume=True).summary["rounds"] == 6


def test_the_reliability_diagram_holds_every_prediction(model: Model, federation: Federation, tmp_path: Path) -> None:
    result = fit(PFedVEM(), model, federation, rounds=1, participation=1.0, out=tmp_path / "run", executor="vectorised")
    found = json.loads((tmp_path / "run" / "calibration.json").read_bytes())
    tested = sum(len(federation.test_indices(j)) for j in range(len(federation)))
    assert sum(found["pm"]["count"]) == tested
    gm = found["gm"]
    pairs = [row for row in zip(gm["count"], gm["confidence"], gm["accuracy"], strict=True) if row[0]]
    ece = sum(count * abs(sure - right) for count, sure, right in pairs) / sum(gm["count"])
    assert 100 * ece == pytest.approx(result.history[-1]["gm_ece"], abs=0.02)
