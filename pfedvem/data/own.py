"""Federations of a user's own data: whatever clients have, as tensors, arrays, datasets or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from pfedvem.data.federation import Federation, Indices
from pfedvem.data.images import decode
from pfedvem.data.inputs import as_tensor, numbers, refuse_missing
from pfedvem.data.loading import assemble
from pfedvem.data.settings import DataSettings
from pfedvem.data.sources import Samples, Source, channel_constants
from pfedvem.errors import UserError

Labels = NDArray[Any]
Part = tuple[Tensor, Labels]
CLASSES = 100_000  # a label beyond is no number of a class, but some id


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
        strangers = [client for client in held if client not in parts]
        if strangers:
            raise UserError(f"There is test data for {strangers[0]!r}, which is no client.")
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
    for column in (client, label, *(features or ())):
        _known(frame, column)
    chosen = list(features) if features is not None else [c for c in frame.columns if c not in (client, label)]
    # Numbers are labels like words: those that occur are the classes.
    sides = [frame] if test is None else [frame, test]
    values = [None if side[label].isna().any() else _values(side, label) for side in sides]
    found = [str(value) for value in np.unique(np.concatenate([v for v in values if v is not None] or [np.empty(0)]))]
    parts = _by_client(frame, client, label, chosen)
    held = None if test is None else _by_client(test, client, label, chosen)
    return _federation(parts, held, tuple(map(str, chosen)), holdout, classes or found, standardise, name, seed)


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
    shape, dtype = parts[ids[0]][0].shape[1:], parts[ids[0]][0].dtype
    for client, (x, _) in [*parts.items(), *(held or {}).items()]:
        if x.shape[1:] != shape or x.dtype != dtype:
            raise UserError(
                f"Client {client} has inputs {_kind(x.shape[1:], x.dtype)} where others have {_kind(shape, dtype)}."
            )
    names = _classes([y for _, y in [*parts.values(), *(held or {}).values()]], classes)

    def samples(side: dict[str, Part]) -> Samples:
        labels = [_numbered(client, y, names) for client, (_, y) in side.items()]
        owners = [np.full(len(y), ids.index(client), dtype=np.int64) for client, (_, y) in side.items()]
        return Samples(torch.cat([x for x, _ in side.values()]), np.concatenate(labels), np.concatenate(owners))

    source = Source(name, samples(parts), samples(held) if held else None, names, tuple(ids))
    settings = DataSettings(dataset="arrays", clients=len(ids), partition="natural", holdout=holdout)
    federation = replace(assemble(source, settings, seed), columns=columns)
    if dtype == torch.uint8:
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
    named = dict(clients) if isinstance(clients, Mapping) else dict(enumerate(clients))
    if not named:
        raise UserError("A federation needs at least one client.")
    parts = {}
    for key, data in named.items():
        x, y, columns = read(data, f"Client {key}", label, columns)
        if y is None:
            raise UserError(f"Client {key} has no labels; give each client a pair (x, y).")
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
    x = as_tensor(data[0])
    try:
        y = np.asarray(data[1])
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose} has labels that are no list or array of one dimension.") from error
    _check(x, y, whose)
    return x, y, None


def _items(data: Any, whose: str) -> tuple[Any, Any]:
    """The samples of a torch dataset, one by one."""
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(f"{whose} is a {type(data).__name__}; give (x, y), a Dataset with a length, or a DataFrame.")
    pairs = [data[i] for i in range(len(data))]
    if not pairs:
        raise _empty(whose)
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise UserError(f"{whose}: each item of its Dataset must be a pair (input, label).")
    inputs = [_sample(x) for x, _ in pairs]
    if len({x.shape for x in inputs}) > 1:
        raise UserError(f"{whose} has inputs of different shapes; bring them to one.")
    return torch.stack(inputs), np.array([int(y) if isinstance(y, Tensor) else y for _, y in pairs])


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

    if len(data) == 0:
        raise _empty(whose)
    label = _label_column(data, label)
    images = [name for name, feature in data.features.items() if isinstance(feature, Image)]
    y = np.asarray(data.with_format(None)[label])
    names = getattr(data.features[label], "names", None)
    if names is not None:
        y = np.asarray(names)[y]
    if images:
        return torch.from_numpy(decode(_encoded(data, images[0]))), y, None
    frame = data.with_format(None).to_pandas().assign(**{label: y})
    others = [name for name in frame.columns if name != label]
    if len(others) == 1 and frame[others[0]].dtype.kind == "O":  # a list of numbers in each row
        x = as_tensor(np.stack([np.stack(value) for value in frame[others[0]]]))
        _check(x, y, whose)
        return x, y, None
    return _read_frame(frame, whose, label, columns)


def _read_frame(
    frame: Any, whose: str, label: str | None, columns: tuple[str, ...] | None
) -> tuple[Tensor, Labels | None, tuple[str, ...]]:
    if label is None and "label" in frame.columns:
        label = "label"
    if label is not None:
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
    return numbers(frame, chosen, whose), y, tuple(map(str, chosen))


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
    for key, rows in frame.groupby(client, sort=True, observed=True):
        x, y, _ = _read_frame(rows, f"Client {key}", label, tuple(columns))
        assert y is not None
        parts[str(key)] = x, np.array([str(value) for value in y])
    return parts


def _known(frame: Any, column: str) -> None:
    if column not in frame.columns:
        raise UserError(f"There is no column {column!r}; the columns are {', '.join(map(str, frame.columns))}.")


def _check(x: Tensor, y: Labels, whose: str) -> None:
    if y.ndim != 1 or len(x) != len(y):
        raise UserError(f"{whose} has {len(x)} inputs but labels of shape {y.shape}; give one label for each input.")
    if len(y) == 0:
        raise _empty(whose)
    refuse_missing(x, whose)
    if y.dtype.kind == "f":
        refuse_missing(torch.as_tensor(y.astype(np.float64)), f"{whose} (labels)")


def _empty(whose: str) -> UserError:
    return UserError(f"{whose} has no data; leave it out, every client needs at least one sample.")


def _kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"of shape {tuple(shape)} ({'uint8 images' if dtype == torch.uint8 else 'numbers'})"


# Labels


def _classes(labels: list[Labels], given: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the classes: as given, or the words that occur, or the whole numbers from 0 to the highest."""
    if given is not None:
        return tuple(map(str, given))
    if any(_worded(y) for y in labels):
        return tuple(sorted({str(value) for y in labels for value in y}))
    highest = max(int(y.max()) for y in labels)
    if highest >= CLASSES:
        raise UserError(
            f"The label {highest} is no number of a class; number the classes from 0, or name them with classes=."
        )
    return tuple(str(label) for label in range(1 + highest))


