"""Data for people: the list of known data sets, and how a federation's data is spread over its clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pfedvem.data.catalogue import CATALOGUE
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".pdf", ".svg")

_BLUE, _GREY = "#2a6f97", "#8d99a6"


def catalogue_rows() -> list[dict[str, Any]]:
    """The known data sets as plain values, for ``--json``."""
    return [
        {
            "name": entry.name,
            "what": entry.what,
            "hub": entry.hub,
            "samples": entry.samples,
            "partition": entry.preset["partition"],
            "clients": entry.preset["clients"],
        }
        for entry in CATALOGUE.values()
    ]


def catalogue_table() -> Table:
    """The known data sets as a table."""
    table = Table(title="Data sets", title_justify="left", header_style="bold")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it is, samples for training + testing, and hub id")
    table.add_column("dealt by", no_wrap=True)
    table.add_column("clients", justify="right", no_wrap=True)
    for row in catalogue_rows():
        source = f"[dim]{escape(row['samples'])}; {escape(row['hub'] or 'no download')}[/]"
        table.add_row(row["name"], f"{escape(row['what'])}\n{source}", row["partition"], str(row["clients"]))
    table.caption = "Any other hub id (owner/name) or folder works too: parquet files, or a folder of images a class."
    table.caption_justify = "left"
    return table


def label_counts(federation: Federation) -> NDArray[np.int64]:
    """How many training samples of each label each client has: (clients, labels)."""
    y, labels = federation.train.y.numpy(), len(federation.classes)
    return np.stack([np.bincount(y[shard.train], minlength=labels) for shard in federation.shards])


def summary(federation: Federation) -> dict[str, Any]:
    """A federation as plain values, for ``--json``: totals, sizes, and what each client has."""
    sizes, counts = np.array(federation.sizes), label_counts(federation)
    return {
        "name": federation.name,
        "shape": list(federation.shape),
        "classes": list(federation.classes),
        "train_samples": int(sizes.sum()),
        "test_samples": len(federation.test),
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "clients": [
            {
                "id": shard.id,
                "train": shard.n,
                "test": sum(len(part) for part in shard.test),
                "labels": {name: int(n) for name, n in zip(federation.classes, row, strict=True) if n},
                "owns": list(shard.owns),
            }
            for shard, row in zip(federation.shards, counts, strict=True)
        ],
        "notes": list(federation.notes),
    }


def summary_view(federation: Federation, first: int = 10) -> RenderableType:
    """A federation for the terminal: its totals, its notes and its first clients."""
    facts = summary(federation)
    sizes = facts["sizes"]
    shape = "x".join(str(n) for n in facts["shape"])
    lines = [
        f"[bold]{escape(federation.name)}[/]: {facts['train_samples']:,} training and {facts['test_samples']:,} test "
        f"samples of {len(federation.classes)} classes, each {shape}",
        f"{len(federation)} clients with {sizes['min']:,} to {sizes['max']:,} samples, median {sizes['median']:,.0f}",
        *(f"[yellow]note[/] {escape(note)}" for note in federation.notes),
    ]
    table = Table(header_style="bold")
    table.add_column("client", justify="right", no_wrap=True)
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    table.add_column("owns (training samples)")
    for client in facts["clients"][:first]:
        labels = client["labels"]
        owns = [escape(name) + (f" [dim]({labels[name]:,})[/]" if name in labels else "") for name in client["owns"]]
        rest = f" and {len(owns) - 6} more" if len(owns) > 6 else ""
        table.add_row(escape(client["id"]), f"{client['train']:,}", f"{client['test']:,}", ", ".join(owns[:6]) + rest)
    more = len(federation) - first
    if more > 0:
        table.caption = f"and {more:,} more clients; --json shows all of them"
        table.caption_justify = "left"
    return Group(*lines, table)


def draw(federation: Federation, path: Path) -> None:
    """Draws who owns what: a circle for each client and label, its area the number of samples, and the local sizes."""
    from matplotlib.figure import Figure  # slow to import, and only pictures need it
    from matplotlib.ticker import MaxNLocator

    counts, sizes = label_counts(federation), np.array(federation.sizes)
    clients, labels = counts.shape
    left, wide = 0.075 * max(len(name) for name in federation.classes), float(np.clip(0.085 * clients, 5, 15))
    tall = float(np.clip(0.26 * labels, 1.6, 9))
    figure = Figure(figsize=(wide + left + 1.0, tall + 2.6), layout="constrained")
    owned, local = figure.subplots(2, 1, sharex=True, height_ratios=[tall, 1.3])

    # The largest circle is wider than its cell, the more so the more clients there are: small ones stay visible.
    cell = 72 * min(1.2 * tall / labels, float(np.interp(clients, [20, 100, 200], [1.2, 2.4, 2.8])) * wide / clients)
    at = np.argwhere(counts)
    area = counts[at[:, 0], at[:, 1]] * (cell**2 / counts.max())
    owned.scatter(at[:, 0], at[:, 1], s=np.maximum(area, 0.6), color=_BLUE, alpha=0.75, linewidths=0)
    owned.set_ylim(labels - 0.3, -0.7)
    if labels <= 40:
        owned.set_yticks(range(labels), federation.classes, fontsize=9 if labels <= 25 else 7)
    else:
        owned.set_ylabel("label")
    owned.tick_params(length=0)
    owned.grid(axis="y", color="#e6e9ec", linewidth=0.6)
    owned.set_axisbelow(True)
    title = f"{federation.name}: {sizes.sum():,} training samples, {clients} clients"
    owned.set_title(f"{title} (largest circle: {counts.max():,} samples)", fontsize=10, loc="left")

    local.bar(np.arange(clients), sizes, width=0.8, color=_BLUE)
    middle = float(np.median(sizes))
    local.axhline(middle, color=_GREY, linewidth=0.8, linestyle="--")
    where = local.get_yaxis_transform()
    local.text(1.005, middle, f"median {middle:,.0f}", transform=where, fontsize=8, color=_GREY, va="center")
    local.set_xlim(-0.8, clients - 0.2)
    local.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    local.set_xlabel("client")
    local.set_ylabel("samples")
    for axes in (owned, local):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
    save_picture(figure, path)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a picture whole or not at all; its form is that of the name's end."""
    from pfedvem.report.plots import save

    if path.suffix not in PICTURES:
        raise UserError(f"A picture cannot be written as {path.name}; end its name in {' or '.join(PICTURES)}.")
    save(figure, path)
