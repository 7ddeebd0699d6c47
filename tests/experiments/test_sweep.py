"""A sweep: what is tried and what is not tried again, by which data it judges, and what it leaves."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pfedvem import Federation, Result, UserError
from pfedvem.algorithms import METHODS
from pfedvem.data import load_federation
from pfedvem.data.federation import Split
from pfedvem.experiments import sweep as module
from pfedvem.experiments.config import Config, load
from pfedvem.experiments.plan import Plan, plan
from pfedvem.experiments.run import train
from pfedvem.experiments.spaces import SPACES
from pfedvem.experiments.sweep import sweep
from pfedvem.experiments.trials import Trials
from pfedvem.simulation.fit import Interrupted
from tests.test_cli import Start, call, start, wait_for  # noqa: F401 - a fixture

SMALL = {"rounds": 2, "participation": 0.5, "executor": "vectorised", "data": {"clients": 4, "train_samples": 200}}
WORDS = "sweep --method fedavg --clients 4 --rounds 2 --participation 0.5 --executor vectorised --set train_samples=200"
SPACE = ("lr=0.1,0.01", "epochs=1,2")


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that are trained."""
    made: list[Config] = []

    def watched(config: Config, **options: Any) -> Result:
        made.append(config)
        return train(config, **options)

    monkeypatch.setattr(module, "train", watched)
    return made


def small(*space: str, method: str = "fedavg", **options: Any) -> Plan:
    changed: dict[str, Any] = {key: options.pop(key) for key in ("rounds", "eval_every", "seed") if key in options}
    return plan(load(flags={**SMALL, **changed, "method": method}), space=space or SPACE, **options)


def tried(configs: list[Config], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(config.algorithm, key) for key in keys) for config in configs]


# What is tried


def test_a_grid_is_tried_point_by_point_and_each_once(tmp_path: Path, runs: list[Config]) -> None:
    found = sweep(small(), tmp_path / "s")
    points = [(0.1, 1), (0.1, 2), (0.01, 1), (0.01, 2)]
    assert tried(runs, "lr", "epochs") == points
    assert sorted((row.settings["lr"], row.settings["epochs"]) for row in found.rows) == sorted(points)
    assert {row.state for row in found.rows} == {"complete"}
    scores = [row.score for row in found.rows]
    assert scores == sorted(scores, key=lambda score: -(score or 0))
    assert not any(config.alone for config in runs)


