"""Validation data: held out of the clients' training data, and nothing of the test data in it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pfedvem import Federation, UserError
from pfedvem.data.federation import Split
from tests.conftest import blobs


def test_each_client_holds_out_a_share_of_its_own_training_data_and_trains_on_the_rest() -> None:
    federation = blobs((7, 12, 1, 23, 40))
    held = federation.validation(0.2, seed=3)
    for before, after in zip(federation.shards, held.shards, strict=True):
        train, test = set(after.train.tolist()), set(after.test[0].tolist())
        assert not train & test
        assert train | test == set(before.train.tolist())
        assert len(test) == min(round(0.2 * before.n), before.n - 1)
        assert (after.id, after.owns) == (before.id, before.owns)
    assert held.sizes == (6, 10, 1, 18, 32)


def test_the_general_model_is_tested_on_all_that_is_held_out() -> None:
    held = blobs((7, 12, 1, 23)).validation()
    everything = np.concatenate([shard.test[0] for shard in held.shards])
    assert held.general_indices().tolist() == everything.tolist()
    assert len(everything) == 1 + 2 + 0 + 5


def test_samples_and_labels_that_are_held_out_are_those_of_the_training_data() -> None:
    federation = blobs((7, 12, 1, 23))
    held = federation.validation()
    index = held.test_indices(3)
    x, y = held.test_samples(index)
    assert torch.equal(x, federation.train.x[index])
    assert torch.equal(y, federation.train.y[index])


def test_nothing_of_the_test_data_is_left() -> None:
    federation = blobs((7, 12, 1, 23))
    garbage = Split(torch.full_like(federation.test.x, torch.nan), torch.full_like(federation.test.y, -1))
    spoilt = dataclasses.replace(federation, test=garbage, general=np.arange(3)).validation()
    clean = federation.validation()
    assert spoilt.fingerprint() == clean.fingerprint()
    assert spoilt.test is spoilt.train
    assert spoilt.general_indices().tolist() == clean.general_indices().tolist()
    assert not any(bool(part.isnan().any()) for part in spoilt.prepared if part is not None)


def test_the_split_is_a_function_of_the_seed() -> None:
    def held(seed: int) -> list[list[int]]:
        return [shard.test[0].tolist() for shard in blobs((30, 40)).validation(seed=seed).shards]

    assert held(1) == held(1)
    assert held(1) != held(2)


def test_a_client_keeps_a_sample_to_train_on_however_much_is_held_out() -> None:
    assert blobs((2, 1, 30)).validation(0.99).sizes == (1, 1, 1)


def test_clients_that_are_too_small_have_no_validation_data_and_are_counted() -> None:
    held = blobs((2, 1, 30)).validation(0.2)
    assert [len(held.test_indices(j)) for j in range(3)] == [0, 0, 6]
    assert held.notes == ("2 of 3 clients are too small to hold out validation data.",)


def test_a_split_that_is_shared_is_prepared_once(federation: Federation) -> None:
    train, test = federation.validation().prepared
    assert train is test


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_that_is_none_is_refused(share: float, federation: Federation) -> None:
    with pytest.raises(UserError, match="must be above 0 and below 1"):
        federation.validation(share)


def test_clients_that_are_all_too_small_are_refused() -> None:
    with pytest.raises(UserError, match=r"No client has enough training data to hold out a share of 0\.2"):
        blobs((1, 2, 2)).validation(0.2)
