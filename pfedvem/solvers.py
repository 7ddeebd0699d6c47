"""Mini-batch SGD over a cohort of clients.

Every tensor has a leading client dimension. Clients with fewer samples get padded batches and stop earlier; a mask
keeps the padding out of every result. A cohort of one is an ordinary client and pays for none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from pfedvem import tree
from pfedvem.data.federation import ClientData
from pfedvem.rng import Stream

V = TypeVar("V")


@dataclass(frozen=True)
class Batch:
    """One step's data: ``x`` (C, B, ...), ``y`` (C, B).

    ``mask`` (C, B) is True where a sample is real and ``active`` (C,) where the client takes this step; both are None
    where they would be True everywhere.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    active: Tensor | None = None


def minibatches(data: ClientData, order: Stream, *, batch_size: int, epochs: int) -> Iterator[Batch]:
    """Shuffled mini-batches, all of a client's samples in every epoch; the last batch of an epoch may be short."""
    plans: list[list[NDArray[np.int64]]] = [[] for _ in data.sizes]
    for _ in range(epochs):
        for plan, permutation in zip(plans, order.permutations(data.sizes), strict=True):
            plan += np.split(permutation, range(batch_size, len(permutation), batch_size))
    rows = torch.arange(len(plans)).unsqueeze(1)
    for step in range(max(len(plan) for plan in plans)):
        parts = [plan[step] if step < len(plan) else plan[0][:0] for plan in plans]
        lengths = [len(part) for part in parts]
        width = max(lengths)
        if min(lengths) == width:
            index, mask, active = np.stack(parts), None, None
        else:
            index = np.zeros((len(parts), width), dtype=np.int64)
            for row, part in zip(index, parts, strict=True):
                row[: len(part)] = part
            mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
            active = None if min(lengths) > 0 else mask[:, 0]
        chosen = torch.from_numpy(index)
        yield Batch(data.x[rows, chosen], data.y[rows, chosen], mask, active)


def full_batches(x: Tensor, data: ClientData, *, steps: int) -> Iterator[Batch]:
    """All of a client's data in every step, as ``x`` (C, N, ...): the data's inputs, or features of them."""
    batch = Batch(x, data.y, data.mask)
    return iter([batch] * steps)


def nll(logits: Tensor, batch: Batch) -> Tensor:
    """The negative log-likelihood summed over the samples of a batch: logits (C, ..., B, classes) give (C, ...)."""
    extra = logits.ndim - 3
    y = batch.y.view(batch.y.shape[0], *[1] * extra, -1).expand(logits.shape[:-1])
    each = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    if batch.mask is not None:
        each = each * batch.mask.view(batch.mask.shape[0], *[1] * extra, -1)
    return each.sum(-1)


def count(batch: Batch) -> Tensor | int:
    """How many samples each client has in the batch, at least 1 so that it can be divided by."""
    return batch.y.shape[1] if batch.mask is None else batch.mask.sum(1).clamp(min=1)


def sgd(
    loss: Callable[[V, Batch], Tensor],
    start: V,
    batches: Iterable[Batch],
    *,
    lr: float,
    momentum: float = 0.0,
) -> V:
    """Plain SGD from ``start``: v <- momentum v + gradient, variable <- variable - lr v.

    Args:
        loss: gives the loss of each client (C,) for the current value of the variables and a batch.
        start: any tree of tensors with a leading client dimension; what is in it is trained, nothing else.
        batches: one step each.
    """
    values = [leaf.detach().clone() for leaf in tree.leaves(start)]
    trained = [value.requires_grad_() for value in values if value.is_floating_point()]
    variables = tree.rebuild(start, values)
    velocity: list[Tensor] | None = None
    for batch in batches:
        found = torch.autograd.grad(loss(variables, batch).sum(), trained, allow_unused=True)
        # Buffers (running statistics) are part of the tree but get no gradient: the forward pass changes them.
        pairs = [(value, grad) for value, grad in zip(trained, found, strict=True) if grad is not None]
        moved, gradient = [value.detach() for value, _ in pairs], [grad for _, grad in pairs]
        if momentum and velocity is not None:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, gradient)
        else:
            velocity = gradient
        if batch.active is None:
            torch._foreach_add_(moved, velocity, alpha=-lr)
        else:
            for value, v in zip(moved, velocity, strict=True):
                value.sub_(v * batch.active.view(-1, *[1] * (v.ndim - 1)), alpha=lr)
    return tree.map(lambda leaf: leaf.detach(), variables)
