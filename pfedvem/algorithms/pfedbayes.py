"""pFedBayes: Zhang et al., "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022.

A client keeps a Gaussian q_j over the whole network; the server keeps a Gaussian v.

    w_j = v;  R times:
        q_j <- Adam step on  E_q[ sum NLL ] + zeta KL[ q_j || w_j ]     one draw of the network, five times; w_j fixed
        w_j <- Adam step on  zeta KL[ q_j || w_j ]                      q_j fixed
    v = (1 - beta) v + beta mean_S w_j                                  mu and rho averaged, sigma = log(1 + exp(rho))

Full batches, so the NLL is summed over the client's data and zeta is undivided. q_j keeps the moments of its Adam from
round to round, as the public code does; w_j begins anew, and so do its moments.
PM = the mean of q_j, GM = the mean of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor

from pfedvem import bayes, tree
from pfedvem.algorithms.base import Algorithm, Averaging
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params, Posterior
from pfedvem.rng import Rng
from pfedvem.solvers import Adam, Batch, Descent, Moments, as_batch, in_parts

PART = 500  # samples of a full batch that go through the network at a time

Part = tuple[Tensor, Tensor]
"""Mean and standard deviation of the weights in one tensor."""


@dataclass(frozen=True)
class Belief:
    """A Gaussian over a whole network: mean and rho of every weight."""

    mu: Params
    rho: Params

    @property
    def parts(self) -> list[Part]:
        """As it is now: a step changes the means in place, but not these standard deviations."""
        pairs = zip(tree.leaves(self.mu), tree.leaves(self.rho), strict=True)
        return [(mu, F.softplus(rho)) for mu, rho in pairs]


@dataclass(frozen=True)
class Client:
    """The posterior q_j, and what Adam remembers of its gradients."""

    q: Belief
    moments: Moments[Belief]


@dataclass(frozen=True)
class Up:
    """The local copy of the global Gaussian, and the data size n_j (C,)."""

    w: Belief
    n: Tensor


def divergence(q: list[Part], w: list[Part]) -> Tensor:
    """KL[ q_j || w_j ] over all weights, (C,)."""
    return torch.stack([bayes.kl_between(*a, *b) for a, b in zip(q, w, strict=True)]).sum(0)


class PFedBayes(Averaging, Algorithm[Belief, Client, Belief, Belief, Up]):
    """Gaussian posteriors over whole networks, kept near a global Gaussian."""

    name: ClassVar[str] = "pfedbayes"
    title: ClassVar[str] = "pFedBayes"
    reference: ClassVar[str] = "Zhang et al., ICML 2022"
    keeps: ClassVar[str] = "a Gaussian over its whole network"
    sends: ClassVar[str] = "mean and rho of every weight"
    personal_kept: ClassVar[bool] = True

    lr: float = Field(default=1e-2, gt=0, description="learning rate of both Gaussians (eta)")
    epochs: int = Field(default=5, ge=1, description="local iterations a round (R)")
    samples: int = Field(default=5, ge=1, description="steps on q, each on one draw, an iteration")
    lam: float = Field(default=1.0, gt=0, description="weight of the KL divergence (zeta)")
    sigma: float = Field(default=0.1, ge=1e-6, le=1e3, description="initial standard deviation")
    beta: float = Field(default=1.0, gt=0, description="how far the server moves to the mean")
    weights: Literal["size", "uniform"] = Field(
        default="uniform", description="weigh uploads by data size, or all alike"
    )

    def server_init(self, model: Model, clients: int, rng: Rng) -> Belief:
        model.refuse_buffers(self.title)
        rho = bayes.inverse_softplus(self.sigma)
        return Belief(model.initial, tree.map(lambda leaf: torch.full_like(leaf, rho), model.initial))

    def client_init(self, model: Model, server: Belief, rng: Rng) -> Client:
        q = tree.map(lambda leaf: leaf.clone(), tree.expand(server, len(rng)))
        return Client(q, Moments.zero(q))

    def down(self, server: Belief) -> Belief:
        return server

    def adapt(self, model: Model, down: Belief, client: Client, data: ClientData, rng: Rng) -> tuple[Client, Belief]:
        noise, batch, adam = rng.stream("noise"), as_batch(data), Adam(self.lr, client.moments)
        q, w = Descent(client.q, adam), Descent(tree.expand(down, len(rng)), Adam(self.lr))

        def nll(draw: Params, batch: Batch) -> Tensor:
            return model.nll(model.logits(draw, batch.x, train=True), batch)

        def negative_elbo(belief: Belief, batch: Batch) -> Tensor:
            parts = belief.parts
            draw = tree.rebuild(belief.mu, [mu + sigma * noise.normal(*mu.shape[1:]) for mu, sigma in parts])
            return in_parts(nll, draw, batch, PART) + self.lam * divergence(parts, prior)

        def to_posterior(belief: Belief, batch: Batch) -> Tensor:
            return self.lam * divergence(posterior, belief.parts)

        for _ in range(self.epochs):
            prior = w.value.parts
            for _ in range(self.samples):
                q.step(negative_elbo, batch)
            posterior = q.value.parts
            w.step(to_posterior, batch)
        return Client(q.value, adam.moments), w.value

    def contribute(
        self, model: Model, down: Belief, client: Client, carry: Belief | None, data: ClientData, rng: Rng
    ) -> tuple[Up, Client, Belief]:
        assert carry is not None
        return Up(carry, data.n), client, carry

    def merge(self, server: Belief, ups: Up) -> Belief:
        return tree.towards(server, tree.weighted_mean(ups.w, self.weigh(ups.n)), self.beta)

    def personal(
        self, model: Model, down: Belief, client: Client, carry: Belief | None, data: ClientData, rng: Rng
    ) -> Params:
        return client.q.mu

    def posterior(
        self, model: Model, down: Belief, client: Client, carry: Belief | None, data: ClientData, rng: Rng
    ) -> Posterior:
        return Posterior(client.q.mu, tree.named(tree.map(F.softplus, client.q.rho)))

    def general(self, server: Belief) -> Params:
        return server.mu
