"""A comparison for people: the table on the terminal and as CSV, Markdown and LaTeX, and the progress of many runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pfedvem.report.run import LiveRuns, shown
from pfedvem.simulation import checkpoints

if TYPE_CHECKING:  # the comparison itself writes these tables
    from pfedvem.experiments.compare import Comparison, Measure

HEADER = ("Method", "PM (%)", "GM (%)", "Small clients (PM, %)", "ECE (%)", "NLL", "Sent down", "Sent up", "Seeds")
SHORT = ("Method", "PM (%)", "GM (%)", "Small (%)", "ECE (%)", "NLL", "Down", "Up", "Seeds")
WIDE = 106  # columns of a terminal that has room for all of these
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: f"\\{c}" for c in "&%$#_{}"
}


def comparison_table(comparison: Comparison, width: int = WIDE) -> Table:
    """The table on a terminal of this width; the best PM and GM are bold."""
    shown_here = [name for name in SHORT if width >= WIDE or name not in ("ECE (%)", "NLL")]
    title = f"{escape(comparison.dataset)}: {comparison.clients} clients"
    caption = "mean ± SEM over seeds; small: the smallest 10%; bytes a client and round"
    caption += "; ECE, NLL: of the PM, else of the GM" if width >= WIDE else ""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", header_style="bold")
    for name in shown_here:
        table.add_column(name, justify="left" if name == "Method" else "right", no_wrap=name != "Method")
    for line in _lines(comparison, escape, lambda text, best: f"[bold]{text}[/]" if best else text):
        table.add_row(*(cell for name, cell in zip(SHORT, line, strict=True) if name in shown_here))
    return table


def comparison_csv(comparison: Comparison) -> str:
    """Plain numbers; empty where a method has no such model or one seed has no SEM."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    measures = [f"{name}{end}" for name in ("pm", "gm", "small_clients_pm", "ece", "nll") for end in ("", "_sem")]
    writer.writerow(["method", "title", "seeds", *measures, "bytes_down", "bytes_up", "seconds"])
    for row in comparison.rows:
        columns = (row.pm, row.gm, row.small, row.ece, row.nll)
        found = [(None, None) if m is None else (m.mean, m.sem) for m in columns]
        numbers = ["" if value is None else f"{value:.4f}" for pair in found for value in pair]
        writer.writerow([row.name, row.title, row.seeds, *numbers, row.down, row.up, f"{row.seconds:.3f}"])
    return table.getvalue()


def comparison_markdown(comparison: Comparison) -> str:
    """A table of Markdown."""
    body = _lines(comparison, lambda text: text.replace("|", r"\|"), lambda text, best: f"**{text}**" if best else text)
    rule = ["---", *["---:"] * (len(HEADER) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (HEADER, rule, *body))


def comparison_latex(comparison: Comparison) -> str:
    """A tabular of LaTeX; it needs the package booktabs."""

    def number(text: str, best: bool) -> str:
        mean, plus_minus, sem = text.partition(" ± ")
        mean = rf"\textbf{{{mean}}}" if best else mean
        return "--" if text == "-" else f"${mean} \\pm {sem}$" if plus_minus else f"${mean}$"

    body = [" & ".join(line) for line in _lines(comparison, tex, number)]
    head = " & ".join(tex(name) for name in HEADER)
    lines = [r"\toprule", rf"{head} \\", r"\midrule", *(rf"{line} \\" for line in body), r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(HEADER) - 1)}}}", *lines, r"\end{tabular}", ""])


def write_tables(comparison: Comparison, out: Path) -> None:
    """Writes comparison.csv, comparison.md and comparison.tex, each whole or not at all."""
    for end, form in (("csv", comparison_csv), ("md", comparison_markdown), ("tex", comparison_latex)):
        checkpoints.replace(out / f"comparison.{end}", form(comparison).encode())


def tex(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(TEX.get(character, character) for character in text)


def size(count: int) -> str:
    """A number of bytes for people, to three digits: 243 kB."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def plain(measure: Measure | None, digits: int = 1) -> str:
    """Mean ± SEM to so many decimals; the mean alone where there is one seed; a dash where there is nothing."""
    if measure is None or measure.sem is None:
        return shown(measure.mean if measure is not None else None, digits)
    return f"{shown(measure.mean, digits)} ± {shown(measure.sem, digits)}"


def _lines(comparison: Comparison, text: Callable[[str], str], number: Callable[[str, bool], str]) -> list[list[str]]:
    """The cells of the table. Methods whose best means do not differ in the decimal that is shown are all the best."""

    def column(measures: list[Measure | None]) -> list[str]:
        best = shown(max((m.mean for m in measures if m is not None), default=None))
        return [number(plain(m), m is not None and shown(m.mean) == best) for m in measures]

    rows = comparison.rows
    pm, gm = column([row.pm for row in rows]), column([row.gm for row in rows])
    lines = []
    for i, row in enumerate(rows):
        others = [number(plain(m, digits), False) for m, digits in ((row.small, 1), (row.ece, 1), (row.nll, 2))]
        lines.append([text(row.title), pm[i], gm[i], *others, size(row.down), size(row.up), str(row.seeds)])
    return lines


class LiveComparison(LiveRuns):
    """The progress of the runs of several methods and seeds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "runs")
        self._cell, self._training = "", False
        self._told: set[tuple[str, str]] = set()

    def cell(self, title: str, done: int, total: int) -> None:
        """A run of this title is next; so many are done."""
        self._cell, self._training = title, False
        self.ended(done, total)

    def stage(self, title: str, done: int, rounds: int) -> None:
        self._training = True
        super().stage(self._cell, done, rounds)

    def note(self, text: str) -> None:
        # What is to say about the data, before training, is the same for every method, and all else is not.
        said = self._cell if self._training else "", text
        if said not in self._told:
            self._told.add(said)
            super().note(f"{self._cell}: {text}")
