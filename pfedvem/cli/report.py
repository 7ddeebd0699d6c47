"""``pfedvem report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pfedvem.cli.app import Json, Option, app


@app.command(epilog="Example:  pfedvem report runs/digits-pfedvem-1 --open")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, a comparison or a reproduction.")],
    out: Annotated[Path | None, Option(metavar="FILE", help="The page; by default report.html in the folder.")] = None,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write one page about a run, a comparison or a reproduction: its tables, pictures, settings and command.

    The page is a single HTML file that needs nothing else: it opens without a network, and can be sent and printed.
    """
    from pfedvem.report.html import report as write

    console = Console(stderr=as_json)
    with console.status("Drawing"):
        page, file = write(folder, out)
    for problem in page.problems:
        console.print(f"[yellow]missing[/] {escape(problem)}", highlight=False, soft_wrap=True)
    console.print(f"The page is in [bold]{escape(str(file))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        sections = [section.title for section in page.sections]
        about = {"kind": page.kind.lower(), "title": page.title, "sections": sections, "problems": list(page.problems)}
        print(json.dumps({"page": str(file), **about}))
    if show:
        import webbrowser

        if not webbrowser.open(file.resolve().as_uri()):
            console.print("There is no browser here that can be opened.")
