"""What a page is made of: a title, a few large numbers, sections of sentences, pictures and tables, and a command."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import count
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.axes import Axes

from pfedvem.report import plots
from pfedvem.report.html.folders import printable, title
from pfedvem.report.html.pictures import picture, themed

MINUS = "\N{MINUS SIGN}"
NUMBER = re.compile(rf"[-+{MINUS}]?[\d.,]+(e[-+]?\d+)?( ?%)?( ± [\d.,]+)?( of [\d,]+)?( [kMGT]?B| s)?(\n.*)?|-?(\n.*)?")
GLYPHS = {"s": "■", "o": "●", "^": "▲", "v": "▼", "D": "◆", "<": "◀", ">": "▶", "p": "⬟", "P": "✚", "*": "★", "X": "✖"}
GLYPHS |= {"h": "⬢", "8": "⯃", "d": "♦"}


@dataclass(frozen=True)
class Tile:
    """A large number, what it is, and a word about it."""

    name: str
    value: str
    about: str


@dataclass(frozen=True)
class Figure:
    """A picture, inline, and what it shows. A wide one has a row of its own."""

    content: Markup
    title: str
    about: str
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Cells of text; ``best`` are the (row, column) of those in bold. The first column names its row.

    A number may have a second line, which is paler.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    about: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    folded: bool = False

    @property
    def numeric(self) -> list[bool]:
        """The columns that hold numbers, and so are aligned to the right."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.header)
        return [at > 0 and all(map(NUMBER.fullmatch, column)) for at, column in enumerate(columns)]


@dataclass(frozen=True)
class Section:
    """A part of a page. ``methods`` are those in the pictures that need a legend."""

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    methods: Sequence[str] = ()

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """The name, colour and mark of each method."""
        return [(title(name), themed(plots.colour(name)), GLYPHS[plots.marker(name)]) for name in self.methods]


@dataclass(frozen=True)
class File:
    """A small text file that the page carries."""

    name: str
    text: str

    @property
    def link(self) -> str:
        return f"data:text/plain;base64,{base64.b64encode(self.text.encode()).decode()}"


@dataclass(frozen=True)
class Page:
    """Everything that is shown. ``problems`` say what is missing; ``command`` repeats it, with ``file`` beside it."""

    kind: str
    title: str
    facts: Sequence[str]
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()
    problems: Sequence[str] = ()
    command: str = ""
    about_command: str = ""
    file: File | None = None

    @property
    def html(self) -> str:
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("pfedvem.report.html"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        now = date.today()
        made = f"Written by pfedvem {version('pfedvem')} on {now.day} {now:%B %Y}"
        return printable(environment.get_template("page.html").render(page=self, made=made))


class Drawing:
    """Draws the pictures of one page."""

    def __init__(self) -> None:
        self._numbers = count()

    def __call__(self, title: str, about: str, draw: Callable[..., None], *values: Any, tall: float = 3.1) -> Figure:
        """A picture of ``draw(axes, *values)``."""

        def on(axis: Axes) -> None:
            draw(axis, *values)

        content = picture(on, f"{title}. {about}", str(next(self._numbers)), (4.4, tall))
        return Figure(content, title, about)


def png(content: bytes, about: str) -> Markup:
    """A picture of bytes, inline."""
    encoded = base64.b64encode(content).decode()
    return Markup('<img src="data:image/png;base64,{}" alt="{}">').format(encoded, about)


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", MINUS)
