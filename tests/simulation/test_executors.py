"""Every executor gives the numbers of the sequential one, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfedvem import tree
from pfedvem.algorithms import METHODS, PFedVEM
from pfedvem.data.federation import Federation, Shard, Split
from pfedvem.errors import UserError
from pfedvem.models import Model
from pfedvem.simulation.executors import (
    MOST,
    PADDING,
    Executor,
    Processes,
    Sequential,
    Vectorised,
    cohorts,
    executor,
    require,
)
from pfedvem.simulation.rounds import Progress, State, simulate, start
from pfedvem.simulation.work import Job, Setup
from tests.conftest import blobs, small_network


def run(place: Executor, rounds: int = 3) -> State:
    return simulate(
        start(place.setup),
        rounds=rounds,
        participation=0.5,
        eval_every=2,
        executor=place,
        progress=Progress(),
        after_round=lambda state: None,
    )


@pytest.mark.parametrize("cohort", [None, 1, 3])
def test_processes_give_bit_for_bit_the_numbers_of_one_process(model: Model, cohort: int | None) -> None:
    setup = Setup(METHODS["pfedvem"](), model, blobs((40, 12, 35, 33, 1, 38, 41, 36)), 0)
    reference = run(Vectorised(setup, cohort))
    for workers in (1, 2):
        with Processes(setup, workers, cohort) as place:
            parallel = run(place)
        for part in ("server", "clients", "scores"):
            pairs = zip(tree.leaves(getattr(reference, part)), tree.leaves(getattr(parallel, part)), strict=True)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs), part


def of_sizes(sizes: list[int], model: Model) -> Setup:
    shards = tuple(Shard(str(j), np.arange(n), (np.arange(1),), ()) for j, n in enumerate(sizes))
    nobody = Split(torch.zeros(max(sizes), 4), torch.zeros(max(sizes), dtype=torch.long))
    return Setup(METHODS["fedavg"](), model, Federation("sizes", nobody, nobody, shards, ("a", "b", "c")), 0)


def test_the_work_is_shared_out_among_workers_unless_cohorts_are_asked_for() -> None:
    setup, jobs = of_sizes([50] * 40, small_network()), [Job(0, tuple(range(40)))]
    assert [len(job.clients) for job in cohorts(setup, jobs)] == [5] * 8
    assert [len(job.clients) for job in cohorts(setup, jobs, 64)] == [40]
    assert [len(job.clients) for job in cohorts(replace(setup, device="cuda"), jobs)] == [40]


def test_convolutions_go_in_smaller_cohorts_on_a_processor() -> None:
    sizes, jobs = [2000] * 64, [Job(0, tuple(range(64)))]
    images = Model(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 2), torch.nn.Flatten(), torch.nn.Linear(2, 3)))
    assert {len(job.clients) for job in cohorts(of_sizes(sizes, small_network()), jobs)} == {8}
    assert {len(job.clients) for job in cohorts(of_sizes(sizes, images), jobs)} == {2}


@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=60), most=st.sampled_from([None, 1, 4]))
def test_cohorts_have_every_client_once_and_little_padding(sizes: list[int], most: int | None) -> None:
    setup = of_sizes(sizes, small_network())
    half = len(sizes) // 2
    jobs = [Job(0, tuple(range(half)), upload=True), Job(0, tuple(range(half, len(sizes))))]
    found = cohorts(setup, [job for job in jobs if job.clients], most)
    assert sorted(j for job in found for j in job.clients) == list(range(len(sizes)))
    assert all(job.upload == (j < half) for job in found for j in job.clients)
    for job in found:
        work = [sizes[j] + 10 for j in job.clients]
        assert len(work) * max(work) <= PADDING * sum(work)
        assert len(work) <= (most or MOST)


def test_a_network_that_mixes_samples_is_trained_client_by_client(federation: Federation) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    setup = Setup(METHODS["fedavg"](), Model(network), federation, 0)
    assert all(len(job.clients) == 1 for job in cohorts(setup, [Job(0, (0, 1, 2, 3))], 4))


def test_auto_takes_processes_where_there_are_processors(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(METHODS["fedavg"](), model, federation, 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert type(executor(setup)) is Vectorised
    monkeypatch.setattr(sys, "platform", "linux")
    assert type(executor(setup, workers=1)) is Vectorised
    assert type(executor(replace(setup, device="cuda"))) is Vectorised
    assert isinstance(executor(setup, "sequential"), Sequential)
    with executor(setup) as place:
        assert isinstance(place, Processes)


@pytest.mark.parametrize(("device", "reason"), [("cuda", "finds no cuda"), ("tpu", "no device 'tpu'")])
def test_a_device_that_is_not_there_is_refused(device: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=reason):
        require(device)


def test_processes_are_for_the_cpu(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match="take --executor vectorised"):
        executor(Setup(METHODS["fedavg"](), model, federation, 0, "cuda"), "processes", 2)


def test_the_work_of_a_worker_that_dies_is_done_again(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setup = Setup(METHODS["pfedvem"](), model, federation, 0)
    expected = run(Vectorised(setup))
    killed = tmp_path / "killed"

    class Deadly(PFedVEM):
        def adapt(self, *args: Any) -> Any:
            if not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().adapt(*args)

    with Processes(replace(setup, algorithm=Deadly()), 2) as place:
        survived = run(place)
    assert killed.exists()
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(expected.server), tree.leaves(survived.server), strict=True)
    )


def test_workers_that_keep_dying_are_an_error_that_says_what_to_do(model: Model, federation: Federation) -> None:
    class Fatal(PFedVEM):
        def adapt(self, *args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with Processes(Setup(Fatal(), model, federation, 0), 1) as place, pytest.raises(UserError, match="keep dying"):
        run(place, rounds=1)


def test_half_an_answer_of_a_worker_that_was_killed_is_not_waited_for(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parent, killed, send = os.getpid(), tmp_path / "killed", Connection._send  # type: ignore[attr-defined]

    def break_off(pipe: Any, message: bytes, **options: Any) -> None:
        if os.getpid() != parent and not killed.exists():
            killed.touch()
            send(pipe, message[: len(message) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        send(pipe, message, **options)

    setup = Setup(METHODS["pfedvem"](), model, federation, 0)
    expected = run(Vectorised(setup))
    monkeypatch.setattr(Connection, "_send", break_off)
    with Processes(setup, 2) as place:
        survived = run(place)
    assert killed.exists()
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(expected.server), tree.leaves(survived.server), strict=True)
    )


class Odd(Exception):
    """An error that goes into a pipe and does not come out of it."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "kind"), [(UserError("too hot"), UserError), (KeyError("too hot"), KeyError), (Odd(3, 4), RuntimeError)]
)
def test_an_error_in_a_worker_is_raised_and_says_where_it_was(
    model: Model, federation: Federation, error: Exception, kind: type[Exception]
) -> None:
    class Failing(PFedVEM):
        def adapt(self, *args: Any) -> Any:
            raise error

    with Processes(Setup(Failing(), model, federation, 0), 2) as place, pytest.raises(kind) as raised:
        run(place, rounds=1)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "in adapt" in told
    assert str(error) in told


