"""The page of a reproduction of the paper: what its folder says of itself."""

from __future__ import annotations

from pfedvem.experiments.compare import Measure
from pfedvem.experiments.studies import COURSES, MEASURES
from pfedvem.report.compare import plain
from pfedvem.report.html.folders import Reproduction, Row, listed, number, title
from pfedvem.report.html.page import Figure, Page, Section, Table, png, signed
from pfedvem.report.reproduction import HEADER

LEGEND = (
    "Ours, and below it the paper's and the difference. Mean ± standard error over seeds; = where the difference lies "
    "within two joint standard errors."
)


def reproduction_page(found: Reproduction) -> Page:
    """The page of a table or a figure of the paper."""
    name = str(found.about.get("name") or found.folder.name)
    notes = [str(note) for note in listed(found.about.get("notes"))]
    sections = [Section("Notes", notes)] if notes else []
    for head, header, rows in found.tables:
        if set(header) >= set(HEADER):
            sections += _beside(head, [dict(zip(header, row, strict=True)) for row in rows])
        else:
            sections.append(Section(head, tables=[Table(header, rows)]))
    figures = [Figure(png(content, head), head, about, wide=True) for head, about, content in found.figures]
    command = str(found.about.get("command") or "")
    return Page(
        kind="Reproduction",
        title=str(found.about.get("title") or name),
        facts=[name],
        problems=found.problems,
        sections=[*sections, Section("Figures", figures=figures)] if figures else sections,
        command=command,
        about_command="Finished runs are kept: the same command goes on where it was stopped." if command else "",
    )


def _beside(head: str, rows: list[Row]) -> list[Section]:
    """The numbers of a study, which come a line each: for each data set a table of methods by columns."""
    sections = []
    apart = [(row["dataset"], row["measure"] in COURSES) for row in rows]
    for dataset, course in dict.fromkeys(apart):
        mine = [row for row, key in zip(rows, apart, strict=True) if key == (dataset, course)]
        cells = {(row["method"], row["column"], row["measure"]): _both(row) for row in mine}
        columns = list(dict.fromkeys((row["column"], row["measure"]) for row in mine))
        columns.sort(key=lambda column: [row["column"] for row in mine].index(column[0]))
        methods = dict.fromkeys(row["method"] for row in mine)
        lines = [[title(name), *(cells.get((name, *column), "-") for column in columns)] for name in methods]
        words = COURSES if course else MEASURES
        header = ["Method", *(f"{column}: {words.get(measure, measure)}" for column, measure in columns)]
        about = f"{head}: {dataset}" + (", from round to round" if course else "")
        sections.append(Section(about, tables=[Table(header, lines, about=LEGEND)]))
    return sections


def _both(row: Row) -> str:
    """Ours, and in a second line the paper's and the difference."""
    ours, paper, by = (number(row[key]) for key in ("ours", "paper", "difference"))
    first = plain(Measure(ours, number(row["ours_sem"]))) if ours is not None else "-"
    if paper is None:
        return first
    same = " =" if row.get("within_2_sem") == "true" else ""
    second = plain(Measure(paper, number(row["paper_sem"])))
    return f"{first}\n{second}" + (f", {signed(by)}{same}" if by is not None else "")
