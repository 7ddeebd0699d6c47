"""Methods side by side: the same clients, partition, initial weights and client stream, over several seeds.

A cell is one run of one method with one seed. Its folder is an ordinary run's, so a cell that is finished is never
run again and one that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pfedvem import tree
from pfedvem.algorithms import METHODS, method
from pfedvem.data import load_federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config, Tree, _read, load, merged
from pfedvem.experiments.run import run
from pfedvem.models import build
from pfedvem.report.compare import write_tables
from pfedvem.simulation.executors import one_thread
from pfedvem.simulation.fit import FREE
from pfedvem.simulation.rounds import Progress, start
from pfedvem.simulation.work import Job, Setup, perform


@dataclass(frozen=True)
class Measure:
    """The mean over seeds and its standard error, which one seed does not have."""

    mean: float
    sem: float | None


@dataclass(frozen=True)
class Row:
    """A method over its finished seeds. Accuracies in percent, None where it has no such model; seconds of one run."""

    name: str
    title: str
    seeds: int
    pm: Measure | None
    gm: Measure | None
    small: Measure | None
    seconds: float
    down: int
    up: int


@dataclass(frozen=True)
class Comparison:
    """A row for each method that has a finished cell, and a sentence for each cell that failed."""

    dataset: str
    clients: int
    rows: tuple[Row, ...]
    failures: tuple[str, ...] = ()


def cells(
    methods: Iterable[str] = ("all",),
    *,
    seeds: int = 1,
    file: Path | None = None,
    flags: Tree | None = None,
    assignments: Iterable[str] = (),
) -> list[Config]:
    """The runs of a comparison, seed by seed: every method with the setting ``seed`` and the seeds that follow it.

    Settings come from presets, the file, flags and ``key=value`` assignments, as for a run; each of them may hold

    - common settings, which go to every method that has them; a setting that none of the methods has is an error;
    - a method's own: ``fedprox.mu=1``, or ``mu = 1`` in a section ``[fedprox]`` of the file, which may hold sections
      for other methods too. They win over common ones. What can be a method's own is its algorithm's settings and
      ``rounds``, so that the rest is always the same for all.

    Where a file names a method, as a run's config.toml does, its section ``[algorithm]`` is that method's own. Common
    rounds are not for methods that need a certain number by their nature: Local trains once.
    """
    names = _names(methods)
    if seeds < 1:
        raise UserError(f"A comparison needs at least one seed, not {seeds}.")
    texts = list(assignments)
    for owner in map(_owner, texts):
        if owner == "method" or (owner in METHODS and owner not in names):
            raise UserError(f"A setting is for {owner}, but the methods that are compared are {', '.join(names)}.")
    layers = [_read_file(file) if file is not None else {}, flags or {}]
    plan = []
    for name in names:
        values = merged(*(_part(layer, name, names) for layer in layers))
        own = [*_texts(texts, name, names), f"method={name}", "alone=false"]
        first = load(None, values, own).seed
        plan.append([load(None, values, [*own, f"seed={seed}"]) for seed in range(first, first + seeds)])
    return [config for column in zip(*plan, strict=True) for config in column]


def compare(
    plan: Sequence[Config],
    out: Path,
    *,
    progress: Progress | None = None,
    on_cell: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Runs the cells that are not finished in ``out``, and writes the tables there after each.

    A cell that cannot be trained (it diverges, say) does not keep the others from running. Ctrl-C ends the comparison
    with ``Interrupted``; the same call goes on from there. ``on_cell`` hears the title of each cell that starts, how
    many are done and how many there were to run.
    """
    progress = progress or Progress()
    # First of all: folders of other settings are refused before anything runs.
    summaries = {(c.method, c.seed): finished(c, _folder(out, c)) for c in plan}
    missing = [c for c in plan if summaries[c.method, c.seed] is None]
    clients, wire = _wire(plan)
    failures: list[str] = []
    out.mkdir(parents=True, exist_ok=True)

    def save() -> Comparison:
        done = {name: [s for (n, _), s in summaries.items() if n == name and s is not None] for name in wire}
        rows = tuple(_row(name, found, *wire[name]) for name, found in done.items() if found)
        comparison = Comparison(plan[0].data.dataset, clients, rows, tuple(failures))
        write_tables(comparison, out)
        return comparison

    comparison = save()
    for number, config in enumerate(missing):
        title, folder = f"{config.algorithm.title}, seed {config.seed}", _folder(out, config)
        if on_cell is not None:
            on_cell(title, number, len(missing))
        try:
            result = run(config, out=folder, resume=(folder / "checkpoint").exists(), progress=progress)
        except UserError as error:
            failures.append(f"{title}: {error}")
        else:
            summaries[config.method, config.seed] = result.summary
        comparison = save()
    return comparison


