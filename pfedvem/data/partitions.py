"""Who owns which samples: pure functions from labels and a generator to one index list for each client.

Two questions are kept apart. *Who owns which types?* A type is a label, a subclass or a label within a domain; types
are dealt to clients like cards. *How is a type cut among its owners?* By a size rule, which gives every owner a weight.
Every sample is dealt exactly once and no client is left empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pfedvem.errors import UserError

Indices = NDArray[np.int64]
Sizes = Literal["slices", "equal"] | Sequence[float]
Cuts = Literal["shared", "independent"]
Describe = Callable[[int], str]
LARGEST = 1e100  # of the weights by which data is cut: their sums and products must be numbers


def _name(kind: int) -> str:
    return f"Label {kind}"


def positions(types: Indices) -> dict[int, Indices]:
    """For each type, in order, where its samples are."""
    if len(types) == 0:
        return {}
    kinds, counts = np.unique(types, return_counts=True)
    order = np.argsort(types, kind="stable").astype(np.int64)
    return dict(zip(kinds.tolist(), np.split(order, np.cumsum(counts)[:-1]), strict=True))


def deal(kinds: Sequence[int], clients: int, each: int, rng: np.random.Generator) -> list[list[int]]:
    """Deals ``each`` kinds to every client from a shuffled deck that is refilled when it is empty.

    A client that is served from two decks skips what it already holds, so no client gets a kind twice, nothing has to
    divide anything, and any two kinds differ by at most one in how many clients own them.
    """
    deck: list[int] = []
    hands: list[list[int]] = []
    for _ in range(clients):
        hand: list[int] = []
        while len(hand) < each:
            if not deck:
                deck = [int(kind) for kind in rng.permutation(np.asarray(kinds, dtype=np.int64))]
            hand.append(deck.pop(next(i for i, kind in enumerate(deck) if kind not in hand)))
        hands.append(sorted(hand))
    return hands


def deal_labels(labels: Indices, clients: int, each: int, rng: np.random.Generator) -> list[list[int]]:
    """Label skew: every client owns ``each`` of the labels. Returns the labels of each client."""
    kinds = np.unique(labels)
    _check_clients(clients, len(labels))
    _check_each(each, len(kinds), clients, "labels", "")
    return deal(kinds.tolist(), clients, each, rng)


def deal_subclasses(
    labels: Indices, types: Indices, clients: int, each: int, rng: np.random.Generator, names: Sequence[str] = ()
) -> list[list[int]]:
    """Concept drift: every client owns ``each`` of the types of every label. Returns the types of each client."""
    _check_clients(clients, len(labels))
    hands: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        kinds = np.unique(types[labels == label])
        _check_each(each, len(kinds), clients, "subclasses", f" of {names[label] if names else label}")
        for hand, dealt in zip(hands, deal(kinds.tolist(), clients, each, rng), strict=True):
            hand.extend(dealt)
    return hands


def deal_domains(
    domains: Indices, types: Indices, clients: int, each: int, rng: np.random.Generator, names: Sequence[str] = ()
) -> list[list[int]]:
    """Feature skew: every client gets one domain and ``each`` of that domain's types. Returns the types of each."""
    _check_clients(clients, len(domains))
    kinds = np.unique(domains)
    if clients < len(kinds):
        raise UserError(f"{clients} clients cannot own all {len(kinds)} domains; take at least {len(kinds)} clients.")
    home = np.array([hand[0] for hand in deal(kinds.tolist(), clients, 1, rng)])
    hands: list[list[int]] = [[] for _ in range(clients)]
    for domain in kinds:
        members = np.flatnonzero(home == domain)
        inside = np.unique(types[domains == domain])
        where = f" of domain {names[domain] if names else domain}"
        _check_each(each, len(inside), len(members), "labels", where, len(kinds))
        dealt = deal(inside.tolist(), len(members), each, rng)
        for j, hand in zip(members, dealt, strict=True):
            hands[j] = hand
    return hands


def cut(
    types: Indices,
    owned: Sequence[Sequence[int]],
    rng: np.random.Generator,
    sizes: Sizes = "slices",
    cuts: Cuts = "shared",
    describe: Describe = _name,
) -> list[Indices]:
    """Shuffles the samples of each type and cuts them among the clients that own it. Returns each client's samples.

    Random slicing cuts at points drawn uniformly at random. The gaps between such points are distributed as
    exponential draws divided by their sum, so the m-th owner of a type has an exponential weight. With shared cuts it
    is one weight for all types: types of equal size and number of owners are then cut at the same points, and types
    that differ are cut at nearly the same fractions.
    """
    _check_clients(len(owned), len(types))
    given = None if isinstance(sizes, str) else _check_given(sizes, len(owned))
    gaps = rng.standard_exponential(len(owned))
    owners_of: dict[int, list[int]] = {}
    for j, hand in enumerate(owned):
        for kind in hand:
            owners_of.setdefault(kind, []).append(j)
    parts: list[list[Indices]] = [[] for _ in owned]
    for kind, samples in positions(types).items():
        owners = owners_of[kind]
        if len(owners) > len(samples):
            raise UserError(
                f"{describe(kind)} has {len(samples)} samples for {len(owners)} clients that own it; "
                "take fewer clients, fewer labels for each, or more training samples."
            )
        if given is not None:
            weights = given[owners]
        elif sizes == "equal":
            weights = np.ones(len(owners))
        elif cuts == "shared":
            weights = gaps[: len(owners)]
        else:
            weights = rng.standard_exponential(len(owners))
        for j, part in zip(owners, _slices(rng.permutation(samples), weights), strict=True):
            parts[j].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def iid(samples: int, clients: int, rng: np.random.Generator, sizes: Sizes = "slices") -> list[Indices]:
    """Every client draws from the same distribution: all samples are shuffled and cut once."""
    _check_clients(clients, samples)
    one = np.zeros(samples, dtype=np.int64)
    return cut(one, [[0]] * clients, rng, sizes, describe=lambda _: "The training data")


