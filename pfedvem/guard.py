"""The guard: what uploads must pass before they are merged.

It maps uploads to uploads, so that every method merges as it always does, in the simulator and on Flower alike. What
the bounds are worth, and against whom, is in docs/security.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import AnyAlgorithm
from pfedvem.errors import UserError

T = TypeVar("T")


class Guard(BaseModel):
    """How far the server trusts what it is sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bounds: bool = Field(default=True, description="leave out uploads that are not finite, and cap incredible weights")
    largest: float = Field(
        default=20.0, ge=1, description="how much more data a client may count for, in medians of all clients' sizes"
    )
    merge: Literal["mean", "median", "trimmed"] = Field(
        default="mean", description="the method's own means, or for each number the median or trimmed mean of uploads"
    )
    trim: float = Field(default=0.2, gt=0, lt=0.5, description="share of uploads that a trimmed mean drops at each end")
    clip: float | None = Field(
        default=None, gt=0, description="how far an upload may move, in medians of the round's uploads"
    )

    def check(self, algorithm: AnyAlgorithm) -> None:
        """Refuses what this method cannot do."""
        if self.merge != "mean" and not algorithm.merges_alike:
            raise UserError(
                f"{algorithm.title} does not merge all uploads into one, so there is no {self.merge} of them; "
                "take guard.clip instead."
            )


TRUST = Guard()  # where nothing else is asked for


@dataclass(frozen=True)
class Counts:
    """How often each client uploaded (C,), and how often that was left out, its weight capped or its change clipped."""

    uploads: Tensor
    left_out: Tensor
    capped: Tensor
    clipped: Tensor

    @staticmethod
    def none(clients: int) -> Counts:
        """Those before the first round."""
        return Counts(*torch.zeros(4, clients))

    def plus(self, clients: Sequence[int], found: Counts) -> Counts:
        """With those of one round, in which these clients uploaded."""
        index = torch.tensor(clients, dtype=torch.long)
        return tree.map(lambda all, new: all.index_add(0, index, new), self, found)

    def unsuspected(self, client: int) -> bool:
        """Whether nothing was ever done to this client's uploads."""
        return not any(count[client] for count in (self.left_out, self.capped, self.clipped))

    @property
    def diverged(self) -> bool:
        """Whether most clients have sent what had to be left out, which is no longer the fault of a few."""
        return 2 * int((self.left_out > 0).sum()) > int((self.uploads > 0).sum())

    def warnings(self) -> list[str]:
        """What a user should know, in a sentence for each kind."""
        said = {
            "left_out": "had uploads left out, which were not finite or weighed nothing",
            "capped": "claimed incredible weights, which were capped",
            "clipped": "had their changes clipped",
        }
        counts = {words: getattr(self, name) for name, words in said.items()}
        return [
            f"{int((count > 0).sum())} clients {words} ({int(count.sum())} times); clients.csv counts them."
            for words, count in counts.items()
            if bool(count.any())
        ]


@dataclass(frozen=True)
class Admitted:
    """The uploads that are merged, what was done to all that came (by their rows), and what to say of it."""

    ups: Any
    rows: list[int]
    counts: Counts
    notes: dict[int, str]


def admit(guard: Guard, algorithm: AnyAlgorithm, down: Any, ups: Any, typical: float) -> Admitted:
    """Judges the uploads of a round, of which ``typical`` is the median data size of all clients.

    Rows are left out where they are not finite or a weight is not above 0; weights are capped; then changes are
    clipped and numbers replaced by their median or trimmed mean, where that is wanted.
    """
    total = len(tree.leaves(ups)[0])
    counts, notes = replace(Counts.none(total), uploads=torch.ones(total)), dict[int, str]()
    rows = list(range(total))
    if guard.bounds:
        fine = _usable(algorithm, ups)
        rows = fine.nonzero()[:, 0].tolist()
        counts = replace(counts, left_out=(~fine).float())
        notes |= dict.fromkeys((~fine).nonzero()[:, 0].tolist(), "has overflowed and was left out")
        ups = ups if len(rows) == total else tree.take(ups, rows)
        if not rows:
            return Admitted(ups, rows, counts, notes)
        ups, capped = _capped(algorithm, down, ups, guard.largest * typical)
        notes |= {rows[row]: text for row, text in capped.items()}
        counts.capped[[rows[row] for row in capped]] = 1
    if guard.clip is not None:
        ups, clipped = _clipped(algorithm, down, ups, guard.clip)
        counts.clipped[[rows[row] for row in clipped]] = 1
        notes |= {rows[row]: "moved further than most and was clipped" for row in clipped if rows[row] not in notes}
    if guard.merge == "median":
        ups = _agreed(algorithm, ups, 0.5)
    elif guard.merge == "trimmed":
        ups = _agreed(algorithm, ups, guard.trim)
    return Admitted(ups, rows, counts, notes)


