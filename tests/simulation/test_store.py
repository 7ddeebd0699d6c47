"""What clients keep: in memory or in files, written as a whole or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import safetensors.torch
import torch

from pfedvem import tree
from pfedvem.algorithms import METHODS
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.models import Model
from pfedvem.simulation import checkpoints, store
from pfedvem.simulation.fit import fit
from pfedvem.simulation.store import mapped, stacked, uninterrupted


def rows(clients: Sequence[int]) -> dict[str, torch.Tensor]:
    index = torch.tensor(list(clients))
    return {"a": index.float().view(-1, 1).expand(-1, 3), "b": index}


def test_states_in_files_are_those_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside = stacked(rows, 10)
    monkeypatch.setattr(store, "SPILL_BYTES", 0)
    monkeypatch.setattr(store, "CHUNK", 3)
    outside = stacked(rows, 10, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(inside), tree.leaves(outside), strict=True))
    tree.write(outside, [7, 2], rows([1, 0]))
    assert outside["b"].tolist() == [0, 1, 0, 3, 4, 5, 6, 1, 8, 9]


def test_the_file_of_a_state_has_no_name_that_could_be_left_behind(tmp_path: Path) -> None:
    tensor = mapped((4, 2), torch.float32, tmp_path)
    tensor += 1
    assert float(tensor.sum()) == 8
    assert not list(tmp_path.iterdir())


def test_rows_that_are_written_belong_to_nobody_else() -> None:
    shared = torch.zeros(1, 3)
    kept = stacked(lambda clients: shared.expand(len(clients), 3), 1)
    tree.write(kept, [0], torch.ones(1, 3))
    assert float(shared.sum()) == 0


@pytest.mark.parametrize("method", ["local", "scaffold", "pfedbayes", "pfedvem"])
def test_a_run_with_states_in_files_is_resumed_to_the_same_end(
    method: str, model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(out: Path, rounds: int, **options: Any) -> None:
        fit(METHODS[method](), model, federation, rounds=rounds, participation=0.5, out=out, workers=1, **options)

    run(tmp_path / "memory", 4)
    monkeypatch.setattr(store, "SPILL_BYTES", 0)
    run(tmp_path / "files", 2)
    run(tmp_path / "files", 4, resume=True)
    for name in ("server", "clients"):
        first, second = (tmp_path / way / f"model/{name}.safetensors" for way in ("memory", "files"))
        assert first.read_bytes() == second.read_bytes()


def test_a_checkpoint_is_a_file_that_safetensors_reads(model: Model, federation: Federation, tmp_path: Path) -> None:
    result = fit(METHODS["local"](), model, federation, rounds=1, out=tmp_path / "run", workers=1)
    stored = safetensors.torch.load_file(tmp_path / "run/checkpoint/round-00001/state.safetensors")
    assert torch.equal(stored["clients.choice"], result.state.clients.choice)
    assert torch.equal(stored["clients.params.w"], result.state.clients.params.w)


def test_two_that_write_the_same_file_do_so_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, failed = tmp_path / "table.csv", checkpoints.write, []

    def other() -> None:
        try:
            checkpoints.replace(path, b"theirs")
        except UserError as error:
            failed.append(error)

    thread = Thread(target=other)

    def interrupted(partial: Path, content: bytes) -> None:
        write(partial, content)
        if content == b"ours":  # before this one is put in place, another has all the time to write the same file
            thread.start()
            thread.join(0.3)

    monkeypatch.setattr(checkpoints, "write", interrupted)
    checkpoints.replace(path, b"ours")
    thread.join()
    assert not failed
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_wait_until_what_belongs_together_is_done(number: signal.Signals) -> None:
    other = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT
    steps = []

    def send() -> None:
        with uninterrupted():
            os.kill(os.getpid(), number)
            steps.append("after the signal")

    before = {each: signal.signal(each, signal.SIG_IGN) for each in (number, other)}
    try:
        send()  # where it is ignored, it stays so
        signal.signal(number, signal.default_int_handler)  # and is not where the other one is
        with pytest.raises(KeyboardInterrupt):
            send()
        assert signal.getsignal(number) is signal.default_int_handler
        assert signal.getsignal(other) == signal.SIG_IGN
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert len(steps) == 2
