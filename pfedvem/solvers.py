"""Mini-batch SGD over a cohort of clients.

Every tensor has a leading client dimension. Clients with fewer samples get padded batches and stop earlier: a mask
keeps the padding out of every result, and once the last clients of a cohort are done, steps go on without them. So a
cohort costs least with its largest clients first. A cohort of one is an ordinary client and pays for none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pfedvem import tree
from pfedvem.data.federation import ClientData
from pfedvem.rng import Stream

V = TypeVar("V")


@dataclass(frozen=True)
class Batch:
    """One step's data: ``x`` (A, B, ...), ``y`` (A, B), for the first A of the cohort's clients.

    ``mask`` (A, B) is True where a sample is real and ``active`` (A,) where the client takes this step; both are None
    where they would be True everywhere.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    active: Tensor | None = None

    @property
    def clients(self) -> int:
        """A: a loss that knows of each client's own values takes those of the first A."""
        return len(self.y)


def minibatches(data: ClientData, order: Stream, *, batch_size: int, epochs: int) -> Iterator[Batch]:
    """Shuffled mini-batches, all of a client's samples in every epoch; the last batch of an epoch may be short."""
    steps = [-(-n // batch_size) for n in data.sizes]
    width = min(batch_size, max(data.sizes))
    index = np.zeros((epochs * max(steps), len(steps), width), dtype=np.int64)
    counts = np.zeros(index.shape[:2], dtype=np.int64)
    for epoch in range(epochs):
        for c, permutation in enumerate(order.permutations(data.sizes)):
            for step in range(steps[c]):
                chosen = permutation[step * batch_size : (step + 1) * batch_size]
                at = epoch * steps[c] + step
                index[at, c, : len(chosen)], counts[at, c] = chosen, len(chosen)
    for rows, sizes in zip(index, counts, strict=True):
        clients = int(np.flatnonzero(sizes)[-1]) + 1
        yield as_batch(data.pick(rows[:clients, : sizes.max()], sizes[:clients]))


def random_batches(data: ClientData, choice: Stream, *, batch_size: int, steps: int) -> Iterator[Batch]:
    """For each step a fresh random batch, independent of the others: all of a client's samples if it has no more."""
    for _ in range(steps):
        yield as_batch(data.select([order[:batch_size] for order in choice.permutations(data.sizes)]))


def as_batch(data: ClientData) -> Batch:
    """All of the data as one batch; a client without samples takes no step."""
    mask = data.mask
    return Batch(data.x, data.y, mask, mask[:, 0] if mask is not None and min(data.sizes) == 0 else None)


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


def in_parts(batch: Batch, size: int) -> list[Batch]:
    """The samples of a batch, so many at a time, for the clients up to the last that has some of them.

    What a pass keeps for its gradient is then small enough for a processor's cache, and clients whose samples are
    through are left out of later parts.
    """
    if batch.y.shape[1] <= size:
        return [batch]
    parts = []
    for start in range(0, batch.y.shape[1], size):
        chosen = slice(start, start + size)
        mask = None if batch.mask is None else batch.mask[:, chosen]
        clients = batch.clients if mask is None else int(mask[:, 0].nonzero().max()) + 1
        # Copied once, in its order in memory: every pass would copy what lies apart.
        x = batch.x[:clients, chosen].clone()
        parts.append(Batch(x, batch.y[:clients, chosen], None if mask is None else mask[:clients]))
    return parts


def gradient(loss: Callable[[V, Batch], Tensor], at: V, batch: Batch) -> V:
    """The gradient of each client's loss, as a tree like ``at``."""
    leaves = [leaf.detach().requires_grad_() for leaf in tree.leaves(at)]
    found = torch.autograd.grad(loss(tree.rebuild(at, leaves), batch).sum(), leaves)
    return tree.rebuild(at, found)


def gradient_of_parts(loss: Callable[[V, Batch], Tensor], at: V, parts: Sequence[Batch]) -> V:
    """The gradient of each client's loss, a sum over the samples of all parts; later parts may be of fewer clients."""
    total = tree.map(torch.zeros_like, at)
    for part in parts:
        found = gradient(loss, tree.first(at, part.clients), part)
        for sums, leaf in zip(tree.leaves(total), tree.leaves(found), strict=True):
            sums[: part.clients] += leaf
    return total


class Rule(Protocol):
    """How a gradient becomes a step of the variables, in place. Clients that are ``idle`` (C,) stay where they are."""

    def __call__(self, variables: list[Tensor], gradient: list[Tensor], idle: Tensor | None) -> None: ...


class Momentum:
    """v <- momentum v + gradient; the step is lr v."""

    def __init__(self, lr: float, momentum: float = 0.0) -> None:
        self._lr, self._momentum = lr, momentum
        self._velocity: list[Tensor] = []

    def __call__(self, variables: list[Tensor], gradient: list[Tensor], idle: Tensor | None) -> None:
        first = not self._velocity
        if first and self._momentum:
            self._velocity = [torch.empty_like(g) for g in gradient]
        velocity = [v[: len(g)] for v, g in zip(self._velocity, gradient, strict=bool(self._momentum))]
        if idle is not None:
            _stop(idle, gradient if first else gradient + velocity)
        torch._fused_sgd_(
            variables,
            gradient,
            velocity,
            weight_decay=0.0,
            momentum=self._momentum,
            lr=self._lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=first,
        )


@dataclass(frozen=True)
class Moments(Generic[V]):
    """What Adam remembers of the gradient and of its square, each like the variables, and of how many steps (C,)."""

    first: V
    second: V
    steps: Tensor

    @staticmethod
    def zero(variables: V) -> Moments[V]:
        """Before the first step."""
        first, second = (tree.map(torch.zeros_like, variables) for _ in range(2))
        leaf = tree.leaves(variables)[0]
        return Moments(first, second, leaf.new_zeros(len(leaf)))


class Adam:
    """Kingma and Ba's Adam with its usual constants.

    Moments start where they are given, one for each variable and client, or else at zero.
    """

    def __init__(self, lr: float, moments: Moments[Any] | None = None) -> None:
        self._lr = lr
        self._like = moments
        self._first = [] if moments is None else [leaf.clone() for leaf in tree.leaves(moments.first)]
        self._second = [] if moments is None else [leaf.clone() for leaf in tree.leaves(moments.second)]
        self._steps = None if moments is None else moments.steps.clone()

    def __call__(self, variables: list[Tensor], gradient: list[Tensor], idle: Tensor | None) -> None:
        if self._steps is None:
            self._first, self._second = ([torch.zeros_like(g) for g in gradient] for _ in range(2))
            self._steps = gradient[0].new_zeros(len(gradient[0]))
        # Clients may have taken different numbers of steps, by which young moments are corrected: each goes for itself.
        moving = list(range(len(gradient[0]))) if idle is None else torch.nonzero(~idle)[:, 0].tolist()
        steps = self._steps.unbind()
        torch._foreach_add_([steps[c] for c in moving], 1)

        def rows(tensors: list[Tensor]) -> list[Tensor]:
            unbound = [tensor.unbind() for tensor in tensors]
            return [each[c] for each in unbound for c in moving]

        torch._fused_adam_(
            rows(variables),
            rows(gradient),
            rows(self._first),
            rows(self._second),
            [],
            [steps[c] for c in moving] * len(gradient),
            lr=self._lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    @property
    def moments(self) -> Moments[Any]:
        """Those after the last step, where some were given."""
        assert self._like is not None
        assert self._steps is not None
        first, second = tree.rebuild(self._like.first, self._first), tree.rebuild(self._like.second, self._second)
        return Moments(first, second, self._steps)


def _stop(idle: Tensor, tensors: Iterable[Tensor]) -> None:
    """Takes all movement from the rows of idle clients."""
    for tensor in tensors:
        tensor[idle] = 0


class Descent(Generic[V]):
    """Gradient steps from ``start``, any tree of tensors with a leading client dimension.

    What is in the tree is trained, nothing else. Buffers (running statistics) may be in it: they get no gradient, and
    the forward pass changes them.
    """

    def __init__(self, start: V, rule: Rule) -> None:
        self._variables = tree.map(lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format), start)
        self._rule = rule

    def step(self, loss: Callable[[V, Batch], Tensor], batch: Batch) -> None:
        """One step on the loss of each client (A,); clients that are not active in the batch stay where they are."""
        leaves = [leaf[: batch.clients] for leaf in tree.leaves(self._variables)]
        if not leaves:  # a network that is its head alone has no base to train
            return
        trained = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        total = loss(tree.rebuild(self._variables, leaves), batch).sum()
        if not total.requires_grad:  # of a base without weights, whose buffers the forward pass has changed
            return
        found = torch.autograd.grad(total, trained, allow_unused=True)
        pairs = [(leaf.detach(), grad) for leaf, grad in zip(trained, found, strict=True) if grad is not None]
        # Fused updates walk through memory in order, whatever a tensor's strides.
        gradient = [grad.contiguous() for _, grad in pairs]
        self._rule([leaf for leaf, _ in pairs], gradient, None if batch.active is None else ~batch.active)

    def follow(self, gradient: V, active: Tensor | None) -> None:
        """One step by a gradient that is known; clients that are not ``active`` (C,) stay where they are."""
        self._rule(tree.leaves(self._variables), tree.leaves(gradient), None if active is None else ~active)

    @property
    def value(self) -> V:
        """Where the variables are now; further steps change them."""
        return self._variables


def sgd(
    loss: Callable[[V, Batch], Tensor],
    start: V,
    batches: Iterable[Batch],
    *,
    lr: float,
    momentum: float = 0.0,
) -> V:
    """SGD from ``start``, one step a batch, on the loss of each client (C,)."""
    return descend(loss, start, batches, Momentum(lr, momentum))


def descend(loss: Callable[[V, Batch], Tensor], start: V, batches: Iterable[Batch], rule: Rule) -> V:
    """Steps by this rule from ``start``, one a batch, on the loss of each client (C,)."""
    descent = Descent(start, rule)
    for batch in batches:
        descent.step(loss, batch)
    return descent.value
