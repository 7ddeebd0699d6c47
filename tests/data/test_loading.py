"""From arrays to a federation: who is tested on what, natural clients, and arrays of the user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfedvem.data import DataSettings, Federation, from_arrays, load_federation
from pfedvem.data.settings import Partition
from pfedvem.errors import UserError
from tests.data.conftest import Writer, labels

X = np.arange(120, dtype=np.float32)[:, None]
Y = np.tile(np.arange(4), 30)


def natural(ids: list[int], clients: int, seed: int = 0, **values: Any) -> Federation:
    n = len(ids)
    return from_arrays(X[:n], Y[:n], clients=clients, partition="natural", group=ids, seed=seed, **values)


def test_the_federation_of_one_client_alone_has_its_data_and_no_others() -> None:
    federation = from_arrays(X, Y, X, Y, clients=6, labels_per_client=2)
    for j, shard in enumerate(federation.shards):
        alone = federation.only(j)
        assert (len(alone), alone.shards[0].id, alone.shards[0].owns) == (1, shard.id, shard.owns)
        assert torch.equal(alone.train.x, federation.train.x[shard.train])
        assert torch.equal(alone.test.y, federation.test.y[federation.test_indices(j)])
        assert torch.equal(alone.cohort([0]).x, federation.cohort([j]).x)
        assert len(alone.general_indices()) == len(alone.test_indices(0)) == len(alone.test)
    with pytest.raises(UserError, match="There is no client 6; there are 6, from 0"):
        federation.only(6)


def test_a_client_is_tested_on_all_test_data_of_the_labels_that_it_owns() -> None:
    federation = from_arrays(X, Y, X, Y, clients=6, labels_per_client=2)
    for j, shard in enumerate(federation.shards):
        owned = {int(name) for name in shard.owns}
        assert set(Y[shard.train]) == owned
        assert sorted(federation.test_indices(j).tolist()) == np.flatnonzero(np.isin(Y, list(owned))).tolist()


def test_clients_share_the_memory_of_their_test_indices() -> None:
    federation = from_arrays(X, Y, X, Y, clients=6, labels_per_client=4)
    assert len({id(part) for shard in federation.shards for part in shard.test}) == 4


@pytest.mark.parametrize("partition", ["labels", "dirichlet", "iid"])
def test_the_federation_depends_on_the_seed_and_on_nothing_else(partition: Partition) -> None:
    def fingerprint(seed: int) -> str:
        np.random.seed(len(str(seed)))  # the global state must not matter
        return from_arrays(X, Y, X, Y, clients=5, partition=partition, labels_per_client=2, seed=seed).fingerprint()

    assert fingerprint(3) == fingerprint(3)
    assert fingerprint(3) != fingerprint(4)


def test_a_fingerprint_says_who_owns_what() -> None:
    x, y = torch.from_numpy(X[:20]), torch.from_numpy(Y[:20])

    def cut(train: int, test: int) -> Federation:
        return Federation.from_clients(
            [(x[:train], y[:train], x[:test], y[:test]), (x[train:], y[train:], x[test:], y[test:])]
        )

    one = cut(5, 10)
    swapped = replace(one.shards[0], test=one.shards[1].test), replace(one.shards[1], test=one.shards[0].test)
    others = [
        cut(15, 10),
        cut(5, 6),
        replace(one, shards=swapped),
        replace(one, shards=(replace(one.shards[0], id="other"), one.shards[1])),
        replace(one, general=np.arange(3)),
    ]
    assert len({federation.fingerprint() for federation in (one, *others)}) == 6
    assert cut(5, 10).fingerprint() == replace(one, general=np.arange(20)).fingerprint() == one.fingerprint()


def test_the_sizes_rule_does_not_change_who_owns_what() -> None:
    owns = [
        [s.owns for s in from_arrays(X, Y, X, Y, clients=6, labels_per_client=2, sizes=sizes).shards]
        for sizes in ("slices", "equal")
    ]
    assert owns[0] == owns[1]


def test_limited_training_data_leaves_the_test_data_whole() -> None:
    first, second = (from_arrays(X, Y, X, Y, clients=3, partition="iid", train_samples=20, seed=s) for s in (0, 1))
    assert len(first.train) == 20
    assert not torch.equal(first.train.x, second.train.x)  # the seed chooses them
    assert len(first.test) == 120


def test_natural_clients_hold_out_some_of_their_own_data() -> None:
    ids = [i // 10 for i in range(120)]
    federation = natural(ids, clients=12, holdout=0.3)
    assert federation.sizes == (7,) * 12
    for j, shard in enumerate(federation.shards):
        train, test = federation.train.x[torch.from_numpy(shard.train)], federation.test.x[federation.test_indices(j)]
        assert sorted(torch.cat([train, test]).flatten().tolist()) == list(
            range(10 * int(shard.id), 10 * int(shard.id) + 10)
        )
    assert federation.general is None


def test_fewer_clients_than_ids_are_a_random_choice_of_them() -> None:
    ids = [i // 10 for i in range(120)]
    chosen = [[shard.id for shard in natural(ids, 5, seed).shards] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 5


def test_a_natural_client_with_one_sample_trains_on_it_and_is_not_tested() -> None:
    federation = natural([0, 1, 1, 1, 1, 1], clients=2)
    assert federation.sizes[0] == 1
    assert len(federation.test_indices(0)) == 0
    assert "1 of 2 clients have no test data" in federation.notes[-1]


def test_the_general_model_of_natural_clients_is_tested_on_the_test_split() -> None:
    federation = from_arrays(
        X[:20], Y[:20], X[100:], Y[100:], clients=2, partition="natural", group=["a"] * 10 + ["b"] * 10
    )
    assert federation.general is not None
    assert federation.test.x[torch.from_numpy(federation.general)].flatten().tolist() == list(range(100, 120))
    held = [federation.test.x[federation.test_indices(j)].flatten() for j in range(2)]
    assert [len(part) for part in held] == [2, 2]
    assert max(held[0]) < 10 <= min(held[1])


def test_a_natural_client_with_samples_in_the_test_split_is_tested_on_those() -> None:
    federation = from_arrays(
        X[:20], Y[:20], X[100:104], Y[100:104], clients=2, partition="natural",
        group=[0] * 10 + [1] * 10, group_test=[1, 1, 5, 5],
    )  # fmt: skip
    assert federation.sizes == (8, 10)
    assert federation.test.x[federation.test_indices(1)].flatten().tolist() == [100, 101]


def test_natural_clients_are_read_from_a_column(write_split: Writer, root: Path) -> None:
    for split in ("train", "test"):
        write_split("ylecun/mnist", split, {"label": labels(6, 10), "writer": [i // 6 for i in range(60)]})
    federation = load_federation(DataSettings(dataset="mnist-writers", root=root, clients=4), 0)
    assert len(federation) == 4
    assert federation.mean == (0.1307,)


def test_more_natural_clients_than_ids_are_refused() -> None:
    with pytest.raises(UserError, match="has 2 natural clients"):
        natural([0, 0, 1, 1], clients=3)


def test_images_of_the_user_are_normalised_and_numbers_are_left_alone() -> None:
    images = np.arange(120 * 4, dtype=np.int64).reshape(120, 2, 2).astype(np.uint8)
    federation = from_arrays(images, Y, clients=2, partition="iid")
    assert federation.shape == (1, 2, 2)
    assert abs(float(federation.inputs(federation.train.x).mean())) < 1e-4
    assert torch.equal(from_arrays(X, Y, X, Y, clients=2, partition="iid").train.x, torch.from_numpy(X))


def test_labels_of_the_user_may_be_words() -> None:
    words = np.array(["cat", "ant", "bee", "dog"])[Y]
    federation = from_arrays(X, words, X, words, clients=2, partition="iid")
    assert federation.classes == ("ant", "bee", "cat", "dog")
    assert [federation.classes[label] for label in federation.test.y.tolist()] == words.tolist()


NAN = np.where(X == 7, np.nan, X)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"y": Y + 0.7}, "The training data has labels that are no whole numbers"),
        ({"x_test": X, "y_test": Y + 0.7}, "The test data has labels that are no whole numbers"),
        ({"y": np.where(Y, Y, np.nan)}, "The training data: 30 of the labels are missing"),
        ({"y": Y + 2_000_000}, "The label 2000003 is no number of a class"),
        ({"x": NAN}, "The training data: 1 of the values are missing or infinite"),
        ({"x_test": NAN, "y_test": Y}, "The test data: 1 of the values are missing or infinite"),
        ({"x_test": X}, r"The test data has 120 inputs but labels of shape \(\)"),
        ({"x_test": X.repeat(2, 1), "y_test": Y}, r"The test data has inputs of shape \(2,\) .* where others have"),
        ({"x": np.zeros((120, 8, 8, 3), dtype=np.uint8)}, r"use x.transpose\(0, 3, 1, 2\)"),
        ({"x": X[:0], "y": Y[:0]}, "no samples"),
        ({"classes": ["1", "2", "3", "4"]}, "has the label '0', which is not among 1, 2, 3, 4"),
        ({"y": Y[:5]}, "one label"),
        ({"y": Y - 1}, "from 0"),
        ({"classes": ["only one"]}, "from 0 to 0"),
        ({"partition": "natural"}, "needs each sample's"),
        ({"partition": "subclasses", "group": Y, "x_test": X, "y_test": Y}, "group_test"),
        ({"partition": "natural", "group": Y[:7]}, "one group"),
        ({"partition": "natural", "group": [None] + ["a"] * 119}, "The data: 1 of the groups are missing"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(values: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"x": X, "y": Y, "clients": 2, "labels_per_client": 2} | values
    with pytest.raises(UserError, match=sentence):
        from_arrays(**arguments)
