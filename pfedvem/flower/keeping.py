"""What a site keeps between rounds, in files of its own that never leave it.

FOLDER/EXPERIMENT/client-00003/round-00012.safetensors    what client 3 kept after 12 rounds

A file is written whole or not at all, readable by its owner only, with a checksum. The three newest are kept: a
server that was stopped goes on from one of its two newest checkpoints, and a round that is repeated must start from
what the site kept before it, not train twice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open

from pfedvem import tree
from pfedvem.errors import Damaged, UserError
from pfedvem.simulation.checkpoints import digest, sync, writing

FORMAT = 1
KEPT = 3


@dataclass(frozen=True)
class Keeping:
    """The place of one client's files in one experiment."""

    folder: Path
    experiment: str
    client: int
    method: str

    @property
    def place(self) -> Path:
        return self.folder / self.experiment / f"client-{self.client:05d}"

    @property
    def newest(self) -> int:
        """The newest round that there is a file of; 0 if there is none."""
        return max(self._rounds(), default=0)

    def save(self, round: int, client: Any) -> None:
        """Keeps the state after so many rounds; files of later rounds belong to a past that is being repeated."""
        tensors = {name or "value": leaf.contiguous() for name, leaf in tree.named(client).items()}
        about = self._about(round)
        payload = safetensors.torch.save(tensors, {**about, "sha256": digest(about, tensors)})
        target = self._path(round)
        partial = target.with_name(f".{target.name}.partial")
        with writing(target):
            self.place.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.unlink(missing_ok=True)  # one that was left behind has permissions of its own
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            sync(self.place)
        found = self._rounds()
        for old in [later for later in found if later > round] + [r for r in found if r <= round][:-KEPT]:
            self._path(old).unlink()

    def load(self, round: int, like: Any) -> tuple[Any | None, list[str]]:
        """What the client kept when this round began, and a warning for each file that cannot be read.

        A site that missed rounds goes on from what it had. ``like`` is a state of the same method and network.
        """
        warnings: list[str] = []
        for number in reversed([r for r in self._rounds() if r <= round]):
            try:
                return self._read(number, like), warnings
            except Damaged as damage:
                warnings.append(f"{self._path(number).name} cannot be used ({damage})")
        return None, warnings

    def _read(self, round: int, like: Any) -> Any:
        path = self._path(round)
        try:
            with safe_open(path, framework="pt") as file:
                about = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError) as error:
            raise Damaged(type(error).__name__) from error
        if about.get("format") != str(FORMAT):
            raise Damaged(f"it is of format {about.get('format')}, not {FORMAT}")
        if about.pop("sha256", None) != digest(about, tensors):
            raise Damaged("its checksum does not match")
        expected = {name or "value": leaf for name, leaf in tree.named(like).items()}
        kinds = [{name: (leaf.shape, leaf.dtype) for name, leaf in side.items()} for side in (tensors, expected)]
        if about != self._about(round) or kinds[0] != kinds[1]:
            raise UserError(
                f"{path} was kept by another client, method or network; give the experiment another name "
                f"(it was {about.get('method')}, now {self.method})."
            )
        return tree.rebuild(like, [tensors[name] for name in expected])

    def _about(self, round: int) -> dict[str, str]:
        """What a file says of itself."""
        values = {"format": FORMAT, "experiment": self.experiment, "client": self.client, "round": round}
        return {**{key: str(value) for key, value in values.items()}, "method": self.method}

    def _path(self, round: int) -> Path:
        return self.place / f"round-{round:05d}.safetensors"

    def _rounds(self) -> list[int]:
        """The rounds that there are files of, oldest first."""
        found = (path.stem.removeprefix("round-") for path in self.place.glob("round-*.safetensors"))
        return sorted(int(number) for number in found if number.isdecimal())
