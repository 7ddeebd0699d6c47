"""What holds for every way to deal data to clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pfedvem.data import partitions
from pfedvem.data.partitions import Indices
from pfedvem.errors import UserError

seeds = st.integers(0, 2**32 - 1)
size_rules = st.sampled_from(["slices", "equal", "given"])
cut_rules = st.sampled_from(["shared", "independent"])


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def check_complete(parts: Sequence[Indices], samples: int) -> None:
    assert all(len(part) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


@given(seeds, st.integers(1, 12), st.integers(1, 40), st.integers(1, 12))
def test_dealing_never_gives_a_client_the_same_kind_twice_and_serves_all_kinds_evenly(
    seed: int, kinds: int, clients: int, each: int
) -> None:
    assume(each <= kinds <= clients * each)
    hands = partitions.deal(range(kinds), clients, each, generator(seed))
    assert all(len(set(hand)) == each for hand in hands)
    owners = Counter(kind for hand in hands for kind in hand)
    assert set(owners) == set(range(kinds))
    assert max(owners.values()) - min(owners.values()) <= 1


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(2, 8), st.integers(1, 20), st.integers(1, 8), size_rules, cut_rules, st.data())
def test_label_skew_deals_every_sample_once_to_a_client_that_owns_its_label(
    seed: int, kinds: int, clients: int, each: int, sizes: str, cuts: str, data: st.DataObject
) -> None:
    assume(each <= kinds <= clients * each)
    counts = data.draw(st.lists(st.integers(20, 60), min_size=kinds, max_size=kinds))
    y = np.repeat(np.arange(kinds), counts)
    rng = generator(seed)
    owned = partitions.deal_labels(y, clients, each, rng)
    rule = np.linspace(1, 3, clients).tolist() if sizes == "given" else sizes
    parts = partitions.cut(y, owned, rng, rule, cuts)  # type: ignore[arg-type]
    check_complete(parts, len(y))
    for hand, part in zip(owned, parts, strict=True):
        assert np.unique(y[part]).tolist() == hand


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 12))
def test_concept_drift_gives_every_client_so_many_subclasses_of_every_label(
    seed: int, kinds: int, subclasses: int, each: int, clients: int
) -> None:
    assume(each <= subclasses <= clients * each)
    types = np.tile(np.arange(kinds * subclasses), 15)
    y = types // subclasses
    rng = generator(seed)
    owned = partitions.deal_subclasses(y, types, clients, each, rng)
    for hand in owned:
        assert Counter(kind // subclasses for kind in hand) == dict.fromkeys(range(kinds), each)
    check_complete(partitions.cut(types, owned, rng), len(y))


def test_all_subclasses_for_every_client_is_the_homogeneous_case() -> None:
    types = np.tile(np.arange(10), 30)
    owned = partitions.deal_subclasses(types // 5, types, clients=7, each=5, rng=generator(0))
    assert owned == [list(range(10))] * 7


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(4, 25), st.integers(2, 5))
def test_feature_skew_gives_every_client_labels_of_one_domain_only(
    seed: int, domains: int, clients: int, each: int
) -> None:
    assume((clients // domains) * each >= 5)
    domain, y = (part.ravel() for part in np.meshgrid(np.arange(domains), np.tile(np.arange(5), 25)))
    types = y * domains + domain
    rng = generator(seed)
    owned = partitions.deal_domains(domain, types, clients, each, rng)
    assert all(len({kind % domains for kind in hand}) == 1 and len(hand) == each for hand in owned)
    check_complete(partitions.cut(types, owned, rng), len(y))


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 30), st.floats(1e-3, 100), size_rules)
def test_dirichlet_deals_every_sample_once_and_leaves_no_client_empty(
    seed: int, clients: int, alpha: float, sizes: str
) -> None:
    y = np.repeat(np.arange(5), [40, 5, 30, 1, 24])
    rule = np.linspace(1, 3, clients).tolist() if sizes == "given" else sizes
    parts = partitions.dirichlet(y, clients, alpha, generator(seed), rule)  # type: ignore[arg-type]
    check_complete(parts, len(y))


def test_a_large_alpha_gives_every_client_nearly_the_prior_and_a_small_one_nearly_one_label() -> None:
    y = np.tile(np.arange(4), 1000)

    def share_of_largest_label(alpha: float) -> float:
        parts = partitions.dirichlet(y, 10, alpha, generator(0), "equal")
        return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))

    assert share_of_largest_label(1e4) < 0.3
    assert share_of_largest_label(1e-2) > 0.7


@given(seeds, st.integers(1, 50))
def test_iid_deals_every_sample_once(seed: int, clients: int) -> None:
    check_complete(partitions.iid(50, clients, generator(seed)), 50)


@given(st.integers(1, 30), st.integers(0, 60))
def test_equal_sizes_differ_by_at_most_one_sample(clients: int, extra: int) -> None:
    sizes = [len(part) for part in partitions.iid(clients + extra, clients, generator(0), "equal")]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_given_sizes_are_met_to_within_the_sample_that_every_client_gets_first(weights: list[float]) -> None:
    n, m = 1000, len(weights)
    parts = partitions.iid(n, m, generator(0), weights)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(len(part) - (1 + (n - m) * weight / sum(weights))) <= 2


@given(seeds)
def test_shared_cuts_give_a_client_as_many_samples_of_each_of_its_labels(seed: int) -> None:
    y = np.tile(np.arange(10), 200)
    rng = generator(seed)
    parts = partitions.cut(y, partitions.deal_labels(y, 20, 5, rng), rng, cuts="shared")
    for part in parts:
        assert len(set(np.bincount(y[part], minlength=10)) - {0}) == 1


@given(seeds)
def test_shared_cuts_give_nearly_the_same_share_where_labels_differ_in_size(seed: int) -> None:
    y = np.repeat(np.arange(4), [1000, 2000, 3000, 4000])
    parts = partitions.cut(y, [range(4)] * 10, generator(seed), cuts="shared")
    for part in parts:
        shares = np.bincount(y[part]) / np.bincount(y)
        assert np.ptp(shares) < 0.015


def test_shared_cuts_spread_sizes_wider_than_independent_ones() -> None:
    """A client's size is L times one gap, or the sum of L gaps: over many seeds the variances differ by a factor L."""
    y = np.tile(np.arange(10), 300)

    def variance(cuts: partitions.Cuts) -> float:
        found = []
        for seed in range(60):
            rng = generator(seed)
            parts = partitions.cut(y, partitions.deal_labels(y, 40, 5, rng), rng, cuts=cuts)
            found.append(np.var([len(part) for part in parts]))
        return float(np.mean(found))

    assert variance("shared") / variance("independent") == pytest.approx(5, rel=0.4)