def _worded(y: Labels) -> bool:
    return y.dtype.kind not in "biuf"


def _numbered(client: str, y: Labels, names: tuple[str, ...]) -> Indices:
    """Labels as places among the names of the classes."""
    return label_numbers(y, names, f"Client {client}")


def label_numbers(y: Labels, names: tuple[str, ...], whose: str) -> Indices:
    """Labels as places among the names of the classes: by name or, where they are no names, whole numbers from 0."""
    place = {name: number for number, name in enumerate(names)}
    if _worded(y) or all(str(value) in place for value in np.unique(y)):
        strangers = [str(value) for value in y if str(value) not in place]
        if strangers:
            raise UserError(f"{whose} has the label {strangers[0]!r}, which is not among {', '.join(names)}.")
        return np.array([place[str(value)] for value in y], dtype=np.int64)
    if y.dtype.kind == "f" and (not np.isfinite(y).all() or (y != np.round(y)).any()):
        raise UserError(f"{whose} has labels that are no whole numbers; this is for classes, not for regression.")
    wrong = [int(value) for value in (y.min(), y.max()) if not 0 <= value < len(names)]
    if wrong:  # before the cast, which some are too large for
        raise UserError(f"{whose} has the label {wrong[0]}; labels are whole numbers from 0 to {len(names) - 1}.")
    numbered: Indices = y.astype(np.int64)
    return numbered
