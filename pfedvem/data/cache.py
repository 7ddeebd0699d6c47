"""Decoded data kept on disk, so that a data set is read and decoded once.

One safetensors file for each way to read a data set. It says what it was made from; when that changed, or the file is
damaged, which its checksum tells, it is made again. Reading it imports nothing slow and maps the pixels instead of
copying them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pfedvem.errors import Damaged

_LAYOUT = 2  # raised when what is stored changes


def folder() -> Path:
    """Where decoded data is kept: $PFEDVEM_CACHE, else ~/.cache/pfedvem."""
    return Path(os.environ.get("PFEDVEM_CACHE") or Path.home() / ".cache" / "pfedvem")


def path_for(name: str, how: Mapping[str, Any]) -> Path:
    """The cache file of a data set that is read in this way (``how``: all that decides what the arrays are)."""
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()
    return folder() / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}-{digest[:12]}.safetensors"


def state_of(where: Path) -> str:
    """A digest of the names, sizes and times of all files of a folder: it changes when the data does."""
    files = sorted(os.path.join(base, name) for base, _, names in os.walk(where, followlinks=True) for name in names)
    rows = [(file, stat.st_size, stat.st_mtime_ns) for file in files for stat in (os.stat(file),)]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def load(path: Path, made_from: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the notes kept with them, or None where there is nothing, or nothing that is still right."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            if about["layout"] != _LAYOUT or about["made_from"] != made_from:
                return None
            if about.pop("sha256") != _digest(about, tensors):
                raise Damaged("its checksum does not match")
            return tensors, about
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Damaged(str(error)) from error


def save(path: Path, made_from: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Writes the file in one step. Where the cache cannot be written, the data is simply read again next time."""
    said = {**about, "layout": _LAYOUT, "made_from": made_from}
    text = json.dumps({**said, "sha256": _digest(said, tensors)})
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
        os.close(handle)
        try:
            save_file(dict(tensors), name, metadata={"about": text})
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of tensors, without a copy of them, and of what is said about them."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, leaf in sorted(tensors.items()):
        digest.update(repr((name, leaf.dtype, tuple(leaf.shape))).encode())
        digest.update(np.ascontiguousarray(leaf.numpy()).data)
    return digest.hexdigest()
