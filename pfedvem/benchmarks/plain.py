"""The plain way to train a client: what a benchmark compares with.

pFedVEM as one would write it with ``nn.Module`` and ``torch.optim``: one client after the other, everything that the
published procedure does, PyTorch's own threads. It draws the random numbers that the library draws, so that both end
with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pfedvem import tree
from pfedvem.algorithms.pfedvem import PFedVEM
from pfedvem.models import Params
from pfedvem.rng import Rng
from pfedvem.simulation.work import Job, Setup, perform


@dataclass(frozen=True)
class Plain:
    """What a client has after a round: its mean mu and its whole network."""

    mu: Tensor
    network: nn.Module


def train(setup: Setup, down: Any, clients: Any, j: int, round: int) -> Any:
    """Client j's whole local training, upload and all, whether or not anything reads it.

    Methods other than pFedVEM run their own code for one client in full, which already knows some short cuts: what is
    said of them is the less for it.
    """
    if isinstance(setup.algorithm, PFedVEM):
        return pfedvem(setup, down, clients, j, round)
    return perform(setup, down, tree.take(clients, [j]), Job(round, (j,), upload=True))


def pfedvem(setup: Setup, down: Any, clients: Any, j: int, round: int) -> Plain:
    """Algorithm 1 on the side of client j."""
    algorithm = setup.algorithm
    assert isinstance(algorithm, PFedVEM)
    data, rng = setup.federation.cohort([j]), Rng(setup.seed, round, [j])
    x, y, w = data.x[0].contiguous(), data.y[0], down.w
    network = setup.model.module(Params(down.theta, w)).train()
    base = network[:-1]  # type: ignore[index]
    mu, pi = clients.q.mu[j].clone().requires_grad_(), clients.q.pi[j].clone().requires_grad_()
    d = mu.numel()
    with torch.no_grad():
        tau = d / (F.softplus(pi).square().sum() + (mu - w).square().sum())

    noise = rng.stream("head")
    optimizer = torch.optim.SGD([mu, pi], lr=algorithm.lr_head, momentum=algorithm.momentum)
    for _ in range(algorithm.head_epochs):
        optimizer.zero_grad()
        with torch.no_grad():
            features = base(x)
        sigma = F.softplus(pi)
        nll = torch.zeros(())
        for epsilon in noise.normal(algorithm.samples, *w.shape)[0]:
            head = mu + sigma * epsilon
            nll = nll + F.cross_entropy(F.linear(features, head[:, :-1], head[:, -1]), y, reduction="sum")
        spread = sigma.square().sum() + (mu - w).square().sum()
        divergence = 0.5 * (tau * spread - d - d * tau.log()) - sigma.log().sum()
        (nll / algorithm.samples + divergence).backward()
        optimizer.step()

    noise, order = rng.stream("base"), rng.stream("batches")
    sigma = F.softplus(pi).detach()
    optimizer = torch.optim.SGD(base.parameters(), lr=algorithm.lr_base, momentum=algorithm.momentum)
    for _ in range(algorithm.base_epochs):
        (permutation,) = order.permutations(data.sizes)
        for chosen in torch.from_numpy(permutation).split(algorithm.batch_size):
            optimizer.zero_grad()
            features = base(x[chosen])
            nll = torch.zeros(())
            for epsilon in noise.normal(algorithm.samples, *w.shape)[0]:
                head = mu.detach() + sigma * epsilon
                nll = nll + F.cross_entropy(F.linear(features, head[:, :-1], head[:, -1]), y[chosen])
            (nll / algorithm.samples).backward()
            optimizer.step()
    with torch.no_grad():
        network[-1].weight.copy_(mu[:, :-1])  # type: ignore[index]
        network[-1].bias.copy_(mu[:, -1])  # type: ignore[index]
    return Plain(mu.detach(), network.eval())


@torch.no_grad()
def evaluate(setup: Setup, network: nn.Module, j: int) -> float:
    """The accuracy of a network on client j's test data, in batches of 100."""
    right, test = 0, setup.federation.test_indices(j)
    for part in test.split(100):
        x, y = setup.federation.test_samples(part)
        right += int((network(x.contiguous()).argmax(1) == y).sum())
    return right / len(test)
