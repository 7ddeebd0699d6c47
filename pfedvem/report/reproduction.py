"""A reproduction for people: ours beside the paper's, as CSV, Markdown and LaTeX, on the terminal and as pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from pfedvem.experiments.compare import Measure
from pfedvem.experiments.reproduce import Found, Reproduction
from pfedvem.experiments.studies import COURSES, MEASURES, Study
from pfedvem.report import figures
from pfedvem.report.compare import plain, tex
from pfedvem.simulation import checkpoints

HEADER = ("dataset", "method", "column", "measure", "ours", "ours_sem", "seeds", "paper", "paper_sem", "difference")
ROUNDS = "the global model from round to round, since the last depends on who uploads in it"
LEGEND = (
    "Each cell: ours (the paper's; the difference). Mean ± standard error over seeds; = where the difference lies "
    "within two joint standard errors."
)


def write_tables(reproduction: Reproduction, folder: Path) -> None:
    """Writes the table of a study as CSV, Markdown and LaTeX; a figure has none."""
    folder.mkdir(parents=True, exist_ok=True)
    if not reproduction.study.figure:
        for end, form in (("csv", table_csv), ("md", table_markdown), ("tex", table_latex)):
            checkpoints.replace(folder / f"{reproduction.study.name}.{end}", form(reproduction).encode())


def write_reproduction(reproduction: Reproduction, folder: Path, command: str) -> None:
    """Writes the tables and pictures of a study, and reproduction.json, which lists them."""
    write_tables(reproduction, folder)
    write_card(reproduction.study, folder, command, notes(reproduction), figures.draw(reproduction, folder))


def write_card(study: Study, folder: Path, command: str, said: Sequence[str], drawn: figures.Drawn) -> None:
    """reproduction.json: what is in the folder."""
    tables = [] if study.figure else [{"file": f"{study.name}.csv", "title": study.title}]
    pictures = [{"file": f"{name}.png", "title": title, "about": about} for name, title, about in drawn]
    card = {"name": study.name, "title": study.title, "command": command, "notes": list(said)}
    content = json.dumps({**card, "tables": tables, "figures": pictures}, indent=1) + "\n"
    checkpoints.replace(folder / "reproduction.json", content.encode())


def table_csv(reproduction: Reproduction) -> str:
    """A line for each number, for programs; empty where there is none."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*HEADER, "within_2_sem"])
    for one in [*reproduction.found, *reproduction.courses]:
        pair = [_number(value) for m in (one.ours, one.paper) for value in ((m.mean, m.sem) if m else (None, None))]
        where = [one.cell.dataset, one.cell.line.key, one.cell.column, one.measure]
        within = "" if one.within is None else str(one.within).lower()
        writer.writerow([*where, *pair[:2], one.seeds, *pair[2:], _number(one.difference), within])
    return table.getvalue()


def table_markdown(reproduction: Reproduction) -> str:
    """A table of Markdown for each data set."""
    parts = []
    for dataset, head, lines in _tables(reproduction, reproduction.found, _both):
        parts.append(f"**{dataset}**\n\n{_markdown(head, lines)}")
    for dataset, head, lines in _tables(reproduction, reproduction.courses, _both):
        parts.append(f"**{dataset}: {ROUNDS}**\n\n{_markdown(head, lines)}")
    return "\n".join([*parts, f"{LEGEND}\n", *(f"- {note}\n" for note in notes(reproduction))])


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def table_latex(reproduction: Reproduction) -> str:
    """A tabular of LaTeX for each data set, with the package booktabs; the paper's numbers are small and below ours."""

    def number(one: Found) -> str:
        ours, paper = (_math(m) for m in (one.ours, one.paper))
        return rf"\shortstack{{{ours}\\{{\scriptsize {paper}}}}}"

    parts = []
    for dataset, head, lines in _tables(reproduction, reproduction.found, number, tex):
        body = [rf"{' & '.join(line)} \\" for line in lines]
        top = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", rf"{' & '.join(map(tex, head))} \\"]
        parts.append("\n".join([f"% {dataset}", *top, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]))
    return "\n".join(parts)


