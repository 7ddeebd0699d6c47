"""Checkpoints: each is a folder written whole or not at all, with checksums; the two newest are kept.

checkpoint/round-00012/state.safetensors    server, clients, scores and the average of the global models
checkpoint/round-00012/manifest.json        format, round, checksums, history, and the identity of the run
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pfedvem import tree
from pfedvem.errors import Damaged, UserError
from pfedvem.guard import Counts
from pfedvem.models import Params
from pfedvem.simulation.rounds import State
from pfedvem.simulation.work import Scores

if sys.platform != "win32":
    import fcntl

FORMAT = 2  # 1 had no checksum of the manifest and is still read
KEPT = 2
CHUNK = 2**24  # numbers that are written or read at a time
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class _Tensors:
    server: Any
    clients: Any
    scores: Scores
    counts: Counts
    average: Params | None


def _tensors(state: State) -> _Tensors:
    return _Tensors(state.server, state.clients, state.scores, state.counts, state.average)


class Unwritten(UserError):
    """Files that cannot be written, for want of space say: what comes after them would fare no better."""


def save(folder: Path, state: State, identity: Mapping[str, Any]) -> None:
    """Adds a checkpoint of ``state`` and drops all but the two newest."""
    name = f"round-{state.round:05d}"
    target, partial, before = folder / name, folder / f".partial-{name}", folder / f".before-{name}"
    with writing(target):
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        try:
            partial.mkdir()
            tensors = tree.named(_tensors(state))
            manifest = {
                "format": FORMAT,
                "round": state.round,
                "sha256": _write_tensors(partial / "state.safetensors", tensors),
                "seconds": state.seconds,
                "history": [],
                "identity": identity,
            }
            history = "[\n" + ",\n".join(lines(state.history)) + "\n]"
            text = json.dumps(manifest, indent=1).replace('"history": []', f'"history": {history}', 1)
            write(partial / "manifest.json", sealed(text))
            sync(partial)
        except OSError:
            _clear(folder)  # what there was space for is of no use
            raise
        if target.exists():  # a round that is repeated
            os.rename(target, before)
        os.rename(partial, target)
        sync(folder)
        _clear(folder)
        found = _found(folder)
        place = found.index(target)
        for old in found[:place] + found[place + KEPT :]:  # later ones belong to a past that is being repeated
            shutil.rmtree(old)


def load(folder: Path, like: State, identity: Mapping[str, Any]) -> tuple[State | None, list[str]]:
    """The newest readable checkpoint, and a warning for each damaged one that was passed over.

    ``like`` is a state of the same run; its clients' arrays are filled. There is nothing to go on from where the folder
    is empty; it is an error if checkpoints are there but none can be read, or if they belong to other settings.
    """
    warnings: list[str] = []
    for path in _found(folder):
        try:
            manifest = _read(path)
            _refuse_other(manifest["identity"], identity, folder)
            return _restore(manifest, path / "state.safetensors", like), warnings
        except Damaged as damage:
            warnings.append(f"the checkpoint {path.name} is damaged ({damage})")
    strangers = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
    if warnings or strangers:
        reason = warnings[0] if warnings else f"{strangers[0]} is no checkpoint"
        raise UserError(f"No checkpoint in {folder} can be read ({reason}); start anew with another --out.")
    return None, []


def _found(folder: Path) -> list[Path]:
    """The checkpoints' folders, newest first."""
    found = [path for path in folder.glob("round-*") if path.name.removeprefix("round-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("round-")), reverse=True)


def _clear(folder: Path) -> None:
    """Drops what is hidden in the folder: checkpoints that were not finished, or that another has replaced."""
    for left in folder.glob(".*-round-*"):
        shutil.rmtree(left, ignore_errors=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file and gives its checksum, with little in memory: what clients keep may be in files."""
    header, end = {}, 0
    for name, leaf in tensors.items():
        begin, end = end, end + leaf.numel() * leaf.element_size()
        header[name] = {"dtype": DTYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def put(part: bytes | memoryview) -> None:
            digest.update(part)
            file.write(part)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for leaf in tensors.values():
            for rows in leaf.reshape(-1).split(CHUNK):
                put(rows.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that is as it was written."""
    try:
        manifest = unsealed((path / "manifest.json").read_bytes())
        with open(path / "state.safetensors", "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(str(error.strerror)) from error
    if manifest.get("format") not in (1, FORMAT):
        raise Damaged("it is not of this version's format")
    if found != manifest.get("sha256"):
        raise Damaged("its checksum does not match")
    kinds = {"identity": dict, "history": list, "round": int, "seconds": int | float}
    if not all(isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        raise Damaged("its manifest is not what this version writes")
    if not all(isinstance(line, dict) and isinstance(line.get("round"), int) for line in manifest["history"]):
        raise Damaged("its history is not what this version writes")
    return manifest


def _refuse_other(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    differing = [
        f"{key} (was {saved.get(key)!r}, now {current.get(key)!r})"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
    if differing:
        raise UserError(
            f"{folder.parent} was run with other settings: {', '.join(differing)}. Go on with those that it had, or "
            "choose another --out."
        )


def _restore(manifest: Mapping[str, Any], file: Path, like: State) -> State:
    template = _tensors(dataclasses.replace(like, clients=None))
    try:
        with safetensors.safe_open(file, framework="pt") as stored:
            known = set(stored.keys())
            for name, leaf in tree.named(_tensors(like)).items():
                if name in known and _kind(stored.get_slice(name)) != (DTYPES[leaf.dtype], list(leaf.shape)):
                    raise Damaged(f"{name} is of another network")
            # A score or a count that an earlier version did not know is not known here either.
            leaves = tree.named(template).items()
            filled = [stored.get_tensor(name) if name in known else leaf for name, leaf in leaves]
            value = tree.rebuild(template, filled)
            for name, leaf in tree.named({"clients": like.clients}).items():
                rows, step = stored.get_slice(name), max(1, CHUNK // max(1, leaf[0].numel()))
                for begin in range(0, len(leaf), step):
                    leaf[begin : begin + step] = rows[begin : begin + step]
    except (OSError, SafetensorError) as error:
        raise Damaged(str(error)) from error
    # Nor did it know of averages: this one begins anew.
    average = value.average if known.issuperset(tree.named({"average": like.average})) else None
    return State(
        manifest["round"],
        value.server,
        like.clients,
        value.scores,
        tuple(manifest["history"]),
        manifest["seconds"],
        value.counts,
        average,
    )


_encoded: list[tuple[Mapping[str, Any], str]] = []  # replaced, never changed: runs in other threads use it too


def lines(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """The records of a history as JSON. Those that were asked for last are known: it grows by one at a time."""
    global _encoded
    known = []
    for encoded, wanted in zip(_encoded, history, strict=False):
        if encoded[0] is not wanted:
            break
        known.append(encoded)
    _encoded = now = known + [(record, json.dumps(record)) for record in history[len(known) :]]
    return [line for _, line in now]


def sealed(text: str) -> bytes:
    """The text of a JSON object that begins with a checksum of all that follows."""
    rest = text.removeprefix("{").encode()
    return f'{{"seal": "{hashlib.sha256(rest).hexdigest()}",'.encode() + rest


def unsealed(content: bytes) -> dict[str, Any]:
    """The object of such a text. Format 1, and what had no format then, has no checksum."""
    seal = re.match(rb'\{"seal": "([0-9a-f]{64})",', content)
    if seal and hashlib.sha256(content[seal.end() :]).hexdigest().encode() != seal[1]:
        raise Damaged("its checksum does not match")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Damaged("it holds no JSON object")
    if not seal and value.get("format", 1) != 1:
        raise Damaged("it has no checksum, or is of another version")
    value.pop("seal", None)
    return value


def digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of tensors and of what is said about them."""
    said = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(said + safetensors.torch.save(dict(tensors))).hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in a sentence why a file cannot be written."""
    try:
        yield
    except OSError as error:
        again = "give the command again, for a run with --resume."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unwritten(f"The disk is full: {path} could not be written. Free some space and {again}") from error
        reason = error.strerror or error
        raise Unwritten(
            f"{path} could not be written ({reason}). Mend that or choose another place, and {again}"
        ) from error


def _kind(stored: Any) -> tuple[str, list[int]]:
    """The type and shape of a tensor in a file."""
    return stored.get_dtype(), stored.get_shape()


def write(path: Path, content: bytes) -> None:
    """Writes a file so that it survives a crash of the machine."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            try:
                write(partial, content)
                os.replace(partial, path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process after the other: two commands may write the same table."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some disks on a network know no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(folder: Path) -> None:
    """Makes renames in a folder survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
