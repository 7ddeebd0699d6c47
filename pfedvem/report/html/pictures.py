"""Pictures inside a page: what matplotlib draws, as SVG that takes its colours and fonts from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfedvem.report.plots import ALONE, GM, INK, LOSS, PAPER, PM

# The colours that differ between light and dark, by their names in the style sheet.
NAMED = {PM: "--blue", GM: "--orange", ALONE: "--grey", LOSS: "--red", INK: "--ink", PAPER: "--paper"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name with two dollars is a name
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": ALONE,
}
UNWRITTEN = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def picture(draw: Callable[[Axes], None], about: str, salt: str, size: tuple[float, float] = (4.4, 3.1)) -> Markup:
    """What ``draw`` draws, as inline SVG. ``about`` describes it, and ``salt`` keeps its ids from those of others."""
    with rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        written = io.BytesIO()
        figure.savefig(written, format="svg", transparent=True, metadata=UNWRITTEN, dpi=150)
    root = ElementTree.fromstring(written.getvalue())
    for element in root.iter():
        _adapt(element)
    _prune(root)
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": about}
    # Escaped by the writer; the text in it is what matplotlib and the descriptions have.
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _adapt(element: ElementTree.Element) -> None:
    """Takes namespaces away, which inline SVG does not need, and makes colours those of the page.

    Links, in which points say what they are, become titles: browsers show them when a point is pointed at.
    """
    element.tag = element.tag.rpartition("}")[2]
    element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    if "style" in element.attrib:
        element.attrib["style"] = re.sub(r"#[0-9a-f]{6}\b", lambda found: themed(found[0]), element.attrib["style"])
    if element.tag == "g":
        element.attrib.pop("id", None)
    if element.tag == "a":
        element.tag = "g"
        title = ElementTree.Element("title")
        title.text = element.attrib["href"]
        element.attrib = {}
        element.insert(0, title)


def _prune(root: ElementTree.Element) -> None:
    """Takes away the style sheet, which would be the whole page's, and what is empty."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("style", "metadata") or (child.tag == "defs" and all(c.tag == "style" for c in child)):
                parent.remove(child)


def themed(colour: str) -> str:
    """A colour as the style sheet has it, light or dark."""
    return f"var({NAMED[colour]})" if colour in NAMED else colour
