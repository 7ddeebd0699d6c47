"""The diagonal Gaussian of the paper: parametrisation, samples, KL divergence and confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """q = N(mu, diag sigma^2) with sigma = log(1 + exp(pi)); both (C, classes, features + 1) for a cohort's heads."""

    mu: Tensor
    pi: Tensor

    @property
    def sigma(self) -> Tensor:
        return F.softplus(self.pi)

    def sample(self, noise: Tensor) -> Tensor:
        """Reparametrised samples mu + sigma * noise; noise (C, K, ...) gives K samples a client."""
        return self.mu.unsqueeze(1) + self.sigma.unsqueeze(1) * noise


def inverse_softplus(sigma: float) -> float:
    """pi with log(1 + exp(pi)) = sigma, without overflow for large sigma."""
    return sigma + math.log(-math.expm1(-sigma))


def uncertainty(q: Gaussian) -> Tensor:
    """Tr(Sigma_j), (C,)."""
    return q.sigma.square().flatten(1).sum(1)


def deviation(q: Gaussian, w: Tensor) -> Tensor:
    """|mu_j - w|^2, (C,)."""
    return (q.mu - w).square().flatten(1).sum(1)


def dimension(q: Gaussian) -> int:
    """d, the number of parameters of one head."""
    return q.mu[0].numel()


def confidence(q: Gaussian, w: Tensor, terms: str = "both") -> Tensor:
    """tau_j = d / (Tr(Sigma_j) + |mu_j - w|^2), (C,).

    ``terms`` keeps only one of the two for the paper's ablations. A client whose mean still equals w has no deviation
    to judge by (before its first training all have); there the uncertainty stands in, which gives 1 / scale^2.
    """
    if terms == "uncertainty":
        spread = uncertainty(q)
    elif terms == "deviation":
        distance = deviation(q, w)
        spread = distance.where(distance > 0, uncertainty(q))
    else:
        spread = uncertainty(q) + deviation(q, w)
    return dimension(q) / spread


def kl_slope(mu: Tensor, sigma: Tensor, prior_mu: Tensor, prior_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of KL[ N(mu, sigma^2) || N(prior_mu, prior_sigma^2) ] by mu and sigma, elementwise."""
    precision = prior_sigma.square().reciprocal()
    return (mu - prior_mu) * precision, sigma * precision - sigma.reciprocal()


def kl_slope_of_prior(mu: Tensor, sigma: Tensor, prior_mu: Tensor, prior_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the same by prior_mu and prior_sigma."""
    ahead, ratio = (prior_mu - mu) / prior_sigma, sigma / prior_sigma
    return ahead / prior_sigma, (1 - ratio.square() - ahead.square()) / prior_sigma


def kl(q: Gaussian, w: Tensor, tau: Tensor) -> Tensor:
    """KL[ q_j || N(w, I / tau_j) ], (C,)."""
    d = dimension(q)
    squared = tau * (uncertainty(q) + deviation(q, w))
    return 0.5 * (squared - d - d * tau.log()) - q.sigma.log().flatten(1).sum(1)
