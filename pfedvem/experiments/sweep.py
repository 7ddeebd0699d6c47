"""A search for hyper-parameters: many trials of one method on the same clients, each scored by data that it did not
train on.

What has ended is in the folder of the sweep, so the same call goes on where it stopped, and several processes that are
started alike share the work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import torch

from pfedvem.data import Federation, load_federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config
from pfedvem.experiments.course import Probe, recent, refuse_divergence
from pfedvem.experiments.plan import Plan
from pfedvem.experiments.run import train
from pfedvem.experiments.trials import Attempt, Found, Record, Trials
from pfedvem.report.sweep import write_sweep
from pfedvem.simulation.rounds import Progress, State, Together
from pfedvem.simulation.workers import follow

OnChange = Callable[[Found], None]
POLL = 0.5  # seconds between two looks at what other processes have done


class Pruned(Exception):
    """A trial is not worth going on with."""


class _Listener(Progress):
    """Hears the record of each evaluated round; after the last, the global model's accuracy is a mean over rounds."""

    def __init__(self, config: Config, data: Federation, hear: Callable[[Record], None]) -> None:
        self._hear, self._probe = hear, Probe(config, data)
        self._last, self._recent = config.rounds, recent(config.rounds)
        self._gm: list[float] = []

    def round(self, state: State) -> None:
        refuse_divergence(state)
        if state.round > self._last - self._recent and (gm := self._probe.global_model(state)) is not None:
            self._gm.append(gm)
        if state.measured is not None:
            steady = {"gm": fmean(self._gm)} if self._gm and state.round == self._last else {}
            self._hear({**state.measured, **steady})


def sweep(
    plan: Plan,
    out: Path,
    *,
    progress: Progress | None = None,
    on_change: OnChange | None = None,
    jobs: int = 1,
    ray: str | None = None,
) -> Found:
    """Runs the trials that are not in ``out`` yet, and writes trials.csv and best.toml there after each.

    Ctrl-C ends the sweep with ``Interrupted`` or ``KeyboardInterrupt``. With several ``jobs``, so many processes work
    at the same time and share the processors; with ``ray`` the trials run on the Ray cluster of this address, or on one
    that is started here for it if that is ``local``. ``on_change`` hears what has been found whenever a trial ends.
    """
    progress, on_change = progress or Progress(), on_change or (lambda found: None)
    federation = load_federation(plan.config.data, plan.config.seed)
    data = plan.data(federation)
    for note in dict.fromkeys((*federation.notes, *data.notes)):
        progress.note(note)
    if ray is not None:
        from pfedvem.experiments.on_ray import work_on_ray

        work_on_ray(plan, out, data, on_change, ray)
    elif jobs > 1:
        _in_processes(plan, out, data, on_change, jobs)
    else:
        work(plan, out, data, progress, on_change)
    with Trials(out, plan, data) as trials, trials.writing() as found:
        write_sweep(found, out)  # whoever was stopped after its last trial has not
    if found.best is None:
        reason = next((row.reason for row in found.rows if row.reason), "all were pruned.")
        raise UserError(f"No trial came to its end: {reason}")
    return found


def work(plan: Plan, out: Path, data: Federation, progress: Progress, on_change: OnChange) -> None:
    """Runs one trial after the other until all have ended, here and elsewhere."""
    with Trials(out, plan, data) as trials:
        on_change(trials.found())
        while True:
            chosen = trials.next()
            if chosen is None and not trials.running:
                return
            if chosen is None:  # the trial of a process that is killed is there to try again
                time.sleep(POLL)
                on_change(trials.found())
                continue
            trial, settings = chosen

            def hear(record: Record, trial: optuna.Trial = trial) -> None:
                trial.report(plan.score(record), int(record["round"] or 0))
                if trial.should_prune():
                    raise Pruned

            trials.end(trial, attempt(plan.trial(settings), data, hear, progress))
            with trials.writing() as found:
                write_sweep(found, out)
            on_change(found)


def attempt(
    config: Config, data: Federation, hear: Callable[[Record], None], progress: Progress | None = None
) -> Attempt:
    """Trains by a configuration; ``hear`` gets the record of each evaluated round and may raise ``Pruned``."""
    began, history = time.perf_counter(), list[Record]()

    def heard(record: Record) -> None:
        history.append(record)
        hear(record)

    pruned, reason = False, None
    try:
        train(config, federation=data, progress=Together(progress or Progress(), _Listener(config, data, heard)))
    except Pruned:
        pruned = True
    except UserError as error:
        reason = str(error)
    return Attempt(tuple(history), time.perf_counter() - began, pruned, reason)


def _in_processes(plan: Plan, out: Path, data: Federation, on_change: OnChange, jobs: int) -> None:
    """So many processes that each work; this one looks on."""
    workers = plan.config.workers or max(1, (os.cpu_count() or 1) // jobs)
    plan = replace(plan, workers=workers)
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [context.Process(target=_job, args=(plan, out, data, os.getpid())) for _ in range(jobs)]
    with Trials(out, plan, data) as trials:
        _ = data.prepared  # before processes are forked, so that all share it
        for process in processes:
            process.start()
        try:
            while any(process.is_alive() for process in processes):
                on_change(trials.found())
                time.sleep(POLL)
        finally:
            for process in processes:
                process.terminate()
                process.join()
        on_change(trials.found())
    ended = [process.exitcode for process in processes if process.exitcode]
    if ended:
        raise UserError(f"A job of the sweep ended with exit code {ended[0]}; what has ended is kept in {out}.")


def _job(plan: Plan, out: Path, data: Federation, parent: int) -> None:
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork; clients train in one thread anyway
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the parent's command line has it
    threading.Thread(target=follow, args=(parent,), daemon=True).start()
    try:
        work(plan, out, data, Progress(), lambda found: None)
    except (OSError, UserError) as error:  # a full disk, say: the parent would show where, not what
        sys.exit(f"A job of the sweep cannot go on: {error}")
