"""The pictures: plain functions that take numbers and the axes to draw them on.

Clients are rows as in clients.csv (``client``, ``n_train``, ``pm``, ...) and a history is the lines of metrics.jsonl; a
value that is missing is None or not there. Accuracies are in percent.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from pfedvem.algorithms import METHODS
from pfedvem.simulation import checkpoints
from pfedvem.simulation.results import Result

Row = dict[str, Any]
Histories = Mapping[str, Sequence[Sequence[Row]]]  # by method: a history for each seed
Clients = Mapping[str, Sequence[Row]]  # by method: the clients of all seeds

PM, GM, ALONE, LOSS = "#2a6f97", "#e07a1f", "#8d99a6", "#c8453b"
INK, PAPER = "#1f2a33", "#fffffe"  # text and lines, and the inside of hollow points
COLOURS = {
    "local": ALONE,
    "fedavg": GM,
    "fedprox": "#c79a1b",
    "scaffold": "#a0694b",
    "fedper": "#2f9e6e",
    "fedrep": "#86b32d",
    "ifca": "#1aa3b5",
    "perfedavg": "#8e6bbf",
    "pfedme": "#d1495b",
    "pfedbayes": "#d46fb0",
    "pfedvem": PM,
}
OTHERS = ("#5b7f2b", "#b5651d", "#5f7fb8", "#9a5c8f", "#4f8f8b")  # methods of one's own
MARKERS = "so^vD<>pP*X"  # in the order of the methods; pFedVEM has the last
MANY = 2000  # points that are drawn one by one; more are drawn as pixels


def draw_run(result: Result, path: Path) -> None:
    """Accuracy against rounds, and each client's accuracy against its data size, as a PNG or PDF."""
    personal = result.summary["pm"] is not None
    figure = Figure(figsize=(9, 3.6) if personal else (4.8, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if personal else 1, squeeze=False)[0]
    accuracy_by_round(axes[0], result.history, result.summary["alone_pm"])
    if personal:
        accuracy_by_size(axes[1], result.rows)
    summary = result.summary
    figure.suptitle(
        f"{result.setup.algorithm.title} on {summary['dataset']}, {summary['clients']} clients", fontsize=11
    )
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture whole or not at all."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name with two dollars is a name
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".") or "png", dpi=150)
    checkpoints.replace(path, picture.getvalue())


# One run


def accuracy_by_round(axis: Axes, history: Sequence[Row], alone: float | None = None) -> None:
    """The mean of the personalised models and the global model, round by round."""
    for key, name, colour in (("pm", "personalised models (mean)", PM), ("gm", "global model", GM)):
        rounds, values = _columns(history, "round", key)
        if len(values):
            axis.plot(rounds, values, color=colour, marker="o", markersize=3, label=name)
    if alone is not None:
        axis.axhline(alone, color=ALONE, linestyle="--", linewidth=1.2, label="clients alone (mean)")
    _rounds(axis)
    axis.set_ylabel("test accuracy (%)")
    _finish(axis, legend="lower right")


def accuracy_by_size(axis: Axes, clients: Sequence[Row]) -> None:
    """Each client's accuracy against its data size, joined to what it reaches alone where that is known."""
    rows = known(clients, "n_train", "pm")
    both = known(rows, "alone")
    if both:
        sizes, alone, pm = _columns(both, "n_train", "alone", "pm")
        axis.vlines(sizes, alone, pm, color=ALONE, alpha=0.5, linewidth=1, rasterized=len(both) > MANY)
        points(axis, both, "n_train", "alone", color=PAPER, edgecolor=ALONE, linewidth=1.2, s=14, label="alone")
    points(axis, rows, "n_train", "pm", s=16, color=PM, label="personalised", zorder=3)
    _sizes(axis)
    axis.set_ylabel("test accuracy (%)")
    _finish(axis, legend="lower right")


