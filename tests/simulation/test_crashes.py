"""Runs that are killed, or find the disk full, at any moment: they go on to the same end, bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pfedvem import Federation, Model, PFedVEM, UserError, fit
from pfedvem.cli import main
from pfedvem.simulation import checkpoints, store

ROOT = Path(__file__).parent.parent.parent
MOMENTS = ("checkpoint", "final", "any", "time")


class Runner:
    """Has runs done by another process, which may kill them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.crashing"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def run(self, out: Path, **order: Any) -> dict[str, Any]:
        """All that there is to say of a run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"method": "pfedvem", "executor": "vectorised", "out": str(out), **order}),
            file=self._process.stdin,
            flush=True,
        )
        said: dict[str, Any] = {}
        while "ended" not in said:
            line = self._process.stdout.readline()
            assert line, "the process that runs others is gone"
            said |= json.loads(line)
        assert said["ended"] in (0, -9)
        return said

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def files(out: Path) -> dict[str, Any]:
    """What a run leaves, without the seconds that it took and without checkpoints but the newest."""
    newest = max((out / "checkpoint").iterdir())
    apart = {out / "summary.json", out / "metrics.jsonl", newest / "manifest.json"}
    found: dict[str, Any] = {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path not in apart and path.parent.parent != newest.parent
    }
    found["state"] = (newest / "state.safetensors").read_bytes()
    summary = json.loads((out / "summary.json").read_bytes())
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    for place, record in enumerate([summary, *history]):
        del record["seconds"]
        found[f"record {place}"] = record
    return found


def whole(out: Path) -> None:
    """Whatever is there after a kill is whole: the newest checkpoint, and every file that people or programs read."""
    for newest in checkpoints._found(out / "checkpoint")[:1]:
        checkpoints._read(newest)
    for path in out.glob("[!.]*.json"):
        json.loads(path.read_bytes())
    for path in out.glob("metrics.jsonl"):
        assert all(json.loads(line)["round"] for line in path.read_text().splitlines())
    for path in out.glob("config.toml"):
        assert tomllib.loads(path.read_text())["rounds"] > 0
    for path in out.glob("model/**/[!.]*.safetensors"):
        safetensors.torch.load_file(path)


def gone(group: int) -> None:
    """Waits for the workers of a run that has ended; they notice within a second or so that it was killed."""
    deadline = time.monotonic() + 30
    while left := processes(group):
        assert time.monotonic() < deadline, f"{left} stayed behind"
        time.sleep(0.1)


def processes(group: int) -> list[int]:
    """The processes of a group that have not ended (on Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            state, _, its_group = path.read_text().rpartition(") ")[2].split()[:3]
            if its_group == str(group) and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def chain(
    runner: Runner, place: Path, seed: int, kills: int, method: str, executor: str, spill: bool = False
) -> list[str]:
    """Kills a run so many times at moments that the seed decides, and goes on each time; gives where it was hit."""
    rng, options = random.Random(seed), {"method": method, "executor": executor, "spill": spill}
    events = {name: runner.run(place / f"straight {name}", moment=name, **options) for name in MOMENTS[:3]}
    straight, out, hit = files(place / "straight any"), place / "broken", list[str]()
    while len(hit) < kills:
        moment = rng.choice(MOMENTS)
        longest = events["any"]["seconds"] if moment == "time" else events[moment]["events"]
        at = rng.uniform(0, longest) if moment == "time" else rng.randint(1, longest)
        said = runner.run(out, moment=moment, at=at, seed=rng.randint(0, 10**6), **options)
        assert "error" not in said, said
        if said["ended"] == -9:
            hit.append(f"seed {seed}, {method}, {executor}: {said.get('killed', f'after {at:.2f} s')}")
        gone(said["group"])
        whole(out)
    runner.run(out, **options)
    assert files(out) == straight, hit
    assert not list(out.rglob(".*")), hit
    return hit


def test_a_run_that_is_killed_goes_on_to_the_same_end(runner: Runner, tmp_path: Path) -> None:
    chain(runner, tmp_path, seed=2, kills=4, method="pfedvem", executor="vectorised")


@pytest.mark.slow
def test_runs_that_are_killed_at_many_moments_go_on_to_the_same_end(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [("pfedvem", "vectorised", False), ("scaffold", "vectorised", False), ("pfedvem", "processes", False)]
    kinds += [("scaffold", "processes", False), ("scaffold", "vectorised", True)]
    seeds, hit = range(100, 120), list[str]()
    for seed in seeds:
        method, executor, spill = kinds[seed % len(kinds)]
        hit += chain(runner, tmp_path / str(seed), seed, 4, method, executor, spill)
    with capsys.disabled():
        print("", *hit, f"{len(hit)} of {len(hit)} identical (seeds {seeds[0]} to {seeds[-1]})", sep="\n")
    assert len(hit) == 80
    for where in ("state.safetensors", "manifest.json", "os.rename", "summary.json", "model/", "after"):
        assert any(where in one for one in hit), where


def test_the_workers_of_a_run_that_is_killed_do_not_stay_behind(runner: Runner, tmp_path: Path) -> None:
    said = runner.run(tmp_path / "run", executor="processes", moment="checkpoint", at=30)
    assert said["ended"] == -9
    assert processes(said["group"])  # they are there when it is killed
    gone(said["group"])


def test_a_round_that_is_repeated_replaces_its_checkpoint_and_those_of_later_rounds(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    first = fit(PFedVEM(), model, federation, rounds=1, executor="vectorised").state
    for round in (99_998, 99_999, 100_000, 100_000):
        checkpoints.save(tmp_path, dataclasses.replace(first, round=round), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-100000", "round-99999"]
    checkpoints.save(tmp_path, dataclasses.replace(first, round=99_999), {})
    assert [path.name for path in tmp_path.iterdir()] == ["round-99999"]
    checkpoints.save(tmp_path, dataclasses.replace(first, round=100_000), {})
    found, _ = checkpoints.load(tmp_path, first, {})
    assert found is not None
    assert found.round == 100_000


def test_a_checkpoint_holds_tensors_of_any_type(model: Model, federation: Federation, tmp_path: Path) -> None:
    first = fit(PFedVEM(), model, federation, rounds=1, executor="vectorised").state
    kinds = {name: torch.tensor([[0, 1], [1, 3]]).to(dtype) for dtype, name in checkpoints.DTYPES.items()}
    checkpoints.save(tmp_path, dataclasses.replace(first, server=kinds, clients=kinds), {})
    empty = {name: torch.zeros_like(value) for name, value in kinds.items()}
    found, _ = checkpoints.load(tmp_path, dataclasses.replace(first, server=empty, clients=empty), {})
    assert found is not None
    for side in (found.server, found.clients):
        assert all(torch.equal(side[name], value) for name, value in kinds.items())
        assert [value.dtype for value in side.values()] == list(checkpoints.DTYPES)


def test_a_record_of_the_history_is_encoded_once_however_often_it_is_written(
    model: Model, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rounds would take longer the more of them there were."""
    encode, encoded = json.dumps, list[Any]()

    def counted(value: Any, **options: Any) -> str:
        encoded.append(value)
        return encode(value, **options)

    monkeypatch.setattr(json, "dumps", counted)
    options: dict[str, Any] = {"eval_every": 1, "executor": "vectorised"}
    for seed in (0, 1):
        result = fit(PFedVEM(), model, federation, rounds=6, seed=seed, out=tmp_path / str(seed), **options)
        assert [value for value in encoded if isinstance(value, dict) and "pm_loss" in value] == result.history
        written = (tmp_path / str(seed) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in written] == result.history
        encoded.clear()


# No space, no permission


class Full:
    """A disk on which there is no space left when so many files have been written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self._fsync = 10**6, os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, file: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(file)


def test_wherever_the_disk_is_full_a_run_says_so_and_goes_on_when_there_is_space(
    model: Model, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, space: int = 10**6) -> None:
        disk.left = space
        algorithm = PFedVEM(head_epochs=1, base_epochs=1)
        options: dict[str, Any] = {"rounds": 3, "eval_every": 2, "executor": "vectorised", "keep_models": True}
        fit(algorithm, model, federation, out=tmp_path / name, resume=True, **options)

    disk = Full(monkeypatch)
    run("straight")
    writes = 10**6 - disk.left
    assert writes > 25
    for space in range(0, writes, 2):
        name = f"full after {space}"
        with pytest.raises(UserError, match=rf"^The disk is full: .*{name}.* Free some space .* --resume\.$"):
            run(name, space)
        assert not list((tmp_path / name).rglob(".*")), "what was not finished takes up space"
        for path in (tmp_path / name / "checkpoint").glob("*"):
            checkpoints._read(path)
        run(name)
        assert files(tmp_path / name) == files(tmp_path / "straight")


def test_a_file_that_the_system_refuses_to_write_on_leaves_the_checkpoint_before_it(
    runner: Runner, tmp_path: Path
) -> None:
    runner.run(tmp_path / "straight")
    said = runner.run(tmp_path / "run", full_after=3)
    assert "round-00004 could not be written (File too large)" in said["error"]
    assert sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir()) == ["round-00002", "round-00003"]
    runner.run(tmp_path / "run")
    assert files(tmp_path / "run") == files(tmp_path / "straight")


def command(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command line, in a shell after other commands."""
    line = f"{before} exec {shlex.join([sys.executable, '-m', 'pfedvem.cli', *words])}"
    return subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True)


RUN = ("run", "--clients", "4", "--rounds", "3", "--no-alone", "--executor", "vectorised", "--set", "train_samples=200")


def test_the_command_line_says_in_a_sentence_that_there_is_no_space(tmp_path: Path) -> None:
    ended = command(*RUN, "--out", str(tmp_path / "run"), before="ulimit -f 8;")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert f"{tmp_path / 'run'}" in ended.stderr
    assert "could not be written (File too large)" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 60, 130, 200, 260, 320])
def test_a_real_disk_that_is_full_stops_a_run_with_a_sentence(size: int, tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("no disk can be mounted here")
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    run = shlex.join([sys.executable, "-m", "pfedvem.cli", *RUN, "--out", str(disk / "run")])
    line = f"mount -t tmpfs -o size={size}k none {disk}; {run}; du -a {disk}; cp -r {disk}/run {kept}"
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert f"The disk is full: {disk}/run" in ended.stderr, ended.stdout
    assert "Traceback" not in ended.stderr
    again, straight = (command(*RUN, "--out", str(out), "--resume") for out in (kept, tmp_path / "straight"))
    assert again.returncode == straight.returncode == 0, again.stderr + straight.stderr
    assert files(kept) == files(tmp_path / "straight")


@pytest.mark.parametrize("place", ["/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_made_is_a_sentence(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pfedvem", *RUN, "--out", place])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{place}/config.toml could not be written" in said
    assert "choose another place" in said


def test_a_folder_without_permission_is_a_sentence(
    model: Model, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(UserError, match=r"round-00001 could not be written \(Permission denied\)"):
        fit(PFedVEM(), model, federation, rounds=1, out=tmp_path / "run", executor="vectorised")


def test_states_in_files_have_their_space_from_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the system would kill the process at a write to its memory."""
    reserved = list[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda file, begin, length: reserved.append(length))
    store.mapped((1000, 3), torch.float32, tmp_path)
    assert reserved == [12_000]
