"""Federations of a user's own data: whatever clients have, as tensors, arrays, datasets or tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from pfedvem.data.federation import Federation, Indices, Shard, Split
from pfedvem.data.images import decode
from pfedvem.data.inputs import as_tensor, named, numbers, refuse_missing, refuse_unlabelled
from pfedvem.data.loading import assemble
from pfedvem.data.settings import DataSettings
from pfedvem.data.sources import Samples, Source, channel_constants
from pfedvem.errors import UserError

Labels = NDArray[Any]
Part = tuple[Tensor, Labels]
CLASSES = 100_000  # a label beyond is no number of a class, but some id
WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0)?")  # a whole number as text, of an int or a float


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
    occurring = _values(pd.concat([side[[label]] for side in sides]), label)
    found = [_plain(str(value)) if occurring.dtype.kind == "f" else str(value) for value in np.unique(occurring)]
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


# What clients have


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


def read(
    data: Any, whose: str, label: str | None = None, columns: tuple[str, ...] | None = None
) -> tuple[Tensor, Labels | None, tuple[str, ...] | None]:
    """Inputs and labels of one client, and the columns that they come from if it is a table.

    Where ``columns`` are given, these are read.
    """
    if hasattr(data, "column_names") and hasattr(data, "features"):  # a Hugging Face dataset
        return _read_hub(data, whose, label, columns)
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return _read_frame(data, whose, label, columns)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, tuple | list):
        data = _items(data, whose)
    if len(data) != 2:
        raise UserError(f"{whose} has {len(data)} parts; give a pair (x, y), and test data by tests=.")
    x, y = pair(data[0], data[1], whose)
    if len(y) == 0:
        raise _empty(whose)
    return x, y, None


def pair(x: Any, y: Any, whose: str) -> Part:
    """Inputs, and a label for each of them; there may be none."""
    inputs = as_tensor(x)
    try:
        labels = np.asarray(y.detach() if isinstance(y, Tensor) else y)
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose} has labels that are no list or array of one dimension.") from error
    if labels.ndim != 1 or len(inputs) != len(labels):
        raise UserError(
            f"{whose} has {len(inputs)} inputs but labels of shape {labels.shape}; give one label for each input."
        )
    refuse_missing(inputs, whose)
    refuse_unlabelled(y if np.ma.isMaskedArray(y) else labels, whose)
    if labels.dtype.kind == "f":
        refuse_missing(torch.as_tensor(labels.astype(np.float64)), f"{whose} (labels)")
    return inputs, labels


def _items(data: Any, whose: str) -> tuple[Any, Any]:
    """The samples of a torch dataset, one by one."""
    if isinstance(data, Mapping) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(f"{whose} is a {type(data).__name__}; give (x, y), a Dataset with a length, or a DataFrame.")
    pairs = [data[i] for i in range(len(data))]
    if not pairs:
        raise _empty(whose)
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise UserError(f"{whose}: each item of its Dataset must be a pair (input, label).")
    try:
        inputs = [_sample(x) for x, _ in pairs]
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose}: each input must be numbers of one shape, or an image: {error}.") from error
    if len({x.shape for x in inputs}) > 1:
        raise UserError(f"{whose} has inputs of different shapes; bring them to one.")
    return torch.stack(inputs), [y.squeeze().tolist() if isinstance(y, Tensor) else y for _, y in pairs]


def _sample(x: Any) -> Tensor:
    """One input: a tensor, an array, numbers or a PIL image, whose channels come first then."""
    if isinstance(x, Tensor):
        return x
    array = np.array(x)
    if hasattr(x, "getbands"):
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.as_tensor(array)


def _read_hub(
    data: Any, whose: str, label: str | None, columns: tuple[str, ...] | None
) -> tuple[Tensor, Labels | None, tuple[str, ...] | None]:
    """Images of a Hugging Face dataset or, where it has none, its columns of numbers."""
    from datasets import Image

    from pfedvem.data.reading import _encoded, _label_column

    if not hasattr(data, "__len__"):
        raise UserError(f"{whose} is an {type(data).__name__}, which is read as it comes; load it without streaming.")
    if len(data) == 0:
        raise _empty(whose)
    label = _label_column(data, label)
    images = [name for name, feature in data.features.items() if isinstance(feature, Image)]
    y = np.asarray(data.with_format(None)[label])
    names = getattr(data.features[label], "names", None)
    refuse_unlabelled(y, whose)
    if names is not None:
        if (y < 0).any():  # so the hub marks labels that are missing or kept secret
            raise UserError(f"{whose}: {int((y < 0).sum())} of the labels are missing (-1); drop those samples.")
        y = np.asarray(names)[y]
    if images:
        return torch.from_numpy(decode(_encoded(data, images[0]))), y, None
    frame = data.with_format(None).to_pandas().assign(**{label: y})
    others = [name for name in frame.columns if name != label]
    if len(others) == 1 and frame[others[0]].dtype.kind == "O":  # a list of numbers in each row
        try:
            x = np.stack([np.stack(value) for value in frame[others[0]]])
        except (TypeError, ValueError) as error:
            raise UserError(f"{whose} has no list of numbers of one shape in each row of {others[0]!r}.") from error
        return *pair(x, y, whose), None
    return _read_frame(frame, whose, label, columns)


def _read_frame(
    frame: Any, whose: str, label: str | None, columns: tuple[str, ...] | None
) -> tuple[Tensor, Labels | None, tuple[str, ...]]:
    frame = named(frame)
    if label is None and "label" in frame.columns:
        label = "label"
    if label is not None:
        label = str(label)
        _known(frame, label)
    chosen = list(columns) if columns is not None else [name for name in frame.columns if name != label]
    for column in chosen:
        _known(frame, column)
    if not chosen:
        raise UserError(f"{whose} has no columns of features.")
    if len(frame) == 0:
        raise _empty(whose)
    if label is not None and frame[label].isna().any():
        raise UserError(f"{whose} has rows without a label in column {label!r}; drop them.")
    y = None if label is None else _values(frame, label)
    return numbers(frame, chosen, whose), y, tuple(chosen)


def _values(frame: Any, column: str) -> Labels:
    """A column of clients or labels: numbers or words, but not both."""
    values: Labels = frame[column].to_numpy()
    kinds = {str if isinstance(value, str) else Real for value in values} if values.dtype.kind == "O" else set()
    if len(kinds) > 1 or not all(isinstance(value, tuple(kinds)) for value in values if kinds):
        raise UserError(f"The column {column!r} holds more than words or numbers; make them all of one kind.")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UserError(
            f"The column {column!r} holds values that are missing or infinite; fill them or drop those rows."
        )
    return values


def _by_client(frame: Any, client: str, label: str, columns: list[str]) -> dict[str, Part]:
    for column in (client, label, *columns):
        _known(frame, column)
    if len(frame) == 0:
        raise UserError("The table has no rows.")
    if frame[client].isna().any():
        raise UserError(f"Some rows have no client in column {client!r}; fill it or drop them.")
    _values(frame, client)
    parts = {}
    for key, rows in frame.reset_index(drop=True).groupby(client, sort=True, observed=True):
        x, y, _ = _read_frame(rows, f"Client {key}", label, tuple(columns))
        assert y is not None
        parts[str(key)] = x, np.array([str(value) for value in y])
    return parts


def _known(frame: Any, column: str) -> None:
    if column not in frame.columns:
        raise UserError(f"There is no column {column!r}; the columns are {', '.join(map(str, frame.columns))}.")


def refuse_mixed(parts: Iterable[tuple[str, Part]]) -> None:
    """All inputs must have one shape, and all be images or none."""
    kinds = [(whose, (tuple(x.shape[1:]), x.dtype)) for whose, (x, _) in parts]
    for whose, kind in kinds:
        if kind != kinds[0][1]:
            raise UserError(f"{whose} has inputs {_kind(*kind)} where others have {_kind(*kinds[0][1])}.")


def _empty(whose: str) -> UserError:
    return UserError(f"{whose} has no data; leave it out, every client needs at least one sample.")


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"of shape {shape} ({'uint8 images' if dtype == torch.uint8 else 'numbers'})"


# Labels


def class_names(labels: list[Labels], given: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the classes: as given, or the words that occur, or the whole numbers from 0 to the highest."""
    if given is not None:
        return tuple(map(str, given))
    if any(_worded(y) for y in labels):
        words = {value if isinstance(value, str) else _plain(str(value)) for y in labels for value in y}
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
    plain = [_plain(name) for name in names]
    renumbered = any(WHOLE.fullmatch(name) and name != str(number) for number, name in enumerate(plain))
    return {name: number for each in (plain, names) for number, name in enumerate(each)}, renumbered


def _plain(text: str) -> str:
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
    texts = [text if (text := str(value)) in place else _plain(text) for value in values]
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
