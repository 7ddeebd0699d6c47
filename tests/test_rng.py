"""Randomness is a function of (seed, round, client, purpose) and of nothing else."""

from __future__ import annotations

import numpy as np
import torch

from pfedvem.rng import Rng, generator, uploaders


def test_a_client_draws_the_same_numbers_in_any_cohort() -> None:
    together = Rng(5, 2, [3, 1, 8]).stream("noise").normal(4, 2)
    for row, client in enumerate([3, 1, 8]):
        torch.testing.assert_close(Rng(5, 2, [client]).stream("noise").normal(4, 2)[0], together[row], atol=0, rtol=0)


def test_seed_round_client_and_purpose_each_change_the_numbers() -> None:
    def draw(seed: int, round: int, client: int, purpose: str) -> float:
        return float(generator(seed, purpose, round=round, client=client).random())

    base = (5, 2, 3, "noise")
    draws = {draw(*base), draw(6, *base[1:]), draw(5, 3, 3, "noise"), draw(5, 2, 4, "noise"), draw(5, 2, 3, "order")}
    assert len(draws) == 5
    assert draw(*base) == draw(*base)


def test_a_stream_goes_on_and_does_not_repeat() -> None:
    stream = Rng(0, 0, [0]).stream("noise")
    assert not torch.equal(stream.normal(3), stream.normal(3))


def test_drawing_in_parts_gives_the_numbers_of_drawing_at_once() -> None:
    parts, whole = Rng(0, 0, [0]).stream("noise"), Rng(0, 0, [0]).stream("noise")
    torch.testing.assert_close(torch.cat([parts.normal(4), parts.normal(2)], 1), whole.normal(6), atol=0, rtol=0)


def test_permutations_depend_on_the_clients_size_alone() -> None:
    a, b = Rng(1, 1, [4, 5]).stream("order").permutations([6, 9])
    (alone,) = Rng(1, 1, [5]).stream("order").permutations([9])
    assert sorted(a) == list(range(6))
    np.testing.assert_array_equal(b, alone)


def test_nothing_depends_on_global_generators() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    first = Rng(1, 1, [0]).stream("noise").normal(3), uploaders(0, 0, 50, 0.1)
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(first[0], Rng(1, 1, [0]).stream("noise").normal(3))
    assert first[1] == uploaders(0, 0, 50, 0.1)


def test_each_client_uploads_with_the_given_probability() -> None:
    counts = np.zeros(100)
    for round in range(2000):
        counts[uploaders(0, round, 100, 0.1)] += 1
    assert abs(counts.mean() / 2000 - 0.1) < 0.003
    assert np.abs(counts / 2000 - 0.1).max() < 0.035  # five standard errors


def test_at_least_two_clients_upload_even_where_that_is_rare() -> None:
    assert all(len(uploaders(0, round, 50, 0.1)) >= 2 for round in range(300))
    assert all(len(uploaders(0, round, 3, 1e-6)) == 2 for round in range(3))
    assert uploaders(0, 0, 1, 0.1) == [0]


def test_full_participation_means_everyone() -> None:
    assert uploaders(0, 0, 7, 1.0) == list(range(7))
