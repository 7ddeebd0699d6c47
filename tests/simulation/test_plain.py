"""Every method, over several rounds of the engine, against a plain program: one client after the other, by torch.optim.

The plain programs share nothing with the library but where random numbers come from. They have no cohorts, no padding
and no work that is left out; so what clients keep, who is merged, by which weights, and which model is tested when is
compared as well, not the steps alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from pfedvem.algorithms import (
    IFCA,
    METHODS,
    AnyAlgorithm,
    FedAvg,
    FedPer,
    FedProx,
    FedRep,
    Local,
    PerFedAvg,
    PFedBayes,
    PFedMe,
    PFedVEM,
    Scaffold,
)
from pfedvem.conformance.conftest import drifting, small_network
from pfedvem.guard import Guard
from pfedvem.rng import generator, uploaders
from pfedvem.simulation.fit import fit

SIZES = [7, 12, 1, 23, 5, 9, 31, 2]
CLIENTS = range(len(SIZES))
ROUNDS, PARTICIPATION, SEED = 3, 0.4, 3
LR, EPOCHS, B = 0.05, 2, 5

Weights = list[Tensor]  # W and b of the base, then the head w
Score = tuple[float, float]  # accuracy in percent, loss
Loss = Callable[[Weights, Any], Tensor]
Round = tuple[Score | None, Score | None, Any]  # PM, GM, and what server and clients have afterwards

MODEL, FEDERATION = small_network(), drifting(SIZES)
START: Weights = [*MODEL.initial.theta.values(), MODEL.initial.w]
TRAIN = [(FEDERATION.train.x[shard.train], FEDERATION.train.y[shard.train]) for shard in FEDERATION.shards]
TEST = [(FEDERATION.test.x[shard.test[0]], FEDERATION.test.y[shard.test[0]]) for shard in FEDERATION.shards]
EVERYONE = (FEDERATION.test.x, FEDERATION.test.y)


def features(base: Weights, x: Tensor) -> Tensor:
    return torch.tanh(x @ base[0].T + base[1])


def logits(w: Tensor, h: Tensor) -> Tensor:
    return h @ w[:, :-1].T + w[:, -1]


def output(params: Weights, x: Tensor) -> Tensor:
    return logits(params[2], features(params[:2], x))


def loss(client: int) -> Loss:
    x, y = TRAIN[client]
    return lambda params, batch: F.cross_entropy(output(params, x[batch]), y[batch])


def score(params: Weights, data: tuple[Tensor, Tensor]) -> Score:
    found = output(params, data[0])
    return 100 * float((found.argmax(1) == data[1]).float().mean()), float(F.cross_entropy(found, data[1]))


def mean_score(models: Iterable[Weights]) -> Score:
    """The PM: each client's model on its own test data, all clients alike."""
    scores = [score(params, TEST[j]) for j, params in enumerate(models)]
    return float(np.mean([s[0] for s in scores])), float(np.mean([s[1] for s in scores]))


def batches(client: int, number: int, epochs: int = EPOCHS, purpose: str = "batches") -> Iterator[Tensor]:
    """All samples in a new order each epoch, the last batch perhaps a short one."""
    order = generator(SEED, purpose, round=number, client=client)
    for _ in range(epochs):
        yield from torch.from_numpy(order.permutation(SIZES[client])).split(B)


def one_batch(source: np.random.Generator, client: int) -> Tensor:
    return torch.from_numpy(source.permutation(SIZES[client])[:B])


