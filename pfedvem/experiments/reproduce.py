"""Runs the paper's tables and figures, and keeps every finished run as one small file.

``OUT/runs/NAME.json`` is a finished run: its configuration, its scores, its history and its clients. A run that is not
finished has a folder ``OUT/unfinished/NAME`` with its checkpoint, from which it goes on.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from pfedvem.data.loading import assemble, load_federation
from pfedvem.data.settings import DataSettings
from pfedvem.data.sources import load_source
from pfedvem.errors import Damaged, UserError
from pfedvem.experiments.compare import Measure, Summary, measure
from pfedvem.experiments.config import Config, merged
from pfedvem.experiments.course import RECENT, Probe, refuse_divergence
from pfedvem.experiments.run import train
from pfedvem.experiments.studies import SNAPSHOTS, Cell, Study, published
from pfedvem.simulation import checkpoints
from pfedvem.simulation.fit import EARLIER, FREE, flat
from pfedvem.simulation.results import Result
from pfedvem.simulation.rounds import Progress, State, Together

Record = dict[str, Any]
KEPT = ("n_train", "pm", "pm_nll", "pm_ece", "tau", "uncertainty", "deviation")  # of each client
MEASURED = {"pm": "pm", "gm": "gm", "small": "small_clients_pm"}
COURSE = "gm.json"
OFTEN = 5  # rounds from one test of the global model to the next, before that


@dataclass(frozen=True)
class Found:
    """A cell's number: ours over the finished seeds, the paper's, and whether they agree."""

    cell: Cell
    measure: str
    ours: Measure | None
    seeds: int
    paper: Measure | None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper.mean

    @property
    def within(self) -> bool | None:
        """Whether the difference lies within two joint standard errors; None where one of them is unknown."""
        if self.ours is None or self.paper is None or self.ours.sem is None or self.paper.sem is None:
            return None
        return abs(self.ours.mean - self.paper.mean) <= 2 * math.hypot(self.ours.sem, self.paper.sem)


@dataclass(frozen=True)
class Reproduction:
    """A study as far as it has been run: the records of each cell's finished runs, and why others failed."""

    study: Study
    cells: tuple[Cell, ...]
    records: Mapping[str, Record]
    failures: tuple[str, ...] = ()

    def of(self, cell: Cell) -> list[Record]:
        """The finished runs of a cell."""
        return [self.records[name] for name in cell.names if name in self.records]

    @property
    def courses(self) -> list[Found]:
        """The global model from round to round: its mean over the last rounds and the best of every fifth."""
        out = []
        for cell in self.cells if "gm" in self.study.measures else ():
            runs = [run["gm_by_round"] for run in self.of(cell) if run.get("gm_by_round")]
            courses = [{int(number): gm for number, gm in run.items()} for run in runs]
            recent = [fmean(gm for at, gm in course.items() if at > max(course) - RECENT) for course in courses]
            best = [max(gm for at, gm in course.items() if at % OFTEN == 0 or at == max(course)) for course in courses]
            average = [run["gm_average"] for run in self.of(cell) if run.get("gm_average") is not None]
            paper = published(self.study.name, cell.dataset, cell.line.key, cell.column, "gm")
            for name, values in (("gm_recent", recent), ("gm_best", best), ("gm_average", average)):
                if values:
                    out.append(Found(cell, name, measure(values), len(values), paper))
        return out

    @property
    def found(self) -> list[Found]:
        """Every number of the table that we or the paper have."""
        out = []
        for cell in self.cells:
            runs = self.of(cell)
            for name in self.study.measures:
                paper = published(self.study.name, cell.dataset, cell.line.key, cell.column, name)
                ours = measure(run["summary"][MEASURED[name]] for run in runs)
                if ours is not None or paper is not None:
                    out.append(Found(cell, name, ours, len(runs), paper))
        return out


class _Kept(BaseModel):
    """What tables and figures take from a run's file, which may be damaged."""

    model_config = ConfigDict(allow_inf_nan=False)

    config: dict[str, Any]
    summary: Summary
    history: list[dict[str, float | None]]
    clients: dict[str, list[float | None]]
    snapshots: dict[int, dict[str, list[float | None]]]
    gm_by_round: dict[int, float] = {}
    gm_average: float | None = None


