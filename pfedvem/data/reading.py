"""Reads a hub data set or a local folder with ``datasets``: encoded images and columns of labels, nothing decoded."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pfedvem.data.images import Encoded
from pfedvem.data.partitions import Indices
from pfedvem.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_IMAGE_NAMES = ("image", "img")


@dataclass(frozen=True)
class Column:
    """Values as whole numbers from 0, for train and test, and the name of each value."""

    train: Indices
    test: Indices
    names: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """What was read. ``test`` is empty where the data has no test split."""

    train: list[Encoded]
    test: list[Encoded]
    labels: Column
    group: Column | None
    notes: tuple[str, ...]


def read(
    where: Path | str,
    image: str | None = None,
    label: str | None = None,
    group: str | None = None,
) -> Table:
    """Reads a folder, or a hub id "owner/name" or "owner/name:config"; a column that is not named is looked for."""
    with _opened(where) as splits:
        train, test, notes = _train_and_test(splits, str(where))
        image = _image_column(train, image)
        label = label_column(train, label)
        parts = [train] if test is None else [train, test]
        files = [encoded(part, image) for part in parts]
        labels = _column(parts, label)
        groups = None if group is None else _column(parts, _known(train, group))
    if not files[0]:
        raise UserError(f"{where} has no images.")
    return Table(files[0], files[1] if test is not None else [], labels, groups, notes)


@contextmanager
def _opened(where: Path | str) -> Iterator[DatasetDict]:
    if isinstance(where, str):
        yield _from_hub(where)
        return
    # What `datasets` writes on the way is as large as the data and not needed afterwards.
    with tempfile.TemporaryDirectory(prefix="pfedvem-", ignore_cleanup_errors=True) as scratch:
        folder = where
        if glob.has_magic(str(where.resolve())):  # `datasets` takes brackets and stars in a name for a pattern
            folder = Path(scratch) / "data"
            shutil.copytree(where, folder, copy_function=lambda file, link: os.symlink(os.path.realpath(file), link))
        yield _from_folder(folder, scratch, where)


def _from_hub(where: str) -> DatasetDict:
    import datasets

    identity, _, config = where.partition(":")
    _check_hub(identity)
    try:
        return datasets.load_dataset(identity, config or None)
    except (ConnectionError, FileNotFoundError) as error:
        raise _unreachable(identity) from error
    except ValueError as error:  # says which configurations there are
        reason = str(error).splitlines()[0]
        raise UserError(f"{where} cannot be read; one configuration of several is {identity}:NAME. {reason}") from error


def _from_folder(folder: Path, scratch: str, where: Path) -> DatasetDict:
    """Reads a folder; ``where`` is what the user calls it."""
    import datasets

    # No bar for what takes seconds, and no log of what becomes a sentence here.
    bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return datasets.load_dataset(str(folder), cache_dir=scratch)
    except (FileNotFoundError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(
            f"The folder {where} has no images that can be read; it needs parquet files with one set of columns, or a "
            "folder of images for each class."
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _check_hub(identity: str) -> None:
    """Asks the hub once for the data set: `datasets` alone would retry for half a minute where there is no network."""
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.is_offline_mode():
        return
    try:
        huggingface_hub.HfApi().dataset_info(identity, timeout=5)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"The Hugging Face hub has no data set {identity}, or none that is open to you.") from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # that of whichever HTTP library it uses
        raise _unreachable(identity) from error


def _unreachable(identity: str) -> UserError:
    return UserError(f"{identity} could not be fetched from the Hugging Face hub; --data-root DIR reads a local copy.")


def _train_and_test(splits: DatasetDict, where: str) -> tuple[Dataset, Dataset | None, tuple[str, ...]]:
    names = list(splits)
    first = "train" if "train" in names else names[0]
    if first != "train" and len(names) > 1:
        raise UserError(f"{where} has no split 'train', only {', '.join(names)}; rename one of them.")
    if "test" in names and first != "test":
        return splits[first], splits["test"], ()
    if "validation" in names and first != "validation":
        return splits[first], splits["validation"], ("There is no test split; the validation split is the test data.",)
    return splits[first], None, ()


def _known(data: Dataset, column: str) -> str:
    if column not in data.column_names:
        raise UserError(f"There is no column {column!r}; the columns are {', '.join(data.column_names)}.")
    return column


def _image_column(data: Dataset, column: str | None) -> str:
    if column is not None:
        return _known(data, column)
    from datasets import Image

    found: list[str] = [name for name, feature in data.features.items() if isinstance(feature, Image)]
    found = found or [name for name in _IMAGE_NAMES if name in data.column_names]
    if len(found) != 1:
        what = "no column of images" if not found else f"several columns of images ({', '.join(found)})"
        raise UserError(f"The data has {what}; name one of {', '.join(data.column_names)} as image_column.")
    return found[0]


def label_column(data: Dataset, column: str | None) -> str:
    """The column of the labels: as named, or the only one that it can be."""
    if column is not None:
        return _known(data, column)
    from datasets import ClassLabel

    found: list[str] = [name for name, feature in data.features.items() if isinstance(feature, ClassLabel)]
    found = ["label"] if "label" in data.column_names else found
    if len(found) != 1:
        raise UserError(
            "It is not clear which column holds the labels; name it, as label_column or in Python as label=: "
            f"{', '.join(data.column_names)}."
        )
    return found[0]


def encoded(data: Dataset, column: str) -> list[Encoded]:
    """The images as bytes, or as paths where the data keeps them in files."""
    from datasets import Image

    if isinstance(data.features[column], Image):
        data = data.cast_column(column, Image(decode=False))
    rows: list[Any] = data.with_format("arrow")[column].to_pylist()
    files: list[Any] = [(row.get("bytes") or row.get("path")) if isinstance(row, dict) else row for row in rows]
    files = [os.path.realpath(file) if isinstance(file, str) else file for file in files]
    if not all(isinstance(file, (bytes, str)) for file in files):
        raise UserError(f"The column {column!r} does not hold images; name the column that does as image_column.")
    return files


def _column(parts: Sequence[Dataset], column: str) -> Column:
    """Numbers the values of a column: as its ClassLabel says, else in sorted order over all splits."""
    arrays = [part.with_format("arrow")[column] for part in parts]
    values = [np.asarray(array.to_numpy(zero_copy_only=False)) for array in arrays]
    names = getattr(parts[0].features[column], "names", None)
    empty = UserError(f"Some samples have no value in column {column!r}; take another column or remove them.")
    if any(array.null_count for array in arrays):
        raise empty
    if names is None:
        known, numbers = np.unique(np.concatenate(values), return_inverse=True)
        names = [str(value) for value in known]
        values = np.split(numbers, [len(values[0])])
    train, test = (*values, np.empty(0, dtype=np.int64))[:2]
    train, test = train.astype(np.int64), test.astype(np.int64)
    if any(len(part) and part.min() < 0 for part in (train, test)):
        raise empty  # the hub marks labels that are kept secret by -1
    return Column(train, test, tuple(names))