def test_what_was_begun_and_not_waited_for_is_not_taken_for_what_comes_next(model: Model) -> None:
    setup = Setup(METHODS["fedavg"](), model, blobs((5,) * 8), 0)
    state, jobs = start(setup), [Job(0, tuple(range(8)), upload=True)]
    with Processes(setup, 2, 1) as place:
        begun = place.run(state.server, state.clients, jobs)
        next(begun)
        begun.close()  # type: ignore[attr-defined]
        later = list(place.run(state.server, state.clients, [replace(jobs[0], round=1)]))
    assert sorted(j for outcome in later for j in outcome.job.clients) == list(range(8))
    assert {outcome.job.round for outcome in later} == {1}


ORPHANS = """
import os, torch
from pfedvem import FedAvg
from pfedvem.simulation.executors import Processes
from pfedvem.simulation.rounds import start
from pfedvem.simulation.work import Job, Setup
from tests.conftest import blobs, small_network
if __name__ == "__main__":
    setup = Setup(FedAvg(), small_network(), blobs((5, 5)), 0)
    place, state = Processes(setup, 2), start(setup)
    list(place.run(state.server, state.clients, [Job(0, (0, 1), True, False)]))
    print(*(worker.pid for worker in place.workers), flush=True)
    input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the workers")
def test_workers_end_when_their_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
        parent.wait()
        waited = time.monotonic() + 30
        while any(_alive(pid) for pid in workers) and time.monotonic() < waited:
            time.sleep(0.1)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