def gains_in_order(axis: Axes, gains: Sequence[float]) -> None:
    """What joining is worth to each client, from the one that gains most to the one that loses most."""
    ordered = np.sort(np.asarray(gains))[::-1]
    at = np.arange(len(ordered))
    for part, colour, name in ((ordered > 0, PM, "gain"), (ordered < 0, LOSS, "lose")):
        if part.any():
            label = f"{int(part.sum()):,} {name}"
            if len(at) <= 100:
                axis.bar(at[part], ordered[part], width=0.85, color=colour, label=label)
            else:  # bars would touch
                axis.fill_between(at[part], ordered[part], step="mid", color=colour, linewidth=0, label=label)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_xlim(-0.8, len(at) - 0.2)
    axis.set_xticks([])
    axis.set_xlabel("clients, by their gain")
    axis.set_ylabel("gain by joining (points)")
    _finish(axis, legend="best")


def gains_by_size(axis: Axes, rows: Sequence[Row]) -> None:
    """What joining is worth (``gain``, in points) against a client's data size."""
    axis.axhline(0, color=INK, linewidth=0.8)
    for part, colour in ([row for row in rows if row["gain"] >= 0], PM), ([r for r in rows if r["gain"] < 0], LOSS):
        points(axis, part, "n_train", "gain", s=18, color=colour, zorder=3)
    _sizes(axis)
    axis.set_ylabel("gain by joining (points)")
    _finish(axis)


def confidence_by_size(axis: Axes, clients: Sequence[Row]) -> None:
    """The confidence tau of each client against its data size."""
    points(axis, known(clients, "n_train", "tau"), "n_train", "tau", s=18, color=PM)
    _sizes(axis)
    axis.set_ylabel("confidence τ")
    _finish(axis)


def confidence_by_deviation(axis: Axes, clients: Sequence[Row]) -> None:
    """The confidence tau of each client against how far its head is from the global one."""
    points(axis, known(clients, "deviation", "tau"), "deviation", "tau", s=18, color=PM)
    _plain(axis, "deviation |μ \N{MINUS SIGN} w|²/d")
    axis.set_ylabel("confidence τ")
    _finish(axis)


def distribution(axis: Axes, values: Sequence[float], label: str) -> None:
    """How a number is spread over clients, as the paper shows confidences and deviations."""
    density(axis, np.asarray(values), PM, "")
    axis.set_ylim(bottom=0)
    _plain(axis, label)
    axis.set_ylabel("density over clients")
    _finish(axis)


def density(axis: Axes, values: NDArray[np.float64], colour: str, name: str) -> None:
    """A Gaussian kernel density of numbers that are not negative; nothing where they do not differ."""
    from scipy.stats import gaussian_kde

    if len(values) < 3 or np.ptp(values) == 0:
        return
    margin = 0.15 * np.ptp(values)
    grid = np.linspace(max(0.0, values.min() - margin), values.max() + margin, 300)
    level = gaussian_kde(values)(grid)
    axis.fill_between(grid, level, color=colour, alpha=0.15, linewidth=0)
    axis.plot(grid, level, color=colour, lw=1.8, label=name)


def calibration_by_size(axis: Axes, clients: Sequence[Row]) -> None:
    """The expected calibration error of each client's model against its data size."""
    points(axis, known(clients, "n_train", "pm_ece"), "n_train", "pm_ece", s=18, color=PM)
    _sizes(axis)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("expected calibration error (%)")
    _finish(axis)


def reliability(axis: Axes, bins: Mapping[str, tuple[Row, str]]) -> None:
    """How often predictions are right against how sure they are, for each name its bins (0 to 1) and a colour.

    The area of a point is the share of the predictions that are in its bin.
    """
    axis.plot([0, 100], [0, 100], color=INK, linewidth=0.8, linestyle="--", alpha=0.6)
    for name, (found, colour) in bins.items():
        count, sure, right = (np.asarray(found[key], dtype=float) for key in ("count", "confidence", "accuracy"))
        axis.plot(100 * sure, 100 * right, color=colour, linewidth=1.2, label=name)
        axis.scatter(100 * sure, 100 * right, s=6 + 150 * count / count.sum(), color=colour, linewidths=0, alpha=0.8)
    axis.set_xlabel("how sure (%)")
    axis.set_ylabel("how often right (%)")
    _finish(axis, legend="upper left" if len(bins) > 1 else None)