def test_what_has_ended_is_not_tried_again(tmp_path: Path, runs: list[Config]) -> None:
    first = sweep(small(), tmp_path / "s")
    again = sweep(small(), tmp_path / "s")
    assert len(runs) == 4
    assert again.rows == first.rows


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Interrupted(1, None), OSError("No space left on device")])
def test_a_sweep_that_was_stopped_goes_on_with_the_trial_that_it_was_at(
    tmp_path: Path, runs: list[Config], monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    working: Callable[..., Result] = vars(module)["train"]

    def stopped(config: Config, **options: Any) -> Result:
        if len(runs) == 2:
            raise stop
        return working(config, **options)

    monkeypatch.setattr(module, "train", stopped)
    with pytest.raises((KeyboardInterrupt, Interrupted, OSError)):
        sweep(small(), tmp_path / "s")
    assert len((tmp_path / "s" / "trials.csv").read_text().splitlines()) == 1 + 2
    monkeypatch.setattr(module, "train", working)
    found = sweep(small(), tmp_path / "s")
    assert tried(runs, "lr", "epochs") == [(0.1, 1), (0.1, 2), (0.01, 1), (0.01, 2)]
    assert len(found.rows) == 4


def test_results_of_a_sweep_that_was_stopped_before_it_wrote_them_are_written_by_the_next(
    tmp_path: Path, runs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_sweep", stopped)
        with pytest.raises(KeyboardInterrupt):
            sweep(small("lr=0.1"), tmp_path / "s")
    sweep(small("lr=0.1"), tmp_path / "s")
    assert len(runs) == 1
    assert len((tmp_path / "s" / "trials.csv").read_text().splitlines()) == 1 + 1
    assert load(tmp_path / "s" / "best.toml").algorithm.model_dump()["lr"] == 0.1


def test_random_trials_are_points_of_the_grid_without_repetition_and_more_can_be_added(
    tmp_path: Path, runs: list[Config]
) -> None:
    assert len(sweep(small(sampler="random", trials=2), tmp_path / "s").rows) == 2
    assert len(sweep(small(sampler="random", trials=3), tmp_path / "s").rows) == 3
    assert len(set(tried(runs, "lr", "epochs"))) == len(runs) == 3
    assert len(sweep(small(sampler="random", trials=100), tmp_path / "s").rows) == 4


def test_tpe_tries_nothing_twice_and_stops_when_there_is_nothing_left(tmp_path: Path, runs: list[Config]) -> None:
    assert len(sweep(small(sampler="tpe", trials=3), tmp_path / "s").rows) == 3
    assert len(sweep(small(sampler="tpe"), tmp_path / "s").rows) == 4
    assert len(set(tried(runs, "lr", "epochs"))) == len(runs) == 4


def test_values_that_are_lists_or_text_can_be_searched(tmp_path: Path, runs: list[Config]) -> None:
    found = sweep(small("lr=[0.1, 0.01],[0.01]", "epochs=1", method="local"), tmp_path / "lists")
    assert tried(runs, "lr") == [((0.1, 0.01),), ((0.01,),)]
    assert found.best is not None
    assert load(tmp_path / "lists" / "best.toml").algorithm.model_dump()["lr"] == found.best.settings["lr"]
    space = small("confidence=both,uncertainty", method="pfedvem").space
    assert space == {"confidence": ("both", "uncertainty")}


def test_values_are_as_the_method_takes_them_and_none_is_there_twice() -> None:
    assert small("lr=1,1.0,0.1", "algorithm.epochs=1").space == {"lr": (1.0, 0.1), "epochs": (1,)}


def test_by_default_the_ranges_of_the_paper_are_searched() -> None:
    sizes = {}
    for name in METHODS:
        searched = plan(load(flags={"method": name}))
        assert searched.space == SPACES[name]
        for settings in searched.all:  # the method takes every value as it is
            taken = {key: getattr(searched.trial(settings).algorithm, key) for key in settings}
            assert taken == settings
        sizes[name] = searched.total
    assert sizes == {
        **{"local": 1, "fedavg": 27, "fedprox": 81, "scaffold": 27, "fedper": 27, "fedrep": 81, "ifca": 27},
        **{"perfedavg": 81, "pfedme": 81, "pfedbayes": 108, "pfedvem": 27},
    }


# What it judges by


def test_test_data_plays_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = sweep(small(), tmp_path / "clean")

    def spoilt(*arguments: Any) -> Federation:
        federation = load_federation(*arguments)
        x, y = federation.test.x, federation.test.y
        return dataclasses.replace(federation, test=Split(torch.zeros_like(x), (y + 1) % 10))

    monkeypatch.setattr(module, "load_federation", spoilt)
    garbage = sweep(small(), tmp_path / "garbage")
    assert [dataclasses.replace(row, seconds=0) for row in garbage.rows] == [
        dataclasses.replace(row, seconds=0) for row in clean.rows
    ]
    on_test = sweep(small(select_on="test"), tmp_path / "test")
    assert on_test.best is not None
    assert clean.best is not None
    assert (on_test.best.score or 100) < 30 < (clean.best.score or 0)


def test_trials_train_on_what_is_not_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Federation] = []

    def watched(config: Config, *, federation: Federation, **options: Any) -> Result:
        seen.append(federation)
        return train(config, federation=federation, **options)

    monkeypatch.setattr(module, "train", watched)
    searched = small("lr=0.1", share=0.4, seed=7)
    sweep(searched, tmp_path / "s")
    federation = load_federation(searched.config.data, 7)
    assert seen[0].fingerprint() == federation.validation(0.4, 7).fingerprint()


@pytest.mark.parametrize(
    ("method", "objective", "expected"),
    [
        ("pfedvem", None, "mean"),
        ("pfedme", None, "mean"),
        ("fedavg", None, "gm"),
        ("fedper", None, "pm"),
        ("pfedvem", "gm", "gm"),
    ],
)
def test_the_score_is_by_default_the_mean_of_the_models_that_there_are(
    method: str, objective: str | None, expected: str
) -> None:
    assert plan(load(flags={"method": method}), objective=objective).objective == expected


def test_the_score_is_that_of_the_last_round(tmp_path: Path) -> None:
    searched = small("lr_head=0.01", method="pfedvem", rounds=3, eval_every=1)
    row = sweep(searched, tmp_path / "s").rows[0]
    data = searched.data(load_federation(searched.config.data, 0))
    history = train(searched.trial(row.settings), federation=data).history
    assert row.scores == {record["round"]: searched.score(record) for record in history}
    assert (row.pm, row.gm) == (history[-1]["pm"], history[-1]["gm"])
    assert row.score == row.scores[3] == pytest.approx(((row.pm or 0) + (row.gm or 0)) / 2)


def test_a_global_model_is_judged_by_its_last_rounds_and_a_personal_one_by_the_last(tmp_path: Path) -> None:
    searched = small("lr_head=0.0001", method="pfedvem", rounds=8)  # of which the last two count
    row = sweep(searched, tmp_path / "s").rows[0]
    data = searched.data(load_federation(searched.config.data, 0))
    every = searched.trial(row.settings).model_copy(update={"eval_every": 1})
    *_, before, last = train(every, federation=data).history
    assert before["gm"] != last["gm"]
    assert row.gm == pytest.approx(((before["gm"] or 0) + (last["gm"] or 0)) / 2, abs=1e-3)
    assert row.pm == last["pm"]


# Trials that come to nothing


def test_a_hopeless_trial_is_pruned_after_its_first_rounds_and_not_tried_again(
    tmp_path: Path, runs: list[Config]
) -> None:
    space = ("lr=0.1,0.09,0.08,0.07,0.06,1e-9", "epochs=1")
    pruned = small(*space, rounds=4, eval_every=1, prune=True)
    found = sweep(pruned, tmp_path / "s")
    assert [row.state for row in found.rows].count("complete") == 5
    assert found.rows[-1].settings["lr"] == 1e-9
    assert found.rows[-1].state == "pruned"
    assert list(found.rows[-1].scores) == [1]
    sweep(pruned, tmp_path / "s")
    assert len(runs) == 6
    patient = sweep(small(*space, rounds=4, eval_every=1), tmp_path / "patient")
    assert {row.state for row in patient.rows} == {"complete"}


def test_a_trial_that_diverges_has_failed_for_a_reason_and_the_others_go_on(tmp_path: Path, runs: list[Config]) -> None:
    found = sweep(small("lr=1e30,0.1"), tmp_path / "s")
    assert [row.state for row in found.rows] == ["complete", "failed"]
    assert "Training diverged in round 1" in (found.rows[1].reason or "")
    assert "Training diverged" in (tmp_path / "s" / "trials.csv").read_text()
    sweep(small("lr=1e30,0.1"), tmp_path / "s")
    assert len(runs) == 2


def test_a_sweep_in_which_every_trial_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No trial came to its end: Training diverged in round 1"):
        sweep(small("lr=1e30,1e31"), tmp_path / "s")


# What it leaves


def test_the_best_settings_run_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*WORDS.split(), "--space", "lr=0.000001,0.1", "--out", "s") == 0
    shown = capsys.readouterr().out
    assert "FedAvg on digits: 2 rounds, 2 complete" in shown
    assert "Run the best with: pfedvem run --config s/best.toml" in shown
    assert call("run", "--config", "s/best.toml", "--out", "best", "--no-alone") == 0
    saved = tomllib.loads((tmp_path / "best" / "config.toml").read_text())
    assert saved["algorithm"]["lr"] == 0.1
    assert saved["data"] == {**saved["data"], "clients": 4, "train_samples": 200}
    assert (tmp_path / "best" / "summary.json").exists()