class Recorder(Progress):
    """Tests the global model now and then, keeps what a method says of its clients in the paper's rounds, and ends a
    run that diverges."""

    def __init__(self, config: Config, folder: Path, probe: Probe) -> None:
        self._algorithm, self._folder, self._wanted = config.algorithm, folder, snapshots(config)
        self._last = config.rounds
        self._probe = probe
        self._gm = _course(folder)

    def resumed(self, state: State) -> None:
        self.round(state)  # a kill may have come after the checkpoint and before this was written

    def round(self, state: State) -> None:
        refuse_divergence(state)
        due = state.round % OFTEN == 0 or state.round > self._last - RECENT
        gm = self._probe.global_model(state) if due else None
        if gm is not None:
            self._gm[str(state.round)] = gm
            checkpoints.replace(self._folder / COURSE, json.dumps(self._gm).encode())
        if state.round in self._wanted:
            said = self._algorithm.inspect(self._algorithm.down(state.server), state.clients)
            kept = {name: _digits(said[name].tolist()) for name in ("tau", "deviation") if name in said}
            if kept:
                checkpoints.replace(self._folder / f"snapshot-{state.round}.json", json.dumps(kept).encode())


def snapshots(config: Config) -> tuple[int, ...]:
    """The rounds of the paper's figures, as far as the run has them, and its last."""
    return tuple(sorted({*(number for number in SNAPSHOTS if number < config.rounds), config.rounds}))


def reproduce(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    *,
    finished_only: bool = False,
    progress: Progress | None = None,
    on_cell: Callable[[str, int, int], None] | None = None,
    save: Callable[[Reproduction], None] = lambda _: None,
) -> Reproduction:
    """Runs what is not finished in ``out``, seed by seed, so that all of a table is there early.

    With ``finished_only`` nothing is run: the study is made of what is there. ``save`` gets the study as it stands, at
    first, after each run and at the end. A run that diverges does not keep the others from running. Ctrl-C ends with
    ``Interrupted``; the same call goes on from there. Several processes may do the same study in one folder: none runs
    what another is at, and at the end each waits for what the others have begun.
    """
    progress = progress or Progress()
    runs = [(cell, cell.names[i], cell.configs[i]) for i in range(_seeds(cells)) for cell in cells]
    found = ((name, finished(config, _file(out, name), as_it_is=finished_only)) for _, name, config in runs)
    records = {name: record for name, record in found if record is not None}
    missing = [run for run in runs if run[1] not in records and not finished_only]
    if finished_only and not records:
        raise UserError(f"None of these runs is finished in {out}; leave out --finished to run them.")
    failures: dict[str, list[str]] = {}  # the runs that ended for the same reason

    def current() -> Reproduction:
        return Reproduction(study, tuple(cells), dict(records), tuple(map(_failure, failures, failures.values())))

    save(current())
    left, total = deque((*run, False) for run in missing), len(missing)
    while left:
        cell, name, config, wait = left.popleft()
        title = f"{cell.dataset}, {cell.heading}, {cell.line.title}, seed {config.seed}"
        if on_cell is not None:
            on_cell(title, total - len(left) - 1, total)
        try:
            with _claimed(out, name, wait) as mine:
                if not mine:
                    progress.note("Another process is at this run, and is waited for at the end.")
                    left.append((cell, name, config, True))
                    continue
                done = finished(config, _file(out, name))  # perhaps by another process in the meantime
                records[name] = done or run_one(config, _file(out, name), out / "unfinished" / name, progress)
        except checkpoints.Unwritten:
            raise  # the others could not be written either
        except UserError as error:
            progress.note(str(error))
            failures.setdefault(str(error), []).append(title)
        save(current())
    return current()


def _failure(why: str, titles: Sequence[str]) -> str:
    return f"{titles[0]}{f' and {len(titles) - 1} more' if len(titles) > 1 else ''}: {why}"


@contextmanager
def _claimed(out: Path, name: str, wait: bool) -> Iterator[bool]:
    """Keeps other processes from a run; False where one of them has it, unless it is to be waited for."""
    file = out / "unfinished" / f"{name}.lock"
    lock, mine = FileLock(file), True
    with checkpoints.writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            mine = False
        except NotImplementedError:  # a file system without locks, on which nobody can know of others
            pass
    try:
        yield mine
    finally:
        lock.release()
    if mine and _file(out, name).exists():  # whoever takes the lock after that finds the run finished
        with suppress(OSError):  # Windows, where another process has the lock open
            file.unlink()


