"""The Gaussian: its KL divergence, and confidence and w as the maximisers of the ELBO."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from pfedvem import bayes, tree
from pfedvem.algorithms import PFedBayes, PFedVEM
from pfedvem.bayes import Gaussian


def posterior(clients: int = 3, seed: int = 0) -> tuple[Gaussian, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    mu, pi, w = (torch.randn(n, 2, 4, generator=rng, dtype=torch.float64) for n in (clients, clients, 1))
    return Gaussian(mu, pi), w[0]


@pytest.mark.parametrize("sigma", [1e-6, 0.01, 0.5, 1.0, 30.0, 1e4])
def test_inverse_softplus_gives_back_sigma(sigma: float) -> None:
    pi = torch.tensor(bayes.inverse_softplus(sigma), dtype=torch.float64)
    assert Gaussian(pi, pi).sigma.item() == pytest.approx(sigma, rel=1e-9)


@pytest.mark.parametrize("spread", [1e-21, 1e20])
def test_a_spread_that_single_precision_cannot_square_is_refused(spread: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        PFedVEM(scale=spread)
    with pytest.raises(ValueError, match="sigma"):
        PFedBayes(sigma=spread)


def test_kl_is_that_of_torch_distributions() -> None:
    q, w = posterior()
    tau = torch.tensor([0.1, 1.0, 25.0], dtype=torch.float64)
    prior = Normal(w.expand_as(q.mu), tau.rsqrt().view(-1, 1, 1).expand_as(q.mu))
    expected = kl_divergence(Normal(q.mu, q.sigma), prior).sum((1, 2))
    torch.testing.assert_close(bayes.kl(q, w, tau), expected)


def test_slopes_of_the_kl_between_gaussians_are_the_gradients_of_torch_distributions() -> None:
    """At the divergence's hand-computed value, 1.042544, among others."""
    numbers = torch.tensor([[1.0, 0.5, 0.0, 2.0], [-3.0, 1.0, 2.0, 0.1], [0.0, 2.0, 0.0, 2.0]], dtype=torch.float64)
    mu, sigma, prior_mu, prior_sigma = numbers.T.clone().requires_grad_()
    divergence = kl_divergence(Normal(mu, sigma), Normal(prior_mu, prior_sigma))
    assert divergence[0].item() == pytest.approx(1.042544, abs=1e-6)
    expected = torch.autograd.grad(divergence.sum(), (mu, sigma, prior_mu, prior_sigma))
    of_q = bayes.kl_slope(mu, sigma, prior_mu, prior_sigma)
    of_prior = bayes.kl_slope_of_prior(mu, sigma, prior_mu, prior_sigma)
    for slope, wanted in zip(of_q + of_prior, expected, strict=True):
        torch.testing.assert_close(slope, wanted)


