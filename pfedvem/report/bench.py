"""What ``pfedvem bench`` measured, as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def bench_view(figures: dict[str, Any]) -> RenderableType:
    """All tables that there are figures for."""
    machine = figures["machine"]
    peak = f"one core's matrix product {machine['peak_gflops']} GFLOP/s"
    about = f"{machine['processor']}, {machine['cores']} cores, {peak}"
    parts: list[RenderableType] = [Text(about)]
    for name, costs in figures.get("networks", {}).items():
        parts.append(_network(name, costs))
    if figures.get("methods"):
        parts.append(_methods(figures["methods"]))
    for method, rows in figures.get("growth", {}).items():
        parts.append(_growth(method, rows))
    return Group(*parts)


def _network(name: str, costs: dict[str, Any]) -> Table:
    base, plain = costs["base"], costs["plain"]
    table = Table(
        title=f"pFedVEM, {name}, {costs['clients']} clients: base training at {base['gflops']:.0f} GFLOP/s, "
        f"{base['share_of_peak']:.0%} of peak",
        caption="plain: timed on five clients; tests of one process: on every twentieth; scaled to all",
    )
    for column in ("s a round", "train", "tested", "every 5", "x", "at end", "x", "MB"):
        table.add_column(column, justify="left" if column == "s a round" else "right", no_wrap=True)
    every, end = plain["round"] + plain["evaluation"] / 5, plain["round"] + plain["evaluation"] / 100
    both = plain["round"] + plain["evaluation"]
    table.add_row("plain", f"{plain['round']:.1f}", f"{both:.1f}", f"{every:.1f}", "1", f"{end:.1f}", "1", "")
    for way in ("sequential", "vectorised", "processes"):
        row = costs[way]
        table.add_row(
            way,
            f"{row['round']:.2f}",
            f"{row['evaluated_round']:.1f}",
            f"{row['every_5']:.1f}",
            f"{row['ratio_every_5']:.1f}",
            f"{row['at_end']:.1f}",
            f"{row['ratio_at_end']:.1f}",
            f"{row['peak_mb']:.0f}" if row["peak_mb"] else "",
        )
    return table


def _methods(methods: dict[str, Any]) -> Table:
    table = Table(title="All methods, MLP: a round of ten clients of 100", caption="the plain way on three, scaled")
    for column in ("method", "plain (s)", "processes (s)", "x plain"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, row in methods.items():
        table.add_row(method, f"{row['plain']:.2f}", f"{row['processes']:.2f}", f"{row['ratio']:.1f}")
    return table


def _growth(method: str, rows: dict[str, Any]) -> Table:
    table = Table(title=f"{method}, MLP: the same 60,000 samples with more clients")
    for column in ("clients", "train all (s)", "x 100", "train uploaders (s)", "x 100", "memory (MB)"):
        table.add_column(column, justify="right")
    for clients, row in rows.items():
        table.add_row(
            f"{int(clients):,}",
            f"{row['all']:.2f}",
            f"{row['growth_all']:.1f}",
            f"{row['uploaders']:.2f}",
            f"{row['growth_uploaders']:.1f}",
            f"{row['peak_mb']:.0f}" if row["peak_mb"] else "",
        )
    return table