def declined(axis: Axes, bins: Mapping[str, tuple[Row, str]]) -> None:
    """The accuracy on the rest against the share of cases that are declined, bin by bin from the least sure."""
    for name, (found, colour) in bins.items():
        left, right = accuracy_of_the_rest(found)
        axis.plot(100 * left, 100 * right, color=colour, linewidth=1.2, marker=".", label=name)
    axis.set_xlabel("declined, least sure first (%)")
    axis.set_ylabel("accuracy on the rest (%)")
    _finish(axis, legend="lower right" if len(bins) > 1 else None)


def accuracy_of_the_rest(bins: Row) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The shares that are declined, bin by bin from the least sure, and the accuracy on the rest (both 0 to 1)."""
    order = np.argsort(np.asarray(bins["confidence"], dtype=float))
    count, right = (np.asarray(bins[key], dtype=float)[order] for key in ("count", "accuracy"))
    kept = count[::-1].cumsum()[::-1]
    return 1 - kept / count.sum(), (count * right)[::-1].cumsum()[::-1] / kept


# Several methods


def colour(method: str) -> str:
    """The colour of a method, the same in every picture."""
    return COLOURS.get(method) or OTHERS[crc32(method.encode()) % len(OTHERS)]


def marker(method: str) -> str:
    """The marker of a method, the same in every picture."""
    return MARKERS[list(METHODS).index(method)] if method in METHODS else "h8d"[crc32(method.encode()) // 5 % 3]


def convergence(axis: Axes, histories: Histories, key: str) -> None:
    """The accuracy ``key`` (pm or gm) of each method round by round: the mean over seeds, and from lowest to highest.

    A method that is evaluated once, as Local is, is a level line.
    """
    for name, seeds in histories.items():
        values: dict[float, list[float]] = {}
        for row in (row for history in seeds for row in known(history, "round", key)):
            values.setdefault(row["round"], []).append(row[key])
        rounds = sorted(values)
        means = [float(np.mean(values[at])) for at in rounds]
        if len(rounds) == 1:
            axis.axhline(means[0], color=colour(name), linestyle="--", linewidth=1.3, label=_title(name))
        elif rounds:
            low, high = [min(values[at]) for at in rounds], [max(values[at]) for at in rounds]
            axis.fill_between(rounds, low, high, color=colour(name), alpha=0.15, linewidth=0)
            every = max(1, len(rounds) // 10)
            axis.plot(rounds, means, **_style(name), markevery=every, label=_title(name))
    _rounds(axis)
    axis.set_ylabel(f"{key.upper()}, test accuracy (%)")
    _finish(axis)


def by_size(axis: Axes, clients: Clients, key: str, label: str, groups: int = 6) -> None:
    """The mean of a column over groups of clients of about the same size, for each method."""
    for name, rows in clients.items():
        ordered = sorted(known(rows, "n_train", key), key=lambda row: float(row["n_train"]))
        count = max(1, min(groups, len(ordered) // 4))
        parts = [part for part in np.array_split(np.arange(len(ordered)), count) if len(part)]
        sizes, values = _columns(ordered, "n_train", key)
        x = [float(np.exp(np.log(sizes[part]).mean())) for part in parts]
        axis.plot(x, [float(values[part].mean()) for part in parts], **_style(name), label=_title(name))
    _sizes(axis)
    axis.set_ylabel(label)
    _finish(axis)


def gains_by_method(axis: Axes, gains: Clients) -> None:
    """What joining is worth to clients (``gain``, in points), a row of points for each method, with the mean."""
    axis.axvline(0, color=INK, linewidth=0.8)
    for at, (name, rows) in enumerate(gains.items()):
        shift = 0.5 * ((np.arange(len(rows)) * 0.618034) % 1 - 0.5)  # spreads points evenly, the same each time
        placed = [{**row, "at": at + float(s)} for row, s in zip(rows, shift, strict=True)]
        points(axis, placed, "gain", "at", s=12, color=colour(name), alpha=0.55, linewidths=0)
        mean = float(np.mean([row["gain"] for row in rows]))
        axis.plot([mean, mean], [at - 0.36, at + 0.36], color=INK, linewidth=2.2)
    axis.set_yticks(range(len(gains)), [_title(name) for name in gains])
    axis.set_ylim(len(gains) - 0.4, -0.6)
    axis.set_xlabel("gain by joining (points)")
    _finish(axis)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", alpha=0.25)


# Parts


def known(rows: Sequence[Row], *keys: str) -> list[Row]:
    """The rows in which all of these have a value. Sizes are drawn on a scale that has no 0."""
    return [row for row in rows if all(row.get(key) is not None and (key != "n_train" or row[key] > 0) for key in keys)]


def varied(values: Sequence[float]) -> bool:
    """Whether there are a few values, and they differ by more than rounding."""
    return len(values) > 2 and float(np.ptp(values)) > 1e-9 * float(np.abs(values).max())


def pooled_bins(runs: Sequence[Row], bins: int = 15) -> Row:
    """The calibration bins of several runs as those of one."""
    count, sure, right = (np.concatenate([run[key] for run in runs]) for key in ("count", "confidence", "accuracy"))
    place = np.minimum((sure * bins).astype(int), bins - 1)
    total = np.bincount(place, count)
    full = total > 0
    means = [np.bincount(place, count * column)[full] / total[full] for column in (sure, right)]
    return {"count": total[full], "confidence": means[0], "accuracy": means[1]}


def points(axis: Axes, rows: Sequence[Row], x: str, y: str, **style: Any) -> PathCollection:
    """A point for each row. What a point says of itself is its URL, which pages show when it is pointed at."""
    dots = axis.scatter(*_columns(rows, x, y), **{"zorder": 2, **style})
    if len(rows) > MANY:
        dots.set_rasterized(True)
    elif rows:
        dots.set_urls([described(row) for row in rows])
    return dots


def described(row: Row) -> str:
    """A client in a line."""
    forms = {"client": "client {}", "n_train": "{:,.0f} samples", "pm": "{:.1f} %", "alone": "alone {:.1f} %"}
    forms |= {"gain": "gain {:+.1f}", "tau": "τ {:.3g}", "deviation": "deviation {:.3g}"}
    return ", ".join(form.format(row[key]) for key, form in forms.items() if row.get(key) is not None)


def _columns(rows: Sequence[Row], *keys: str) -> list[NDArray[np.float64]]:
    """The values of the rows that have them all."""
    full = known(rows, *keys)
    return [np.array([row[key] for row in full], dtype=float) for key in keys]


def _title(method: str) -> str:
    return METHODS[method].title if method in METHODS else method.rpartition(":")[2]


def _style(method: str) -> dict[str, Any]:
    ours = method == "pfedvem"
    return {
        "color": colour(method),
        "marker": marker(method),
        "markersize": 6 if ours else 4,
        "linewidth": 2.4 if ours else 1.4,
        "zorder": 4 if ours else 3,
    }


def _rounds(axis: Axes) -> None:
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _plain(axis: Axes, label: str) -> None:
    """An axis of a few numbers; a common power of ten where they are very small or large."""
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.ticklabel_format(axis="x", scilimits=(-2, 4))


def _sizes(axis: Axes) -> None:
    """A logarithmic axis of data sizes with plain numbers, as many as fit."""
    axis.set_xscale("log")
    axis.set_xlabel("a client's training samples")
    low, high = axis.get_xlim()
    subs = (1, 2, 5) if high / max(low, 1e-9) < 200 else (1,)
    axis.xaxis.set_major_locator(LogLocator(subs=subs))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _finish(axis: Axes, legend: Literal["best", "lower right", "upper left"] | None = None) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    if legend is not None and axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8.5, loc=legend)


def plain_ticks(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
