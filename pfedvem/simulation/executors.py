"""Where cohorts run. Every executor gives the numbers of the sequential one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pfedvem import tree
from pfedvem.simulation.work import Job, Outcome, Setup, perform


class Executor(Protocol):
    """Runs jobs for the clients whose states are the rows of ``clients``; outcomes may come in any order."""

    def run(self, setup: Setup, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]: ...


class Sequential:
    """Cohorts of one, in order: the reference that all others must match."""

    def run(self, setup: Setup, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        with one_thread():
            for job in jobs:
                for j in job.clients:
                    single = Job(job.round, (j,), job.upload, job.evaluate)
                    yield perform(setup, down, tree.take(clients, [j]), single)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for PyTorch's kernels: at the batch sizes of local training its own threading only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
