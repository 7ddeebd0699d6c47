"""The tables and figures of the paper: what each is made of, and the numbers that were published.

A study is a grid of cells: lines (methods) by columns (clients, and how their data differs), each over several seeds.
Cells that are the same run in two studies have the same name, and so are run once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from pfedvem.algorithms import METHODS, method
from pfedvem.errors import UserError
from pfedvem.experiments.compare import Measure, cells
from pfedvem.experiments.config import Config, Tree
from pfedvem.experiments.run import as_file

EVERYTHING = tuple(METHODS)
MEASURES = {"small": "small clients (PM)", "pm": "PM", "gm": "GM"}  # in the order of a table's columns
COURSES = {"gm_recent": "GM, mean of the last 10 rounds", "gm_best": "GM, best of every 5th round"}
COURSES |= {"gm_average": "GM, weights averaged over about 10 rounds"}
SMALL = {"digits": 10}  # by how much data sets are too small for the paper's numbers of clients
SNAPSHOTS = (5, 30, 60, 100)  # rounds in which the paper looks at confidences and deviations


@dataclass(frozen=True)
class Variant:
    """A way of dealing the data that differs from the data set's own: settings of the section ``data``."""

    key: str
    title: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A row of a table: a method, perhaps with settings of its own."""

    key: str
    title: str
    method: str
    algorithm: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """A table or figure. Either the numbers of clients make its columns, or variants do."""

    name: str
    title: str
    datasets: tuple[str, ...]
    clients: tuple[int, ...] = (50, 100, 200)
    methods: tuple[str, ...] = EVERYTHING
    lines: tuple[Line, ...] = ()
    variants: tuple[Variant, ...] = ()
    measures: tuple[str, ...] = ("pm", "gm")
    figure: bool = False
    eval_every: int = 0
    clients_given: bool = False  # by the user, for every data set; else a small one has fewer

    def counts(self, dataset: str) -> tuple[int, ...]:
        """The numbers of clients that a data set is dealt to."""
        return tuple(count // (1 if self.clients_given else SMALL.get(dataset, 1)) for count in self.clients)


@dataclass(frozen=True)
class Cell:
    """A line in a column of a data set's table, with a run for each seed."""

    dataset: str
    line: Line
    column: str
    heading: str
    names: tuple[str, ...]
    configs: tuple[Config, ...]


PFEDVEM = Line("pfedvem", "pFedVEM", "pfedvem")
HOMOGENEOUS = {"cifar100": {"subclasses_per_client": 5}, "sun397": {"subclasses_per_client": 50}}

STUDIES = {
    study.name: study
    for study in (
        Study("table1", "Overall accuracy", ("fmnist", "cifar10", "cifar100", "sun397")),
        Study(
            "ablation-uncertainty",
            "Confidence from the uncertainty alone",
            ("cifar100",),
            clients=(50,),
            lines=(PFEDVEM, Line("pfedvem-uncertainty", "Uncertainty", "pfedvem", {"confidence": "uncertainty"})),
            variants=(Variant("hetero", "heterogeneous"), Variant("homo", "homogeneous")),
            measures=("pm",),
        ),
        Study(
            "ablation-deviation",
            "Uploads weighed by the model deviation alone",
            ("cifar100",),
            clients=(50,),
            lines=(PFEDVEM, Line("pfedvem-deviation", "Model deviation", "pfedvem", {"confidence": "deviation"})),
            variants=(Variant("random", "random sizes"), Variant("equal", "equal sizes", {"sizes": "equal"})),
            measures=("pm",),
        ),
        Study(
            "small-clients",
            "The tenth of the clients with the least data",
            ("cifar10", "cifar100"),
            clients=(100,),
            methods=("fedper", "fedrep", "perfedavg", "pfedme", "pfedbayes", "pfedvem"),
            measures=("small", "pm"),
        ),
        Study(
            "limited-data",
            "Fewer training samples in all",
            ("cifar10",),
            clients=(100,),
            variants=(
                Variant("5000", "5,000 samples", {"train_samples": 5000}),
                Variant("10000", "10,000 samples", {"train_samples": 10000}),
                Variant("50000", "all samples"),
            ),
        ),
        Study(
            "digit5",
            "Feature skew: clients of different domains",
            ("digit5",),
            methods=("fedprox", "pfedme", "pfedbayes", "pfedvem"),
        ),
        Study(
            "fig-accuracy-vs-size",
            "Accuracy against the size of local data",
            ("cifar100",),
            clients=(50, 100),
            methods=("local", "fedrep", "pfedme", "pfedbayes", "pfedvem"),
            figure=True,
        ),
        Study(
            "fig-confidence",
            "Distribution of confidence ratios",
            ("fmnist", "cifar10", "cifar100", "sun397"),
            clients=(100,),
            methods=("pfedvem",),
            figure=True,
        ),
        Study(
            "fig-deviation",
            "Distribution of model deviations",
            ("fmnist", "cifar10", "cifar100", "sun397"),
            clients=(100,),
            methods=("pfedvem",),
            figure=True,
        ),
        Study("fig-convergence", "Accuracy against rounds", ("cifar10",), figure=True, eval_every=5),
        Study(
            "fig-partition-sizes",
            "Distribution of local data sizes",
            ("fmnist", "cifar10", "cifar100", "sun397"),
            methods=(),
            figure=True,
        ),
    )
}