def test_samples_have_the_posteriors_mean_and_deviation() -> None:
    q, _ = posterior()
    noise = torch.randn(3, 40_000, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samples = q.sample(noise)
    assert samples.shape == (3, 40_000, 2, 4)
    torch.testing.assert_close(samples.mean(1), q.mu, atol=0.05, rtol=0)
    torch.testing.assert_close(samples.std(1), q.sigma, atol=0.05, rtol=0)


def test_confidence_is_a_stationary_point_of_the_elbo_in_tau() -> None:
    q, w = posterior()
    tau = bayes.confidence(q, w).requires_grad_()
    (gradient,) = torch.autograd.grad(bayes.kl(q, w, tau).sum(), tau)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_the_confidence_weighted_mean_is_a_stationary_point_of_the_elbo_in_w() -> None:
    q, w = posterior()
    tau = bayes.confidence(q, w)
    best = tree.weighted_mean(q.mu, tau).requires_grad_()
    (gradient,) = torch.autograd.grad(bayes.kl(q, best, tau).sum(), best)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_confidence_is_the_paper_formula_and_the_ablations_keep_one_term() -> None:
    q = Gaussian(torch.tensor([[[1.0, 2.0]]]), torch.full((1, 1, 2), bayes.inverse_softplus(0.5)))
    w = torch.tensor([[1.0, 0.0]])  # Tr(Sigma) = 2 * 0.25, |mu - w|^2 = 4, d = 2
    assert bayes.confidence(q, w).item() == pytest.approx(2 / 4.5)
    assert bayes.confidence(q, w, "uncertainty").item() == pytest.approx(2 / 0.5)
    assert bayes.confidence(q, w, "deviation").item() == pytest.approx(2 / 4)


def test_a_client_that_still_equals_w_falls_back_on_its_uncertainty() -> None:
    mu = torch.ones(1, 1, 2)
    q = Gaussian(mu, torch.full_like(mu, bayes.inverse_softplus(0.5)))
    assert bayes.confidence(q, mu[0], "deviation").item() == pytest.approx(1 / 0.5**2)


class LinearGaussian:
    """Clients that see n_j values y ~ N(w_j, 1) in d dimensions: every step of the VEM has a closed form."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(3)
        self.n = torch.tensor([3.0, 10.0, 40.0], dtype=torch.float64)
        self.mean = torch.randn(3, 1, 5, generator=rng, dtype=torch.float64) + 2  # of each client's values

    def e_step(self, w: Tensor, tau: Tensor) -> Gaussian:
        precision = (self.n + tau).view(-1, 1, 1)
        mu = (self.n.view(-1, 1, 1) * self.mean + tau.view(-1, 1, 1) * w) / precision
        sigma = precision.rsqrt().expand_as(mu)
        return Gaussian(mu, sigma + torch.log(-torch.expm1(-sigma)))

    def elbo(self, q: Gaussian, w: Tensor, tau: Tensor) -> float:
        """Up to the constant that the values' own spread adds."""
        squared = ((q.mu - self.mean).square() + q.sigma.square()).flatten(1).sum(1)
        return float((-0.5 * self.n * squared - bayes.kl(q, w, tau)).sum())


def test_with_exact_steps_the_elbo_never_falls() -> None:
    task = LinearGaussian()
    w, tau = torch.zeros(1, 5, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    elbos = []
    for _ in range(200):
        q = task.e_step(w, tau)
        elbos.append(task.elbo(q, w, tau))
        w = tree.weighted_mean(q.mu, tau)
        elbos.append(task.elbo(q, w, tau))
        tau = bayes.confidence(q, w)
        elbos.append(task.elbo(q, w, tau))
    steps = [later - earlier for earlier, later in itertools.pairwise(elbos)]
    assert min(steps) > -1e-9
    assert elbos[-1] > elbos[0] + 1


def test_the_fixed_point_for_given_confidences_is_the_closed_form() -> None:
    """With tau fixed, w = sum kappa_j ybar_j / sum kappa_j where kappa_j = n_j tau_j / (n_j + tau_j)."""
    task, tau = LinearGaussian(), torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64)
    w = torch.zeros(1, 5, dtype=torch.float64)
    for _ in range(3000):
        w = tree.weighted_mean(task.e_step(w, tau).mu, tau)
    kappa = task.n * tau / (task.n + tau)
    torch.testing.assert_close(w, tree.weighted_mean(task.mean, kappa), atol=1e-9, rtol=0)


def test_the_kl_pulls_mu_to_w_by_tau() -> None:
    q, w = posterior(1)
    mu = q.mu.clone().requires_grad_()
    tau = torch.tensor([7.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(bayes.kl(Gaussian(mu, q.pi), w, tau).sum(), mu)
    torch.testing.assert_close(gradient, tau * (q.mu - w))


def test_kl_of_one_weight_matches_the_hand_computed_number() -> None:
    """KL(N(1, 0.5^2) || N(0, 2^2)) = 1.042544."""
    q = Gaussian(torch.ones(1, 1, 1), torch.full((1, 1, 1), bayes.inverse_softplus(0.5)))
    tau = torch.tensor([1 / 4])
    assert bayes.kl(q, torch.zeros(1, 1), tau).item() == pytest.approx(1.042544, abs=1e-5)
    assert math.log(4) + 0.5 * ((0.25 + 1) / 4 - 1) == pytest.approx(1.042544, abs=1e-5)
