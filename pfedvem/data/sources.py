"""Data sets as arrays: read once, decoded, and kept in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedvem.data import cache, sun397
from pfedvem.data.catalogue import DIGIT_FIVE, find, locate
from pfedvem.data.images import decode
from pfedvem.data.partitions import Indices, hold_out
from pfedvem.data.reading import Column, read
from pfedvem.data.settings import DataSettings
from pfedvem.errors import UserError

_GROUP_COLUMN = {"subclasses": "subclass_column", "domains": "domain_column", "natural": "client_column"}


@dataclass(frozen=True)
class Samples:
    """Inputs ``x`` (N, ...), labels ``y`` (N,) and, where the partition needs it, each sample's ``group`` (N,):
    its subclass, its domain or the client that it comes from."""

    x: Tensor
    y: Indices
    group: Indices | None = None

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Indices) -> Samples:
        group = None if self.group is None else self.group[index]
        return Samples(self.x[torch.from_numpy(index)], self.y[index], group)


@dataclass(frozen=True)
class Source:
    """A data set before it is dealt. ``test`` is None only for natural clients, who hold out data of their own."""

    name: str
    train: Samples
    test: Samples | None
    classes: tuple[str, ...]
    groups: tuple[str, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    notes: tuple[str, ...] = ()


def load_source(settings: DataSettings) -> Source:
    """The data set of these settings, from the cache if it was read before."""
    entry = find(settings.dataset)
    kind = entry.name if entry and entry.name in _READERS else "images"
    how = _how(settings, kind)
    if kind == "digits":
        made_from = "scikit-learn"
    elif kind == "digit5":
        made_from = repr([_state(name, where) for name, where in _digit_five(settings).items()])
    else:
        made_from = _state("", locate(settings.dataset, settings.root))
    path = cache.path_for(settings.dataset, how)
    kept = cache.load(path, made_from)
    if kept is not None:
        return _unpack(settings.dataset, *kept)
    source = _with_constants(with_test(_READERS[kind](settings), settings))
    cache.save(path, made_from, *_pack(source))
    return source


def channel_constants(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of uint8 images (N, C, H, W) by channel, on the scale [0, 1]."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ levels
    std = (share @ levels**2 - mean**2).clamp_min(0).sqrt()
    # An image that is one flat colour has no spread to divide by.
    return tuple(mean.tolist()), tuple(value if value > 0 else 1.0 for value in std.tolist())


def _how(settings: DataSettings, kind: str) -> dict[str, Any]:
    """Everything that decides what the arrays of a data set are, apart from the files."""
    where = None if kind in ("digits", "digit5") else str(locate(settings.dataset, settings.root))
    if where is not None and Path(where).is_dir():
        where = str(Path(where).resolve())
    if kind == "digit5" and settings.root is not None:
        where = str(settings.root.expanduser().resolve())
    group = _GROUP_COLUMN.get(settings.partition)
    return {
        "kind": kind,
        "where": where,
        "image": settings.image_column,
        "label": settings.label_column,
        "group": group and (group, getattr(settings, group)),
        "image_size": settings.image_size,
        "holdout": None if settings.partition == "natural" else settings.holdout,
    }


def _state(name: str, where: Path | str | None) -> str:
    """What a data set is made from: the files of a folder, or a hub id, which is taken not to change."""
    return f"{name} {cache.state_of(where) if isinstance(where, Path) else where}"


def _read_digits(_: DataSettings) -> Source:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    names = tuple(str(name) for name in digits.target_names)
    return Source("digits", Samples(x, digits.target.astype(np.int64)), None, names)


def _read_images(settings: DataSettings) -> Source:
    group = _GROUP_COLUMN.get(settings.partition)
    column = None if group is None else getattr(settings, group)
    if group is not None and column is None:
        what = {"subclasses": "subclasses", "domains": "domains", "natural": "client ids"}[settings.partition]
        raise UserError(f"The partition '{settings.partition}' needs the column of the {what}; name it as {group}.")
    table = read(locate(settings.dataset, settings.root), settings.image_column, settings.label_column, column)
    x = torch.from_numpy(decode([*table.train, *table.test], settings.image_size))
    n = len(table.train)
    groups = table.group or Column(*[np.empty(0, dtype=np.int64)] * 2, names=())
    train = Samples(x[:n], table.labels.train, None if table.group is None else groups.train)
    test = Samples(x[n:], table.labels.test, None if table.group is None else groups.test) if table.test else None
    return Source(settings.dataset, train, test, table.labels.names, groups.names, notes=table.notes)


def _read_sun397(settings: DataSettings) -> Source:
    """The paper's part of SUN397: 3 superclasses of 50 categories with 100 images each."""
    table = read(locate(settings.dataset, settings.root), settings.image_column, settings.label_column)
    files = [*table.train, *table.test]
    chosen = sun397.choose(table.labels.names, np.concatenate([table.labels.train, table.labels.test]))
    x = torch.from_numpy(decode([files[i] for i in chosen.samples], settings.image_size, colour=True))
    data = Samples(x, chosen.superclass, chosen.category)
    return Source(settings.dataset, data, None, sun397.SUPERCLASSES, chosen.names, notes=chosen.notes)


