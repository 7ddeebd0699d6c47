"""The data sets that the library knows by name: where they come from and how the paper deals them to clients."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedvem.errors import UserError

# Digit-Five, in the paper's order. Synthetic Digits has no copy on the hub that we know; it is read from a data root.
DIGIT_FIVE = {
    "mnist": "ylecun/mnist",
    "svhn": "ufldl-stanford/svhn:cropped_digits",
    "usps": "flwrlabs/usps",
    "mnist-m": "Mike0307/MNIST-M",
    "synthetic-digits": "synthetic-digits",
}


@dataclass(frozen=True)
class Entry:
    """One data set. ``preset`` holds values of DataSettings; ``hub`` is "owner/name" or "owner/name:config"."""

    name: str
    what: str
    hub: str | None
    samples: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


_LABELS = {"partition": "labels", "labels_per_client": 5, "clients": 100}
_SUBCLASSES = {"partition": "subclasses", "subclasses_per_client": 1, "clients": 100}

CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(
            "digits",
            "handwritten digits, 8x8, grey; ships with scikit-learn",
            None,
            "1,797",
            _LABELS | {"clients": 20},
        ),
        Entry(
            "fmnist",
            "Fashion-MNIST: clothing, 28x28, grey, 10 labels",
            "zalando-datasets/fashion_mnist",
            "60,000 + 10,000",
            _LABELS,
            mean=(0.2860,),
            std=(0.3530,),
        ),
        Entry(
            "cifar10",
            "CIFAR-10: objects, 32x32, 10 labels",
            "uoft-cs/cifar10",
            "50,000 + 10,000",
            _LABELS | {"image_column": "img", "label_column": "label"},
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2023, 0.1994, 0.2010),
        ),
        Entry(
            "cifar100",
            "CIFAR-100: objects, 32x32, 20 superclasses of 5 subclasses",
            "uoft-cs/cifar100",
            "50,000 + 10,000",
            _SUBCLASSES | {"image_column": "img", "label_column": "coarse_label", "subclass_column": "fine_label"},
            mean=(0.5074, 0.4867, 0.4411),
            std=(0.2011, 0.1987, 0.2025),
        ),
        Entry(
            "sun397",
            "SUN397: scenes, 64x64, 3 superclasses of 50 categories, chosen as in the paper",
            "tanganke/sun397",
            "12,000 + 3,000",
            _SUBCLASSES | {"image_size": 64, "holdout": 0.2},
        ),
        Entry(
            "digit5",
            "Digit-Five: digits of five domains (MNIST, SVHN, USPS, MNIST-M, synthetic), 32x32",
            "five data sets",
            "varies",
            {"partition": "domains", "labels_per_client": 5, "clients": 100, "image_size": 32},
        ),
        Entry(
            "mnist",
            "MNIST: handwritten digits, 28x28, grey, 10 labels",
            "ylecun/mnist",
            "60,000 + 10,000",
            _LABELS,
            mean=(0.1307,),
            std=(0.3081,),
        ),
        Entry(
            "mnist-writers",
            "MNIST by writer: a client is a person; needs a copy with a column 'writer'",
            "ylecun/mnist",
            "60,000 + 10,000",
            {"partition": "natural", "clients": 100, "client_column": "writer"},
            mean=(0.1307,),
            std=(0.3081,),
        ),
    )
}


def find(dataset: str) -> Entry | None:
    """The entry of this name or hub id, if the catalogue has one."""
    by_id = (entry for entry in CATALOGUE.values() if entry.hub == dataset)
    return CATALOGUE.get(dataset) or next(by_id, None)


def locate(dataset: str, root: Path | None) -> Path | str:
    """Where to read a data set: a local folder, or a hub id where there is none.

    With a data root, hub ids are folders under it, as a clone of the hub would lay them out.
    """
    entry = CATALOGUE.get(dataset)
    hub = entry.hub or dataset if entry else dataset
    identity, _, config = hub.partition(":")
    if entry is None and Path(dataset).expanduser().is_dir():
        return Path(dataset).expanduser()
    if root is not None:
        if not root.expanduser().is_dir():
            raise UserError(f"The data root {root} is not a folder; give the folder that holds the data sets.")
        folder = root.expanduser() / identity
        if folder.is_dir():
            return folder / config if config and (folder / config).is_dir() else folder
        if entry is not None or _is_hub_id(identity):
            raise UserError(
                f"The data root {root} has no folder {identity}; put a copy of it there or leave out --data-root to "
                "read it from the Hugging Face hub."
            )
    if entry is None and not _is_hub_id(identity):
        near = difflib.get_close_matches(dataset, CATALOGUE, n=1, cutoff=0.5)
        guess = f"the nearest known name is {near[0]}" if near else f"known names are {', '.join(CATALOGUE)}"
        raise UserError(f"There is no data set or folder {dataset!r}; {guess} (a hub id has the form owner/name).")
    return hub


def _is_hub_id(text: str) -> bool:
    owner, slash, name = text.partition("/")
    return bool(slash and owner.strip(".~") and name) and "/" not in name
