"""One client's samples from a file or a folder: tables, arrays or images."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedvem.data.images import decode
from pfedvem.data.inputs import Inputs
from pfedvem.errors import UserError

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
LABEL = "label"  # the column that is looked for if none is named
FORMS = "a .csv or .parquet table, an .npz or .safetensors file with x and y, or a folder of images"


def read_samples(path: Path, inputs: Inputs, label: str = LABEL) -> tuple[Tensor, NDArray[Any] | None]:
    """Inputs as the model takes them and, if they are there, labels: of a table, those in the column ``label``.

    In a folder of images, an image's label is the name of the folder that it lies in, unless that is the one given.
    """
    if not path.exists():
        raise UserError(f"There is no file or folder {path}; give {FORMS}.")
    x, y = _read(path, inputs, label)
    if len(x) == 0:
        raise UserError(f"{path} has no samples.")
    return x, y


def _read(path: Path, inputs: Inputs, label: str) -> tuple[Tensor, NDArray[Any] | None]:
    if path.is_dir():
        return _images(path, inputs)
    if path.suffix in (".csv", ".parquet"):
        return _table(path, inputs, label)
    if path.suffix in (".npz", ".safetensors"):
        arrays = _arrays(path)
        if "x" not in arrays:
            raise UserError(f"{path} has no array x of inputs; it has {', '.join(arrays) or 'none'}.")
        y = arrays.get("y")
        y = y.float() if isinstance(y, Tensor) and y.dtype == torch.bfloat16 else y  # which NumPy does not know
        return inputs.read(arrays["x"]), None if y is None else np.asarray(y)
    raise UserError(f"{path} cannot be read; give {FORMS}.")


def _table(path: Path, inputs: Inputs, label: str) -> tuple[Tensor, NDArray[Any] | None]:
    import pandas as pd

    try:
        frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        labels = None if label in inputs.columns else frame.get(label)
        if labels is not None and path.suffix == ".csv" and labels.isna().any():  # a class may be called NA or None
            labels = pd.read_csv(path, usecols=[label], dtype=str, keep_default_na=False)[label]
    except Exception as error:  # whatever the file's bytes make of pandas and its readers
        raise UserError(f"{path} cannot be read as a table: {_said(error)}.") from error
    if labels is None and label != LABEL:
        raise UserError(
            f"{path} has no column {label!r} of labels; its columns are {', '.join(map(str, frame.columns))}."
        )
    return inputs.read(frame), None if labels is None else np.array([str(value) for value in labels])


def _arrays(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # whatever the file's bytes make of their readers
        raise UserError(f"{path} cannot be read: {_said(error)}.") from error


def _said(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _images(path: Path, inputs: Inputs) -> tuple[Tensor, NDArray[Any] | None]:
    if not inputs.images:
        raise UserError("The model does not take images; give it a table or arrays.")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
    if not files:
        raise UserError(f"The folder {path} has no images.")
    channels, height, width = inputs.shape
    pixels = decode([str(file) for file in files], height if height == width else None, colour=channels == 3)
    folders = [file.parent for file in files]
    labels = None if path in folders else np.array([folder.name for folder in folders])
    return inputs.read(torch.from_numpy(pixels)), labels
