"""Methods side by side: the same clients, partition, initial weights and client stream, over several seeds.

A cell is one run of one method with one seed. Its folder is an ordinary run's, so a cell that is finished is never
run again and one that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict

from pfedvem import tree
from pfedvem.algorithms import METHODS, method
from pfedvem.data import load_federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config, Tree, load, read
from pfedvem.experiments.run import run
from pfedvem.networks import build
from pfedvem.report.compare import write_tables
from pfedvem.report.logs import Logs
from pfedvem.simulation import checkpoints
from pfedvem.simulation.executors import one_thread
from pfedvem.simulation.fit import FREE, flat
from pfedvem.simulation.rounds import Progress, start
from pfedvem.simulation.work import Job, Setup, perform

SECTIONS = ("data", "guard", "algorithm")  # what stands before a dot and is no method
# Settings of a run that the cells of a comparison do not have, and what to do instead.
FIXED = {
    "alone": "clients are not trained alone besides. Leave it out, and take the method local too.",
    "keep_models": "clients' models are not kept. Leave it out, and train the method that you want by `pfedvem run`.",
}


@dataclass(frozen=True)
class Measure:
    """The mean over seeds and its standard error, which one seed does not have."""

    mean: float
    sem: float | None


class Summary(BaseModel):
    """What tables take from a run's summary.json, which may be damaged."""

    model_config = ConfigDict(allow_inf_nan=False)

    pm: float | None
    gm: float | None
    small_clients_pm: float | None
    pm_ece: float | None = None
    gm_ece: float | None = None
    pm_nll: float | None = None
    gm_nll: float | None = None
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """A method over its finished seeds. Accuracies in percent, None where it has no such model; seconds of one run.

    Expected calibration error (in percent) and NLL are those of the PM or, where a method has none, of the GM.
    """

    name: str
    title: str
    seeds: int
    pm: Measure | None
    gm: Measure | None
    small: Measure | None
    seconds: float
    down: int
    up: int
    ece: Measure | None = None
    nll: Measure | None = None


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

    Settings come from presets, the file, flags and ``key=value`` assignments; the later ones win. In each there are

    - common settings, which go to every method that has them; one that none of the methods has is an error;
    - a method's own, which win over common ones: ``fedprox.mu=1``, or ``mu = 1`` in a section ``[fedprox]`` of the
      file. These are its hyper-parameters and ``rounds``, so that all the rest is the same for all methods.

    Where a file names a method, as a run's config.toml does, the section ``[algorithm]`` is that method's own. Common
    rounds are not for methods that need a certain number by their nature: Local trains once.
    """
    names = list(dict.fromkeys(name for word in methods for name in (METHODS if word == "all" else [word])))
    if not names or seeds < 1:
        raise UserError("A comparison needs at least one method and one seed.")
    layers = [_assignments(read(file) if file is not None else {}), _assignments(flags or {}), list(assignments)]
    for owner, setting, value in map(_owned, layers[-1]):
        if setting and owner not in SECTIONS:
            method(owner)  # says so if there is none
        if owner in FIXED and value.strip() != "false":
            raise UserError(f"{owner} is not for several methods side by side: {FIXED[owner]}")
        if owner == "method" or (_is_method(owner) and owner not in names):
            raise UserError(f"A setting is for {owner}, but the methods that are compared are {', '.join(names)}.")
    columns = []
    for name in names:
        ordered = [text for layer in layers for text in sorted(layer, key=lambda text: _is_method(_owned(text)[0]))]
        mine = [own for text in ordered if (own := _mine(text, name, names))]
        mine += [f"method={name}", "alone=false", "keep_models=false"]
        first = load(assignments=mine).seed
        columns.append([load(assignments=[*mine, f"seed={seed}"]) for seed in range(first, first + seeds)])
    return [config for row in zip(*columns, strict=True) for config in row]


def _assignments(values: Tree) -> list[str]:
    """A tree of settings as assignments; where it names a method, the algorithm's settings are that method's own."""
    given = flat(values)
    home = str(given.pop("method", "algorithm"))
    keys = {key: re.sub(r"^algorithm\.", f"{home}.", key) for key in given}
    return [f"{keys[key]}={tomli_w.dumps({'_': value}).removeprefix('_ = ')}" for key, value in given.items()]


def _mine(text: str, name: str, names: Sequence[str]) -> str | None:
    """An assignment as one method is to have it; None where it is not for that method."""
    owner, setting, value = _owned(text)
    if _is_method(owner):
        key = setting if setting == "rounds" else f"algorithm.{setting}"
        return f"{key}={value}" if owner == name else None
    if (owner, setting) == ("rounds", "") and method(name).default_rounds is not None:
        return None
    plain = setting if owner == "algorithm" else owner if not setting else None
    having = [other for other in names if plain in method(other).model_fields]
    return text if not having or name in having else None


def _owned(text: str) -> tuple[str, str, str]:
    """An assignment as the section or method that it is for, the setting there, and the value.

    A bare key stands in the place of the section. The dots of ``package.module:Class.setting`` belong to the method
    but for the last.
    """
    key, _, value = text.partition("=")
    owner, dot, setting = key.strip().rpartition(".") if ":" in key else key.strip().partition(".")
    return owner, setting if dot else "", value


def _is_method(owner: str) -> bool:
    return owner in METHODS or ":" in owner


def compare(
    plan: Sequence[Config],
    out: Path,
    *,
    progress: Progress | None = None,
    on_cell: Callable[[str, int, int], None] | None = None,
    logs: Logs | None = None,
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
    names, seeds = list(dict.fromkeys(c.method for c in plan)), list(dict.fromkeys(c.seed for c in plan))
    about = {"command": command(names, len(seeds)), "methods": names, "seeds": seeds}

    def save() -> Comparison:
        done = {name: [s for (n, _), s in summaries.items() if n == name and s is not None] for name in wire}
        rows = tuple(_row(name, found, *wire[name]) for name, found in done.items() if found)
        comparison = Comparison(plan[0].data.dataset, clients, rows, tuple(failures))
        write_tables(comparison, out)
        told = json.dumps({**about, "failures": failures}, indent=2) + "\n"
        checkpoints.replace(out / "comparison.json", told.encode())
        return comparison

    checkpoints.replace(out / "comparison.toml", tomli_w.dumps(settings(c.dump() for c in plan)).encode())
    comparison = save()
    for number, config in enumerate(missing):
        title, folder = f"{config.algorithm.title}, seed {config.seed}", _folder(out, config)
        if on_cell is not None:
            on_cell(title, number, len(missing))
        try:
            result = run(config, out=folder, resume=(folder / "checkpoint").exists(), progress=progress, logs=logs)
        except checkpoints.Unwritten:
            raise  # the others could not be written either
        except UserError as error:
            progress.note(str(error))
            failures.append(f"{title}: {error}")
        else:
            summaries[config.method, config.seed] = result.summary
        comparison = save()
    return comparison


def settings(cells: Iterable[Tree]) -> Tree:
    """The settings of all cells in one tree, as comparison.toml has it: common ones, and a section for each method."""
    found = list(cells)
    common = {key: value for key, value in found[0].items() if key not in ("method", "rounds", "algorithm")}
    own = {cell["method"]: {"rounds": cell["rounds"], **cell["algorithm"]} for cell in found}
    return {**common, "seed": min(cell["seed"] for cell in found), **own}


def command(methods: Sequence[str], seeds: int) -> str:
    """The command that repeats a comparison from its comparison.toml."""
    words = ["--config", "comparison.toml", "--methods", ",".join(methods), "--seeds", str(seeds), "--out", "NEW"]
    return shlex.join(["pfedvem", "compare", *words])


def finished(config: Config, folder: Path) -> dict[str, Any] | None:
    """The summary of a cell, or None where some of its rounds are still to run; other settings there are an error."""
    if not any((folder / name).exists() for name in ("checkpoint", "summary.json")):  # it has not come to anything
        return None
    was, now = flat(load(folder / "config.toml").dump()), flat(config.dump())
    keys = {*was, *now} - (FREE if was["rounds"] <= now["rounds"] else FREE - {"rounds"})  # more rounds can be added
    differing = [f"{k} (was {was.get(k)!r}, now {now.get(k)!r})" for k in sorted(keys) if was.get(k) != now.get(k)]
    if differing:
        raise UserError(
            f"{folder} was run with other settings: {', '.join(differing)}. Delete it to run it anew, or "
            "choose another --out."
        )
    if not (folder / "summary.json").exists():
        return None
    # While rounds are added, the configuration is already the new one and the summary still the old.
    try:
        Summary.model_validate_json(content := (folder / "summary.json").read_bytes())
        summary: dict[str, Any] = json.loads(content)
    except ValueError as error:
        raise UserError(f"{folder / 'summary.json'} is damaged: delete it, and it is written again.") from error
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
    model = "pm" if pm is not None else "gm"
    ece, nll = (measure(one.get(f"{model}_{key}") for one in found) for key in ("ece", "nll"))
    return Row(name, method(name).title, len(found), pm, gm, small, seconds, down, up, ece, nll)


def _wire(plan: Sequence[Config]) -> tuple[int, dict[str, tuple[int, int]]]:
    """The number of clients, and the bytes down and up of each method."""
    data, seed = plan[0].data, plan[0].seed  # the same for all methods
    federation = load_federation(data, seed)
    model = build(plan[0].network, federation.shape, len(federation.classes), seed)
    algorithms = {config.method: config.algorithm for config in plan}
    wire = {name: wire_bytes(Setup(one, model, federation, seed)) for name, one in algorithms.items()}
    return len(federation), wire


def _folder(out: Path, config: Config) -> Path:
    return out / "cells" / f"{config.method}-{config.seed}".replace(":", "-")
