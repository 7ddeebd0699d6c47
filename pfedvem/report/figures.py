"""The paper's figures with our data, and its tables as pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from pfedvem.experiments.reproduce import OFTEN, Found, Record, Reproduction
from pfedvem.experiments.run import as_file
from pfedvem.experiments.studies import MEASURES, Cell
from pfedvem.report.plots import GM, PM, density, save

Paint = Callable[[Axes, Sequence[Cell], Reproduction], None]
Drawn = list[tuple[str, str, str]]  # for each picture its name, title and what it shows
COLOURS = [
    *("#2a6f97", "#e07a1f", "#3d8b5f", "#b5485d", "#7b5ea7", "#8c6d46"),
    *("#c9a227", "#4f9da6", "#d16ba5", "#6b7280", "#1f3b4d", "#a3b18a"),
]


def draw(reproduction: Reproduction, folder: Path) -> Drawn:
    """Draws what a study is about, as PNG and PDF; nothing where no run of it is finished."""
    painters = {
        "fig-accuracy-vs-size": accuracy_against_size,
        "fig-confidence": confidence,
        "fig-deviation": deviation,
        "fig-convergence": convergence,
    }
    if not reproduction.records:
        return []
    return painters.get(reproduction.study.name, agreement)(reproduction, folder)


def agreement(reproduction: Reproduction, folder: Path) -> Drawn:
    """A table as a picture: for each method our number beside the paper's, with two standard errors."""
    drawn: Drawn = []
    for dataset in dict.fromkeys(cell.dataset for cell in reproduction.cells):
        mine = [one for one in reproduction.found if one.cell.dataset == dataset and one.ours is not None]
        if not mine:
            continue
        shown = [cell for cell in reproduction.cells if any(one.cell.line == cell.line for one in mine)]
        lines = list(dict.fromkeys(cell.line.title for cell in shown))[::-1]  # in the order of the study
        columns = list(dict.fromkeys((one.cell.column, one.cell.heading) for one in mine))
        size = (1.6 + 2.7 * len(columns), 1.3 + 0.3 * len(lines))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axis, (column, heading) in zip(axes, columns, strict=True):
            for one in mine:
                if one.cell.column == column:
                    _pair(axis, one, lines.index(one.cell.line.title))
            axis.set_title(heading, fontsize=10)
            axis.set_xlabel("accuracy (%)")
            _plain(axis, "x")
        axes[0].set_yticks(range(len(lines)), lines)
        axes[0].set_ylim(-0.5, len(lines) - 0.5)
        for kind in (kind for kind in reproduction.study.measures if any(one.measure == kind for one in mine)):
            faces = [("ours", _colour(kind)), ("the paper", "white")]
            for whose, face in faces if any(one.paper for one in mine) else faces[:1]:
                label = f"{MEASURES[kind]}, {whose}"
                axes[0].plot([], [], "o", color=_colour(kind), markerfacecolor=face, label=label)
        figure.legend(loc="outside lower center", ncols=min(4, 2 * len(columns)), frameon=False, fontsize=8)
        name = f"{reproduction.study.name}-{as_file(dataset)}"
        _save(figure, folder, name)
        about = "Ours (filled) and the paper's (hollow), each with two standard errors of the mean."
        drawn.append((name, f"{reproduction.study.title}: {dataset}", about))
    return drawn


def _colour(kind: str) -> str:
    return {"pm": PM, "gm": GM}.get(kind, "#3d8b5f")


def _pair(axis: Axes, one: Found, place: int) -> None:
    shift = {"pm": 0.12, "gm": -0.12}.get(one.measure, -0.12)
    if one.ours is None:
        return
    if one.paper is not None:
        axis.plot([one.ours.mean, one.paper.mean], [place + shift] * 2, color=_colour(one.measure), alpha=0.35, lw=1)
        _mark(axis, one.paper.mean, one.paper.sem, place + shift, _colour(one.measure), "white")
    _mark(axis, one.ours.mean, one.ours.sem, place + shift, _colour(one.measure), _colour(one.measure))


def _mark(axis: Axes, mean: float, sem: float | None, y: float, colour: str, face: str) -> None:
    error = None if sem is None else [2 * sem]
    axis.errorbar([mean], [y], xerr=error, fmt="o", color=colour, markerfacecolor=face, markersize=4.5, elinewidth=1)


def accuracy_against_size(reproduction: Reproduction, folder: Path) -> Drawn:
    """Each client's accuracy against its data size, over all seeds, with a running mean for each method."""
    return _panels(
        reproduction,
        folder,
        _sizes_panel,
        ("a client's training samples", "test accuracy of its PM (%)"),
        "Points are clients of all seeds; lines are the mean of the clients of about one size.",
    )


