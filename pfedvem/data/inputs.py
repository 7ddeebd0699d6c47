"""What a user's inputs are, and how they become what a network sees, in training and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedvem.errors import UserError


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Samples (B, ...) brought to mean 0 and deviation 1 by channel or feature (the dimension after the batch).

    Of uint8 images the constants are on the scale [0, 1].
    """
    images = x.dtype == torch.uint8
    if not images and _nothing(mean, std):
        return x.float()
    centre, scale = Normalise(mean, std, images).to(x.device).constants(x.ndim)
    return (x.float() if images else x.float().clone()).sub_(centre).div_(scale)


class Normalise(nn.Module):
    """(x - mean) / std by channel or feature; x is what a user has, uint8 images or numbers."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], images: bool) -> None:
        super().__init__()
        scale = 255 if images else 1
        self.register_buffer("mean", torch.tensor(mean) * scale)
        self.register_buffer("std", torch.tensor(std) * scale)

    def constants(self, ndim: int) -> tuple[Tensor, Tensor]:
        """Mean and deviation as they stand beside a batch of so many dimensions."""
        shape = (1, -1, *[1] * (ndim - 2))
        return self.get_buffer("mean").view(shape), self.get_buffer("std").view(shape)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.constants(x.ndim)
        return (x.float() - mean) / std


@dataclass(frozen=True)
class Inputs:
    """What a user's inputs are: their shape without the batch, uint8 images or numbers, a table's columns.

    They are normalised by ``mean`` and ``std`` and then go through the ``backbone``, if there is one.
    """

    shape: tuple[int, ...]
    images: bool
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    columns: tuple[str, ...] = ()
    backbone: nn.Module | None = None

    def read(self, x: Any) -> Tensor:
        """A user's batch as a tensor (B, ...): from a tensor, an array or a DataFrame with these columns."""
        if hasattr(x, "columns") and hasattr(x, "to_numpy"):
            x = named(x)
            missing = [name for name in self.columns if name not in x.columns]
            if missing or not self.columns:
                what = f"The table has no column {missing[0]!r}" if missing else "The model does not take tables"
                raise UserError(f"{what}; it was trained on {', '.join(self.columns) or f'inputs of {self.shape}'}.")
            x = numbers(x, self.columns, "The table")
        tensor = as_tensor(x)
        if tensor.dtype == torch.uint8 and not self.images:
            raise UserError("The model was trained on numbers, not on uint8 images; give it floats as in training.")
        if tuple(tensor.shape[1:]) != self.shape:
            raise UserError(f"The model takes inputs of shape (N, {_dims(self.shape)}), not {tuple(tensor.shape)}.")
        if self.images and tensor.dtype != torch.uint8:
            raise UserError("The model was trained on uint8 images; give it pixels from 0 to 255 as uint8.")
        refuse_missing(tensor, "The inputs")
        return tensor

    def steps(self) -> list[tuple[str, nn.Module]]:
        """What comes before the network, as modules by name."""
        steps: list[tuple[str, nn.Module]] = []
        if self.images or not _nothing(self.mean, self.std):
            steps.append(("normalise", Normalise(self.mean, self.std, self.images)))
        if self.backbone is not None:
            steps += [("backbone", self.backbone), ("flatten", nn.Flatten())]
        return steps


def as_tensor(x: Any) -> Tensor:
    """Samples as uint8 images (N, channels, height, width) or float32 numbers (N, ...)."""
    if np.ma.is_masked(x):
        raise UserError("Some of the inputs are masked; fill them (x.filled) or drop those samples.")
    if isinstance(x, Tensor) and x.layout != torch.strided:
        raise UserError("The inputs are a sparse tensor; use x.to_dense() first.")
    try:
        tensor = x.detach() if isinstance(x, Tensor) else torch.from_numpy(np.require(x, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise UserError(f"Inputs must be numbers of one shape, as a tensor or an array: {error}.") from error
    if tensor.ndim == 0:
        raise UserError("Inputs must be numbers of one shape, as a tensor or an array: this is a single one.")
    if tensor.dtype == torch.uint8 and tensor.ndim == 3:
        return tensor.unsqueeze(1)
    if tensor.dtype == torch.uint8 and tensor.ndim == 4:
        if tensor.shape[1] > 4 and tensor.shape[3] <= 4:
            raise UserError("Images must be (N, channels, height, width): use x.transpose(0, 3, 1, 2) first.")
        return tensor
    if tensor.is_complex():
        raise UserError("Inputs must be real numbers.")
    tensor = tensor.float()
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor


def named(frame: Any) -> Any:
    """A DataFrame whose columns are called by text, as models remember them."""
    renamed = frame.set_axis([str(name) for name in frame.columns], axis=1)
    twice = renamed.columns[renamed.columns.duplicated()]
    if len(twice):
        raise UserError(f"Two columns of the table are called {twice[0]!r}; rename one of them.")
    return renamed


def numbers(frame: Any, columns: Sequence[str], whose: str) -> Tensor:
    """The columns of a DataFrame as float32 (N, F); text and missing values are refused by the column's name."""
    for name in columns:
        column = frame[name]
        if column.dtype.kind not in "biuf":
            raise UserError(
                f"The column {name!r} holds no numbers; turn it into some (pandas.get_dummies) or leave it out."
            )
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
            refuse_missing(torch.from_numpy(np.array(column, dtype=np.float32)), f"{whose} (column {name!r})")
    return torch.from_numpy(np.array(frame[list(columns)], dtype=np.float32))


def refuse_missing(x: Tensor, whose: str) -> None:
    """NaN and infinity would spoil every weight."""
    bad = int((~x.isfinite()).sum()) if x.is_floating_point() else 0
    if bad:
        raise UserError(f"{whose}: {bad} of the values are missing or infinite; fill them or drop those samples.")


def refuse_unlabelled(labels: Any, whose: str, what: str = "labels") -> None:
    """None, NaN and the like would become a class, or a client, of that name."""
    import pandas as pd

    missing = int(np.ma.getmaskarray(labels).sum())
    if labels.dtype.kind in "fOmM":
        missing += int(pd.isna(np.asarray(labels)).sum())
    if missing:
        raise UserError(f"{whose}: {missing} of the {what} are missing; drop those samples.")


def _nothing(mean: Sequence[float], std: Sequence[float]) -> bool:
    return not any(mean) and all(value == 1 for value in std)


def _dims(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
