"""Every executor gives the numbers of the sequential one, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from pfedvem import tree
from pfedvem.algorithms import METHODS
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.models import Model, build
from pfedvem.simulation.executors import Executor, Processes, Sequential, executor
from pfedvem.simulation.rounds import Progress, State, simulate, start
from pfedvem.simulation.work import Setup


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


@pytest.mark.parametrize("method", list(METHODS))
def test_processes_give_bit_for_bit_the_numbers_of_the_sequential_executor(
    method: str, model: Model, federation: Federation
) -> None:
    setup = Setup(METHODS[method](), model, federation, 0)
    reference = run(Sequential(setup))
    with Processes(setup, 2) as place:
        parallel = run(place)
    for part in ("server", "clients", "scores"):
        pairs = zip(tree.leaves(getattr(reference, part)), tree.leaves(getattr(parallel, part)), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs), part


def test_auto_takes_processes_for_convolutions_or_where_workers_are_asked_for(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    perceptron = Setup(METHODS["fedavg"](), model, federation, 0)
    convolutions = Setup(METHODS["fedavg"](), build("lenet", (1, 16, 16), 3, 0), federation, 0)
    assert isinstance(executor(perceptron), Sequential)
    assert isinstance(executor(convolutions, workers=1), Sequential)
    assert isinstance(executor(convolutions, "sequential"), Sequential)
    for setup, workers in ((convolutions, None), (perceptron, 2)):
        with executor(setup, workers=workers) as place:
            assert isinstance(place, Processes)


def test_a_worker_that_dies_is_an_error_that_says_what_to_do(model: Model, federation: Federation) -> None:
    with Processes(Setup(METHODS["fedavg"](), model, federation, 0), 1) as place:
        run(place, rounds=1)
        for pid in place._pool._processes:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserError, match="A worker died"):
            run(place, rounds=1)


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
    print(*place._pool._processes, flush=True)
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
