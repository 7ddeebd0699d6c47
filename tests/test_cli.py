"""The command line as a user has it: words in, files and sentences out."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pfedvem
from pfedvem.cli import main

SMALL = ("run", "--clients", "4", "--participation", "0.5", "--set", "train_samples=200")
LONG = (*SMALL, "--rounds", "12")


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def call(*words: str | Path) -> int:
    """Runs a command in this process; gives its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pfedvem", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command in a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[str]] = []
    # Tests that run in the background ignore Ctrl-C, and a process would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def popen(*words: str | Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pfedvem.cli", *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield popen
    signal.signal(signal.SIGINT, before)
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def model(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in (out / "model").rglob("*.*")}


def summary(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "summary.json").read_text())
    del values["seconds"]
    return values


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert call(*LONG, "--out", out) == 0
    return out


def test_a_run_writes_its_files_and_shows_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--rounds", "2", "--out", "mine") == 0
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "clients.csv", "summary.json", "model", "checkpoint"}
    shown = capsys.readouterr().out
    assert "pFedVEM on digits: 4 clients, 2 rounds" in shown
    assert "Files are in mine" in shown


def test_json_is_all_that_is_printed_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--rounds", "2", "--out", "mine", "--json") == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert list(printed) == [
        *("method", "dataset", "clients", "rounds", "seed"),
        *("pm", "pm_sem", "gm", "small_clients_pm", "alone_pm"),
        *("pm_nll", "pm_ece", "pm_brier", "gm_nll", "gm_ece", "gm_brier", "seconds"),
    ]
    assert printed == json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (printed["method"], printed["dataset"], printed["clients"], printed["rounds"]) == ("pfedvem", "digits", 4, 2)
    assert "Files are in mine" in err


def test_flags_are_saved_and_the_saved_configuration_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    flags = ("--rounds", "3", "--seed", "5", "--eval-every", "2", "--no-alone", "--set", "lr_head=0.002")
    assert call(*SMALL, *flags, "--partition", "iid", "--out", "first") == 0
    saved = tomllib.loads((tmp_path / "first" / "config.toml").read_text())
    top = {key: saved[key] for key in ("rounds", "seed", "eval_every", "alone", "participation")}
    assert top == {"rounds": 3, "seed": 5, "eval_every": 2, "alone": False, "participation": 0.5}
    assert saved["algorithm"]["lr_head"] == 0.002
    assert (saved["data"]["clients"], saved["data"]["train_samples"], saved["data"]["partition"]) == (4, 200, "iid")
    assert call("run", "--config", "first/config.toml", "--out", "second") == 0
    assert model(tmp_path / "second") == model(tmp_path / "first")
    assert summary(tmp_path / "second") == summary(tmp_path / "first")
    assert (tmp_path / "second" / "config.toml").read_text() == (tmp_path / "first" / "config.toml").read_text()
    assert call("run", "--config", "first/config.toml", "--seed", "6", "--out", "third") == 0
    assert model(tmp_path / "third") != model(tmp_path / "first")


def test_runs_without_a_folder_are_numbered(tmp_path: Path) -> None:
    for _ in range(2):
        assert call(*SMALL, "--rounds", "1", "--no-alone") == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"digits-pfedvem-1", "digits-pfedvem-2"}
    assert model(tmp_path / "runs" / "digits-pfedvem-1") == model(tmp_path / "runs" / "digits-pfedvem-2")


def test_a_killed_run_goes_on_to_the_same_model(tmp_path: Path, start: Start, uninterrupted: Path) -> None:
    out = tmp_path / "killed"
    process = start(*LONG, "--out", out)
    wait_for(out / "checkpoint" / "round-00003", process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    assert call("run", "--out", out, "--resume") == 0
    assert model(out) == model(uninterrupted)
    assert summary(out) == summary(uninterrupted)


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM", "SIGTERM in the background"])
def test_ctrl_c_or_sigterm_keeps_the_rounds_and_names_the_command_that_goes_on(
    by: str, tmp_path: Path, start: Start, uninterrupted: Path
) -> None:
    out = tmp_path / "stopped [run]"
    if by == "SIGTERM in the background":  # where shells have Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = start(*LONG, "--set", "checkpoint_every=5", "--out", out)
    wait_for(out / "checkpoint" / "round-00005", process)
    process.send_signal(signal.SIGINT if by == "Ctrl-C" else signal.SIGTERM)
    said, errors = process.communicate()
    assert process.returncode == 130, errors
    assert f"Go on with: pfedvem run --out '{out}' --resume" in said
    assert "Traceback" not in said + errors
    done = int(said.split("Stopped after round ")[1].split(".")[0])
    assert (out / "checkpoint" / f"round-{done:05d}").exists()
    assert not (out / "summary.json").exists()
    assert call("run", "--out", out, "--resume") == 0
    assert model(out) == model(uninterrupted)
    assert summary(out) == summary(uninterrupted)


@pytest.fixture
def clutter(tmp_path: Path) -> None:
    """Things that a user may point at by mistake, and a data set of five labels."""
    for label in "abcde":
        (tmp_path / "five" / label).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (8, 8), 10 * i).save(tmp_path / "five" / label / f"{i}.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no run")
    (tmp_path / "broken.toml").write_text("rounds 5")
    (tmp_path / "photos" / "checkpoint").mkdir(parents=True)
    (tmp_path / "photos" / "checkpoint" / "holiday.jpg").write_bytes(b"beach")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "summary.json").write_text("{}")


