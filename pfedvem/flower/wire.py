"""What goes over the wire: trees of tensors as Flower's records, and the checks of what comes back.

A message carries ``Down`` as one ``ArrayRecord``. A reply carries the arrays of ``Up`` as one ``ArrayRecord`` and its
numbers (one of a client, such as n and tau) in the ``MetricRecord``. Where a method sends up what it got down,
trained, the arrays have the names of ``Down``: that is what Flower's privacy mods clip and add noise to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import AnyAlgorithm

FORMAT = 1  # of messages; a site and a server of different formats do not talk to each other
DOWN, GENERAL, UP, JOB, NUMBERS, SITE = "down", "general", "up", "job", "numbers", "site"

SCORES = ("accuracy", "nll", "ece", "brier")  # of a model, in the order of Scores
WEIGHTS = {"up.n", "up.tau"}  # numbers that methods weigh uploads by

LARGEST = 2**27  # samples of a client, and numbers of an input; what says more is no site

T = TypeVar("T")


class Malformed(Exception):
    """A message that cannot be used, and why."""


def record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record. A tree that is one bare tensor has the empty name, which Flower does not take."""
    return ArrayRecord({name or "value": Array(leaf.detach().numpy()) for name, leaf in tensors.items()})


def pack(value: Any) -> ArrayRecord:
    """A tree as a record."""
    return record(tree.named(value))


def unpack(arrays: ArrayRecord, like: T) -> T:
    """The tree of a record, which must have the names, shapes and types of ``like``."""
    return tree.rebuild(like, tensors(arrays, {name or "value": leaf for name, leaf in tree.named(like).items()}))


def tensors(arrays: ArrayRecord, expected: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a record, in the order of ``expected``."""
    if set(arrays) != set(expected):
        wrong = sorted(set(arrays) ^ set(expected))
        raise Malformed(f"its arrays are not those of this method and network ({wrong[0]!r})")
    found = []
    for name, like in expected.items():
        try:
            # A copy: what is read from the message's bytes cannot be written to.
            value = torch.from_numpy(np.array(arrays[name].numpy()))
        except Exception as error:  # whatever bytes somebody sends
            raise Malformed(f"its array {name!r} cannot be read ({type(error).__name__})") from error
        if value.shape != like.shape:
            raise Malformed(f"its array {name!r} has shape {tuple(value.shape)}, not {tuple(like.shape)}")
        if value.is_floating_point() != like.is_floating_point():
            raise Malformed(f"its array {name!r} is of type {value.dtype}, not {like.dtype}")
        found.append(value.to(like.dtype))
    return found


@dataclass(frozen=True)
class Layout:
    """How an upload of one client lies on the wire: ``like`` is one, for its structure."""

    like: Any
    names: tuple[str, ...]
    """For each leaf of the upload its name among the arrays or among the numbers."""
    numbers: tuple[bool, ...]
    """Whether a leaf is one number, (1,)."""

    @staticmethod
    def of(algorithm: AnyAlgorithm, down: Any, up: Any) -> Layout:
        own, sent = tree.named(up), tree.named(down)
        numbers = tuple(leaf.shape == (1,) for leaf in own.values())
        shapes = [leaf.shape[1:] for leaf, number in zip(own.values(), numbers, strict=True) if not number]
        trained = not algorithm.sends_changes and shapes == [leaf.shape for leaf in sent.values()]
        free = iter(sent)
        names = tuple(
            next(free) or "value" if trained and not number else f"up.{name}"
            for name, number in zip(own, numbers, strict=True)
        )
        return Layout(up, names, numbers)

    def write(self, up: Any) -> tuple[ArrayRecord, dict[str, float]]:
        """The arrays and the numbers of an upload."""
        rows = list(zip(self.names, self.numbers, tree.leaves(up), strict=True))
        arrays = {name: leaf[0] for name, number, leaf in rows if not number}
        return record(arrays), {name: float(leaf) for name, number, leaf in rows if number}

    def read(self, arrays: ArrayRecord, numbers: Mapping[str, Any]) -> Any:
        """The upload, with a client dimension; refused where it could spoil what it is merged into."""
        rows = list(zip(self.names, self.numbers, tree.leaves(self.like), strict=True))
        values = iter(tensors(arrays, {name: leaf[0] for name, number, leaf in rows if not number}))
        leaves = []
        for name, number, like in rows:
            if number:
                value = torch.tensor([finite(numbers, name)], dtype=torch.float64).to(like.dtype)
            else:
                value = next(values).unsqueeze(0)
            if not bool(value.isfinite().all()):
                raise Malformed(f"its {'number' if number else 'array'} {name!r} is not finite")
            if name in WEIGHTS and not bool(value > 0):  # what is above 0 as it was sent may be 0 as it is used
                raise Malformed(f"its number {name!r} is {numbers.get(name)!r}, not a weight above 0")
            leaves.append(value)
        return tree.rebuild(self.like, leaves)


def finite(numbers: Mapping[str, Any], name: str) -> float:
    """A finite number of an upload."""
    value = numbers.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Malformed(f"its number {name!r} is {value!r}, which is not finite")
    return float(value)


def whole(record: Mapping[str, Any], name: str, most: int = LARGEST) -> int:
    """A whole number that is said in a record, from 0 on."""
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise Malformed(f"its {name!r} is {value!r}, not a whole number that can be")
    return value


def shape(record: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The shape of inputs that is said in a record."""
    value = record.get(name)
    if not isinstance(value, list) or not all(isinstance(side, int) and side > 0 for side in value):
        raise Malformed(f"its {name!r} is {value!r}, not the shape of inputs")
    if math.prod(value) > LARGEST:
        raise Malformed(f"its {name!r} is {value!r}: inputs that are too large")
    return tuple(value)


def content(message: Message) -> RecordDict:
    """What a reply says, unless it says that it failed."""
    if message.has_error():
        # The reason may be a whole traceback; its last line is what went wrong.
        lines = (message.error.reason or "no reason was given").strip().splitlines()
        raise Malformed(f"it failed (code {message.error.code}): {lines[-1][:300]}")
    return message.content


def config(records: RecordDict, name: str) -> ConfigRecord:
    """The config record of this name."""
    if name not in records.config_records:
        raise Malformed(f"it has no record {name!r}")
    return records.config_records[name]


def numbers(records: RecordDict) -> MetricRecord:
    """The numbers of a reply."""
    if NUMBERS not in records.metric_records:
        raise Malformed(f"it has no record {NUMBERS!r}")
    return records.metric_records[NUMBERS]


def arrays(records: RecordDict, name: str) -> ArrayRecord:
    """The array record of this name."""
    if name not in records.array_records:
        raise Malformed(f"it has no record {name!r}")
    return records.array_records[name]


def check_format(record: Mapping[str, Any]) -> None:
    """Refuses what was written by another version's rules."""
    if record.get("format") != FORMAT:
        raise Malformed(f"it speaks format {record.get('format')!r} of our messages, not {FORMAT}: install one version")
