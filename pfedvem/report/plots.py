"""The picture of a run: how accuracy grew, and what each client gained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from pfedvem.simulation.results import Result

PM, GM, ALONE = "#2a6f97", "#e07a1f", "#8d99a6"


def draw_run(result: Result, path: Path) -> None:
    """Accuracy against rounds, and each client's accuracy against its data size, as a PNG or PDF."""
    personal = result.summary["pm"] is not None
    figure = Figure(figsize=(9, 3.6) if personal else (4.8, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if personal else 1, squeeze=False)[0]
    _curves(axes[0], result)
    if personal:
        _clients(axes[1], result)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_ylabel("test accuracy (%)")
    summary = result.summary
    figure.suptitle(
        f"{result.setup.algorithm.title} on {summary['dataset']}, {summary['clients']} clients", fontsize=11
    )
    figure.savefig(path, dpi=150)


def _curves(axis: Axes, result: Result) -> None:
    history: list[dict[str, Any]] = result.history
    rounds = [line["round"] for line in history]
    for key, name, colour in (("pm", "personalised models (mean)", PM), ("gm", "global model", GM)):
        values = [line[key] for line in history]
        if values[-1] is not None:
            axis.plot(rounds, values, color=colour, marker="o", markersize=3, label=name)
    alone = result.summary["alone_pm"]
    if alone is not None:
        axis.axhline(alone, color=ALONE, linestyle="--", linewidth=1.2, label="clients alone (mean)")
    axis.set_xlabel("round")
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _clients(axis: Axes, result: Result) -> None:
    rows = result.clients.dropna(subset="pm")
    sizes = rows["n_train"]
    if result.alone is not None:
        axis.vlines(sizes, rows["alone"], rows["pm"], color=ALONE, alpha=0.5, linewidth=1)
        axis.scatter(sizes, rows["alone"], s=14, color="white", edgecolor=ALONE, linewidth=1.2, label="alone", zorder=2)
    axis.scatter(sizes, rows["pm"], s=16, color=PM, label="personalised", zorder=3)
    axis.set_xscale("log")
    plain_ticks(axis.xaxis, "{x:,.0f}")
    axis.set_xlabel("a client's training samples")
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def plain_ticks(axis: Axis, form: str = "{x:g}") -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter(form))
    axis.set_minor_formatter(NullFormatter())
