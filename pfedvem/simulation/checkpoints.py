"""Checkpoints: each is a folder written whole or not at all, with a checksum; the two newest are kept.

checkpoint/round-00012/state.safetensors    server, clients and scores
checkpoint/round-00012/manifest.json        format, round, checksum, history, and the identity of the run
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.simulation.rounds import State
from pfedvem.simulation.work import Scores

FORMAT = 1
KEPT = 2


@dataclass(frozen=True)
class _Tensors:
    server: Any
    clients: Any
    scores: Scores


class Damaged(Exception):
    """A checkpoint that cannot be read, and why."""


def save(folder: Path, state: State, identity: Mapping[str, Any]) -> None:
    """Adds a checkpoint of ``state`` and drops all but the two newest."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"round-{state.round:05d}"
    partial = folder / f".partial-{state.round:05d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tensors = tree.named(_Tensors(state.server, state.clients, state.scores))
    payload = safetensors.torch.save({name: leaf.contiguous() for name, leaf in tensors.items()})
    manifest = {
        "format": FORMAT,
        "round": state.round,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "seconds": state.seconds,
        "history": state.history,
        "identity": identity,
    }
    write(partial / "state.safetensors", payload)
    write(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
    shutil.rmtree(target, ignore_errors=True)
    os.rename(partial, target)
    sync(folder)
    for old in _found(folder)[KEPT:]:
        shutil.rmtree(old)


def load(folder: Path, like: State, identity: Mapping[str, Any]) -> tuple[State | None, list[str]]:
    """The newest readable checkpoint, and a warning for each damaged one that was passed over.

    ``like`` is a state of the same run, for its structure. There is nothing to go on from where the folder is empty;
    it is an error if checkpoints are there but none can be read, or if they belong to other settings.
    """
    warnings = []
    for path in _found(folder):
        try:
            manifest, tensors = _read(path)
        except Damaged as damage:
            warnings.append(f"the checkpoint {path.name} is damaged ({damage})")
            continue
        _refuse_other(manifest["identity"], identity, folder)
        return _restore(manifest, tensors, like), warnings
    strangers = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
    if warnings or strangers:
        reason = warnings[0] if warnings else f"{strangers[0]} is no checkpoint"
        raise UserError(f"No checkpoint in {folder} can be read ({reason}); start anew with another --out.")
    return None, []


def _found(folder: Path) -> list[Path]:
    """The checkpoints' folders, newest first."""
    return sorted(folder.glob("round-*"), reverse=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        payload = (path / "state.safetensors").read_bytes()
    except (OSError, ValueError) as error:
        raise Damaged(type(error).__name__) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged("it is not of this version's format")
    if hashlib.sha256(payload).hexdigest() != manifest.get("sha256"):
        raise Damaged("its checksum does not match")
    return manifest, safetensors.torch.load(payload)


def _refuse_other(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    differing = [
        f"{key} (was {saved.get(key)!r}, now {current.get(key)!r})"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
    if differing:
        raise UserError(f"{folder.parent} was run with other settings: {', '.join(differing)}.")


def _restore(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], like: State) -> State:
    template = _Tensors(like.server, like.clients, like.scores)
    value = tree.rebuild(template, [tensors[name] for name in tree.named(template)])
    history = tuple(manifest["history"])
    return State(manifest["round"], value.server, value.clients, value.scores, history, manifest["seconds"])


def write(path: Path, content: bytes) -> None:
    """Writes a file so that it survives a crash of the machine."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial, content)
    os.replace(partial, path)


def sync(folder: Path) -> None:
    """Makes renames in a folder survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