def _sizes_panel(axis: Axes, cells: Sequence[Cell], reproduction: Reproduction) -> None:
    for i, cell in enumerate(cells):
        pairs = [
            (n, pm)
            for run in reproduction.of(cell)
            for n, pm in zip(run["clients"]["n_train"], run["clients"]["pm"], strict=True)
            if pm is not None
        ]
        if not pairs:
            continue
        sizes, scores = (np.array(values, dtype=float) for values in zip(*sorted(pairs), strict=True))
        axis.scatter(sizes, scores, s=7, color=_nth(i), alpha=0.25, linewidth=0)
        middle, level = running_mean(np.log(sizes), scores)
        axis.plot(np.exp(middle), level, color=_nth(i), lw=2, label=cell.line.title)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def running_mean(x: np.ndarray, y: np.ndarray, points: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """A Gaussian-weighted mean of y along x, with a tenth of the range as width."""
    grid = np.linspace(x.min(), x.max(), points)
    width = max(float(np.ptp(x)) / 10, 1e-9)
    weights = np.exp(-0.5 * ((grid[:, None] - x[None]) / width) ** 2)
    return grid, (weights * y).sum(1) / weights.sum(1)


def confidence(reproduction: Reproduction, folder: Path) -> Drawn:
    """Kernel densities of tau_j / sum tau, for each cell, in the paper's rounds."""
    return _densities(reproduction, folder, "tau", "confidence ratio of a client", share=True)


def deviation(reproduction: Reproduction, folder: Path) -> Drawn:
    """Kernel densities of |mu_j - w|^2 / d, for each cell, in the paper's rounds."""
    return _densities(reproduction, folder, "deviation", "model deviation of a client", share=False)


def _densities(reproduction: Reproduction, folder: Path, key: str, label: str, *, share: bool) -> Drawn:
    every = [(cell, [_snapshots(run, key) for run in reproduction.of(cell)]) for cell in reproduction.cells]
    shown = [(cell, runs) for cell, runs in every if any(runs)]  # not every method has such numbers
    numbers = sorted({number for _, runs in shown for run in runs for number in run})
    if not numbers:
        return []
    rows = 1 if len(numbers) < 3 else 2
    columns = -(-len(numbers) // rows)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, number in zip(axes, numbers, strict=False):
        for i, (cell, runs) in enumerate(shown):
            values = [run[number] / run[number].sum() if share else run[number] for run in runs if number in run]
            name = _name(cell, [other for other, _ in shown])
            density(axis, np.concatenate(values) if values else np.empty(0), _nth(i), name)
        axis.set_title(f"round {number}", fontsize=10)
        axis.set_xlabel(label)
        axis.xaxis.set_major_locator(MaxNLocator(5))  # small numbers have long labels
        axis.set_ylabel("density")
        _plain(axis, "y")
    for axis in axes[len(numbers) :]:
        axis.set_visible(False)
    figure.legend(*_entries(axes), loc="outside lower center", ncols=min(4, len(shown)), frameon=False, fontsize=8)
    _save(figure, folder, reproduction.study.name)
    about = "Gaussian kernel densities over the clients of all seeds."
    return [(reproduction.study.name, reproduction.study.title, about)]


def _snapshots(run: Record, key: str) -> dict[int, np.ndarray]:
    """What the clients of a run have of ``key``, by the number of the round."""
    taken = {int(number): kept[key] for number, kept in run["snapshots"].items() if key in kept}
    return {number: np.array(values, dtype=float) for number, values in taken.items()}


def _name(cell: Cell, cells: Sequence[Cell]) -> str:
    """What a cell is among others: its data set, and its method and column where there are several."""
    several = len({one.line.key for one in cells}) > 1, len({one.column for one in cells}) > 1
    more = [text for text, wanted in zip((cell.line.title, cell.heading), several, strict=True) if wanted]
    return ", ".join([cell.dataset, *more])


def convergence(reproduction: Reproduction, folder: Path) -> Drawn:
    """Accuracy against rounds: the mean over seeds with its standard error."""
    return _panels(
        reproduction,
        folder,
        _convergence_panel,
        ("communication round", "test accuracy (%)"),
        "Mean over seeds with one standard error. PM where it was evaluated in several rounds, GM otherwise (dashed).",
    )


def _convergence_panel(axis: Axes, cells: Sequence[Cell], reproduction: Reproduction) -> None:
    for i, cell in enumerate(cells):
        runs = [_followed(run) for run in reproduction.of(cell)]
        if not runs:
            continue
        personal, course = runs[0]
        courses = [other for kind, other in runs if kind == personal]
        rounds = [number for number in course if all(number in other for other in courses)]
        values = np.array([[other[number] for number in rounds] for other in courses], dtype=float)
        mean, style = values.mean(0), "-" if personal else "--"
        if len(rounds) == 1:  # Local trains once
            axis.axhline(mean[0], color=_nth(i), lw=1.2, ls=":", label=cell.line.title)
            continue
        axis.plot(rounds, mean, style, color=_nth(i), lw=1.6, label=cell.line.title)
        if len(courses) > 1:
            sem = values.std(0, ddof=1) / np.sqrt(len(courses))
            axis.fill_between(rounds, mean - sem, mean + sem, color=_nth(i), alpha=0.15, linewidth=0)


def _followed(run: Record) -> tuple[bool, dict[int, float]]:
    """The accuracy that a run has of several rounds, by the number of the round, and whether it is that of the PM."""
    pm = {int(line["round"]): line["pm"] for line in run["history"] if line["pm"] is not None}
    gm = {int(number): value for number, value in run.get("gm_by_round", {}).items()}
    regular = {number: value for number, value in gm.items() if number % OFTEN == 0 or number == max(gm)}
    return (True, pm) if len(pm) > 1 or not regular else (False, regular)


def _panels(reproduction: Reproduction, folder: Path, paint: Paint, labels: tuple[str, str], about: str) -> Drawn:
    """A picture for each data set, a panel for each column, a colour for each method."""
    drawn: Drawn = []
    for dataset in dict.fromkeys(cell.dataset for cell in reproduction.cells):
        mine = [cell for cell in reproduction.cells if cell.dataset == dataset]
        columns = [c for c in dict.fromkeys(cell.column for cell in mine) if _any(reproduction, mine, c)]
        if not columns:
            continue
        figure = Figure(figsize=(1 + 4 * len(columns), 3.8), layout="constrained")
        axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axis, column in zip(axes, columns, strict=True):
            cells = [cell for cell in mine if cell.column == column]
            paint(axis, cells, reproduction)
            axis.set_title(cells[0].heading, fontsize=10)
            axis.set_xlabel(labels[0])
            _plain(axis, "y")
        axes[0].set_ylabel(labels[1])
        figure.legend(*_entries(axes), loc="outside right center", frameon=False, fontsize=8)
        name = f"{reproduction.study.name}-{as_file(dataset)}"
        _save(figure, folder, name)
        drawn.append((name, f"{reproduction.study.title}: {dataset}", about))
    return drawn


def _any(reproduction: Reproduction, cells: Iterable[Cell], column: str) -> bool:
    return any(reproduction.of(cell) for cell in cells if cell.column == column)


def draw_partition_sizes(dataset: str, sizes: Mapping[int, Sequence[int]], draws: int, folder: Path) -> Drawn:
    """How local data sizes are distributed, for each number of clients."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axis = figure.subplots()
    limit = float(np.quantile(np.concatenate([np.array(v) for v in sizes.values()]), 0.995))
    # A client has about as much of each label or subclass that it owns, so its size is a multiple of their number.
    width = 20 * max(1, round(limit / 800))
    edges = np.arange(0, limit + width, width).tolist()
    for i, (clients, values) in enumerate(sizes.items()):
        axis.hist(values, edges, density=True, histtype="stepfilled", color=_nth(i), alpha=0.18)
        axis.hist(values, edges, density=True, histtype="step", color=_nth(i), lw=1.5, label=f"{clients} clients")
    axis.set_xlabel("a client's training samples")
    axis.set_ylabel("density")
    axis.set_title(dataset, fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    _plain(axis, "y")
    name = f"fig-partition-sizes-{as_file(dataset)}"
    _save(figure, folder, name)
    return [(name, f"Local data sizes: {dataset}", f"{draws:,} random partitions; the largest 0.5% are not shown.")]


def _nth(place: int) -> str:
    """A colour for each line of a picture; where there are very many, they come again."""
    return COLOURS[place % len(COLOURS)]


def _entries(axes: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    """The entries of a legend of all panels: what is only in a later one has its own too."""
    entries: dict[str, Artist] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    return list(entries.values()), list(entries)


def _plain(axis: Axes, grid: Literal["x", "y"]) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, alpha=0.25)


def _save(figure: Figure, folder: Path, name: str) -> None:
    for end in ("png", "pdf"):
        save(figure, folder / f"{name}.{end}")