def normal(source: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(source.standard_normal(shape, dtype=np.float32))


def sgd(start: Weights, of: Loss, steps: Iterable[Any], lr: float = LR, momentum: float = 0.9) -> Weights:
    params = [value.clone().requires_grad_() for value in start]
    optimiser = torch.optim.SGD(params, lr=lr, momentum=momentum)
    for step in steps:
        optimiser.zero_grad()
        of(params, step).backward()
        optimiser.step()
    return [value.detach() for value in params]


def gradient(of: Loss, at: Weights, batch: Tensor) -> Weights:
    params = [value.clone().requires_grad_() for value in at]
    return list(torch.autograd.grad(of(params, batch), params))


def mean(models: list[Weights], weights: list[float]) -> Weights:
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return [
        sum(s * value.double() for s, value in zip(shares, side, strict=True)).float()
        for side in zip(*models, strict=True)
    ]


def sizes(clients: Iterable[int]) -> list[float]:
    return [float(SIZES[j]) for j in clients]


# The methods: what one round makes of what server and clients have.


def local(number: int, up: list[int], clients: list[Weights]) -> Round:
    clients = [sgd(own, loss(j), batches(j, number)) for j, own in enumerate(clients)]
    return mean_score(clients), None, clients


def fedprox(mu: float) -> Callable[[int, list[int], Weights], Round]:
    def fedprox(number: int, up: list[int], server: Weights) -> Round:
        def near(params: Weights) -> Tensor:
            return mu / 2 * torch.stack([((p - s) ** 2).sum() for p, s in zip(params, server, strict=True)]).sum()

        def proximal(j: int) -> Loss:
            return lambda params, batch: loss(j)(params, batch) + near(params)

        sent = [sgd(server, proximal(j), batches(j, number)) for j in up]
        server = mean(sent, sizes(up))
        return None, score(server, EVERYONE), server

    return fedprox


def scaffold(number: int, up: list[int], state: tuple[Weights, Weights, list[Weights]]) -> Round:
    x, c, kept = state
    moved, changed, kept = [], [], list(kept)
    for j in up:
        y, steps = x, 0
        for batch in batches(j, number):
            g = gradient(loss(j), y, batch)
            y = [a - LR * (b - own + all_) for a, b, own, all_ in zip(y, g, kept[j], c, strict=True)]
            steps += 1
        new = [own - all_ + (a - b) / (steps * LR) for own, all_, a, b in zip(kept[j], c, x, y, strict=True)]
        moved.append([b - a for a, b in zip(x, y, strict=True)])
        changed.append([a - b for a, b in zip(new, kept[j], strict=True)])
        kept[j] = new
    x = [a + sum(part) / len(up) for a, part in zip(x, zip(*moved, strict=True), strict=True)]
    c = [a + sum(part) / len(SIZES) for a, part in zip(c, zip(*changed, strict=True), strict=True)]
    return None, score(x, EVERYONE), (x, c, kept)


def fedper(number: int, up: list[int], state: tuple[Weights, list[Tensor]]) -> Round:
    base, heads = state
    all_ = [sgd([*base, w], loss(j), batches(j, number)) for j, w in enumerate(heads)]
    base = mean([all_[j][:2] for j in up], sizes(up))
    return mean_score(all_), None, (base, [params[2] for params in all_])


def fedrep(number: int, up: list[int], state: tuple[Weights, list[Tensor]]) -> Round:
    base, heads = state

    def of_head(j: int) -> Loss:
        return lambda head, batch: loss(j)([*base, *head], batch)

    def of_base(j: int, head: Weights) -> Loss:
        return lambda base, batch: loss(j)([*base, *head], batch)

    all_ = []
    for j, kept in enumerate(heads):
        head = sgd([kept], of_head(j), batches(j, number, 3, "head"))
        all_.append([*sgd(base, of_base(j, head), batches(j, number)), *head])
    base = mean([all_[j][:2] for j in up], sizes(up))
    return mean_score(all_), None, (base, [params[2] for params in all_])


def ifca(number: int, up: list[int], state: tuple[Weights, list[Tensor]]) -> Round:
    def chosen(base: Weights, heads: list[Tensor], j: int) -> int:
        return min(range(2), key=lambda k: float(loss(j)([*base, heads[k]], torch.arange(SIZES[j]))))

    base, heads = state
    choice = {j: chosen(base, heads, j) for j in up}
    sent = {j: sgd([*base, heads[choice[j]]], loss(j), batches(j, number)) for j in up}
    base = mean([sent[j][:2] for j in up], sizes(up))
    for k in range(2):
        if members := [j for j in up if choice[j] == k]:
            (merged,) = mean([sent[j][2:] for j in members], sizes(members))
            heads = [merged if other == k else w for other, w in enumerate(heads)]
    return mean_score([*base, heads[chosen(base, heads, j)]] for j in CLIENTS), None, (base, heads)


def perfedavg(number: int, up: list[int], server: Weights) -> Round:
    alpha, beta, delta = 0.05, 0.1, 1e-2
    sent = []
    for j in up:
        sources = [generator(SEED, purpose, round=number, client=j) for purpose in ("adapt", "meta", "hessian")]
        w = server
        for _ in range(4):
            first, second, third = (one_batch(source, j) for source in sources)
            ahead = [a - alpha * g for a, g in zip(w, gradient(loss(j), w, first), strict=True)]
            meta = gradient(loss(j), ahead, second)
            above, below = (
                gradient(loss(j), [a + sign * delta * g for a, g in zip(w, meta, strict=True)], third)
                for sign in (1, -1)
            )
            w = [
                a - beta * (g - alpha * (p - m) / (2 * delta)) for a, g, p, m in zip(w, meta, above, below, strict=True)
            ]
        sent.append(w)
    server = mean(sent, [1.0] * len(up))
    adapted = (sgd(server, loss(j), batches(j, number, 1), alpha, 0.0) for j in CLIENTS)
    return mean_score(adapted), None, server


def pfedme(number: int, up: list[int], server: Weights) -> Round:
    lam, lr, lr_personal = 2.0, 0.1, 0.05
    theta, w = [server for _ in CLIENTS], [server for _ in CLIENTS]
    for j in CLIENTS:
        source = generator(SEED, "batches", round=number, client=j)
        for _ in range(4):
            batch = one_batch(source, j)
            for _ in range(3):
                g = gradient(loss(j), theta[j], batch)
                theta[j] = [a - lr_personal * (b + lam * (a - c)) for a, b, c in zip(theta[j], g, w[j], strict=True)]
            w[j] = [a - lr * lam * (a - c) for a, c in zip(w[j], theta[j], strict=True)]
    server = mean([w[j] for j in up], [1.0] * len(up))
    return mean_score(theta), score(server, EVERYONE), server


def pfedbayes(number: int, up: list[int], state: tuple[Weights, list[Weights], list[Any]]) -> Round:
    """Beliefs are six tensors: means, then rho. What Adam knows of q is kept."""
    server, kept, known = state
    lam, lr = 2.0, 0.01

    def kl(a: Weights, b: Weights) -> Tensor:
        pairs = ((Normal(p[i], F.softplus(p[3 + i])) for p in (a, b)) for i in range(3))
        return torch.stack([kl_divergence(*both).sum() for both in pairs]).sum()

    sent, kept, known = [], list(kept), list(known)
    for j, (x, y) in enumerate(TRAIN):
        noise = generator(SEED, "noise", round=number, client=j)
        q, w = ([value.clone().requires_grad_() for value in start] for start in (kept[j], server))
        of_q, of_w = torch.optim.Adam(q, lr=lr), torch.optim.Adam(w, lr=lr)
        if known[j] is not None:
            of_q.load_state_dict(known[j])
        for _ in range(2):
            for _ in range(3):
                drawn = [q[i] + F.softplus(q[3 + i]) * normal(noise, *q[i].shape) for i in range(3)]
                of_q.zero_grad()
                (F.cross_entropy(output(drawn, x), y, reduction="sum") + lam * kl(q, w)).backward()
                of_q.step()
            of_w.zero_grad()
            (lam * kl(q, w)).backward()
            of_w.step()
        kept[j], known[j] = [value.detach() for value in q], copy.deepcopy(of_q.state_dict())
        sent.append([value.detach() for value in w])
    server = mean([sent[j] for j in up], [1.0] * len(up))
    return mean_score(q[:3] for q in kept), score(server[:3], EVERYONE), (server, kept, known)


def pfedvem(terms: str = "both", beta: float = 1.0) -> Callable[[int, list[int], Any], Round]:
    def expected(mu: Tensor, sigma: Tensor, h: Tensor, y: Tensor, noise: np.random.Generator, reduction: str) -> Tensor:
        drawn = mu + sigma * normal(noise, 5, *mu.shape)
        return torch.stack([F.cross_entropy(logits(w, h), y, reduction=reduction) for w in drawn]).mean()

    def of_head(h: Tensor, y: Tensor, prior: Normal, noise: np.random.Generator) -> Loss:
        def negative_elbo(posterior: Weights, step: int) -> Tensor:
            q = Normal(posterior[0], F.softplus(posterior[1]))
            return expected(q.mean, q.stddev, h, y, noise, "sum") + kl_divergence(q, prior).sum()

        return negative_elbo

    def of_base(mu: Tensor, sigma: Tensor, x: Tensor, y: Tensor, noise: np.random.Generator) -> Loss:
        return lambda base, batch: expected(mu, sigma, features(base, x[batch]), y[batch], noise, "mean")

    def confidence(mu: Tensor, pi: Tensor, w: Tensor, terms: str) -> float:
        trace, squared = float((F.softplus(pi) ** 2).sum()), float(((mu - w) ** 2).sum())
        if terms == "uncertainty":
            squared = 0.0
        elif terms == "deviation" and squared:
            trace = 0.0
        return mu.numel() / (trace + squared)

    def pfedvem(number: int, up: list[int], state: tuple[Weights, list[Weights]]) -> Round:
        server, kept = state[0], list(state[1])
        base, w = server[:2], server[2]
        models, tau = [], []
        for j, (x, y) in enumerate(TRAIN):
            head, body = (generator(SEED, purpose, round=number, client=j) for purpose in ("head", "base"))
            mu, pi = kept[j]
            tau.append(confidence(mu, pi, w, terms))
            pull = confidence(mu, pi, w, "both" if terms == "deviation" else terms)
            prior = Normal(w, pull**-0.5)
            mu, pi = kept[j] = sgd(kept[j], of_head(features(base, x), y, prior, head), range(4), 0.01)
            models.append([*sgd(base, of_base(mu, F.softplus(pi), x, y, body), batches(j, number)), mu])
        theta = mean([models[j][:2] for j in up], sizes(up))
        merged = [*theta, *mean([kept[j][:1] for j in up], [tau[j] for j in up])]
        server = [a + beta * (b - a) for a, b in zip(server, merged, strict=True)]
        return mean_score(models), score(server, EVERYONE), (server, kept)

    return pfedvem


def inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))


