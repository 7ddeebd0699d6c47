"""What a client has, in any form: a pair of arrays, a torch or Hugging Face dataset, or a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pfedvem.data.images import decode
from pfedvem.data.inputs import as_tensor, named, numbers, refuse_missing, refuse_unlabelled
from pfedvem.data.labels import Labels
from pfedvem.errors import UserError

Part = tuple[Tensor, Labels]


def read(
    data: Any, whose: str, label: str | None = None, columns: tuple[str, ...] | None = None
) -> tuple[Tensor, Labels | None, tuple[str, ...] | None]:
    """Inputs and labels of one client, and the columns that they come from if it is a table.

    Where ``columns`` are given, these are read.
    """
    if hasattr(data, "column_names") and hasattr(data, "features"):  # a Hugging Face dataset
        return _read_hub(data, whose, label, columns)
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return read_frame(data, whose, label, columns)
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

    from pfedvem.data.reading import encoded, label_column

    if not hasattr(data, "__len__"):
        raise UserError(f"{whose} is an {type(data).__name__}, which is read as it comes; load it without streaming.")
    if len(data) == 0:
        raise _empty(whose)
    label = label_column(data, label)
    images = [name for name, feature in data.features.items() if isinstance(feature, Image)]
    y = np.asarray(data.with_format(None)[label])
    names = getattr(data.features[label], "names", None)
    refuse_unlabelled(y, whose)
    if names is not None:
        if (y < 0).any():  # so the hub marks labels that are missing or kept secret
            raise UserError(f"{whose}: {int((y < 0).sum())} of the labels are missing (-1); drop those samples.")
        y = np.asarray(names)[y]
    if images:
        return torch.from_numpy(decode(encoded(data, images[0]))), y, None
    frame = data.with_format(None).to_pandas().assign(**{label: y})
    others = [name for name in frame.columns if name != label]
    if len(others) == 1 and frame[others[0]].dtype.kind == "O":  # a list of numbers in each row
        try:
            x = np.stack([np.stack(value) for value in frame[others[0]]])
        except (TypeError, ValueError) as error:
            raise UserError(f"{whose} has no list of numbers of one shape in each row of {others[0]!r}.") from error
        return *pair(x, y, whose), None
    return read_frame(frame, whose, label, columns)


def read_frame(
    frame: Any, whose: str, label: str | None, columns: tuple[str, ...] | None
) -> tuple[Tensor, Labels | None, tuple[str, ...]]:
    """Inputs and labels of a table, and the columns of the inputs."""
    frame = named(frame)
    if label is None and "label" in frame.columns:
        label = "label"
    if label is not None:
        label = str(label)
        require(frame, label)
    chosen = list(columns) if columns is not None else [name for name in frame.columns if name != label]
    for column in chosen:
        require(frame, column)
    if not chosen:
        raise UserError(f"{whose} has no columns of features.")
    if len(frame) == 0:
        raise _empty(whose)
    if label is not None and frame[label].isna().any():
        raise UserError(f"{whose} has rows without a label in column {label!r}; drop them.")
    y = None if label is None else values_of(frame, label)
    return numbers(frame, chosen, whose), y, tuple(chosen)


def values_of(frame: Any, column: str) -> Labels:
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


def require(frame: Any, column: str) -> None:
    """Refuses a table without this column."""
    if column not in frame.columns:
        raise UserError(f"There is no column {column!r}; the columns are {', '.join(map(str, frame.columns))}.")


def _empty(whose: str) -> UserError:
    return UserError(f"{whose} has no data; leave it out, every client needs at least one sample.")


def refuse_mixed(parts: Iterable[tuple[str, Part]]) -> None:
    """All inputs must have one shape, and all be images or none."""
    kinds = [(whose, (tuple(x.shape[1:]), x.dtype)) for whose, (x, _) in parts]
    for whose, kind in kinds:
        if kind != kinds[0][1]:
            raise UserError(f"{whose} has inputs {_kind(*kind)} where others have {_kind(*kinds[0][1])}.")


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"of shape {shape} ({'uint8 images' if dtype == torch.uint8 else 'numbers'})"