def reproduction_view(reproduction: Reproduction) -> Group:
    """The tables on the terminal, ours beside the paper's."""
    shown: list[Any] = []
    found = [] if reproduction.study.figure else reproduction.found
    for dataset, head, lines in _tables(reproduction, found, _both, escape):
        title = f"{escape(reproduction.study.title)}: {escape(dataset)}"
        table = Table(title=title, title_justify="left", header_style="bold", caption=LEGEND, caption_justify="left")
        for name in head:
            table.add_column(escape(name), justify="left" if name == "Method" else "right")
        for line in lines:
            table.add_row(*line)
        shown.append(table)
    return Group(*shown, *(f"[yellow]note[/] {escape(note)}" for note in notes(reproduction)))


def notes(reproduction: Reproduction) -> list[str]:
    """What a reader should know: how much was run, how far it agrees, and whether methods come in the same order."""
    cells, runs = reproduction.cells, sum(len(cell.names) for cell in reproduction.cells)
    said = []
    if runs:
        hours = sum(record["summary"]["seconds"] for record in reproduction.records.values()) / 3600
        said.append(f"{len(reproduction.records)} of {runs} runs are finished; they took {hours:.1f} hours.")
    settings = {record["summary"]["rounds"] for record in reproduction.records.values()} - {1}
    if settings and settings != {100}:
        said.append(f"Runs had {', '.join(map(str, sorted(settings)))} rounds; the paper's have 100.")
    found = [] if reproduction.study.figure else reproduction.found
    compared = [one for one in found if one.difference is not None]
    if compared:
        near = sum(abs(one.difference or 0) <= 1.5 for one in compared)
        judged = [one for one in compared if one.within is not None]
        inside = f"; {sum(bool(one.within) for one in judged)} of {len(judged)} within two joint SEM" if judged else ""
        said.append(f"{near} of {len(compared)} numbers lie within 1.5 points of the paper's{inside}.")
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        for column in dict.fromkeys(cell.column for cell in cells):
            for kind in reproduction.study.measures:
                ranked = [o for o in compared if (o.cell.dataset, o.cell.column, o.measure) == (dataset, column, kind)]
                if len(ranked) > 2:
                    rho = agreement(ranked)
                    what = f"{dataset}, {ranked[0].cell.heading}, {MEASURES[kind]}"
                    said.append(f"Order of the {len(ranked)} methods, {what}: rank correlation {rho:.2f}.")
    return [*said, *reproduction.failures]


def agreement(found: Sequence[Found]) -> float:
    """Spearman's rank correlation between our numbers and the paper's."""
    from scipy.stats import spearmanr

    pairs = [(one.ours.mean, one.paper.mean) for one in found if one.ours is not None and one.paper is not None]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


Form = Callable[[Found], str]


def _tables(
    reproduction: Reproduction, found: Sequence[Found], number: Form, text: Callable[[str], str] = str
) -> list[tuple[str, list[str], list[list[str]]]]:
    """For each data set its name, the headings and the lines; columns that nobody has a number for are left out."""
    out, words = [], MEASURES | COURSES
    for dataset in dict.fromkeys(one.cell.dataset for one in found):
        mine = [one for one in found if one.cell.dataset == dataset]
        columns = list(dict.fromkeys((one.cell.column, one.cell.heading, one.measure) for one in mine))
        order, kinds = [cell.column for cell in reproduction.cells], list(words)
        columns.sort(key=lambda column: (order.index(column[0]), kinds.index(column[2])))
        lines = []
        for line in dict.fromkeys(cell.line.key for cell in reproduction.cells):
            of = {(one.cell.column, one.measure): one for one in mine if one.cell.line.key == line}
            if not of:
                continue
            title = next(iter(of.values())).cell.line.title
            numbers = [number(of[c, kind]) if (c, kind) in of else "-" for c, _, kind in columns]
            lines.append([text(title), *numbers])
        head = ["Method", *(f"{heading}: {words[kind]}" for _, heading, kind in columns)]
        out.append((dataset, head, lines))
    return out


def _both(one: Found) -> str:
    """Ours and the paper's: 90.6 ± 0.1 (91.4, -0.8)."""
    if one.paper is None:
        return plain(one.ours)
    if one.difference is None:
        return f"- ({plain(one.paper)})"
    same = " =" if one.within else ""
    return f"{plain(one.ours)} ({plain(one.paper)}; {one.difference:+.1f}{same})"


def _math(m: Measure | None) -> str:
    return "--" if m is None else f"${m.mean:.1f}$" if m.sem is None else rf"${m.mean:.1f} \pm {m.sem:.1f}$"


def _number(value: float | None) -> str:
    """A number with all digits of a mean over five seeds: pages round it as the tables here do."""
    return "" if value is None else f"{value:.8g}"
