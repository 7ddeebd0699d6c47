"""The trials of a sweep: a journal in its folder, which any number of processes share.

trials.journal     what Optuna knows of every trial, a line of JSON for each change
.lock              held by whoever chooses a trial or writes results
.journal-lock      held by whoever adds a line
.worker-*          held by a process as long as it lives

A journal that is only ever added to is safer than SQLite on a disk that several machines share. All locks are the
system's own, which ends them with their process. A trial whose process is gone was killed: it does not count, and its
settings are tried again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from pfedvem.data import Federation
from pfedvem.errors import UserError
from pfedvem.experiments.plan import Plan, Settings

Record = dict[str, float | None]
NAME = "sweep"
STARTUP = 5  # trials that must be complete before others are pruned
ANEW = "Choose another --out, or delete the file to start anew."
COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Attempt:
    """How a trial went: its history, how long it took, whether it was pruned, and why it failed, if it did."""

    history: tuple[Record, ...]
    seconds: float
    pruned: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Row:
    """A trial that has ended: complete, pruned or failed, which it is for a reason.

    Accuracies in percent are those of the last evaluated round; ``scores`` are those of all evaluated rounds.
    """

    trial: int
    state: str
    score: float | None
    pm: float | None
    gm: float | None
    settings: Settings
    scores: dict[int, float]
    seconds: float
    reason: str | None


@dataclass(frozen=True)
class Found:
    """What a sweep has found so far, out of so many trials, best first."""

    plan: Plan
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        return self.rows[0] if self.rows and self.rows[0].state == "complete" else None


class Trials:
    """The trials in a folder. Used in a ``with`` statement, for which this process counts as alive."""

    def __init__(self, folder: Path, plan: Plan, data: Federation) -> None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, not the folder of a sweep.")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._plan = folder, plan
        self._worker = folder / f".worker-{uuid.uuid4().hex[:12]}"
        self._alive: IO[bytes] | None = None
        self.running = False
        self._distributions: dict[str, BaseDistribution] = {
            key: CategoricalDistribution(plan.choices(key)) for key in plan.space
        }
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with self._locked():
            journal = _journal(folder)
            try:
                self._study = optuna.create_study(
                    storage=JournalStorage(journal), study_name=NAME, direction="maximize", load_if_exists=True
                )
            except (LookupError, TypeError, ValueError, AssertionError) as error:
                raise UserError(f"{folder / 'trials.journal'} is not the journal of a sweep. {ANEW}") from error
            self._claim(plan.identity(data))
        if plan.prune:
            warmup = plan.config.rounds // 4
            self._study.pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warmup)
        else:
            self._study.pruner = optuna.pruners.NopPruner()
        if plan.sampler == "tpe":
            # Processes that start at different times must not propose the same.
            seed = (plan.config.seed + len(self._study.get_trials(deepcopy=False))) % 2**32
            self._study.sampler = optuna.samplers.TPESampler(seed=seed)

    def __enter__(self) -> Self:
        self._alive = open(self._worker, "wb")
        fcntl.lockf(self._alive, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._alive is not None
        self._worker.unlink(missing_ok=True)
        self._alive.close()

    def next(self) -> tuple[optuna.Trial, Settings] | None:
        """A trial to run now; None where there is none.

        ``running`` then says whether trials are still being run, here or elsewhere, which may come to nothing.
        """
        with self._locked():
            tried = self._tried()
            self.running = any(trial.state == TrialState.RUNNING for trial in self._trials())
            if len(tried) >= self._plan.total:
                return None
            if self._plan.sampler != "tpe":
                self._enqueue(tried)
            while True:
                trial = self._study.ask(self._distributions)
                settings = self._plan.decoded(trial.params)
                if settings not in tried:
                    trial.set_user_attr("worker", self._worker.name)
                    return trial, settings
                self._study.tell(trial, state=TrialState.FAIL)  # proposed for the second time
                self._enqueue(tried)

    def end(self, trial: optuna.Trial, attempt: Attempt) -> None:
        """A trial has ended like this."""
        last = attempt.history[-1] if attempt.history else None
        trial.set_user_attr("seconds", round(attempt.seconds, 3))
        for model in ("pm", "gm"):
            trial.set_user_attr(model, last[model] if last is not None else None)
        if attempt.reason is not None:
            trial.set_user_attr("reason", attempt.reason)
            self._study.tell(trial, state=TrialState.FAIL)
        elif attempt.pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            assert last is not None  # the last round is always evaluated
            self._study.tell(trial, self._plan.score(last))

    def found(self) -> Found:
        """All that has ended."""
        rows = [self._row(trial) for trial in self._trials() if _ended(trial)]
        order = {"complete": 0, "pruned": 1, "failed": 2}
        rows.sort(key=lambda row: (order[row.state], -(row.score or 0), row.trial))
        return Found(self._plan, tuple(rows))

    @contextmanager
    def writing(self) -> Iterator[Found]:
        """What has ended, while nobody else writes it."""
        with self._locked():
            yield self.found()

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _tried(self) -> list[Settings]:
        """The settings of trials that have ended or are being run; trials of dead processes are given up."""
        tried = []
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and not self._lives(trial.user_attrs.get("worker")):
                self._study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state == TrialState.RUNNING or _ended(trial):
                tried.append(self._plan.decoded(trial.params))
        return tried

    def _enqueue(self, tried: list[Settings]) -> None:
        untried = next(settings for settings in self._plan.all if settings not in tried)
        self._study.enqueue_trial(self._plan.encoded(untried))

    def _row(self, trial: FrozenTrial) -> Row:
        attributes, scores = trial.user_attrs, trial.intermediate_values
        return Row(
            trial=trial.number,
            state="failed" if trial.state == TrialState.FAIL else trial.state.name.lower(),
            score=trial.value if trial.state == TrialState.COMPLETE else next(reversed(scores.values()), None),
            pm=attributes["pm"],
            gm=attributes["gm"],
            settings=self._plan.decoded(trial.params),
            scores=dict(sorted(scores.items())),
            seconds=attributes["seconds"],
            reason=attributes.get("reason"),
        )

    def _claim(self, identity: dict[str, Any]) -> None:
        """Refuses a folder that holds another sweep."""
        saved = self._study.user_attrs.get("identity")
        if saved is None:
            self._study.set_user_attr("identity", identity)
            return
        differing = [
            f"{key} (was {saved.get(key)!r}, now {identity.get(key)!r})"
            for key in sorted({*saved, *identity})
            if saved.get(key) != identity.get(key)
        ]
        if differing:
            raise UserError(f"{self._folder} holds another sweep: {', '.join(differing)}. Choose another --out.")

    def _lives(self, worker: str | None) -> bool:
        """Whether a process that works on a trial is still there."""
        if worker is None or worker == self._worker.name:
            return worker is not None
        try:
            with open(self._folder / worker, "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except (BlockingIOError, PermissionError):  # systems differ
            return True
        (self._folder / worker).unlink(missing_ok=True)
        return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = _Lock(self._folder / ".lock")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()


class _Lock(JournalFileOpenLock):
    """A lock that the system ends with its process; Optuna's own outlive a process that is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self) -> bool:
        self._file = open(self._path, "ab")  # noqa: SIM115 - it is open as long as it is locked
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        self._file.close()


class _Journal(JournalFileBackend):
    """A journal whose every line has a checksum."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        super().append_logs([{**log, "sum": _sum(log)} for log in logs])


def _sum(log: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(log, sort_keys=True).encode()).hexdigest()[:16]


def _as_written(line: bytes) -> bool:
    """Whether a line of the journal is whole; those of an earlier version have no checksum."""
    try:
        log = json.loads(line)
        return "sum" not in log or log.pop("sum") == _sum(log)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False


def _journal(folder: Path) -> JournalFileBackend:
    """The journal of a folder. A last line that was cut off, by a full disk say, is dropped."""
    path, lock = folder / "trials.journal", _Lock(folder / ".journal-lock")
    lock.acquire()
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    lock.release()
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if line.endswith(b"\n") and not _as_written(line):
            raise UserError(f"Line {number} of {path} is damaged. {ANEW}")
    return _Journal(str(path), lock_obj=lock)


def _ended(trial: FrozenTrial) -> bool:
    """Whether a trial came to an end of its own: it is complete, was pruned, or failed for a reason."""
    return trial.state in COUNTED or (trial.state == TrialState.FAIL and "reason" in trial.user_attrs)
