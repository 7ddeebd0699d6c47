"""Counter-based randomness: every random number is a function of (seed, round, client, purpose).

Nothing here has a running state that outlives a call, so results do not depend on the order of clients, the size of
cohorts, the number of workers or on interruptions, and a checkpoint saves no generator.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SERVER = 2**64 - 1  # the server's place among the clients
START = 2**64 - 1  # the round before the first


def generator(seed: int, purpose: str, *, round: int = START, client: int = SERVER) -> np.random.Generator:
    """The stream of this (seed, round, client, purpose); Philox counters keep all streams apart."""
    key = np.array([seed, zlib.crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([0, 0, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Stream:
    """One purpose's random numbers for a cohort: each client draws from a stream of its own."""

    def __init__(self, generators: Sequence[np.random.Generator], device: str = "cpu") -> None:
        self._generators, self._device = generators, device

    def normal(self, *shape: int, clients: int | None = None) -> Tensor:
        """Standard normal draws (C, *shape), float32, or those of the first so many clients only."""
        sources = self._generators[:clients]
        out = np.empty((len(sources), *shape), dtype=np.float32)
        for row, source in zip(out, sources, strict=True):
            source.standard_normal(dtype=np.float32, out=row)
        return torch.from_numpy(out).to(self._device)

    def uniform(self, *shape: int) -> Tensor:
        """Draws from [0, 1), (C, *shape), float32."""
        draws = np.stack([source.random(shape, dtype=np.float32) for source in self._generators])
        return torch.from_numpy(draws).to(self._device)

    def permutations(self, sizes: Sequence[int]) -> list[NDArray[np.int64]]:
        """For each client a random order of its samples."""
        return [source.permutation(n) for source, n in zip(self._generators, sizes, strict=True)]


class Rng:
    """The randomness of a cohort of clients in one round. Numbers are drawn on the CPU, so no device changes them."""

    def __init__(self, seed: int, round: int, clients: Sequence[int], device: str = "cpu") -> None:
        self.clients = tuple(clients)
        self._seed, self._round, self._device = seed, round, device

    def __len__(self) -> int:
        return len(self.clients)

    def take(self, rows: Sequence[int]) -> Rng:
        """The randomness of some of the clients: each has the numbers that it has among all."""
        return Rng(self._seed, self._round, [self.clients[row] for row in rows], self._device)

    def stream(self, purpose: str) -> Stream:
        """Starts the stream of a purpose; asking twice for the same purpose gives the same numbers."""
        streams = [generator(self._seed, purpose, round=self._round, client=j) for j in self.clients]
        return Stream(streams, self._device)


def uploaders(seed: int, round: int, clients: int, participation: float) -> list[int]:
    """Who uploads in this round: each client with probability ``participation``, at least two of them.

    Redrawn until there are two, as the paper's authors do; when that is hopelessly rare (a tiny federation), the two
    smallest draws of the last try are taken, which is the same rule given that exactly two upload.
    """
    rng = generator(seed, "participation", round=round)
    for _ in range(1000):
        draws = rng.random(clients)
        chosen = np.flatnonzero(draws < participation)
        if len(chosen) >= min(2, clients):
            return [int(j) for j in chosen]
    return sorted(int(j) for j in np.argsort(draws)[: min(2, clients)])
