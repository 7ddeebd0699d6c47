"""Hostile clients: what they may send, to try a method and its guard against."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import AnyAlgorithm
from pfedvem.data.federation import ClientData, Federation, Split
from pfedvem.errors import UserError
from pfedvem.models import Model
from pfedvem.rng import Rng

SCALE = 10.0  # how far a scaled update goes, and the bias of a constant head
WEIGHT = 1e12  # what is claimed by one that wants all the weight

Change = Callable[[AnyAlgorithm, Any, Any], dict[str, Tensor]]
"""From a method, what was sent down and honest uploads, to the leaves that a hostile upload has in their place."""


def _moved(times: float) -> Change:
    """An update of another length or direction."""

    def change(algorithm: AnyAlgorithm, down: Any, ups: Any) -> dict[str, Tensor]:
        before = algorithm.before(down, ups)
        honest = tree.named(ups)
        return {name: start + times * (honest[name] - start) for name, start in before.items()}

    return change


def _filled(value: float) -> Change:
    """Arrays of nothing but this."""

    def change(algorithm: AnyAlgorithm, down: Any, ups: Any) -> dict[str, Tensor]:
        leaves = tree.named(ups).items()
        return {name: torch.full_like(leaf, value) for name, leaf in leaves if leaf.is_floating_point()}

    return change


def _constant_head(algorithm: AnyAlgorithm, down: Any, ups: Any) -> dict[str, Tensor]:
    """A head that gives the first class to everything."""
    name = "mu" if algorithm.name == "pfedvem" else "params.w"
    leaves = tree.named(ups)
    if name not in leaves:
        raise UserError(f"{algorithm.title} sends no head that an attacker could make up; choose another attack.")
    head = torch.zeros_like(leaves[name])
    head[:, 0, -1] = SCALE
    return {name: head}


def _claimed(name: str) -> Change:
    """A claim to all the weight, by a number that uploads are weighed by."""

    def change(algorithm: AnyAlgorithm, down: Any, ups: Any) -> dict[str, Tensor]:
        leaves = tree.named(ups)
        return {key: torch.full_like(leaves[key], WEIGHT) for key in leaves.keys() & {name}}

    return change


ATTACKS: dict[str, Change] = {
    "sign": _moved(-1.0),
    "scale": _moved(SCALE),
    "head": _constant_head,
    "nan": _filled(torch.nan),
    "inf": _filled(torch.inf),
    "n": _claimed("n"),
    "tau": _claimed("tau"),
}


def hostile(algorithm: AnyAlgorithm, attack: str, clients: Collection[int]) -> AnyAlgorithm:
    """The same method, in which these clients train as all do and then send something else."""
    change, liars = ATTACKS[attack], frozenset(clients)
    honest: Any = type(algorithm)

    class Hostile(honest):  # type: ignore[misc]
        def contribute(
            self, model: Model, down: Any, client: Any, carry: Any, data: ClientData, rng: Rng
        ) -> tuple[Any, Any, Any]:
            ups, client, carry = super().contribute(model, down, client, carry, data, rng)
            lying = torch.tensor([j in liars for j in rng.clients], device=data.n.device)
            leaves = tree.named(ups)
            leaves |= change(self, down, ups)
            return tree.where(lying, tree.rebuild(ups, list(leaves.values())), ups), client, carry

    hidden: AnyAlgorithm = Hostile(**algorithm.model_dump())
    return hidden


def mislabelled(federation: Federation, clients: Collection[int]) -> Federation:
    """The same federation, in which the training labels of these clients are reversed: the last class is the first."""
    y = federation.train.y.clone()
    for j in clients:
        own = torch.as_tensor(federation.shards[j].train)
        y[own] = len(federation.classes) - 1 - y[own]
    return replace(federation, train=Split(federation.train.x, y))