def study(
    name: str,
    datasets: Iterable[str] = (),
    methods: Iterable[str] = (),
    clients: Iterable[int] = (),
    columns: Iterable[str] = (),
) -> Study:
    """The study of this name, cut down or changed to what is given; a small data set has fewer clients.

    ``columns`` chooses some of the ways of dealing the data, where those make the columns.
    """
    if name not in STUDIES:
        raise UserError(f"There is no {name!r} in the paper; there are {', '.join(STUDIES)}.")
    chosen = STUDIES[name]
    names = tuple(dict.fromkeys(m for word in methods for m in (chosen.methods if word == "all" else [word])))
    if names and chosen.lines:
        raise UserError(f"{name} is about pFedVEM and its variants; leave out --methods.")
    if names and not chosen.methods:
        raise UserError(f"{name} trains nothing; leave out --methods.")
    for one in names:
        method(one)  # says so if there is none
    counts = tuple(dict.fromkeys(clients))
    if counts and chosen.variants and len(counts) > 1:
        raise UserError(f"The columns of {name} differ in their data: give one number of clients.")
    wanted, there = tuple(columns), {variant.key: variant for variant in chosen.variants}
    if wanted and not there:
        raise UserError(f"The columns of {name} are numbers of clients: choose them by --clients.")
    if unknown := [key for key in wanted if key not in there]:
        raise UserError(f"{name} has no column {unknown[0]!r}; it has {', '.join(there)}.")
    variants = tuple(variant for key, variant in there.items() if not wanted or key in wanted)
    sets = tuple(dict.fromkeys(datasets)) or chosen.datasets
    if len({as_file(one) for one in sets}) < len(sets):
        raise UserError(f"Of {', '.join(sets)}, two would have the same files: give each a command and an --out.")
    if counts:
        chosen = replace(chosen, clients=counts, clients_given=True)
    return replace(chosen, datasets=sets, methods=names or chosen.methods, variants=variants)


def grid(chosen: Study, *, seeds: int, flags: Tree | None = None, assignments: Sequence[str] = ()) -> list[Cell]:
    """The cells of a study. ``flags`` and ``assignments`` are settings of all runs, as for a comparison."""
    refuse_columns(assignments)
    lines = chosen.lines or tuple(Line(name, method(name).title, name) for name in chosen.methods)
    names = list(dict.fromkeys(line.method for line in lines))
    found = []
    for dataset in chosen.datasets:
        for clients in chosen.counts(dataset):
            for variant in chosen.variants or (Variant("", f"{clients} clients"),):
                dealt = _dealt(variant, dataset)
                # The published methods believe every upload; here nobody lies.
                settings: Tree = {
                    "eval_every": chosen.eval_every,
                    "checkpoint_every": 5,
                    "guard": {"bounds": False},
                    **(flags or {}),
                }
                settings["data"] = {"dataset": dataset, "clients": clients, **dealt, **settings.get("data", {})}
                plain = cells(names, seeds=seeds, flags=settings, assignments=assignments) if names else []
                for line in lines:
                    own = [f"{line.method}.{key}={value}" for key, value in line.algorithm.items()]
                    given = [*assignments, *own]
                    every = cells(names, seeds=seeds, flags=settings, assignments=given) if own else plain
                    configs = tuple(config for config in every if config.method == line.method)
                    kind = f"{dataset}-{clients}" + (f"-{variant.key}" if dealt else "")
                    files = tuple(as_file(f"{kind}-{line.key}-{config.seed}") for config in configs)
                    found.append(Cell(dataset, line, variant.key or str(clients), variant.title, files, configs))
    return found


def others(chosen: Study, cells: Iterable[Cell]) -> set[str]:
    """The names of a study's runs that a table of these cells leaves out: other methods, clients, columns or seeds."""
    paper = STUDIES[chosen.name]
    whole = [
        replace(paper, datasets=tuple(dict.fromkeys([*paper.datasets, *chosen.datasets]))),
        replace(chosen, methods=tuple(dict.fromkeys([*paper.methods, *chosen.methods])), variants=paper.variants),
    ]
    names = {name for one in whole for cell in grid(one, seeds=5) for name in cell.names}
    return names - {name for cell in cells for name in cell.names}


def refuse_columns(assignments: Iterable[str]) -> None:
    """Refuses settings that a study has of its own: by them, headings and names of files would be wrong."""
    for text in assignments:
        name = text.partition("=")[0].strip().removeprefix("data.")
        if name in ("dataset", "clients"):
            option = "--datasets" if name == "dataset" else "--clients"
            raise UserError(f"What a table or figure is of is not for --set: choose {name} by {option}.")


def _dealt(variant: Variant, dataset: str) -> Mapping[str, Any]:
    if variant.key == "homo":
        return HOMOGENEOUS.get(dataset, {"partition": "iid"})
    return variant.data


@cache
def _paper() -> dict[str, Any]:
    text = (files("pfedvem.experiments") / "paper.json").read_text(encoding="utf-8")
    numbers: dict[str, Any] = json.loads(text)
    return numbers


def published(study: str, dataset: str, line: str, column: str, measure: str) -> Measure | None:
    """What the paper reports for a cell: mean and standard error over five seeds; None where it reports nothing."""
    found = _paper().get(study, {}).get(dataset, {}).get(line, {}).get(column, {}).get(measure)
    return Measure(*found) if found is not None else None
