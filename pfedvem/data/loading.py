"""Makes a Federation: deals a source to clients and gives each the test data of what it owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedvem.data import partitions
from pfedvem.data.federation import Federation, Indices, Shard, Split
from pfedvem.data.given import pair, refuse_mixed
from pfedvem.data.inputs import refuse_unlabelled
from pfedvem.data.labels import class_names, label_numbers
from pfedvem.data.settings import DataSettings, Partition
from pfedvem.data.sources import Samples, Source, channel_constants, load_source, with_test
from pfedvem.errors import UserError
from pfedvem.rng import generator

_NOTHING = np.empty(0, dtype=np.int64)


def load_federation(settings: DataSettings, seed: int) -> Federation:
    """The data set of these settings, dealt to clients by this seed."""
    return assemble(load_source(settings), settings, seed)


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    clients: int,
    partition: Partition = "labels",
    group: Any = None,
    group_test: Any = None,
    classes: Sequence[str] | None = None,
    name: str = "arrays",
    seed: int = 0,
    **settings: Any,
) -> Federation:
    """Deals your own arrays or tensors to clients.

    ``x`` holds uint8 images (N, C, H, W) or (N, H, W), which are normalised, or numbers (N, ...), which are left as
    they are; ``y`` the labels, whole numbers from 0 or words. ``group`` is each sample's subclass, domain or client
    id, where the partition needs one. Without test data some is held out. ``settings`` are further fields of
    DataSettings, such as ``sizes``.
    """
    chosen = DataSettings(dataset="arrays", clients=clients, partition=partition, **settings)
    grouped = partition in ("subclasses", "domains")
    needed = (grouped or partition == "natural", grouped and x_test is not None)
    if any(need and part is None for need, part in zip(needed, (group, group_test), strict=True)):
        raise UserError(
            f"The partition '{partition}' needs each sample's subclass, domain or client id as group, "
            "and as group_test that of each test sample."
        )
    groups, numbers = _number(group, group_test)
    parts = {"The training data": pair(x, y, "The training data")}
    if x_test is not None:
        parts["The test data"] = pair(x_test, y_test, "The test data")
    refuse_mixed(parts.items())
    names = class_names([labels for _, labels in parts.values()], classes)
    train, *tests = [
        _samples(inputs, label_numbers(labels, names, whose), part)
        for (whose, (inputs, labels)), part in zip(parts.items(), numbers, strict=False)
    ]
    test = tests[0] if tests else None
    source = with_test(Source(name, train, test, names, groups), chosen)
    if train.x.dtype == torch.uint8:
        mean, std = channel_constants(source.train.x)
        source = replace(source, mean=mean, std=std)
    return assemble(source, chosen, seed)


def assemble(source: Source, settings: DataSettings, seed: int) -> Federation:
    """Deals a source to clients. All randomness comes from the seed."""
    rng = generator(seed, "partition")
    types = _Types(settings.partition, source.classes, source.groups)
    if settings.train_samples is not None:
        draw = generator(seed, "train samples")
        some = partitions.some_of_each(types.of(source.train), settings.train_samples, draw, types.describe)
        source = replace(source, train=source.train.take(some))
    if settings.partition == "natural":
        return _natural(source, settings, rng)
    assert source.test is not None  # a source without test data is for natural clients only
    owned, parts = _deal(source, types, settings, rng)
    published = settings.pm_test == "published"
    tested = partitions.positions(types.of(source.test))
    shards = []
    for j, (kinds, part) in enumerate(zip(owned, parts, strict=True)):
        ids = {kind % types.width for kind in kinds}
        wanted = [kind for kind in kinds if not published or kind // types.width in ids]
        test = tuple(tested[kind] for kind in wanted if kind in tested)
        shards.append(Shard(str(j), part, test or (_NOTHING,), tuple(types.name(kind) for kind in kinds)))
    return _federation(source, source.train, source.test, shards)


@dataclass(frozen=True)
class _Types:
    """What is dealt: labels or, where the partition goes by subclass or domain, pairs (label, group) as one number."""

    partition: Partition
    classes: tuple[str, ...]
    groups: tuple[str, ...]

    @property
    def width(self) -> int:
        return len(self.groups) if self.partition in ("subclasses", "domains") else 1

    def of(self, samples: Samples) -> Indices:
        if self.width == 1 or samples.group is None:
            return samples.y
        return samples.y * self.width + samples.group

    def name(self, kind: int) -> str:
        label, group = divmod(kind, self.width)
        if self.partition == "subclasses":
            return self.groups[group]
        return f"{self.classes[label]} of {self.groups[group]}" if self.partition == "domains" else self.classes[label]

    def describe(self, kind: int) -> str:
        return f"{'Subclass' if self.partition == 'subclasses' else 'Label'} {self.name(kind)}"


def _deal(
    source: Source, types: _Types, settings: DataSettings, rng: np.random.Generator
) -> tuple[list[list[int]], list[Indices]]:
    """The types that each client owns, and its samples."""
    train, clients, sizes = source.train, settings.clients, settings.sizes
    kinds = types.of(train)
    if settings.partition in ("iid", "dirichlet"):
        if settings.partition == "iid":
            parts = partitions.iid(len(train), clients, rng, sizes)
        else:
            parts = partitions.dirichlet(train.y, clients, settings.dirichlet_alpha, rng, sizes)
        return [np.unique(train.y[part]).tolist() for part in parts], parts
    if settings.partition == "labels":
        owned = partitions.deal_labels(train.y, clients, settings.labels_per_client, rng)
    elif settings.partition == "subclasses":
        each = settings.subclasses_per_client
        owned = partitions.deal_subclasses(train.y, kinds, clients, each, rng, source.classes)
    else:
        assert train.group is not None  # reading and from_arrays ask for it
        each = settings.labels_per_client
        owned = partitions.deal_domains(train.group, kinds, clients, each, rng, source.groups)
    return owned, partitions.cut(kinds, owned, rng, sizes, settings.cuts, types.describe)


def _natural(source: Source, settings: DataSettings, rng: np.random.Generator) -> Federation:
    """Clients by an id in the data.

    A client is tested on its samples of the test split; one that has none there holds out some of its training data.
    The general model is tested on the test split or, where there is none, on all that is held out.
    """
    train, official = source.train, source.test
    assert train.group is not None  # reading and from_arrays ask for it
    own = partitions.positions(train.group)
    own_test = partitions.positions(official.group) if official is not None and official.group is not None else {}
    kept, held, tests = [], [], []
    end = 0 if official is None else len(official)
    ids = partitions.choose_ids(train.group, settings.clients, rng).tolist()
    for client in ids:
        samples = own[client]
        keep, hold = np.arange(len(samples)), _NOTHING
        if client not in own_test:
            keep, hold = partitions.hold_out(np.zeros_like(samples), settings.holdout, rng)
        kept.append(samples[keep])
        held.append(samples[hold])
        tests.append(own_test.get(client, np.arange(end, end + len(hold))))
        end += len(hold)
    ends = np.cumsum([len(part) for part in kept])
    used, extra = train.take(np.concatenate(kept)), train.take(np.concatenate(held))
    shards = [
        Shard(source.groups[client], np.arange(stop - len(part), stop), (test,), _labels(train.y[part], source))
        for client, part, test, stop in zip(ids, kept, tests, ends.tolist(), strict=True)
    ]
    if official is None:
        return _federation(source, used, extra, shards)
    test = Samples(torch.cat([official.x, extra.x]), np.concatenate([official.y, extra.y]))
    return _federation(source, used, test, shards, general=np.arange(len(official)))


def _labels(y: Indices, source: Source) -> tuple[str, ...]:
    return tuple(source.classes[label] for label in np.unique(y))


def _federation(
    source: Source, train: Samples, test: Samples, shards: Sequence[Shard], general: Indices | None = None
) -> Federation:
    untested = sum(all(len(part) == 0 for part in shard.test) for shard in shards)
    notes = source.notes
    if untested:
        notes = (*notes, f"{untested} of {len(shards)} clients have no test data; they train but are not tested.")
    return Federation(
        name=source.name,
        train=Split(train.x, torch.from_numpy(train.y)),
        test=Split(test.x, torch.from_numpy(test.y)),
        shards=tuple(shards),
        classes=source.classes,
        mean=source.mean,
        std=source.std,
        notes=notes,
        general=general,
    )


def _samples(x: Tensor, y: Indices, group: Indices | None) -> Samples:
    if group is not None and len(group) != len(y):
        raise UserError("There must be one group, if you give groups, for each input.")
    if len(y) == 0:
        raise UserError("There are no samples.")
    return Samples(x, y, group)


def _number(group: Any, group_test: Any) -> tuple[tuple[str, ...], list[Indices | None]]:
    """The names of the groups in order, and the number of each sample's group in the training and the test data."""
    given = [None if part is None else np.asarray(part) for part in (group, group_test)]
    present = [part for part in given if part is not None]
    if not present:
        return (), [None, None]
    for part in present:
        refuse_unlabelled(part, "The data", "groups")
    known = np.unique(np.concatenate(present))
    numbers = [None if part is None else np.searchsorted(known, part).astype(np.int64) for part in given]
    return tuple(str(value) for value in known), numbers
