"""Reads what runs, comparisons and reproductions leave in their folders.

A folder may be unfinished, damaged, or of another version: what can be read is read, and what cannot is said in a
sentence. Nothing here trusts a file: numbers are numbers or None, and all else is text.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pfedvem.algorithms import METHODS
from pfedvem.errors import UserError

Row = dict[str, Any]
T = TypeVar("T")

FILES = ("config.toml", "metrics.jsonl", "clients.csv", "summary.json")  # of a run
TEXT = ("client", "labels")  # the columns of clients.csv that are no numbers


@dataclass(frozen=True)
class Run:
    """A run's files; empty where there is none. ``problems`` are sentences."""

    folder: Path
    config: Row
    summary: Row
    history: list[Row]
    clients: list[Row]
    calibration: dict[str, Row]
    problems: list[str]

    @property
    def method(self) -> str:
        return printable(str(self.config.get("method") or self.summary.get("method") or "?"))

    @property
    def title(self) -> str:
        """The name of the method, as people write it."""
        return title(self.method)

    @property
    def seed(self) -> str:
        return str(self.config.get("seed", self.summary.get("seed", "?")))

    @property
    def dataset(self) -> str:
        data = self.config.get("data")
        named = data.get("dataset") if isinstance(data, dict) else None
        return str(self.summary.get("dataset") or named or "?")

    @property
    def size(self) -> str:
        """How many clients there are."""
        data = self.config.get("data")
        asked = data.get("clients") if isinstance(data, dict) else self.config.get("clients")
        return str(self.summary.get("clients") or len(self.clients) or asked or "?")

    @property
    def rounds(self) -> str:
        return str(self.summary.get("rounds", self.config.get("rounds", "?")))

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    def last(self, key: str) -> float | None:
        """A number of the summary, or of the last evaluated round."""
        found = number(self.summary.get(key))
        return found if found is not None or not self.history else number(self.history[-1].get(key))


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison by method, in the order of its table, and what it says of itself."""

    folder: Path
    about: Row
    settings: str
    rows: list[Row]
    cells: dict[str, list[Run]]
    problems: list[str]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.cells.values() for run in runs]


@dataclass(frozen=True)
class Reproduction:
    """A reproduction's description, its tables (title, header, rows) and its pictures (title, sentence, PNG)."""

    folder: Path
    about: Row
    tables: list[tuple[str, list[str], list[list[str]]]]
    figures: list[tuple[str, str, bytes]]
    problems: list[str]


def read(folder: Path) -> Run | Comparison | Reproduction:
    """What a folder holds."""
    if not folder.exists():
        raise UserError(f"There is no folder {folder}.")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name the folder of a run, a comparison or a reproduction.")
    if (folder / "reproduction.json").exists():
        return read_reproduction(folder)
    if any((folder / name).exists() for name in ("comparison.csv", "comparison.json", "cells")):
        return read_comparison(folder)
    if any((folder / name).exists() for name in FILES):
        return read_run(folder)
    inside = sorted(folder.glob("*/reproduction.json"))
    if inside:
        raise UserError(f"{folder} holds reproductions; name one of them, such as {inside[0].parent}.")
    raise UserError(
        f"{folder} is not the folder of a run, a comparison or a reproduction: it has none of {', '.join(FILES)}, "
        "comparison.csv and reproduction.json. Name what was given to --out."
    )


def read_run(folder: Path) -> Run:
    """A run's folder."""
    problems: list[str] = []
    finished = (folder / "summary.json").exists()
    config: Row = _file(folder / "config.toml", tomllib.loads, {}, problems)
    history: list[Row] = _file(folder / "metrics.jsonl", lambda text: _history(text, problems), [], problems)
    summary: Row = _file(folder / "summary.json", _object, {}, problems, needed=False)
    clients: list[Row] = _file(
        folder / "clients.csv", _clients, [], problems, needed=finished
    )  # known at the end of a run
    calibration: dict[str, Row] = _file(folder / "calibration.json", _calibration, {}, problems, needed=False)
    if not finished:
        done, rounds = history[-1]["round"] if history else 0, config.get("rounds", "?")
        again = f"pfedvem run --out {shlex.quote(str(folder))} --resume"
        reached = f"round {done:.0f} of {rounds} is the last that was evaluated"
        problems.insert(0, f"The run is not finished: {reached}. Go on with: {again}")
    return Run(folder, config, summary, history, clients, calibration, problems)


