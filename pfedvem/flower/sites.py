"""What the server knows of its sites: who they are and what they report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.simulation.executors import Executor
from pfedvem.simulation.results import Result
from pfedvem.trained import Personal


@dataclass(frozen=True)
class Known:
    """A site that has said who it is."""

    node: int
    client: int
    name: str
    n: int
    shape: tuple[int, ...]


KNOWN = TypeAdapter(tuple[Known, ...])


def read_sites(path: Path, clients: int) -> dict[int, Known]:
    """The sites that an earlier server has met, by client; none where the file is missing or damaged."""
    try:
        sites = KNOWN.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {site.client: site for site in sites if 0 <= site.client < clients}


@dataclass(frozen=True)
class SiteStatus:
    """What there is to see of a site: its last complete round, its number tau (if it has one) and its faults."""

    name: str
    client: int
    n: int
    connected: bool
    replied: int
    tau: float | None
    faults: int
    last_fault: str


@dataclass(frozen=True)
class Status:
    """A running federation as others see it: the server's federation.json."""

    experiment: str
    method: str
    round: int
    rounds: int
    asked: int
    replies: int
    uploads: int
    pm: float | None
    gm: float | None
    sites: tuple[SiteStatus, ...]
    notes: tuple[str, ...]

    def dump(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


class Sites(Federation):
    """What the server knows of the sites' data: names and sizes. One that never answered has no size."""

    def __post_init__(self) -> None:
        """Nothing is refused: there is no data here."""


@dataclass(frozen=True)
class Deployed(Result):
    """A finished run whose clients are elsewhere: their numbers are known, what they keep is not."""

    def take_home(self, clients: Sequence[int], place: Executor | None = None) -> Iterator[Personal]:
        raise UserError("Personalised models are at the sites: what a client keeps never leaves it.")

    @property
    def _copies(self) -> list[float]:
        return [math.nan] * len(self.setup.federation)

    def _inspected(self) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = self.state.clients
        return seen
