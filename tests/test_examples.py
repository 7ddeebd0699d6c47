"""The examples of the documentation work, and pass what every method must pass."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from pfedvem.cli import main

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_ditto_passes_the_conformance_suite_as_the_documentation_runs_it() -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "pfedvem.conformance", "--method", "examples.ditto:Ditto"]
    ran = subprocess.run([*command, "-q", "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert "failed" not in ran.stdout


def test_an_own_method_runs_and_compares_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = [
        "--methods",
        "examples.ditto:Ditto,fedavg",
        "--clients",
        "4",
        "--rounds",
        "2",
        "--set",
        "examples.ditto:Ditto.lam=0.7",
    ]
    monkeypatch.setattr(sys, "argv", ["pfedvem", "compare", *words, "--out", str(tmp_path / "c")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    assert "Ditto" in (tmp_path / "c" / "comparison.md").read_text()
    (config,) = (tmp_path / "c" / "cells").glob("*Ditto-0/config.toml")
    assert "lam = 0.7" in config.read_text()


@pytest.mark.parametrize(("name", "least"), [("own_cnn", 80), ("tabular", 90), ("frozen_backbone", 85)])
def test_an_example_of_own_data_runs_and_learns(name: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert importlib.import_module(f"examples.{name}").main() > least


@pytest.mark.slow
def test_the_soak_shows_ten_rows_and_the_slopes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    words = ["--rounds", "20", "--clients", "4", "--executor", "processes", "--workers", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["soak", *words])
    importlib.import_module("examples.soak").main()
    shown = capsys.readouterr().out
    assert shown.count("\n| ") == 10
    assert "| 19-20 |" in shown
    assert "Over 1,000 rounds: " in shown


def test_attacks_are_tabled_and_finished_runs_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    attacks = importlib.import_module("examples.attacks")
    small = ["--clients", "4", "--rounds", "1", "--attacks", "nan", "--guards", "guard", "--shares", "0.3"]
    monkeypatch.setattr(sys, "argv", ["attacks.py", *small, "--workers", "1", "--out", str(tmp_path / "kept.jsonl")])
    attacks.main()
    first = capsys.readouterr().out
    assert "| NaN |" in first
    attacks.main()
    assert capsys.readouterr().out == first[first.index("\npfedvem\n") :]