@pytest.mark.usefixtures("clutter")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--dataset digitz", "There is no data set or folder 'digitz'"),
        ("--dataset [bold]x", "There is no data set or folder '[bold]x'"),
        ("--dataset :smile:", "There is no data set or folder ':smile:'"),
        ("--method [/red]", "There is no method '[/red]'"),
        ("--method fedavgg", "There is no method 'fedavgg'"),
        ("--set round=5", "There is no setting 'round'; the nearest is 'rounds'."),
        ("--clients 0", "data.clients should be greater than or equal to 1, not 0."),
        ("--clients 1000", "Label 0 has 142 samples for 500 clients that own it"),
        ("--clients 5000", "The training data has 1438 samples for 5000 clients; take fewer clients."),
        ("--set labels_per_client=11", "A client cannot own 11 of the 10 labels"),
        ("--dataset five --clients 5 --set labels_per_client=6", "A client cannot own 6 of the 5 labels"),
        ("--dataset five --label-column colour", "There is no column 'colour'; the columns are image, label."),
        ("--dataset empty", "The folder empty has no images"),
        ("--dataset digits --data-root nowhere --partition natural", "digits has no client ids"),
        ("--rounds -1", "rounds should be greater than or equal to 1, not -1."),
        ("--workers 0", "workers should be greater than or equal to 1, not 0."),
        ("--executor gpu", "executor should be 'auto', "),
        ("--config broken.toml", "broken.toml is no readable TOML file: "),
        ("--config missing.toml", "There is no configuration file missing.toml."),
        ("--resume", "Say with --out which run to resume."),
        ("--resume --out nowhere", "There is no run in nowhere to go on with."),
        ("--resume --out file", "file is a file, not the folder of a run."),
        ("--resume --out photos", "No checkpoint in photos/checkpoint can be read (holiday.jpg is no checkpoint)"),
        ("--out done", "done holds a run already; go on with --resume, or choose another --out."),
        ("--out file/run", "file/run/config.toml could not be written (Not a directory)."),
    ],
)
def test_bad_input_is_answered_by_one_line_and_exit_code_2(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", *words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error {sentence}")
    assert err.count("\n") == 1
    assert err.endswith((".\n", "?\n"))
    assert "Traceback" not in out


def test_a_number_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--rounds", "many") == 2
    assert "--rounds" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "run", "data", "data list", "data show", "version"])
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*command.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: pfedvem" in shown
    assert f"Example: pfedvem {command}".strip() in " ".join(shown.split())


def test_the_known_data_sets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("data", "list") == 0
    assert "digits" in capsys.readouterr().out
    assert call("data", "list", "--json") == 0
    assert "cifar10" in [row["name"] for row in json.loads(capsys.readouterr().out)]


def test_a_partition_is_shown_as_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ("data", "show", "--clients", "4", "--plot", "picture.png")
    assert call(*show) == 0
    assert "4 clients with" in capsys.readouterr().out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert call(*show, "--json") == 0
    assert [client["id"] for client in json.loads(capsys.readouterr().out)["clients"]] == ["0", "1", "2", "3"]


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "picture.png").write_bytes(b"the old one")
    monkeypatch.setattr("pfedvem.simulation.checkpoints.write", full)
    assert call("data", "show", "--clients", "4", "--plot", "picture.png") == 2
    assert (tmp_path / "picture.png").read_bytes() == b"the old one"
    assert not list(tmp_path.glob(".picture*"))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("version") == 0
    project = tomllib.loads((Path(pfedvem.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"pfedvem {project['version']}\n"


def test_help_does_not_wait_for_pytorch() -> None:
    code = "import sys, pfedvem.cli; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_the_public_names_are_there_and_nothing_else() -> None:
    for name in pfedvem.__all__:
        assert getattr(pfedvem, name).__name__ == name
    assert set(pfedvem.__all__) <= set(dir(pfedvem))
    with pytest.raises(AttributeError, match="module 'pfedvem' has no attribute 'nothing'"):
        _ = pfedvem.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_command_needs_no_words_besides_its_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(f"pfedvem.experiments.{command}.{command}", reached)
    with pytest.raises(Reached):
        call(command)


def test_methods_shows_what_a_data_set_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("methods", "local") == 0
    shown = capsys.readouterr().out
    assert "lr=[0.01, 0.001]" in shown
    assert call("methods", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["pfedvem"]["presets"]["cifar100"] == {"batch_size": 50, "lr_base": 0.01, "head_epochs": 20}
    assert rows["scaffold"]["presets"].keys() == {"digits", "fmnist"}