W0 = normal(generator(SEED, "w"), 3, 9)
SECOND = 8**-0.5 * (2 * torch.from_numpy(generator(SEED, "heads").random((3, 9), dtype=np.float32)) - 1)
ZERO = [torch.zeros_like(value) for value in START]
BELIEF = START + [torch.full_like(value, inverse_softplus(0.1)) for value in START]
POSTERIOR = [W0, torch.full_like(W0, inverse_softplus(0.3))]
COMMON = {"lr": LR, "epochs": EPOCHS, "batch_size": B}
OURS = {"lr_head": 0.01, "lr_base": LR, "head_epochs": 4, "base_epochs": EPOCHS, "batch_size": B, "scale": 0.3}

CASES: list[tuple[AnyAlgorithm, Callable[..., Round], Any]] = [
    (Local(**COMMON), local, [START for _ in CLIENTS]),
    (FedAvg(**COMMON), fedprox(0.0), START),
    (FedProx(**COMMON, mu=0.5), fedprox(0.5), START),
    (Scaffold(**COMMON), scaffold, (START, ZERO, [ZERO for _ in CLIENTS])),
    (FedPer(**COMMON), fedper, (START[:2], [START[2] for _ in CLIENTS])),
    (FedRep(**COMMON, head_epochs=3), fedrep, (START[:2], [START[2] for _ in CLIENTS])),
    (IFCA(**COMMON), ifca, (START[:2], [START[2], SECOND])),
    (PerFedAvg(alpha=0.05, beta=0.1, steps=4, batch_size=B, delta=1e-2), perfedavg, START),
    (PFedMe(lr=0.1, lr_personal=0.05, lam=2.0, steps=4, inner_steps=3, batch_size=B), pfedme, START),
    (
        PFedBayes(lr=0.01, epochs=2, samples=3, lam=2.0, sigma=0.1),
        pfedbayes,
        (BELIEF, [BELIEF for _ in CLIENTS], [None for _ in CLIENTS]),
    ),
    *(
        (
            PFedVEM(**OURS, confidence=terms, beta=beta),
            pfedvem(terms, beta),
            ([*START[:2], W0], [POSTERIOR for _ in CLIENTS]),
        )
        for terms, beta in (("both", 1.0), ("uncertainty", 1.0), ("deviation", 1.0), ("both", 0.5))
    ),
]


@pytest.mark.parametrize(("algorithm", "plain", "state"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_every_method_does_what_a_plain_program_does(
    algorithm: AnyAlgorithm, plain: Callable[..., Round], state: Any
) -> None:
    found = fit(
        algorithm,
        MODEL,
        FEDERATION,
        rounds=ROUNDS,
        participation=PARTICIPATION,
        seed=SEED,
        eval_every=1,
        executor="vectorised",
        guard=Guard(bounds=False),
    ).history
    for number, record in enumerate(found):
        pm, gm, state = plain(number, uploaders(SEED, number, len(SIZES), PARTICIPATION), state)
        for name, expected in (("pm", pm), ("gm", gm)):
            if expected is None:
                assert record[name] is None
            else:  # the history is rounded to four digits
                assert record[name] == pytest.approx(expected[0], abs=1e-4)
                assert record[f"{name}_loss"] == pytest.approx(expected[1], rel=1e-4, abs=2e-4)


def test_every_method_has_a_plain_program() -> None:
    assert {algorithm.name for algorithm, *_ in CASES} == set(METHODS)
