"""Trials of a sweep as tasks of a Ray cluster. This process chooses them and writes down what comes back."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import ray
from ray.exceptions import RayError, RayTaskError

from pfedvem.data import Federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config
from pfedvem.experiments.plan import Plan
from pfedvem.experiments.sweep import POLL, OnChange, attempt
from pfedvem.experiments.trials import Attempt, Trials
from pfedvem.report.sweep import write_sweep


def work_on_ray(plan: Plan, out: Path, data: Federation, on_change: OnChange, address: str) -> None:
    """Runs trials, as many at a time as the cluster has processors for, until there is nothing left to try.

    A task takes as many processors as the setting ``workers`` says, by default one.
    """
    workers = plan.config.workers or 1
    plan = replace(plan, workers=workers)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns of a change to come
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        task, shared = ray.remote(num_cpus=workers)(_attempt), ray.put(data)
        places = max(1, int(ray.cluster_resources().get("CPU", 1)) // workers)
        running: dict[Any, optuna.Trial] = {}
        with Trials(out, plan, data) as trials:
            on_change(trials.found())
            while True:
                while len(running) < places and (chosen := trials.next()) is not None:
                    trial, settings = chosen
                    running[task.remote(plan.trial(settings), shared)] = trial
                if not running and not trials.running:
                    return
                if not running:  # others are at work
                    time.sleep(POLL)
                    continue
                done, _ = ray.wait(list(running), num_returns=1)
                trial, came = running.pop(done[0]), _came(done[0], out)
                for record in came.history:
                    trial.report(plan.score(record), int(record["round"] or 0))
                trials.end(trial, came)
                with trials.writing() as found:
                    write_sweep(found, out)
                on_change(found)
    finally:
        ray.shutdown()


def _came(task: Any, out: Path) -> Attempt:
    try:
        attempt: Attempt = ray.get(task)
    except RayTaskError:  # an error of ours
        raise
    except RayError as error:  # a process or machine that died, for want of memory say; Ray has tried again by then
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(
            f"A trial on Ray died ({reason}); what has ended is kept in {out}. Go on by the same command."
        ) from error
    return attempt


def _attempt(config: Config, data: Federation) -> Attempt:
    return attempt(config, data, lambda record: None)
