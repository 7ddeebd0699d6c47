"""The page of a reproduction of the paper: what its folder says of itself."""

from __future__ import annotations

from pfedvem.report.html.comparison import runs_section
from pfedvem.report.html.folders import Reproduction, listed
from pfedvem.report.html.page import Figure, Page, Section, Table, png


def reproduction_page(found: Reproduction) -> Page:
    """The page of a table or a figure of the paper."""
    name = str(found.about.get("name") or found.folder.name)
    notes = [str(note) for note in listed(found.about.get("notes"))]
    figures = [Figure(png(content, title), title, about, wide=True) for title, about, content in found.figures]
    tables = [Section(title, tables=[Table(header, rows)]) for title, header, rows in found.tables]
    sections = [Section("Notes", notes) if notes else None, *tables]
    sections += [Section("Figures", figures=figures) if figures else None, runs_section(found.runs)]
    done = sum(run.finished for run in found.runs)
    command = str(found.about.get("command") or "")
    return Page(
        kind="Reproduction",
        title=str(found.about.get("title") or name),
        facts=[name, *([f"{done} of {len(found.runs)} runs finished"] if found.runs else [])],
        problems=found.problems,
        sections=[section for section in sections if section is not None],
        command=command,
        about_command="Finished runs are kept: the same command goes on where it was stopped." if command else "",
    )
