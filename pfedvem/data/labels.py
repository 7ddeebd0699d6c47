"""Labels in any form, as numbers of classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedvem.data.federation import Indices
from pfedvem.errors import UserError

Labels = NDArray[Any]
CLASSES = 100_000  # a label beyond is no number of a class, but some id
WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0)?")  # a whole number as text, of an int or a float


def class_names(labels: list[Labels], given: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the classes: as given, or the words that occur, or the whole numbers from 0 to the highest."""
    if given is not None:
        return tuple(map(str, given))
    if any(_worded(y) for y in labels):
        words = {value if isinstance(value, str) else plain(str(value)) for y in labels for value in y}
        return tuple(sorted(map(str, words)))
    highest = max(int(y.max(initial=0)) for y in labels)
    if highest >= CLASSES:
        raise UserError(
            f"The label {highest} is no number of a class; number the classes from 0, or name them with classes=."
        )
    return tuple(str(label) for label in range(1 + highest))


def _worded(y: Labels) -> bool:
    return y.dtype.kind not in "biuf"


@lru_cache(maxsize=8)  # asked for each client
def _places(names: tuple[str, ...]) -> tuple[dict[str, int], bool]:
    """Where each name is, and whether some are numbers that are not their places."""
    texts = [plain(name) for name in names]
    renumbered = any(WHOLE.fullmatch(text) and text != str(number) for number, text in enumerate(texts))
    return {name: number for each in (texts, names) for number, name in enumerate(each)}, renumbered


def plain(text: str) -> str:
    """A whole number as text of its int, also where it was a float; any other text as it is."""
    found = WHOLE.fullmatch(text)
    return found[1] if found else text


def label_numbers(y: Labels, names: tuple[str, ...], whose: str) -> Indices:
    """Labels as places among the names of the classes: by name or, where they are no names, whole numbers from 0.

    Where the name of a class is a number that is not its place, labels are names only: else the same label could be a
    name for one client and a place for another.
    """
    place, renumbered = _places(names)
    words = np.array([str(value) for value in y], dtype=object) if _worded(y) else y
    values, which = np.unique(words, return_inverse=True)
    texts = [text if (text := str(value)) in place else plain(text) for value in values]
    strangers = [text for text in texts if text not in place]
    if strangers and (_worded(y) or renumbered):
        raise UserError(f"{whose} has the label {strangers[0]!r}, which is not among {', '.join(names)}.")
    if not strangers:
        return np.array([place[text] for text in texts], dtype=np.int64)[which]
    if y.dtype.kind == "f" and (not np.isfinite(y).all() or (y != np.round(y)).any()):
        raise UserError(f"{whose} has labels that are no whole numbers; this is for classes, not for regression.")
    wrong = [int(value) for value in (y.min(), y.max()) if not 0 <= value < len(names)]
    if wrong:  # before the cast, which some are too large for
        raise UserError(f"{whose} has the label {wrong[0]}; labels are whole numbers from 0 to {len(names) - 1}.")
    numbered: Indices = y.astype(np.int64)
    return numbered
