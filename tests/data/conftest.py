"""Tiny data sets that the tests write themselves, and a cache of their own."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Writer = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(value: int, size: tuple[int, int] = (6, 6), mode: str = "L") -> bytes:
    """A flat image, so that a pixel tells which image it was."""
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def write_split(tmp_path: Path) -> Writer:
    """Writes one split of a hub-like folder: images with the values 0, 1, ... unless given, and columns of labels."""

    def write(
        folder: str,
        split: str,
        columns: Mapping[str, Sequence[Any]],
        names: Mapping[str, Sequence[str]] | None = None,
        images: Sequence[bytes] | None = None,
        image_column: str = "image",
    ) -> Path:
        from datasets import ClassLabel, Dataset, Features, Value
        from datasets import Image as ImageFeature

        files = images or [png(i % 256) for i in range(len(next(iter(columns.values()))))]
        features: dict[str, Any] = {image_column: ImageFeature()}
        for key, values in columns.items():
            known = (names or {}).get(key)
            plain = Value("string" if isinstance(values[0], str) else "int64")
            features[key] = ClassLabel(names=list(known)) if known else plain
        rows = {
            image_column: [{"bytes": file, "path": None} for file in files],
            **{k: list(v) for k, v in columns.items()},
        }
        place = tmp_path / "root" / folder
        place.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(rows, features=Features(features)).to_parquet(str(place / f"{split}-00000-of-00001.parquet"))
        return place

    return write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The data root that ``write_split`` writes to."""
    (tmp_path / "root").mkdir(exist_ok=True)
    return tmp_path / "root"


def labels(each: int, kinds: int) -> list[int]:
    """``each`` samples of every label, interleaved."""
    return np.tile(np.arange(kinds), each).tolist()  # type: ignore[no-any-return]
