"""``pfedvem flower new``: a small app that ``flwr run`` accepts, with one file for a site to change."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from pfedvem.errors import UserError

# Each file of the app, and the template that it is made of: a pyproject.toml in our tree would be read by our tools.
FILES = {"pyproject.toml": "pyproject.toml.in", "mysite.py": "mysite.py", "README.md": "README.md"}


def new_app(folder: Path, clients: int) -> list[Path]:
    """Writes the app into a new folder; gives its files."""
    if clients < 2:
        raise UserError(f"A federation needs at least two sites, not {clients}.")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; an app is written into a new folder.")
    if set(folder.resolve().as_posix()) & set('"\\\n'):
        raise UserError(f"The path {folder.resolve()} cannot stand in pyproject.toml; choose one without quotes.")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    values = {
        "name": name,
        "clients": clients,
        "numbers": " ".join(str(number) for number in range(clients)),
        # The server's working folder is not known beforehand, so the path is a whole one.
        "out": (folder / "out").resolve().as_posix(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, template in FILES.items():
        text = (files("pfedvem.flower") / "template" / template).read_text(encoding="utf-8")
        (folder / file).write_text(Template(text).substitute(values), encoding="utf-8")
    return [folder / file for file in FILES]
