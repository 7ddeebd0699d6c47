"""``pfedvem flower watch``: a running federation on the terminal, from the file that its server writes each round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pfedvem.errors import UserError
from pfedvem.flower.sites import Status
from pfedvem.report.run import shown

STATUS = "federation.json"


def watch(out: Path, console: Console, *, once: bool, pause: Callable[[float], None] = time.sleep) -> None:
    """Shows the federation until its last round, or once."""
    if not out.is_dir():
        raise UserError(f"There is no folder {out}; give the one that the app's setting 'out' names.")
    with Live(view(read(out)), console=console, auto_refresh=False) as live:
        while True:
            status = read(out)
            live.update(view(status), refresh=True)
            if once or (status is not None and status["round"] >= status["rounds"]):
                return
            pause(1.0)


def read(out: Path) -> dict[str, Any] | None:
    """What the server wrote last; None before its first round."""
    try:
        return asdict(TypeAdapter(Status).validate_json((out / STATUS).read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{out / STATUS} cannot be read: {error}.") from error
    except ValidationError as error:
        raise UserError(f"{out / STATUS} is not what a server of this version writes.") from error


def view(status: Mapping[str, Any] | None) -> RenderableType:
    """Rounds, sites, replies, tau by site, and what went wrong last."""
    if status is None:
        return Text("The first round is not complete yet.")
    table = Table(
        title=f"{status['experiment']}: {status['method']}, round {status['round']} of {status['rounds']}",
        title_justify="left",
    )
    for name, justify in (("site", "left"), ("samples", "right"), ("last reply", "right"), ("tau", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("faults", justify="right")
    table.add_column("the last of them")
    for site in status["sites"]:
        here = site["connected"]
        who = Text(site["name"] if here else f"{site['name']} (away)", style="" if here else "dim")
        last = f"round {site['replied']}" if site["replied"] else "-"
        faults = Text(str(site["faults"]), style="yellow" if site["faults"] else "")
        table.add_row(
            who, str(site["n"] or "-"), last, shown(site["tau"], 3), faults, Text(site["last_fault"], overflow="fold")
        )
    scores = "  ".join(f"{key.upper()} {status[key]:.1f}%" for key in ("pm", "gm") if status[key] is not None)
    line = f"{status['replies']} of {status['asked']} replies, {status['uploads']} uploads merged  {scores}"
    return Group(table, Text(line))
