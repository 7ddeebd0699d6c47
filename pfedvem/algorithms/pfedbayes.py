"""pFedBayes: Zhang et al., "Personalized Federated Learning via Variational Bayesian Inference", ICML 2022.

A client keeps a Gaussian q_j over the whole network; the server keeps a Gaussian v.

    w_j = v;  R times:
        q_j <- Adam step on  E_q[ sum NLL ] + zeta KL[ q_j || w_j ]     one draw of the network, five times; w_j fixed
        w_j <- Adam step on  zeta KL[ q_j || w_j ]                      q_j fixed
    v = (1 - beta) v + beta mean_S w_j                                  mu and rho averaged, sigma = log(1 + exp(rho))

Gradients are written out: where sum NLL has g by a draw mu + sigma eps, it has g by mu and g eps by sigma; KL's are in
bayes.py; by rho it is that by sigma, times d sigma / d rho = 1 / (1 + exp(-rho)).

Full batches, so the NLL is summed over the client's data and zeta is undivided. q_j keeps the moments of its Adam from
round to round, as the public code does; w_j begins anew, and so do its moments.
PM = the mean of q_j, GM = the mean of v.
"""

from __future__ import annotations

from collections.abc import Callable
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
from pfedvem.solvers import Adam, Batch, Descent, Moments, as_batch, gradient_of_parts, in_parts

PART = 500  # samples of a full batch that go through the network at a time


@dataclass(frozen=True)
class Belief:
    """A Gaussian over a whole network: mean and rho of every weight."""

    mu: Params
    rho: Params

    @property
    def sigma(self) -> Params:
        """The standard deviation of every weight."""
        return tree.map(F.softplus, self.rho)


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


Slope = tuple[Tensor, Tensor]
"""A gradient by mean and rho."""


def slopes(each: Callable[..., Slope], *values: Params) -> Belief:
    """The gradient by all means and rhos, from what ``each`` says of a tensor's values."""
    found = [each(*row) for row in zip(*map(tree.leaves, values), strict=True)]
    by_mu, by_rho = ([pair[i] for pair in found] for i in range(2))
    return Belief(tree.rebuild(values[0], by_mu), tree.rebuild(values[0], by_rho))


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
        noise, adam, batch = rng.stream("noise"), Adam(self.lr, client.moments), as_batch(data)
        q, w = Descent(client.q, adam), Descent(tree.expand(down, len(rng)), Adam(self.lr))
        parts = in_parts(batch, PART)

        def nll(draw: Params, part: Batch) -> Tensor:
            return model.nll(model.logits(draw, part.x, train=True), part)

        def of_q(
            mu: Tensor, rho: Tensor, sigma: Tensor, w_mu: Tensor, w_sigma: Tensor, eps: Tensor, g: Tensor
        ) -> Slope:
            by_mu, by_sigma = bayes.kl_slope(mu, sigma, w_mu, w_sigma)
            return g + self.lam * by_mu, (g * eps + self.lam * by_sigma) * rho.sigmoid()

        def of_w(mu: Tensor, rho: Tensor, sigma: Tensor, q_mu: Tensor, q_sigma: Tensor) -> Slope:
            by_mu, by_sigma = bayes.kl_slope_of_prior(q_mu, q_sigma, mu, sigma)
            return self.lam * by_mu, self.lam * by_sigma * rho.sigmoid()

        for _ in range(self.epochs):
            w_sigma = w.value.sigma
            for _ in range(self.samples):
                sigma = q.value.sigma
                eps = tree.map(lambda leaf: noise.normal(*leaf.shape[1:]), sigma)
                g = gradient_of_parts(nll, tree.map(torch.addcmul, q.value.mu, sigma, eps), parts)
                slope = slopes(of_q, q.value.mu, q.value.rho, sigma, w.value.mu, w_sigma, eps, g)
                q.follow(slope, batch.active)
            slope = slopes(of_w, w.value.mu, w.value.rho, w_sigma, q.value.mu, q.value.sigma)
            w.follow(slope, batch.active)
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
        return Posterior(client.q.mu, tree.named(client.q.sigma))

    def general(self, server: Belief) -> Params:
        return server.mu
