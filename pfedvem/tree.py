"""Trees of tensors: frozen dataclasses and dicts whose leaves are tensors.

What a server keeps, what a client keeps and what goes over the wire are such trees, so stacking clients, saving a
checkpoint and sending a message are each one function for all methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MEAN_CLIENTS = 64  # so many clients' values are in memory in double precision at a time


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a node; None for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if dataclasses.is_dataclass(tree):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if tree is None:
        return []
    if isinstance(tree, Tensor):
        return None
    raise TypeError(f"A tree holds tensors, dicts, dataclasses and None, not {type(tree).__name__}.")


def _rebuild(like: Any, leaves: Iterator[Tensor]) -> Any:
    children = _children(like)
    if children is None:
        return next(leaves)
    values = {name: _rebuild(child, leaves) for name, child in children}
    if like is None:
        return None
    return values if isinstance(like, Mapping) else type(like)(**values)


def leaves(tree: Any) -> list[Tensor]:
    """All tensors, in a fixed order."""
    children = _children(tree)
    if children is None:
        return [tree]
    return [leaf for _, child in children for leaf in leaves(child)]


def rebuild(like: T, new: Sequence[Tensor]) -> T:
    """A tree of the same structure with these leaves."""
    tree: T = _rebuild(like, iter(new))
    return tree


def named(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """The leaves by their dotted names, as in ``theta.conv1.weight``."""
    children = _children(tree)
    if children is None:
        return {prefix: tree}
    return {
        name: leaf
        for key, child in children
        for name, leaf in named(child, f"{prefix}.{key}" if prefix else key).items()
    }


def map(fn: Callable[..., Tensor], *trees: T) -> T:
    """Applies ``fn`` to the leaves that stand at the same place."""
    columns = [leaves(tree) for tree in trees]
    return rebuild(trees[0], [fn(*row) for row in zip(*columns, strict=True)])


def cat(trees: Sequence[T]) -> T:
    """Joins cohorts along the client dimension."""
    return map(lambda *parts: torch.cat(parts), *trees)


def take(tree: T, clients: Sequence[int]) -> T:
    """The rows of these clients, copied."""

    def rows(leaf: Tensor) -> Tensor:
        return leaf[torch.tensor(clients, dtype=torch.long, device=leaf.device)]

    return map(rows, tree)


def first(tree: T, clients: int) -> T:
    """The rows of the first so many clients (a view, not a copy)."""
    return map(lambda leaf: leaf[:clients], tree)


def put(tree: T, clients: Sequence[int], rows: T) -> T:
    """A copy of ``tree`` in which these clients' rows are replaced."""

    def replaced(leaf: Tensor, new: Tensor) -> Tensor:
        return leaf.index_copy(0, torch.tensor(clients, dtype=torch.long, device=leaf.device), new)

    return map(replaced, tree, rows)


def write(tree: T, clients: Sequence[int], rows: T) -> None:
    """Replaces these clients' rows in place."""
    index = torch.tensor(clients, dtype=torch.long)
    for leaf, new in zip(leaves(tree), leaves(rows), strict=True):
        leaf.index_copy_(0, index, new)


def size(tree: Any) -> int:
    """The bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def where(condition: Tensor, a: T, b: T) -> T:
    """For each client the rows of ``a`` where the condition (C,) holds, else those of ``b``."""
    return map(lambda x, y: x.where(condition.view(-1, *[1] * (x.ndim - 1)), y), a, b)


def finite(tree: Any) -> Tensor:
    """Which clients have only finite numbers, (C,); all of none where there are no leaves."""
    found = [_finite_rows(leaf) for leaf in leaves(tree)]
    return torch.stack(found).all(0) if found else torch.ones(0, dtype=torch.bool)


def _finite_rows(leaf: Tensor) -> Tensor:
    """A row whose sum is finite has only finite numbers; the others are looked at in full."""
    rows = leaf.unsqueeze(1).flatten(1)
    found = rows.sum(1).isfinite()
    found[~found] = rows[~found].isfinite().all(1)
    return found


def expand(tree: T, clients: int) -> T:
    """The same value for each of so many clients: every leaf gets a leading client dimension (a view, not a copy)."""
    return map(lambda leaf: leaf.expand(clients, *leaf.shape), tree)


def to(tree: T, device: str) -> T:
    """The same values on a device; those that are there already are not copied."""
    return map(lambda leaf: leaf.to(device), tree)


def add(a: T, b: T, scale: float = 1.0) -> T:
    """a + scale b."""
    return map(lambda x, y: x + scale * y, a, b)


def towards(a: T, b: T, share: float) -> T:
    """From ``a`` this share of the way to ``b``, which 1 reaches exactly; whole numbers (counters) are those of b."""
    return b if share == 1 else map(lambda x, y: torch.lerp(x, y, share) if x.is_floating_point() else y, a, b)


def squared_distance(a: T, b: T) -> Tensor:
    """|a_j - b|^2 over all leaves, (C,); ``b`` may lack the client dimension."""
    pairs = zip(leaves(a), leaves(b), strict=True)
    return torch.stack([(x - y).square().flatten(1).sum(1) for x, y in pairs]).sum(0)


def weighted_mean(tree: T, weights: Tensor) -> T:
    """The mean over the client dimension by ``weights`` (C,); whole-number leaves (counters) are rounded."""
    # In double precision from the start, so that the order of the clients shows in no digit that is kept.
    exact = weights.to(torch.float64)
    shares = (exact / exact.sum()).split(MEAN_CLIENTS)

    def mean(leaf: Tensor) -> Tensor:
        parts = zip(shares, leaf.split(MEAN_CLIENTS), strict=True)
        value: Tensor = sum(torch.tensordot(share, part.to(torch.float64), dims=1) for share, part in parts)
        return (value if leaf.is_floating_point() else value.round()).to(leaf.dtype)

    return map(mean, tree)