def finished(config: Config, folder: Path) -> dict[str, Any] | None:
    """The summary of a cell, or None where some of its rounds are still to run; other settings there are an error."""
    if not (folder / "config.toml").exists():
        return None
    was, now = _flat(load(folder / "config.toml").dump()), _flat(config.dump())
    keys = {*was, *now} - (FREE if was["rounds"] <= now["rounds"] else FREE - {"rounds"})  # more rounds can be added
    differing = [f"{k} (was {was.get(k)!r}, now {now.get(k)!r})" for k in sorted(keys) if was.get(k) != now.get(k)]
    if differing:
        raise UserError(f"{folder} was run with other settings: {', '.join(differing)}. Choose another --out.")
    if not (folder / "summary.json").exists():
        return None
    # While rounds are added, the configuration is already the new one and the summary still the old.
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return summary if summary["rounds"] == config.rounds else None


def wire_bytes(setup: Setup) -> tuple[int, int]:
    """The bytes that one client is sent and that it uploads in one round: those of the tensors themselves."""
    state, sizes = start(setup), setup.federation.sizes
    down, smallest = setup.algorithm.down(state.server), sizes.index(min(sizes))
    with one_thread():
        outcome = perform(setup, down, tree.take(state.clients, [smallest]), Job(0, (smallest,), upload=True))
    down_bytes, up_bytes = (
        sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(sent)) for sent in (down, outcome.up)
    )
    return down_bytes, up_bytes


def next_folder(config: Config, parent: Path = Path("compare")) -> Path:
    """A folder for a comparison that was given none: compare/DATASET-1, or the next free number."""
    stem = config.data.dataset.replace("/", "-").strip(".-")
    return next(folder for n in count(1) if not (folder := parent / f"{stem}-{n}").exists())


def measure(values: Iterable[float | None]) -> Measure | None:
    """Mean and standard error (sd / sqrt(n), sd with n - 1) of the values that there are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    sem = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Measure(statistics.fmean(known), sem)


def _row(name: str, found: list[dict[str, Any]], down: int, up: int) -> Row:
    pm, gm, small = (measure(one[key] for one in found) for key in ("pm", "gm", "small_clients_pm"))
    seconds = statistics.fmean(one["seconds"] for one in found)
    return Row(name, METHODS[name].title, len(found), pm, gm, small, seconds, down, up)


def _wire(plan: Sequence[Config]) -> tuple[int, dict[str, tuple[int, int]]]:
    """The number of clients, and the bytes down and up of each method."""
    data, seed = plan[0].data, plan[0].seed  # the same for all methods
    federation = load_federation(data, seed)
    model = build(plan[0].network, federation.shape, len(federation.classes), seed)
    algorithms = {config.method: config.algorithm for config in plan}
    wire = {name: wire_bytes(Setup(one, model, federation, seed)) for name, one in algorithms.items()}
    return len(federation), wire


def _folder(out: Path, config: Config) -> Path:
    return out / "cells" / f"{config.method}-{config.seed}"


def _names(methods: Iterable[str]) -> list[str]:
    """The names of the methods, each once; ``all`` stands for all that there are."""
    names = [name for word in methods for name in (METHODS if word == "all" else [method(word).name])]
    if not names:
        raise UserError("There is no method to compare.")
    return list(dict.fromkeys(names))


def _read_file(file: Path) -> Tree:
    """The settings of a file; the algorithm's become their method's own where it is named."""
    values = dict(_read(file))
    if "method" in values:
        name = method(str(values.pop("method"))).name
        values[name] = merged(values.pop("algorithm", {}), values.get(name, {}))
    return values


def _flat(values: Tree) -> Tree:
    """The tree with dotted keys."""
    out: Tree = {}
    for key, value in values.items():
        out |= {f"{key}.{name}": leaf for name, leaf in value.items()} if isinstance(value, dict) else {key: value}
    return out


def _owner(setting: str) -> str:
    """What stands before the dot, the equals sign or the end: a section, a method or a bare key."""
    return setting.partition("=")[0].partition(".")[0].strip()


def _key(key: str, name: str, names: Sequence[str]) -> str | None:
    """The key by which one method knows a setting; None where it is not for that method."""
    owner, dot, rest = key.partition(".")
    if dot and owner not in ("data", "algorithm"):
        return (rest if rest == "rounds" else f"algorithm.{rest}") if method(owner).name == name else None
    if key == "rounds" and METHODS[name].default_rounds is not None:
        return None
    having = [other for other in names if key.removeprefix("algorithm.") in METHODS[other].model_fields]
    return key if not having or name in having else None


def _part(layer: Tree, name: str, names: Sequence[str]) -> Tree:
    """The part of a tree of settings that is for one method; its own are merged last, and so win."""
    out: Tree = {}
    for key, value in sorted(_flat(layer).items(), key=lambda item: _owner(item[0]) in METHODS):
        section, _, leaf = (_key(key, name, names) or "").rpartition(".")
        if leaf:
            out = merged(out, {section: {leaf: value}} if section else {leaf: value})
    return out


def _texts(assignments: Sequence[str], name: str, names: Sequence[str]) -> list[str]:
    """The assignments that are for one method; its own come last, and so win."""
    out = []
    for text in sorted(assignments, key=lambda text: _owner(text) in METHODS):
        key, equals, value = text.partition("=")
        mine = _key(key.strip(), name, names)
        if mine is not None:
            out.append(f"{mine}{equals}{value}")
    return out