def run_one(config: Config, file: Path, folder: Path, progress: Progress) -> Record:
    """One run from its checkpoint, if there is one, to its file; its folder is not needed any more."""
    resume = (folder / "checkpoint").exists()
    federation = load_federation(config.data, config.seed)
    probe = Probe(config, federation)
    heard = Together(Recorder(config, folder, probe), progress)
    result = train(config, out=folder, resume=resume, progress=heard, federation=federation)
    record = _record(config, result, folder, probe)
    checkpoints.replace(file, checkpoints.sealed(json.dumps(record) + "\n"))
    shutil.rmtree(folder)
    return record


def finished(config: Config, file: Path, *, as_it_is: bool = False) -> Record | None:
    """A finished run's record, or None where there is none; a run of other settings there is an error.

    One that was evaluated in more rounds than are asked for serves as well. One in fewer does ``as_it_is``, or where
    there is only a global model, which is followed from round to round in any case.
    """
    if not file.exists():
        return None
    try:
        record: Record = checkpoints.unsealed(file.read_bytes())
        _Kept.model_validate(record)
        # What the run's file does not name came later, and was as it is by default.
        default = type(config.algorithm).model_construct().model_dump(mode="json")
        before = {**EARLIER, "algorithm": default}
        was, now = flat(merged(before, record["config"])), flat(config.dump())
    except Damaged as error:
        raise UserError(f"{file} is damaged ({error}): delete it, and it is run again.") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: delete it, and it is run again.") from error
    enough = config.eval_every == 0 or not config.algorithm.personalised
    free = (FREE - {"rounds"}) | ({"eval_every"} if enough else set())
    keys = sorted({*was, *now} - free)
    differing = [f"{key} (was {was.get(key)!r}, now {now.get(key)!r})" for key in keys if was.get(key) != now.get(key)]
    if differing == [f"eval_every (was 0, now {config.eval_every})"]:
        return record if as_it_is else None  # the same run, but its course is wanted too
    if differing:
        raise UserError(
            f"{file} is a run of other settings: {', '.join(differing)}. Delete it or choose another --out."
        )
    return record


def partition_sizes(
    settings: Sequence[DataSettings], draws: int, on_draw: Callable[[], None] = lambda: None
) -> dict[int, list[int]]:
    """The local data sizes of many random partitions of one data set, for each number of clients."""
    source, found = load_source(settings[0]), {}
    for one in settings:
        sizes: list[int] = []
        for seed in range(draws):
            sizes += assemble(source, one, seed).sizes
            on_draw()
        found[one.clients] = sizes
    return found


def _record(config: Config, result: Result, folder: Path, probe: Probe) -> Record:
    """All that the tables and figures need of a run."""
    rows = result.rows
    taken = {}
    for number in snapshots(config):
        file = folder / f"snapshot-{number}.json"
        if file.exists():
            taken[str(number)] = json.loads(file.read_bytes())
    settings = config.dump()
    settings["data"].pop("root", None)  # where the data lies on this machine is nobody else's business
    made = {"pfedvem": version("pfedvem"), "torch": version("torch"), "python": platform.python_version()}
    return {
        "format": 2,  # what has none is of a time without checksums
        "config": settings,
        "summary": result.summary,
        "history": result.history,
        "clients": {name: _digits(row[name] for row in rows) for name in KEPT if name in rows[0]},
        "snapshots": taken,
        "gm_by_round": _course(folder),
        "gm_average": probe.accuracy(result.state.average),
        "made_with": made,
    }


def _course(folder: Path) -> dict[str, float]:
    """The accuracies of the global model so far, by the number of the round."""
    file = folder / COURSE
    found: dict[str, float] = json.loads(file.read_bytes()) if file.exists() else {}
    return found


def _digits(values: Iterable[float | None]) -> list[float | None]:
    """Numbers with six digits, which is more than they mean."""
    return [value if value is None or isinstance(value, int) else float(f"{value:.6g}") for value in values]


def _seeds(cells: Sequence[Cell]) -> int:
    return len(cells[0].configs) if cells else 0


def _file(out: Path, name: str) -> Path:
    return out / "runs" / f"{name}.json"
