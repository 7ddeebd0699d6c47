"""``pfedvem flower``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pfedvem.cli.app import Option, app
from pfedvem.errors import UserError

flower_app = typer.Typer(
    help="Run the methods at real sites, on Flower.",
    epilog="Example:  pfedvem flower new hospitals",
    no_args_is_help=True,
)
app.add_typer(flower_app, name="flower")


@flower_app.command("new", epilog="Example:  pfedvem flower new hospitals --sites 3")
def flower_new(
    folder: Annotated[Path, typer.Argument(help="The new folder of the app.")],
    sites: Annotated[int, Option(help="Number of sites.")] = 3,
) -> None:
    """Write a small app that `flwr run` accepts; a site changes one file of it."""
    _need_flower()
    from pfedvem.flower.new import new_app

    new_app(folder, sites)
    console = Console()
    console.print(
        f"The app is in [bold]{escape(str(folder))}[/]: change mysite.py, and go on by README.md there.",
        highlight=False,
        soft_wrap=True,
    )


@flower_app.command("keys", epilog="Example:  pfedvem flower keys keys --sites 3")
def flower_keys(
    folder: Annotated[Path, typer.Argument(help="The new folder of the keys.")],
    sites: Annotated[int, Option(help="Number of sites.")] = 3,
    host: Annotated[
        list[str] | None, Option(help="A name or address of the server besides localhost; may repeat.")
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="The server's port.")] = 8000,
    days: Annotated[int, Option(min=1, max=36500, help="How long the certificates are valid.")] = 30,
) -> None:
    """Make an authority, the server's certificate and the sites' keys, for a test federation."""
    _need_flower()
    from pfedvem.flower.keys import make_keys

    made = make_keys(folder, sites, host or (), port, days)
    Console().print(f"{len(made)} files are in [bold]{escape(str(folder))}[/].", highlight=False, soft_wrap=True)


@flower_app.command("watch", epilog="Example:  pfedvem flower watch hospitals/out")
def flower_watch(
    out: Annotated[Path, typer.Argument(help="The folder of the server's files: the app's setting `out`.")],
    once: Annotated[bool, Option("--once", help="Show it once instead of following it.")] = False,
) -> None:
    """Show a running federation: rounds, sites, replies, and each site's confidence tau."""
    _need_flower()
    from pfedvem.flower.watch import watch

    watch(out, Console(), once=once)


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise UserError('This needs Flower: pip install "pfedvem[flower]".')
