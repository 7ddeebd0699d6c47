"""Where cohorts run. Every executor gives the numbers of the sequential one."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.simulation.work import Job, Outcome, Setup, perform
from pfedvem.simulation.workers import Died, Worker, packed

PADDING = 1.5  # how much larger than its clients' data a cohort may be by its padding
PADDED_SAMPLES = 4096  # about so many samples are trained together, so that small clients make large cohorts
FEWEST, MOST = 8, 64  # clients in a cohort of large and of small ones; more no longer fit a CPU's cache
CONVOLUTIONS = 4  # by how much a cohort is smaller for convolutions, which fill a CPU's cache sooner and gain little
ACCELERATOR = 8  # by how much a cohort may be larger on an accelerator
SHARES = 8  # unless asked to, no cohort has more of a job's samples than one in so many: all workers get something
ATTEMPTS = 3  # how often a cohort is tried whose worker dies
KEEP_DYING = "Workers keep dying, perhaps for want of memory: try fewer --workers, then --resume."


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
        self.close()

    def close(self) -> None:  # noqa: B027 - most executors have nothing to end
        """Ends the workers."""


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
    """Cohorts in workers of one thread each.

    With the same cohorts, bit for bit the results of one process, since every worker does the same arithmetic. A
    worker that dies is replaced and its cohort done again.
    """

    def __init__(self, setup: Setup, workers: int, cohort: int | None = None) -> None:
        super().__init__(setup)
        self._count, self._cohort = workers, cohort
        self.workers: list[Worker] = []
        _ = setup.federation.prepared  # before workers are forked, so that all share it

    def run(self, down: Any, clients: Any, jobs: Sequence[Job]) -> Iterator[Outcome]:
        sent, busy, done = packed(down), dict[Connection, tuple[Worker, Job, int]](), list[Outcome]()
        left = deque((job, 1) for job in cohorts(self.setup, jobs, self._cohort))
        try:
            while left or busy:
                for worker in self._idle(busy, len(left)):
                    job, attempt = left.popleft()
                    busy[worker.pipe] = worker, job, attempt
                    worker.begin(sent, tree.take(clients, job.clients), job)
                yield from done  # while workers are at their next cohorts
                done.clear()
                for pipe in wait(list(busy)):
                    worker, job, attempt = busy[pipe]  # type: ignore[index]
                    try:
                        done.append(worker.finish())
                    except Died:
                        if attempt == ATTEMPTS:
                            raise UserError(KEEP_DYING) from None
                        left.appendleft((job, attempt + 1))
                        self._end(worker)
                    del busy[worker.pipe]
            yield from done
        finally:  # do not wait for clients whose results nobody wants any more
            for worker, _, _ in busy.values():
                self._end(worker)

    def close(self) -> None:
        while self.workers:
            self._end(self.workers[-1])

    def _idle(self, busy: Container[Connection], most: int) -> list[Worker]:
        """At most so many workers that have nothing to do; they are started when they are first needed."""
        idle = [worker for worker in self.workers if worker.pipe not in busy][:most]
        while len(idle) < most and len(self.workers) < self._count:
            self.workers.append(Worker(self.setup))
            idle.append(self.workers[-1])
        return idle

    def _end(self, worker: Worker) -> None:
        worker.end()
        if worker in self.workers:  # Ctrl-C may come here too, and it is then ended twice
            self.workers.remove(worker)


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