def test_random_slices_are_distributed_as_gaps_between_uniform_cut_points() -> None:
    """With M-1 cut points in N samples a part is longer than x with probability (1 - x/N)^(M-1)."""
    sizes = np.concatenate([[len(p) for p in partitions.iid(10_000, 20, generator(seed))] for seed in range(200)])
    for x in (100, 500, 1500):
        assert np.mean(sizes > x) == pytest.approx((1 - x / 10_000) ** 19, abs=0.03)


def test_the_paper_s_cifar_10_partition_has_the_published_spread_of_sizes() -> None:
    y = np.repeat(np.arange(10), 5000)
    rng = generator(0)
    sizes = sorted(len(part) for part in partitions.cut(y, partitions.deal_labels(y, 100, 5, rng), rng))
    assert sizes[0] < 50
    assert sizes[-1] > 1500


def test_the_same_seed_deals_the_same_and_another_seed_deals_otherwise() -> None:
    y = np.tile(np.arange(10), 50)

    def dealt(seed: int) -> list[list[int]]:
        rng = generator(seed)
        return [part.tolist() for part in partitions.cut(y, partitions.deal_labels(y, 20, 5, rng), rng)]

    assert dealt(1) == dealt(1)
    assert dealt(1) != dealt(2)


@given(seeds, st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0.01, 0.99))
def test_held_out_samples_cover_every_type_that_has_two_and_empty_none(
    seed: int, counts: list[int], fraction: float
) -> None:
    types = np.repeat(np.arange(len(counts)), counts)
    kept, held = partitions.hold_out(types, fraction, generator(seed))
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(types)))
    assert set(types[kept]) == set(types)
    assert set(types[held]) == {kind for kind, n in enumerate(counts) if n > 1}


@given(seeds)
def test_limited_data_are_random_samples_of_each_label_equally_many(seed: int) -> None:
    y = np.tile(np.arange(3), 100)
    some = partitions.some_of_each(y, 100, generator(seed))
    assert len(set(some)) == 100
    assert np.bincount(y[some]).tolist() == [34, 33, 33]
    assert np.array_equal(some, partitions.some_of_each(y, 100, generator(seed)))
    assert not np.array_equal(some, partitions.some_of_each(y, 100, generator(seed + 1)))
    assert np.array_equal(partitions.some_of_each(y, 300, generator(seed)), np.arange(300))


Y = np.tile(np.arange(5), 4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: partitions.deal_labels(Y, 4, 6, generator(0)), "cannot own 6 of the 5 labels; take 1 to 5"),
        (lambda: partitions.deal_labels(Y, 0, 2, generator(0)), "at least one client"),
        (lambda: partitions.deal_labels(Y, 2, 2, generator(0)), "take at least 3 clients"),
        (
            lambda: partitions.deal_subclasses(Y * 0, Y, 3, 1, generator(0), ["animals"]),
            "all 5 subclasses of animals; take at least 5 clients",
        ),
        (lambda: partitions.deal_domains(Y % 2, Y, 1, 1, generator(0)), "cannot own all 2 domains"),
        (lambda: partitions.deal_domains(Y * 0 + 3, Y, 2, 2, generator(0)), "of domain 3; take at least 3 clients"),
        (lambda: partitions.cut(Y, [range(5)] * 7, generator(0)), "Label 0 has 4 samples for 7 clients"),
        (lambda: partitions.iid(3, 4, generator(0)), "The training data has 3 samples for 4 clients"),
        (lambda: partitions.dirichlet(Y, 2, 0.0, generator(0)), "alpha must be positive"),
        (lambda: partitions.iid(20, 3, generator(0), [1.0, 2.0]), "2 numbers for 3 clients"),
        (lambda: partitions.iid(20, 2, generator(0), [1.0, 0.0]), "must be positive"),
        (lambda: partitions.choose_ids(Y, 6, generator(0)), "has 5 natural clients"),
        (lambda: partitions.some_of_each(Y, 30, generator(0)), "Label 0 has 4 samples, but 30 training samples need 6"),
        (lambda: partitions.some_of_each(Y, 4, generator(0)), "cannot cover all 5"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call()