def _read_digit_five(settings: DataSettings) -> Source:
    """Those of the five domains that are there, all in colour and of one size."""
    parts: list[tuple[Samples, Samples]] = []
    found: list[str] = []
    for name, where in _digit_five(settings).items():
        try:
            table = None if where is None else read(where)
        except UserError:
            table = None
        if table is None or not table.test:
            continue
        x = torch.from_numpy(decode([*table.train, *table.test], settings.image_size, colour=True))
        n, here = len(table.train), len(found)
        sides = ((x[:n], table.labels.train), (x[n:], table.labels.test))
        train, test = (Samples(pixels, y, np.full(len(y), here)) for pixels, y in sides)
        parts.append((train, test))
        found.append(name)
    missing = [name for name in DIGIT_FIVE if name not in found]
    if not found:
        place = f"in {settings.root}" if settings.root else "on the Hugging Face hub; --data-root DIR reads local copies"
        raise UserError(f"None of the five data sets of Digit-Five could be found {place}.")
    notes = (f"Digit-Five has {len(found)} of its 5 domains; missing: {', '.join(missing)}.",) if missing else ()
    train, test = (_join(side) for side in zip(*parts, strict=True))
    digits = tuple(str(digit) for digit in range(10))
    return Source(settings.dataset, train, test, digits, tuple(found), notes=notes)


_READERS = {"digits": _read_digits, "images": _read_images, "sun397": _read_sun397, "digit5": _read_digit_five}


def _digit_five(settings: DataSettings) -> dict[str, Path | str | None]:
    """Where each domain is, None if nowhere."""
    places: dict[str, Path | str | None] = {}
    for name, hub in DIGIT_FIVE.items():
        try:
            places[name] = locate(hub, settings.root)
        except UserError:
            places[name] = None
    return places


def _join(parts: Sequence[Samples]) -> Samples:
    groups = [part.group for part in parts if part.group is not None]
    return Samples(torch.cat([part.x for part in parts]), np.concatenate([part.y for part in parts]), np.concatenate(groups))


def with_test(source: Source, settings: DataSettings) -> Source:
    """Holds out test data where there is none, by a seed of its own: every run tests on the same samples."""
    if source.test is not None or settings.partition == "natural":
        return source
    train = source.train
    types = train.y if train.group is None else train.y * len(source.groups) + train.group
    kept, held = hold_out(types, settings.holdout, np.random.default_rng(0))
    note = f"There is no test split; {len(held)} of {len(types)} samples are held out as test data."
    return replace(source, train=train.take(kept), test=train.take(held), notes=(*source.notes, note))


def _with_constants(source: Source) -> Source:
    entry = find(source.name)
    mean, std = (entry.mean, entry.std) if entry else (None, None)
    if mean is None or std is None or len(mean) != source.train.x.shape[1]:
        mean, std = channel_constants(source.train.x)
    return replace(source, mean=mean, std=std)


def _pack(source: Source) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {}
    for side, samples in (("train", source.train), ("test", source.test)):
        if samples is not None:
            tensors |= {f"{side}.x": samples.x.contiguous(), f"{side}.y": torch.from_numpy(samples.y)}
            if samples.group is not None:
                tensors[f"{side}.group"] = torch.from_numpy(samples.group)
    about = {key: getattr(source, key) for key in ("classes", "groups", "mean", "std", "notes")}
    return tensors, about


def _unpack(name: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> Source:
    def side(key: str) -> Samples | None:
        if f"{key}.x" not in tensors:
            return None
        group = tensors.get(f"{key}.group")
        return Samples(tensors[f"{key}.x"], tensors[f"{key}.y"].numpy(), None if group is None else group.numpy())

    train = side("train")
    assert train is not None  # every source has training data
    return Source(
        name, train, side("test"), **{key: tuple(about[key]) for key in ("classes", "groups", "mean", "std", "notes")}
    )