def dirichlet(
    labels: Indices, clients: int, alpha: float, rng: np.random.Generator, sizes: Sizes = "slices"
) -> list[Indices]:
    """Every client draws its mix of labels from Dir(alpha * prior) (Hsu, Qi and Brown, arXiv:1909.06335).

    A client's size comes from the size rule; it is filled without replacement, and where a label has run out, from the
    client's other labels, so that all data is dealt.
    """
    if alpha <= 0:
        raise UserError(f"alpha must be positive, not {alpha}; small values make the clients' labels differ more.")
    wanted = [len(part) for part in iid(len(labels), clients, rng, sizes)]
    _, left = np.unique(labels, return_counts=True)
    prior = left / left.sum()
    piles = [rng.permutation(pile) for pile in positions(labels).values()]
    parts = []
    for size in wanted:
        mix = rng.dirichlet(alpha * prior)
        part = []
        while size:
            weights = np.where(left > 0, mix, 0.0)
            # A very small alpha puts all of the mix on few labels; when these have run out, whatever is left is taken.
            weights = weights if weights.sum() > 1e-12 else left.astype(float)
            take = np.minimum(rng.multinomial(size, weights / weights.sum()), left)
            part += [pile[rest - n : rest] for pile, rest, n in zip(piles, left, take, strict=True)]
            left = left - take
            size -= int(take.sum())
        parts.append(np.sort(np.concatenate(part)))
    return parts


def choose_ids(ids: Indices, clients: int, rng: np.random.Generator) -> Indices:
    """Natural clients: the ids that take part, all of them or a random choice, in order."""
    _check_clients(clients, clients)
    known = np.unique(ids)
    if clients > len(known):
        raise UserError(f"The data has {len(known)} natural clients, so it cannot make {clients}; take fewer clients.")
    return np.sort(rng.choice(known, clients, replace=False))


def hold_out(types: Indices, fraction: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Splits the samples of each type into (kept, held out), as near to ``fraction`` as whole samples allow.

    A type never loses its last sample, so with one sample it holds out nothing; with more it holds out at least one.
    """
    held = []
    for samples in positions(types).values():
        n = min(max(1, round(fraction * len(samples))), len(samples) - 1)
        held.append(rng.permutation(samples)[:n])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(types)), out), out


def some_of_each(types: Indices, total: int, rng: np.random.Generator, describe: Describe = _name) -> Indices:
    """Random samples of each type, the same number of each (give or take one), ``total`` together."""
    where = positions(types)
    if total < len(where):
        raise UserError(f"{total} training samples cannot cover all {len(where)} labels or subclasses; take more.")
    chosen = []
    for i, (kind, samples) in enumerate(where.items()):
        n = total // len(where) + (i < total % len(where))
        if n > len(samples):
            raise UserError(
                f"{describe(kind)} has {len(samples)} samples, but {total} training samples need {n} of it; take fewer."
            )
        chosen.append(rng.choice(samples, n, replace=False))
    return np.sort(np.concatenate(chosen))


def _slices(samples: Indices, weights: NDArray[np.float64]) -> list[Indices]:
    """Cuts the samples into one part for each weight, in proportion to it but never empty."""
    n, m = len(samples), len(weights)
    ends = np.cumsum(weights)
    # Every part first gets one sample, which keeps the cut points apart; the weights place what is left.
    points = np.arange(1, m) + np.minimum(np.floor(ends[:-1] * (n - m + 1) / ends[-1]), n - m).astype(np.int64)
    return np.split(samples, points)


def _check_clients(clients: int, samples: int) -> None:
    if clients < 1:
        raise UserError(f"A federation needs at least one client, not {clients}.")
    if clients > samples:
        raise UserError(f"The training data has {samples} samples for {clients} clients; take fewer clients.")


def _check_each(each: int, kinds: int, clients: int, what: str, where: str, groups: int = 1) -> None:
    if not 1 <= each <= kinds:
        raise UserError(f"A client cannot own {each} of the {kinds} {what}{where}; take 1 to {kinds}.")
    if clients * each < kinds:
        raise UserError(
            f"{clients} clients with {each} each cannot own all {kinds} {what}{where}; "
            f"take at least {-(-kinds // each) * groups} clients or more {what} for each."
        )


def _check_given(sizes: Sequence[float], clients: int) -> NDArray[np.float64]:
    weights = np.asarray(sizes, dtype=np.float64)
    if len(weights) != clients:
        raise UserError(f"The list of sizes has {len(weights)} numbers for {clients} clients; give one for each.")
    if not ((weights > 0) & (weights < LARGEST)).all():
        raise UserError(f"All sizes in the list must be positive numbers below {LARGEST:g}.")
    return weights
