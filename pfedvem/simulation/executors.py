"""Where cohorts run. Every executor gives the numbers of the sequential one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.simulation.work import Job, Outcome, Setup, perform

PADDING = 1.5  # how much larger than its clients' data a cohort may be by its padding
PADDED_SAMPLES = 4096  # about so many samples are trained together, so that small clients make large cohorts
FEWEST, MOST = 8, 64  # clients in a cohort of large and of small ones; more no longer fit a CPU's cache
CONVOLUTIONS = 4  # by how much a cohort is smaller for convolutions, which fill a CPU's cache sooner and gain little
ACCELERATOR = 8  # by how much a cohort may be larger on an accelerator
SHARES = 8  # unless asked to, no cohort has more of a job's samples than one in so many: all workers get something
ATTEMPTS = 3  # how often workers that died are replaced in a round


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


class Vectorised(Executor):
    """Cohorts in this process: one step trains many clients."""

    def __init__(self, setup: Setup, cohort: int | None = None) -> None:
        super().__init__(setup)
        self._cohort = cohort

    def run(self, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        with one_thread():
            for job in cohorts(self.setup, jobs, self._cohort):
                yield perform(self.setup, down, tree.take(clients, job.clients), job)


class Sequential(Vectorised):
    """Cohorts of one: the reference that all others must match."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, cohort=1)


class Processes(Executor):
    """Cohorts in workers of one thread each; the data is shared with them, not copied (on Linux).

    With the same cohorts, bit for bit the results of one process, since every worker does the same arithmetic. A
    worker that dies is replaced and its cohort done again.
    """

    def __init__(self, setup: Setup, workers: int, cohort: int | None = None) -> None:
        super().__init__(setup)
        self._workers, self._cohort = workers, cohort
        _ = setup.federation.prepared  # before workers are forked, so that all share it
        self._pool = self._start()

    def run(self, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        sent = pickle.dumps(down)  # as plain bytes: PyTorch would open a shared file for each of its tensors
        left = cohorts(self.setup, jobs, self._cohort)
        for _ in range(ATTEMPTS):
            try:
                tasks = {self._submit(sent, clients, job): job for job in left}
                for done in as_completed(tasks):
                    outcome: Outcome = pickle.loads(done.result())
                    left.remove(tasks[done])
                    yield outcome
                return
            except BrokenProcessPool:
                self.close(failed=True)
                self._pool = self._start()
        raise UserError("Workers keep dying, perhaps for want of memory: try fewer --workers, then --resume.")

    def close(self, failed: bool) -> None:
        if failed:  # do not wait for clients whose results nobody wants any more
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, sent: bytes, clients: Any, job: Job) -> Future[bytes]:
        return self._pool.submit(_work, sent, pickle.dumps((tree.take(clients, job.clients), job)))

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        return ProcessPoolExecutor(self._workers, context, _start_worker, (self.setup, os.getpid()))


def executor(setup: Setup, name: str = "auto", workers: int | None = None, cohort: int | None = None) -> Executor:
    """The executor of this name.

    ``auto`` takes processes on a CPU with several cores where they can be forked, and one process elsewhere: started
    anew, workers could not find a method that was written in a notebook.
    """
    count = workers if workers is not None else (os.cpu_count() or 1)
    if name == "auto":
        name = "processes" if count > 1 and setup.device == "cpu" and sys.platform == "linux" else "vectorised"
    if name == "processes" and setup.device != "cpu":
        raise UserError(f"Processes train on the CPU; for {setup.device} take --executor vectorised.")
    if name == "processes":
        return Processes(setup, count, cohort)
    return Sequential(setup) if name == "sequential" else Vectorised(setup, cohort)


def require(device: str) -> None:
    """Refuses a device that is not there."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device not in there:
        raise UserError(f"There is no device {device!r}; there are {', '.join(there)}.")
    if not there[device]:
        raise UserError(f"PyTorch finds no {device} on this machine: use --device cpu.")


def cohorts(setup: Setup, jobs: Sequence[Job], most: int | None = None) -> list[Job]:
    """The same work as cohorts of at most so many clients, the most work first.

    Clients of about one size go together, so that little is padded. By default cohorts are as large as pays. They do
    not depend on the number of workers, and so neither do rounding errors.
    """
    sizes = setup.federation.sizes
    out = []
    for job in jobs:
        ordered = sorted(job.clients, key=lambda j: (-sizes[j], j))
        shares = SHARES if most is None and setup.device == "cpu" else 1
        share = sum(sizes[j] for j in ordered) / shares
        cohort: list[int] = []
        samples = work = 0
        for j in ordered:
            largest = sizes[cohort[0]] if cohort else sizes[j]
            full = len(cohort) >= (most or _limit(setup, largest))
            # A step costs about as much as ten samples, however few there are in it.
            padded = (len(cohort) + 1) * (largest + 10) > PADDING * (work + sizes[j] + 10)
            if cohort and (full or padded or samples + sizes[j] > share or setup.model.mixes_samples):
                out.append(replace(job, clients=tuple(cohort)))
                cohort, samples, work = [], 0, 0
            cohort.append(j)
            samples, work = samples + sizes[j], work + sizes[j] + 10
        out.append(replace(job, clients=tuple(cohort)))
    # What contributes trains the base as well, which is by far the most work.
    return sorted(out, key=lambda job: (not (job.upload or job.evaluate), -sum(sizes[j] for j in job.clients)))


def _limit(setup: Setup, largest: int) -> int:
    if setup.device != "cpu":
        return ACCELERATOR * max(FEWEST, min(MOST, PADDED_SAMPLES // largest))
    scale = CONVOLUTIONS if setup.model.convolutional else 1
    return max(FEWEST // scale, min(MOST, PADDED_SAMPLES // scale // largest))


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
    _keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=follow, args=(parent,), daemon=True).start()


def _keep_memory() -> None:
    """Keeps freed memory in the process: giving it back after every step and asking again costs page faults."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than GNU's
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: from so many bytes on, memory is asked for and given back each time
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: so many bytes may lie free


def follow(parent: int) -> None:
    """Ends a process whose parent was killed; nobody else would."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(down: bytes, task: bytes) -> bytes:
    client, job = pickle.loads(task)
    return pickle.dumps(perform(_setup, pickle.loads(down), client, job))
