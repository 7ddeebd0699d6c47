"""Logs for TensorBoard and MLflow hold the numbers of the run's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pfedvem import UserError
from pfedvem.report.logs import TAGS, Logs
from pfedvem.simulation.rounds import Progress, State, Together
from tests.test_cli import call

SMALL = ("--clients", "4", "--participation", "0.5", "--set", "train_samples=200", "--executor", "vectorised")
RUN = (*SMALL, "--set", "eval_every=2")


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def history(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "histograms": 0}).Reload()  # 0: keep all


def same(found: Any, records: list[dict[str, Any]]) -> None:
    """The scalars are those of the history, each once and nothing else."""
    expected = {tag: key for key, tag in TAGS.items() if records[0][key] is not None}
    assert set(found.Tags()["scalars"]) == set(expected)
    for tag, key in expected.items():
        logged = [(event.step, event.value) for event in found.Scalars(tag)]
        assert logged == [(record["round"], pytest.approx(record[key], rel=1e-6)) for record in records]


def test_tensorboard_holds_the_history_of_a_run_and_what_clients_are_like() -> None:
    assert call("run", *RUN, "--rounds", "5", "--out", "mine", "--tensorboard", "--json") == 0
    found = events(Path("mine/tensorboard"))
    assert [record["round"] for record in history(Path("mine"))] == [2, 4, 5]
    same(found, history(Path("mine")))
    assert {"clients/tau", "clients/pm", "clients/uncertainty"} <= set(found.Tags()["histograms"])
    taus = found.Histograms("clients/tau")
    assert [event.step for event in taus] == [2, 4, 5]
    assert taus[0].histogram_value.num == 4


def test_a_folder_that_is_given_has_a_folder_for_each_run() -> None:
    words = ("compare", *SMALL, "--methods", "fedavg,fedper", "--rounds", "2", "--out", "both")
    assert call(*words, "--tensorboard", "logs", "--json") == 0
    assert sorted(path.name for path in Path("logs").iterdir()) == ["fedavg-0", "fedper-0"]
    for name in ("fedavg-0", "fedper-0"):
        same(events(Path("logs") / name), history(Path("both/cells") / name))


def test_the_logs_of_a_resumed_run_go_on_without_doubles() -> None:
    assert call("run", *RUN, "--rounds", "3", "--out", "mine", "--tensorboard") == 0
    assert call("run", "--rounds", "6", "--out", "mine", "--tensorboard", "--resume") == 0
    assert [record["round"] for record in history(Path("mine"))] == [2, 3, 4, 6]
    same(events(Path("mine/tensorboard")), history(Path("mine")))


def test_a_run_that_was_not_logged_from_the_start_has_its_whole_history_in_the_logs() -> None:
    assert call("run", *RUN, "--rounds", "3", "--out", "mine") == 0
    assert call("run", "--rounds", "6", "--out", "mine", "--tensorboard", "--resume") == 0
    same(events(Path("mine/tensorboard")), history(Path("mine")))


def test_mlflow_holds_the_settings_and_the_history_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow otherwise refuses in favour of databases
    address = (tmp_path / "store").as_uri()
    assert call("run", *RUN, "--rounds", "5", "--out", "mine", "--mlflow", address) == 0
    client = mlflow.MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("pfedvem").experiment_id])
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.lr_head"] == "0.003"
    assert run.data.params["data.clients"] == "4"
    for key in TAGS:
        logged = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
        assert sorted(logged) == [(record["round"], record[key]) for record in history(Path("mine"))]


@pytest.mark.parametrize(("name", "title"), [("tensorboard", "TensorBoard"), ("mlflow", "MLflow")])
def test_a_package_that_is_missing_is_named(name: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedvem.report.logs.find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"Logging to {title} needs another package: pip install 'pfedvem\[{name}\]'"):
        Logs(**{name: ""})


def test_all_that_are_together_hear_the_same() -> None:
    heard: list[tuple[Any, ...]] = []

    class Ear(Progress):
        def stage(self, title: str, done: int, rounds: int) -> None:
            heard.append((title, done, rounds))

        def note(self, text: str) -> None:
            heard.append((text,))

        def client(self, done: int, clients: int) -> None:
            heard.append((done, clients))

        def round(self, state: State) -> None:
            heard.append((state,))

    both = Together(Ear(), Ear())
    state: Any = object()
    both.stage("a", 1, 2)
    both.note("b")
    both.client(3, 4)
    both.round(state)
    assert heard == [("a", 1, 2)] * 2 + [("b",)] * 2 + [(3, 4)] * 2 + [(state,)] * 2
