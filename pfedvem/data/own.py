"""Federations of a user's own data: whatever clients have, as tensors, arrays, datasets or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pfedvem.data.federation import Federation, Indices, Shard, Split
from pfedvem.data.given import Part, pair, read, read_frame, refuse_mixed, require, values_of
from pfedvem.data.inputs import named
from pfedvem.data.labels import class_names, label_numbers, plain
from pfedvem.data.loading import assemble
from pfedvem.data.settings import DataSettings
from pfedvem.data.sources import Samples, Source, channel_constants
from pfedvem.errors import UserError


def from_datasets(
    clients: Sequence[Any] | Mapping[Any, Any],
    tests: Sequence[Any] | Mapping[Any, Any] | None = None,
    *,
    holdout: float = 0.2,
    classes: Sequence[str] | None = None,
    label: str | None = None,
    standardise: bool = False,
    name: str = "own",
    seed: int = 0,
) -> Federation:
    """See ``Federation.from_datasets``."""
    parts, columns = _read_all(clients, label, None)
    held = None
    if tests is not None:
        held, _ = _read_all(tests, label, columns or None)
    return _federation(parts, held, columns, holdout, classes, standardise, name, seed)


def from_frame(
    frame: Any,
    *,
    client: str,
    label: str,
    features: Sequence[str] | None = None,
    test: Any = None,
    holdout: float = 0.2,
    classes: Sequence[str] | None = None,
    standardise: bool = True,
    name: str = "table",
    seed: int = 0,
) -> Federation:
    """See ``Federation.from_frame``."""
    import pandas as pd

    for side in (frame, test):
        if side is not None and not isinstance(side, pd.DataFrame):
            raise UserError(
                f"The table is a {type(side).__name__}; give a pandas DataFrame (pandas.read_csv makes one)."
            )
    client, label = str(client), str(label)
    sides = [named(side) for side in (frame, test) if side is not None]
    others = [column for column in sides[0].columns if column not in (client, label)]
    chosen = others if features is None else [str(column) for column in features]
    parts, *held = [_by_client(side, client, label, chosen) for side in sides]
    # Numbers are labels like words: those that occur are the classes.
    occurring = values_of(pd.concat([side[[label]] for side in sides]), label)
    found = [plain(str(value)) if occurring.dtype.kind == "f" else str(value) for value in np.unique(occurring)]
    tests = held[0] if held else None
    return _federation(parts, tests, tuple(chosen), holdout, classes or found, standardise, name, seed)


def from_clients(clients: Sequence[tuple[Any, Any, Any, Any]], classes: Sequence[str] | None, name: str) -> Federation:
    """See ``Federation.from_clients``."""
    if not clients:
        raise UserError("A federation needs at least one client.")
    for j, four in enumerate(clients):
        if not isinstance(four, tuple | list) or len(four) != 4:
            raise UserError(
                f"Client {j} is not (x_train, y_train, x_test, y_test); Federation.from_datasets takes pairs (x, y), "
                "and clients by name."
            )
    train = {f"Client {j}": pair(x, y, f"Client {j}") for j, (x, y, _, _) in enumerate(clients)}
    test = {f"Client {j}": pair(x, y, f"Client {j}") for j, (_, _, x, y) in enumerate(clients)}
    refuse_mixed([*train.items(), *test.items()])
    names = class_names([y for _, y in [*train.values(), *test.values()]], classes)

    def split(side: dict[str, Part]) -> tuple[Split, list[Indices], list[Indices]]:
        """The data of all, and of each client where it is and its labels."""
        labels = [label_numbers(y, names, whose) for whose, (_, y) in side.items()]
        ends = np.cumsum([len(y) for y in labels])
        spans = [np.arange(end - len(y), end, dtype=np.int64) for y, end in zip(labels, ends, strict=True)]
        return Split(torch.cat([x for x, _ in side.values()]), torch.from_numpy(np.concatenate(labels))), spans, labels

    (trained, own, labels), (tested, held, _) = split(train), split(test)
    shards = tuple(
        Shard(str(j), span, (rest,), tuple(names[c] for c in np.unique(y)))
        for j, (span, rest, y) in enumerate(zip(own, held, labels, strict=True))
    )
    return Federation(name, trained, tested, shards, names)


def _federation(
    parts: dict[str, Part],
    held: dict[str, Part] | None,
    columns: tuple[str, ...],
    holdout: float,
    classes: Sequence[str] | None,
    standardise: bool,
    name: str,
    seed: int,
) -> Federation:
    if not 0 < holdout < 1:
        raise UserError(f"holdout is the share of a client's data to test on, between 0 and 1, not {holdout}.")
    ids = list(parts)
    strangers = [client for client in held or {} if client not in parts]
    if strangers:
        raise UserError(f"There is test data for {strangers[0]!r}, which is no client.")
    everyone = [*parts.items(), *(held or {}).items()]
    refuse_mixed((f"Client {client}", part) for client, part in everyone)
    names = class_names([y for _, (_, y) in everyone], classes)

    def samples(side: dict[str, Part]) -> Samples:
        labels = [label_numbers(y, names, f"Client {client}") for client, (_, y) in side.items()]
        owners = [np.full(len(y), ids.index(client), dtype=np.int64) for client, (_, y) in side.items()]
        return Samples(torch.cat([x for x, _ in side.values()]), np.concatenate(labels), np.concatenate(owners))

    source = Source(name, samples(parts), samples(held) if held else None, names, tuple(ids))
    settings = DataSettings(dataset="arrays", clients=len(ids), partition="natural", holdout=holdout)
    federation = replace(assemble(source, settings, seed), columns=columns)
    if federation.train.x.dtype == torch.uint8:
        mean, std = channel_constants(federation.train.x)
        return replace(federation, mean=mean, std=std)
    return _standardised(federation) if standardise else federation


def _standardised(federation: Federation) -> Federation:
    """Mean and deviation of each feature or channel, from the training data; a constant feature is only centred."""
    x = federation.train.x.double().movedim(1, 0).flatten(1)
    std = x.std(1, correction=0)
    std = std.where(std > 1e-12, torch.ones_like(std))
    return replace(federation, mean=tuple(x.mean(1).tolist()), std=tuple(std.tolist()))


def _read_all(
    clients: Sequence[Any] | Mapping[Any, Any], label: str | None, columns: tuple[str, ...] | None
) -> tuple[dict[str, Part], tuple[str, ...]]:
    """Inputs and labels by client, and the columns that they come from, if it is tables."""
    given = dict(clients) if isinstance(clients, Mapping) else dict(enumerate(clients))
    if not given:
        raise UserError("A federation needs at least one client.")
    parts: dict[str, Part] = {}
    for key, data in given.items():
        if str(key) in parts:
            raise UserError(f"Two clients are called {key}; give each a name that differs as text.")
        x, y, found = read(data, f"Client {key}", label, columns)
        columns = columns or found
        if y is None:
            raise UserError(f"Client {key} has no labels; name their column as label=.")
        parts[str(key)] = x, y
    return parts, columns or ()


def _by_client(frame: Any, client: str, label: str, columns: list[str]) -> dict[str, Part]:
    for column in (client, label, *columns):
        require(frame, column)
    if len(frame) == 0:
        raise UserError("The table has no rows.")
    if frame[client].isna().any():
        raise UserError(f"Some rows have no client in column {client!r}; fill it or drop them.")
    values_of(frame, client)
    parts = {}
    for key, rows in frame.reset_index(drop=True).groupby(client, sort=True, observed=True):
        x, y, _ = read_frame(rows, f"Client {key}", label, tuple(columns))
        assert y is not None
        parts[str(key)] = x, np.array([str(value) for value in y])
    return parts
