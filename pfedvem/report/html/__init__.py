"""One page for a run, a comparison or a reproduction: a single HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from pfedvem.errors import UserError
from pfedvem.report.html.comparison import comparison_page
from pfedvem.report.html.folders import Comparison, Run, read
from pfedvem.report.html.page import Page
from pfedvem.report.html.reproduction import reproduction_page
from pfedvem.report.html.run import run_page
from pfedvem.simulation import checkpoints


def report(folder: Path, out: Path | None = None) -> tuple[Page, Path]:
    """Writes the page of a folder, into it if no other file is named; gives the page and the file."""
    file = out if out is not None else folder / "report.html"
    page = make(folder)
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file for the page, such as {file / 'report.html'}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.replace(file, page.html.encode())
    return page, file


def make(folder: Path) -> Page:
    """The page of a folder."""
    found = read(folder)
    if isinstance(found, Run):
        return run_page(found)
    return comparison_page(found) if isinstance(found, Comparison) else reproduction_page(found)
