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
from pfedvem.data.reading import Table, read
from pfedvem.data.settings import DataSettings
from pfedvem.errors import Damaged, UserError

_GROUP_COLUMN = {"subclasses": "subclass_column", "domains": "domain_column", "natural": "client_column"}
_GROUP_NAME = {"subclasses": "subclasses", "domains": "domains", "natural": "client ids"}
_OWN_GROUPS = {"digits": None, "sun397": "subclasses", "digit5": "domains"}  # what has groups without a column for them


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
    if settings.partition in _GROUP_COLUMN and _OWN_GROUPS.get(kind, settings.partition) != settings.partition:
        what = _GROUP_NAME[settings.partition]
        raise UserError(f"{settings.dataset} has no {what}, which the partition '{settings.partition}' deals by.")
    places = _places(settings, kind)
    group = _GROUP_COLUMN.get(settings.partition)
    how = {
        "kind": kind,
        "where": [str(place.resolve()) if isinstance(place, Path) else place for place in places],
        "image": settings.image_column,
        "label": settings.label_column,
        "group": group and [group, getattr(settings, group)],
        "image_size": settings.image_size,
        "holdout": None if settings.partition == "natural" else settings.holdout,
    }
    # A data set on the hub is taken not to change.
    made_from = repr([cache.state_of(place) if isinstance(place, Path) else place for place in places])
    path = cache.path_for(entry.name if entry else Path(settings.dataset).name, how)
    notes: tuple[str, ...] = ()
    try:
        kept = cache.load(path, made_from)
    except Damaged as damage:
        kept, notes = None, (f"{path} is damaged ({damage}): the data set was read again.",)
    if kept is not None:
        return _unpack(settings.dataset, *kept)
    source = _with_constants(with_test(_READERS[kind](settings), settings))
    if kind != "digit5" or len(source.groups) == len(places) - places.count(None):  # else a download failed: try again
        cache.save(path, made_from, *_pack(source))
    return replace(source, notes=(*source.notes, *notes))


def channel_constants(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of uint8 images (N, C, H, W) by channel, on the scale [0, 1]."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ levels
    std = (share @ levels**2 - mean**2).clamp_min(0).sqrt()
    # An image that is one flat colour has no spread to divide by.
    return tuple(mean.tolist()), tuple(value if value > 0 else 1.0 for value in std.tolist())


def _places(settings: DataSettings, kind: str) -> list[Path | str | None]:
    """Where the data is read from: folders and hub ids, None for a domain that is nowhere."""
    if kind == "digits":
        return []
    if kind != "digit5":
        return [locate(settings.dataset, settings.root)]
    places: list[Path | str | None] = []
    for hub in DIGIT_FIVE.values():
        try:
            places.append(locate(hub, settings.root))
        except UserError:
            places.append(None)
    return places


def _read_digits(_: DataSettings) -> Source:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    names = tuple(str(name) for name in digits.target_names)
    return Source("digits", Samples(x, digits.target.astype(np.int64)), None, names)


def _read_images(settings: DataSettings) -> Source:
    column = _GROUP_COLUMN.get(settings.partition)
    group = column and getattr(settings, column)
    if column and not group:
        what = _GROUP_NAME[settings.partition]
        raise UserError(f"The partition '{settings.partition}' needs the column of the {what}; name it as {column}.")
    table = read(locate(settings.dataset, settings.root), settings.image_column, settings.label_column, group)
    train, test = _decode(table, settings.image_size)
    groups = table.group.names if table.group else ()
    return Source(settings.dataset, train, test, table.labels.names, groups, notes=table.notes)


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
    digits = tuple(str(digit) for digit in range(10))
    found: dict[str, Source] = {}
    for name, place in zip(DIGIT_FIVE, _places(settings, "digit5"), strict=True):
        if place is None:
            continue
        try:
            table = read(place)
        except UserError:
            if isinstance(place, Path):
                raise
            continue  # not to be had from the hub now
        found[name] = with_test(Source(name, *_decode(table, settings.image_size, colour=True), digits), settings)
    if not found:
        place = settings.root or "the Hugging Face hub"
        raise UserError(f"{place} has none of the data sets of Digit-Five; --data-root DIR reads local copies.")
    missing = ", ".join(name for name in DIGIT_FIVE if name not in found)
    notes = (f"Digit-Five has {len(found)} of its 5 domains; missing: {missing}.",) if missing else ()
    train = _join([part.train for part in found.values()])
    test = _join([part.test for part in found.values() if part.test is not None])
    return Source(settings.dataset, train, test, digits, tuple(found), notes=notes)


_READERS = {"digits": _read_digits, "images": _read_images, "sun397": _read_sun397, "digit5": _read_digit_five}


def _decode(table: Table, size: int | None, colour: bool = False) -> tuple[Samples, Samples | None]:
    x = torch.from_numpy(decode([*table.train, *table.test], size, colour))
    n, group = len(table.train), table.group
    train = Samples(x[:n], table.labels.train, group.train if group else None)
    return train, Samples(x[n:], table.labels.test, group.test if group else None) if table.test else None


def _join(domains: Sequence[Samples]) -> Samples:
    """All domains as one, each sample with the number of its domain as its group."""
    numbers = [np.full(len(part), i, dtype=np.int64) for i, part in enumerate(domains)]
    labels = np.concatenate([part.y for part in domains])
    return Samples(torch.cat([part.x for part in domains]), labels, np.concatenate(numbers))


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
    tensors: dict[str, Tensor] = {}
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
