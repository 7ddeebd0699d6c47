"""The paper's part of SUN397: which categories belong to which superclass, and which images are taken.

The shipped hierarchy file says which of indoor, outdoor natural and outdoor man-made each of the 397 categories is. Of
the categories with exactly one of them, the first 50 of each superclass are taken in the order of the file, and of each
category the first 100 images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from pfedvem.data.partitions import Indices
from pfedvem.errors import UserError

SUPERCLASSES = ("indoor", "outdoor natural", "outdoor man-made")
CATEGORIES, IMAGES = 50, 100


@dataclass(frozen=True)
class Chosen:
    """Which samples, and the superclass and category of each; ``names`` are the names of the categories."""

    samples: Indices
    superclass: Indices
    category: Indices
    names: tuple[str, ...]
    notes: tuple[str, ...]


def hierarchy() -> dict[str, int | None]:
    """The superclass of each category, such as "/c/church/outdoor", in the file's order; None where it has two."""
    rows = files("pfedvem.data").joinpath("sun397_hierarchy.tsv").read_text("utf-8").splitlines()[1:]
    flags = {row.split("\t")[0]: row.split("\t")[1:4] for row in rows}
    return {name: flag.index("1") if flag.count("1") == 1 else None for name, flag in flags.items()}


def choose(names: Sequence[str], labels: Indices) -> Chosen:
    """Applies the paper's rules to samples with these labels, whose categories have these names.

    Where categories are missing, the rules take the first of those that are there.
    """
    places = _places()
    there = [label for label in np.unique(labels).tolist() if _words(names[label]) in places]
    placed = sorted((*places[_words(names[label])], label) for label in there)
    taken = [place for s in range(3) for place in [p for p in placed if p[1] == s][:CATEGORIES]]
    if not taken:
        raise UserError("None of the classes is a category of SUN397 with one superclass; is this a copy of SUN397?")
    samples = [np.flatnonzero(labels == label)[:IMAGES] for _, _, label in taken]
    sizes = [len(part) for part in samples]
    missing = 3 * CATEGORIES - len(taken)
    notes = (f"SUN397 has {len(taken)} of its {3 * CATEGORIES} categories; {missing} are missing.",) if missing else ()
    return Chosen(
        np.concatenate(samples),
        np.repeat(np.array([superclass for _, superclass, _ in taken], dtype=np.int64), sizes),
        np.repeat(np.arange(len(taken), dtype=np.int64), sizes),
        tuple(names[label] for _, _, label in taken),
        notes,
    )


def _words(name: str) -> tuple[str, ...]:
    """The words of a name without its index letter: "/c/church/outdoor" and "outdoor church" have the same."""
    return tuple(sorted(re.findall(r"[a-z0-9]+", re.sub(r"^/?[a-z]/", "", name.lower()))))


def _places() -> dict[tuple[str, ...], tuple[int, int]]:
    """(position in the file, superclass) by the words of a category that has exactly one superclass.

    What several categories have in common ("desert" of desert/sand and desert/vegetation) stands for the first of
    them if they agree on the superclass and no category has that name.
    """
    known = [(_words(name), name.split("/")[2], at, s) for at, (name, s) in enumerate(hierarchy().items())]
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    for stem in {stem for _, stem, _, _ in known}:
        kin = [(at, s) for _, other, at, s in known if other == stem]
        at, superclass = kin[0]
        if superclass is not None and {s for _, s in kin} == {superclass}:
            places[_words(stem)] = at, superclass
    for words, _, at, superclass in known:
        places.pop(words, None)
        if superclass is not None:
            places[words] = at, superclass
    return places