def _usable(algorithm: AnyAlgorithm, ups: Any) -> Tensor:
    """Which uploads can be merged at all, (C,)."""
    fine = tree.finite(ups)
    for name, leaf in tree.named(ups).items():
        if name in algorithm.claims:
            fine &= leaf > 0
    return fine


def _capped(algorithm: AnyAlgorithm, down: Any, ups: T, size: float) -> tuple[T, dict[int, str]]:
    """The uploads with weights that can be believed, and of whom what was not."""
    limits = {"n": torch.full((len(tree.leaves(ups)[0]),), size), **algorithm.bounds(down, ups)}
    notes: dict[int, str] = {}

    def cap(name: str, claimed: Tensor) -> Tensor:
        if name not in algorithm.claims or name not in limits:  # a claim that its method sets no bound to
            return claimed
        allowed = claimed.minimum(limits[name].to(claimed.dtype))
        for row in (allowed < claimed).nonzero()[:, 0].tolist():
            text = f"{name} = {float(claimed[row]):.4g} (counts as {float(allowed[row]):.4g})"
            notes[row] = f"{notes[row]}, {text}" if row in notes else f"claims {text}"
        return allowed

    named = tree.named(ups)
    return tree.rebuild(ups, [cap(name, leaf) for name, leaf in named.items()]), notes


def _clipped(algorithm: AnyAlgorithm, down: Any, ups: T, times: float) -> tuple[T, list[int]]:
    """The uploads with no part (base or head, say) moved more than so many times the median length, and who was."""
    before, leaves = algorithm.before(down, ups), tree.named(ups)
    parts: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        if name in before and leaf.is_floating_point():
            parts.setdefault(name.partition(".")[0], []).append(name)
    found: set[int] = set()
    for names in parts.values():
        moves = [leaves[name] - before[name] for name in names]
        lengths = torch.stack([move.flatten(1).square().sum(1, dtype=torch.float64) for move in moves]).sum(0).sqrt()
        factor = (times * lengths.median() / lengths).nan_to_num(1.0).clamp(max=1.0)
        found |= set((factor < 1).nonzero()[:, 0].tolist())
        for name, move in zip(names, moves, strict=True):
            scale = factor.view(-1, *[1] * (move.ndim - 1)).to(move.dtype)
            leaves[name] = torch.where(scale < 1, before[name] + scale * move, leaves[name])
    return tree.rebuild(ups, list(leaves.values())), sorted(found)


def _agreed(algorithm: AnyAlgorithm, ups: T, share: float) -> T:
    """The uploads with every array of all of them at its trimmed mean, which is then also their mean by any weights."""
    leaves = tree.named(ups).items()
    return tree.rebuild(
        ups, [leaf if name in algorithm.claims else trimmed(leaf, share).expand_as(leaf) for name, leaf in leaves]
    )


def trimmed(leaf: Tensor, share: float) -> Tensor:
    """For each number its mean without this share of rows at both ends; half of them leaves the median."""
    drop = min(int(share * len(leaf)), (len(leaf) - 1) // 2)
    mean = leaf.sort(0).values[drop : len(leaf) - drop].to(torch.float64).mean(0)
    return (mean if leaf.is_floating_point() else mean.round()).to(leaf.dtype)