def test_all_trials_are_in_a_table_with_their_settings_and_scores(tmp_path: Path) -> None:
    found = sweep(small("lr=1e30,0.1,0.01", rounds=3, eval_every=2), tmp_path / "s")
    with open(tmp_path / "s" / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [str(row.trial) for row in found.rows]
    assert [row["state"] for row in rows] == ["complete", "complete", "failed"]
    assert rows[0]["score_3"] == rows[0]["score"] == f"{found.rows[0].score:.4f}"
    assert rows[0]["score_2"] != ""
    assert float(rows[0]["lr"]) == found.rows[0].settings["lr"]
    assert (rows[2]["score"], rows[2]["score_3"], rows[2]["lr"]) == ("", "", "1e+30")


def test_nothing_but_the_journal_and_the_results_is_left_in_the_folder(tmp_path: Path) -> None:
    sweep(small(), tmp_path / "s")
    seen = {path.name for path in (tmp_path / "s").iterdir()}
    assert seen == {"trials.journal", "trials.csv", "best.toml", ".lock", ".journal-lock"}


def test_json_is_all_that_is_printed_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*WORDS.split(), "--space", "lr=0.1", "--out", "s", "--json") == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["best"] == {"lr": 0.1}
    assert printed["score"] == printed["trials"][0]["score"]
    assert (printed["objective"], printed["select_on"]) == ("gm", "validation")
    assert "Run the best with" in err