def read_comparison(folder: Path) -> Comparison:
    """A comparison's folder. Where it says of which methods and seeds it is, runs of others are left out."""
    problems: list[str] = []
    about: Row = _file(folder / "comparison.json", _object, {}, problems, needed=False)
    settings = _file(folder / "comparison.toml", str, "", problems, needed=False)
    rows: list[Row] = _file(folder / "comparison.csv", _table, [], problems)
    methods, seeds = ([str(value) for value in listed(about.get(key))] for key in ("methods", "seeds"))
    every = [read_run(path.parent) for path in sorted(folder.glob("cells/*/config.toml"))]
    found = [run for run in every if (run.method in methods and run.seed in seeds) or not (methods and seeds)]
    if len(found) < len(every):
        problems.append(f"{len(every) - len(found)} runs in cells/ are of other methods or seeds and are left out.")
    problems += [f"A run failed. {failure}" for failure in listed(about.get("failures"))]
    done = {(run.method, run.seed) for run in found if run.finished}
    planned = [(name, seed) for name in methods for seed in seeds] or [(run.method, run.seed) for run in found]
    missing = [f"{title(name)} (seed {seed})" for name, seed in planned if (name, seed) not in done]
    if missing:
        problems.append(f"Not finished: {', '.join(missing)}. The same command with the same --out goes on.")
    problems += [f"{run.folder.name}: {text}" for run in found if run.finished for text in run.problems]
    if not found:
        problems.append("There is no run in cells/.")
    order = [*methods, *(str(row.get("method")) for row in rows), *METHODS, *(run.method for run in found)]
    cells = {name: runs for name in dict.fromkeys(order) if (runs := [run for run in found if run.method == name])}
    return Comparison(folder, about, settings, rows, cells, problems)


def read_reproduction(folder: Path) -> Reproduction:
    """A reproduction's folder."""
    problems: list[str] = []
    about: Row = _file(folder / "reproduction.json", _object, {}, problems)
    tables, figures = [], []
    for entry in _entries(about.get("tables")):
        if (path := _inside(folder, entry, problems)) is None:
            continue
        lines: list[list[str]] = _file(path, _lines, [], problems)
        if lines:
            width = len(lines[0])
            rows = [[*line, *[""] * width][:width] for line in lines[1:]]
            tables.append((str(entry.get("title") or path.stem), lines[0], rows))
    for entry in _entries(about.get("figures")):
        if (path := _inside(folder, entry, problems)) is None:
            continue
        content = path.read_bytes() if path.is_file() else b""
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            figures.append((str(entry.get("title") or path.stem), str(entry.get("about") or ""), content))
        else:
            problems.append(f"{path.name} is {'no PNG picture' if content else 'not there'}.")
    return Reproduction(folder, about, tables, figures, problems)


def title(method: str) -> str:
    """The name of a method as people write it."""
    return METHODS[method].title if method in METHODS else method.rpartition(":")[2]


def printable(text: str) -> str:
    """Text without the few characters that neither a page nor a picture can hold."""
    return re.sub("[^\\t\\n\\r\\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def number(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) and not isinstance(value, bool) else None


def _file(path: Path, parse: Callable[[str], T], default: T, problems: list[str], needed: bool = True) -> T:
    """What is in a file; a sentence where it is missing, if it is needed, or cannot be read."""
    try:
        return parse(printable(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        problems += [f"{path.name} is not there."] if needed else []
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}.")
    return default


def _object(text: str) -> Row:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def _history(text: str, problems: list[str]) -> list[Row]:
    """The evaluated rounds. A last line that is cut off does not spoil the others."""
    found = []
    for at, line in enumerate(text.splitlines(), 1):
        try:
            row = {key: number(value) for key, value in _object(line).items()}
        except (ValueError, RecursionError):
            problems.append(f"Line {at} of metrics.jsonl cannot be read.")
            continue
        if row.get("round") is not None:
            found.append(row)
    return found


def _clients(text: str) -> list[Row]:
    rows = _table(text)
    return [{key: value if key in TEXT else number(value) for key, value in row.items()} for row in rows]


def _lines(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text), strict=True))


def _table(text: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text), strict=True, restval="")
    return [{key: value for key, value in row.items() if key is not None} for row in reader]


def _calibration(text: str) -> dict[str, Row]:
    """Bins of predictions by how sure they are: their counts, mean confidences and accuracies (0 to 1)."""
    keys = ("count", "confidence", "accuracy")
    found = {}
    for name, bins in _object(text).items():
        columns = [listed(bins.get(key)) if isinstance(bins, dict) else [] for key in keys]
        rows = [[number(value) for value in row] for row in zip(*columns, strict=True)]
        full = [row for row in rows if None not in row and row[0]]  # an empty bin has no accuracy
        if full:
            found[name] = {key: [row[at] for row in full] for at, key in enumerate(keys)}
    return found


def listed(value: Any) -> list[Any]:
    """A list, or an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def _entries(value: Any) -> list[Row]:
    return [entry for entry in listed(value) if isinstance(entry, dict)]


def _inside(folder: Path, entry: Row, problems: list[str]) -> Path | None:
    """The file of an entry; one that is not in the folder is not read, whatever reproduction.json says."""
    name = str(entry.get("file", ""))
    path = folder / name
    if name and path.resolve().is_relative_to(folder.resolve()):
        return path
    problems.append(f"{name or 'A nameless file'} is not in the folder and is not shown.")
    return None
