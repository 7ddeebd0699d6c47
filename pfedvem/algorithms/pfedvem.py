"""pFedVEM: Zhu, Ma and Blaschko, "Confidence-aware Personalized Federated Learning via Variational Expectation
Maximization", CVPR 2023, Algorithm 1.

A client keeps q_j = N(mu_j, diag sigma_j^2) over its linear head; the server keeps the latent head w and base theta.

    tau_j   = d / (Tr(Sigma_j) + |mu_j - w|^2)                                confidence, on receiving w
    q_j     = argmin  E_q[ sum NLL ] + KL[ q || N(w, I / tau_j) ]             E-step, full batches, theta fixed
    theta_j = argmin  E_q[ mean NLL ]                                         SGD on the base, q_j fixed
    w       = sum_j tau_j mu_j / sum_j tau_j                                  M-step, over the uploads
    theta   = sum_j n_j theta_j / sum_j n_j
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pfedvem import bayes, tree
from pfedvem.algorithms.base import Algorithm
from pfedvem.bayes import Gaussian
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params, Posterior, Theta, apply_head
from pfedvem.rng import Rng
from pfedvem.solvers import Batch, as_batch, count, minibatches, sgd

# How much more confident than most a client may be, and than its distance from w allows (docs/security.md).
CREDIBLE = 2.0


@dataclass(frozen=True)
class Server:
    """The latent head w (classes, features + 1) and the base theta; also what is sent down."""

    w: Tensor
    theta: Theta


@dataclass(frozen=True)
class Client:
    """The posterior over the head, and how often (C,) a training that turned non-finite was thrown away."""

    q: Gaussian
    discarded: Tensor


@dataclass(frozen=True)
class Carry:
    """The confidence tau_j (C,) on receiving w, and the trained base theta_j once there is one."""

    tau: Tensor
    theta: Theta | None = None


@dataclass(frozen=True)
class Up:
    """What a client sends: mu_j, its confidence tau_j (C,), its base theta_j and its data size n_j (C,)."""

    mu: Tensor
    tau: Tensor
    theta: Theta
    n: Tensor


class PFedVEM(Algorithm[Server, Client, Server, Carry, Up]):
    """Personalised Bayesian heads, merged by their confidence, on a shared base."""

    name: ClassVar[str] = "pfedvem"
    title: ClassVar[str] = "pFedVEM"
    reference: ClassVar[str] = "Zhu et al., CVPR 2023"
    keeps: ClassVar[str] = "a Gaussian over its head (mu, sigma)"
    sends: ClassVar[str] = "mu, confidence tau and the base"
    claims: ClassVar[frozenset[str]] = frozenset({"n", "tau"})

    lr_head: float = Field(default=1e-3, gt=0, description="learning rate of mu and sigma (eta)")
    lr_base: float = Field(default=1e-3, gt=0, description="learning rate of the base")
    head_epochs: int = Field(default=10, ge=1, description="full-batch steps on the head a round (R)")
    base_epochs: int = Field(default=5, ge=1, description="epochs on the base a round")
    batch_size: int = Field(default=10, ge=1, description="batch size for the base (B)")
    samples: int = Field(default=5, ge=1, description="Monte-Carlo samples of the head a step (K)")
    scale: float = Field(default=1.0, ge=1e-6, le=1e3, description="initial sigma; the first confidence is 1 / scale^2")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of both; it does not outlive a round")
    beta: float = Field(default=1.0, gt=0, le=1, description="how far the server moves to what is merged")
    confidence: Literal["both", "uncertainty", "deviation"] = Field(
        default="both", description="terms of tau (ablations); with 'deviation' the KL keeps both"
    )
    prediction: Literal["mean", "average"] = Field(
        default="mean", description="predict by mu, or average over samples of q"
    )
    prediction_samples: int = Field(default=20, ge=1, description="samples of q that prediction='average' takes")

    def server_init(self, model: Model, clients: int, rng: Rng) -> Server:
        w = rng.stream("w").normal(*model.initial.w.shape)[0]
        return Server(w, model.initial.theta)

    def client_init(self, model: Model, server: Server, rng: Rng) -> Client:
        mu = tree.expand(server.w, len(rng)).clone()
        pi = torch.full_like(mu, bayes.inverse_softplus(self.scale))
        return Client(Gaussian(mu, pi), torch.zeros(len(rng)))

    def down(self, server: Server) -> Server:
        return server

    def adapt(self, model: Model, down: Server, client: Client, data: ClientData, rng: Rng) -> tuple[Client, Carry]:
        tau = bayes.confidence(client.q, down.w, self.confidence)
        # The deviation alone would pull without end where mu_j is near w, as it is at first: no step is small enough.
        pull = bayes.confidence(client.q, down.w) if self.confidence == "deviation" else tau
        with torch.no_grad():
            features = model.features_of(down.theta, data)
        noise = rng.stream("head")

        def negative_elbo(q: Gaussian, batch: Batch) -> Tensor:
            heads = q.sample(noise.normal(self.samples, *down.w.shape))
            logits = apply_head(heads, batch.x)
            return model.nll(logits, batch).mean(1) + bayes.kl(q, down.w, pull)

        steps = [as_batch(replace(data, x=features))] * self.head_epochs
        q = sgd(negative_elbo, client.q, steps, lr=self.lr_head, momentum=self.momentum)
        return self._keep_finite(client, q), Carry(tau)

    def contribute(
        self, model: Model, down: Server, client: Client, carry: Carry | None, data: ClientData, rng: Rng
    ) -> tuple[Up, Client, Carry]:
        assert carry is not None
        noise = rng.stream("base")

        def expected_nll(theta: Theta, batch: Batch) -> Tensor:
            draws = noise.normal(self.samples, *down.w.shape, clients=batch.clients)
            heads = tree.first(client.q, batch.clients).sample(draws)
            logits = apply_head(heads, model.features(theta, batch.x, train=True))
            return model.nll(logits, batch).mean(1) / count(batch)

        steps = minibatches(data, rng.stream("batches"), batch_size=self.batch_size, epochs=self.base_epochs)
        start = tree.expand(down.theta, len(rng))
        theta = sgd(expected_nll, start, steps, lr=self.lr_base, momentum=self.momentum)
        return Up(client.q.mu, carry.tau, theta, data.n), client, Carry(carry.tau, theta)

    def merge(self, server: Server, ups: Up) -> Server:
        merged = Server(tree.weighted_mean(ups.mu, ups.tau), tree.weighted_mean(ups.theta, ups.n))
        return tree.towards(server, merged, self.beta)

    def bounds(self, down: Server, ups: Up) -> dict[str, Tensor]:
        """A confidence is credible where others have nearly as much, and where the head that was sent is near w.

        tau_j <= d / |mu_j - w|^2 holds exactly for the mu_j that tau_j was computed from, which is that before
        training; the factor leaves room for the mean to have moved since. Where most means have moved further, as in a
        first round that starts with little uncertainty, the bound goes with most of them.
        """
        limit = CREDIBLE * _usual(ups.tau).expand_as(ups.tau)
        if self.confidence != "uncertainty":  # whose tau has no deviation in it
            nearness = down.w.numel() / (ups.mu - down.w).square().flatten(1).sum(1)
            limit = limit.minimum(CREDIBLE * nearness * _usual(ups.tau / nearness).clamp(min=1))
        return {"tau": limit}

    def personal(
        self, model: Model, down: Server, client: Client, carry: Carry | None, data: ClientData, rng: Rng
    ) -> Params:
        mean = self.posterior(model, down, client, carry, data, rng).mean
        if self.prediction == "mean":
            return mean
        noise = rng.stream("prediction").normal(self.prediction_samples, *down.w.shape)
        return Params(mean.theta, client.q.sample(noise))

    def posterior(
        self, model: Model, down: Server, client: Client, carry: Carry | None, data: ClientData, rng: Rng
    ) -> Posterior:
        assert carry is not None
        assert carry.theta is not None
        return Posterior(Params(carry.theta, client.q.mu), {"w": client.q.sigma})

    def general(self, server: Server) -> Params:
        return Params(server.theta, server.w)

    def inspect(self, down: Server, client: Client) -> dict[str, Tensor]:
        q, d = client.q, bayes.dimension(client.q)
        return {
            "mu": q.mu,
            "sigma": q.sigma,
            "tau": bayes.confidence(q, down.w, self.confidence),
            "uncertainty": bayes.uncertainty(q) / d,
            "deviation": bayes.deviation(q, down.w) / d,
            "discarded": client.discarded,
        }

    @staticmethod
    def _keep_finite(old: Client, q: Gaussian) -> Client:
        """A client whose training overflowed keeps the posterior that it had."""
        finite = (q.mu.isfinite() & q.pi.isfinite()).flatten(1).all(1)
        return Client(tree.where(finite, q, old.q), old.discarded + (~finite).float())


def _usual(values: Tensor) -> Tensor:
    """The upper median, since of two uploads none is usual."""
    return values.sort().values[len(values) // 2]
