"""Hooks of the documentation site: maths without JavaScript, and links to files that are not pages."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MATHS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Code, examples and results lie beside the pages, not among them: what a link says is their path."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """TeX becomes MathML, which browsers show by themselves."""
    return MATHS.sub(
        lambda found: convert(html.unescape(found[2]), display="inline" if found[1] == "span" else "block"), content
    )