def test_selecting_on_test_data_says_so_wherever_results_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*WORDS.split(), "--space", "lr=0.1", "--out", "s", "--select-on", "test") == 0
    shown = capsys.readouterr().out
    assert "warning Settings were chosen on the test data" in shown
    assert "on the test data" in shown.split("warning")[0]
    assert "# Settings were chosen on the test data" in (tmp_path / "s" / "best.toml").read_text()


# Several processes


def test_processes_that_are_started_alike_share_the_trials(tmp_path: Path, start: Start) -> None:  # noqa: F811
    words = (*WORDS.split(), "--space", "lr=0.1,0.09,0.08,0.07,0.06,0.05", "--out", "s", "--json")
    processes = [start(*words) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    with open(tmp_path / "s" / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["lr"] for row in rows) == ["0.05", "0.06", "0.07", "0.08", "0.09", "0.1"]


def test_jobs_share_the_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*WORDS.split(), "--space", "lr=1e30,0.1,0.01", "--jobs", "2", "--out", "s", "--json") == 0
    parallel = json.loads(capsys.readouterr().out)
    assert call(*WORDS.split(), "--space", "lr=1e30,0.1,0.01", "--out", "t", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert [(row["settings"], row["scores"]) for row in parallel["trials"]] == [
        (row["settings"], row["scores"]) for row in alone["trials"]
    ]


@pytest.mark.slow
def test_trials_on_ray_are_those_of_this_process(
    start: Start,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ray")
    words = (*WORDS.split(), "--space", "lr=1e30,0.1,0.01", "--json")
    process = start(*words, "--out", "r", "--ray", "local")
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert call(*words, "--out", "s") == 0
    ours = json.loads(capsys.readouterr().out)
    theirs = json.loads(said)
    assert [(row["settings"], row["scores"], row["reason"]) for row in theirs["trials"]] == [
        (row["settings"], row["scores"], row["reason"]) for row in ours["trials"]
    ]


@pytest.mark.slow
def test_a_trial_that_dies_on_ray_ends_the_sweep_with_a_sentence(
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_TASK_MAX_RETRIES", "0")
    process = start(*WORDS.split(), "--rounds", "2000", "--space", "lr=0.1,0.01", "--out", "r", "--ray", "local")
    while process.poll() is None and subprocess.run(["pkill", "-9", "-f", "^ray::_attempt"]).returncode:
        time.sleep(0.2)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "A trial on Ray died (" in errors
    assert "Go on by the same command." in errors


LONG = (*WORDS.split(), "--rounds", "20", "--space", "lr=0.1,0.09,0.08,0.07,0.06,0.05", "--out", "s")


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_killed_sweep_tries_again_what_it_was_at(
    tmp_path: Path,
    start: Start,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    jobs: str,
) -> None:
    process = start(*LONG, "--jobs", jobs)
    wait_for(tmp_path / "s" / "trials.csv", process)
    process.kill()
    process.communicate()
    assert call(*LONG, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["trials"]
    assert sorted(row["settings"]["lr"] for row in rows) == [0.05, 0.06, 0.07, 0.08, 0.09, 0.1]


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_ctrl_c_keeps_what_has_ended_and_says_how_to_go_on(tmp_path: Path, start: Start, jobs: str) -> None:  # noqa: F811
    process = start(*LONG, "--jobs", jobs)
    wait_for(tmp_path / "s" / "trials.csv", process)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Stopped. Go on with the same command and --out s" in said
    assert "Traceback" not in said + errors
    assert not list((tmp_path / "s").glob(".worker-*")) or jobs == "2"


def test_a_trial_of_a_living_process_is_left_to_it(tmp_path: Path) -> None:
    searched = small("lr=0.1,0.01")
    data = searched.data(load_federation(searched.config.data, 0))
    with Trials(tmp_path / "s", searched, data) as trials:
        first, second = trials.next(), trials.next()
        assert first is not None
        assert second is not None
        assert [first[1], second[1]] == [{"lr": 0.1}, {"lr": 0.01}]
        assert trials.next() is None
    with Trials(tmp_path / "s", searched, data) as trials:
        again = trials.next()
        assert again is not None
        assert again[1] == {"lr": 0.1}


def test_a_journal_whose_last_line_was_cut_off_is_read_up_to_there(tmp_path: Path, runs: list[Config]) -> None:
    sweep(small(), tmp_path / "s")
    with open(tmp_path / "s" / "trials.journal", "ab") as journal:
        journal.write(b'{"op_code": 4, "wor')
    assert len(sweep(small(), tmp_path / "s").rows) == len(runs) == 4


# Bad input


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--space lrr=0.1", "FedAvg has no hyper-parameter 'lrr'; the nearest is 'lr'."),
        ("--space rounds=1,2", "FedAvg has no hyper-parameter 'rounds'; the nearest is "),
        ("--space lr=fast,0.1", "algorithm.lr should be a number greater than 0, not 'fast'."),
        ("--space lr=0.1,-1", "algorithm.lr should be greater than 0, not -1."),
        ("--space epochs=1.5", "algorithm.epochs should be a whole number"),
        ("--space lr=", "--space has no values for lr: write lr=V1,V2,..."),
        ("--space lr", "--space takes KEY=V1,V2,..., not 'lr'."),
        ("--space lr=0.1 --space lr=0.2", "--space has lr twice; give all its values at once."),
        ("--sampler best", "--sampler should be grid, random or tpe, not 'best'."),
        ("--trials 5", "A grid has as many trials as it has points: "),
        ("--sampler tpe --trials 0", "--trials should be at least 1, not 0."),
        ("--objective pm", "FedAvg has no personalised model: take --objective gm."),
        ("--objective loss", "--objective should be pm, gm or mean, not 'loss'."),
        ("--select-on train", "--select-on should be validation or test, not 'train'."),
        ("--share 1", "The share that is held out must be above 0 and below 1, not 1."),
        ("--ray local --prune", "Ray runs as many trials at a time as it has room for, to their end"),
        ("--out file", "file is a file, not the folder of a sweep."),
        ("--method examples.ditto:Ditto", "The paper has no search ranges for Ditto: give some with --space"),
    ],
)
def test_bad_input_is_answered_by_one_line_and_exit_code_2(
    words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no sweep")
    assert call(*WORDS.split(), *words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error {sentence}")
    assert err.count("\n") == 1
    assert "Traceback" not in out


@pytest.mark.parametrize(
    "change",
    [
        lambda: small("lr=0.1,0.02"),
        lambda: small(rounds=3),
        lambda: small(seed=1),
        lambda: small(share=0.3),
        lambda: small(select_on="test"),
    ],
)
def test_a_folder_of_another_sweep_is_refused(tmp_path: Path, change: Callable[[], Plan]) -> None:
    sweep(small(), tmp_path / "s")
    with pytest.raises(UserError, match=r"holds another sweep: .* Choose another --out"):
        sweep(change(), tmp_path / "s")


def test_a_job_that_cannot_write_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_sweep", refuse)
    with pytest.raises(UserError, match="A job of the sweep ended with exit code 1"):
        sweep(small(), tmp_path / "s", jobs=2)
    said = capfd.readouterr().err
    assert "A job of the sweep cannot go on: [Errno 28] No space left on device" in said
    assert "Traceback" not in said
