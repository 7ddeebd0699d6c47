"""Trees of tensors: stacking, naming and averaging."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pfedvem import tree


@dataclass(frozen=True)
class Node:
    a: Tensor
    b: dict[str, Tensor]
    nothing: None = None


def node(start: float = 0.0) -> Node:
    return Node(torch.arange(3.0) + start, {"x.y": torch.arange(6.0).view(3, 2) + start})


def test_names_are_dotted_paths() -> None:
    assert list(tree.named(node())) == ["a", "b.x.y"]


def test_rebuilding_from_the_leaves_gives_the_tree_back() -> None:
    back = tree.rebuild(node(), tree.leaves(node()))
    assert isinstance(back, Node)
    assert back.nothing is None
    assert torch.equal(back.b["x.y"], node().b["x.y"])


def test_take_copies_and_put_replaces_only_the_named_rows() -> None:
    original = node()
    rows = tree.take(original, [2, 0])
    rows.a.add_(100)
    assert original.a.tolist() == [0, 1, 2]
    changed = tree.put(original, [2, 0], rows)
    assert changed.a.tolist() == [100, 1, 102]
    assert original.a.tolist() == [0, 1, 2]


def test_cat_joins_along_the_client_dimension() -> None:
    assert tree.cat([node(), node(10)]).a.tolist() == [0, 1, 2, 10, 11, 12]


def test_the_weighted_mean_weighs_and_rounds_counters() -> None:
    values = {"v": torch.tensor([[1.0], [2.0]]), "count": torch.tensor([10, 21])}
    mean = tree.weighted_mean(values, torch.tensor([1.0, 3.0]))
    assert mean["v"].tolist() == [1.75]
    assert mean["count"].item() == 18
    assert mean["count"].dtype == torch.int64


def test_the_weighted_mean_does_not_depend_on_the_order_of_clients() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        values, weights = torch.randn(50, 40, generator=random), torch.rand(50, generator=random)
        order = torch.randperm(50, generator=random)
        there, back = tree.weighted_mean(values, weights), tree.weighted_mean(values[order], weights[order])
        assert torch.equal(there, back)


def test_a_leaf_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="not list"):
        tree.leaves({"a": [1, 2]})
