"""Where cohorts run. Every executor gives the numbers of the sequential one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.simulation.work import Job, Outcome, Setup, perform


class Executor(ABC):
    """Runs the jobs of a round. Used in a ``with`` statement, which ends its workers."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def run(self, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Does the jobs for the clients whose states are the rows of ``clients``; outcomes may come in any order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error is not None)

    def close(self, failed: bool) -> None:  # noqa: B027 - most executors have nothing to end
        """Ends the workers, at once where the run has failed."""


class Sequential(Executor):
    """Cohorts of one, in order: the reference that all others must match."""

    def run(self, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        with one_thread():
            for job in singles(jobs):
                yield perform(self.setup, down, tree.take(clients, job.clients), job)


class Processes(Executor):
    """Cohorts of one in workers of one thread each; the data is shared with them, not copied (on Linux).

    Bit for bit the sequential executor's results, since every worker does the same arithmetic.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        super().__init__(setup)
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, (setup, os.getpid()))

    def run(self, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        # The largest clients first, so that no worker is left with one at the end while the others are idle.
        ordered = sorted(singles(jobs), key=lambda job: -self.setup.federation.shards[job.clients[0]].n)
        sent = pickle.dumps(down)  # as plain bytes: PyTorch would open a shared file for each of its tensors
        tasks = [(sent, pickle.dumps((tree.take(clients, job.clients), job))) for job in ordered]
        try:
            for done in as_completed([self._pool.submit(_work, *task) for task in tasks]):
                outcome: Outcome = pickle.loads(done.result())
                yield outcome
        except BrokenProcessPool as error:
            raise UserError("A worker died, perhaps for want of memory: try fewer --workers, then --resume.") from error

    def close(self, failed: bool) -> None:
        if failed:  # do not wait for clients whose results nobody wants any more
            for process in list(self._pool._processes.values()):
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)


def executor(setup: Setup, name: str = "auto", workers: int | None = None) -> Executor:
    """The executor of this name. ``auto`` takes processes where local training is slow enough to pay for them."""
    count = workers if workers is not None else (os.cpu_count() or 1)
    convolutional = any(leaf.ndim > 2 for leaf in setup.model.initial.theta.values())
    if name == "processes" or (name == "auto" and count > 1 and (workers is not None or convolutional)):
        return Processes(setup, count)
    return Sequential(setup)


def singles(jobs: Sequence[Job]) -> list[Job]:
    """The same work as cohorts of one."""
    return [replace(job, clients=(j,)) for job in jobs for j in job.clients]


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for PyTorch's kernels: at the batch sizes of local training its own threading only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_setup: Setup  # of a worker


def _start_worker(setup: Setup, parent: int) -> None:
    global _setup
    _setup = setup
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """Ends a worker whose parent was killed; nobody else would."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(down: bytes, task: bytes) -> bytes:
    client, job = pickle.loads(task)
    return pickle.dumps(perform(_setup, pickle.loads(down), client, job))
