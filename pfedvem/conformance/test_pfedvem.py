"""pFedVEM against the paper's Algorithm 1, written out plainly with torch's own parts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from pfedvem import bayes, tree
from pfedvem.algorithms.pfedvem import Client, PFedVEM, Server, Up
from pfedvem.bayes import Gaussian
from pfedvem.conformance.conftest import drifting
from pfedvem.data.federation import Federation
from pfedvem.models import Model
from pfedvem.rng import SERVER, START, Rng
from pfedvem.solvers import minibatches


def begin(algorithm: PFedVEM, model: Model, clients: list[int]) -> tuple[Server, Client]:
    server = algorithm.server_init(model, len(clients), Rng(0, START, [SERVER]))
    return server, algorithm.client_init(model, server, Rng(0, START, clients))


def train(
    algorithm: PFedVEM, model: Model, federation: Federation, server: Server, client: Client, clients: list[int]
) -> tuple[Client, Up]:
    data, rng = federation.cohort(clients), Rng(0, 0, clients)
    client, carry = algorithm.adapt(model, server, client, data, rng)
    up, client, _ = algorithm.contribute(model, server, client, carry, data, rng)
    return client, up


def plain_client(
    algorithm: PFedVEM, model: Model, federation: Federation, server: Server, client: Client, j: int
) -> tuple[Tensor, Tensor, float, nn.Module]:
    """One client's round as a reader of the paper would write it: modules, optimisers, distributions."""
    data, rng = federation.cohort([j]), Rng(0, 0, [j])
    x, y = data.x[0], data.y[0]
    network = model.module(model.initial)
    base = nn.Sequential(*list(network.children())[:-1])
    mu, pi = client.q.mu[0].clone().requires_grad_(), client.q.pi[0].clone().requires_grad_()
    sigma = F.softplus(pi)
    tau = (mu.numel() / (sigma.square().sum() + (mu - server.w).square().sum())).item()
    prior = Normal(server.w, torch.full_like(mu, tau**-0.5))
    optimiser = torch.optim.SGD([mu, pi], lr=algorithm.lr_head, momentum=algorithm.momentum)
    noise = rng.stream("head")
    for _ in range(algorithm.head_epochs):
        draws = noise.normal(algorithm.samples, *mu.shape)[0]
        loss = kl_divergence(Normal(mu, F.softplus(pi)), prior).sum()
        for draw in draws:
            head = mu + F.softplus(pi) * draw
            logits = base(x).detach() @ head[:, :-1].T + head[:, -1]
            loss = loss + F.cross_entropy(logits, y, reduction="sum") / algorithm.samples
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    mu, sigma = mu.detach(), F.softplus(pi).detach()
    optimiser = torch.optim.SGD(base.parameters(), lr=algorithm.lr_base, momentum=algorithm.momentum)
    noise = rng.stream("base")
    order = rng.stream("batches")
    for batch in minibatches(data, order, batch_size=algorithm.batch_size, epochs=algorithm.base_epochs):
        draws = noise.normal(algorithm.samples, *mu.shape)[0]
        features, losses = base(batch.x[0]), []
        for draw in draws:
            head = mu + sigma * draw
            losses.append(F.cross_entropy(features @ head[:, :-1].T + head[:, -1], batch.y[0]))
        optimiser.zero_grad()
        torch.stack(losses).mean().backward()
        optimiser.step()
    return mu, sigma, tau, base


def test_a_round_is_algorithm_1_step_for_step(model: Model, federation: Federation) -> None:
    algorithm = PFedVEM(lr_head=0.01, lr_base=0.05, head_epochs=4, base_epochs=2, batch_size=5, scale=0.3)
    server, client = begin(algorithm, model, [0, 1, 2, 3])
    after, up = train(algorithm, model, federation, server, client, [0, 1, 2, 3])
    plain = [plain_client(algorithm, model, federation, server, tree.take(client, [j]), j) for j in range(4)]
    for j, (mu, sigma, tau, base) in enumerate(plain):
        torch.testing.assert_close(after.q.mu[j], mu)
        torch.testing.assert_close(after.q.sigma[j], sigma)
        assert up.tau[j].item() == pytest.approx(tau)
        for key, value in base.state_dict().items():
            torch.testing.assert_close(up.theta[key][j], value)

    merged = algorithm.merge(server, up)
    taus, sizes = torch.tensor([row[2] for row in plain]), torch.tensor([7.0, 12.0, 1.0, 23.0])
    w = sum(tau * row[0] for tau, row in zip(taus, plain, strict=True)) / taus.sum()
    torch.testing.assert_close(merged.w, w)
    for key in merged.theta:
        theta = sum(n * row[3].state_dict()[key] for n, row in zip(sizes, plain, strict=True)) / sizes.sum()
        torch.testing.assert_close(merged.theta[key], theta)


def test_clients_start_from_w_with_confidence_one_over_scale_squared(model: Model) -> None:
    server, client = begin(PFedVEM(scale=0.25), model, [0, 1])
    assert torch.equal(client.q.mu[1], server.w)
    torch.testing.assert_close(bayes.confidence(client.q, server.w), torch.full((2,), 16.0))
    wide = build_wide()
    w = PFedVEM().server_init(wide, 2, Rng(0, START, [SERVER])).w
    assert abs(w.mean().item()) < 0.05
    assert w.std().item() == pytest.approx(1, abs=0.05)


def build_wide() -> Model:
    return Model(nn.Linear(500, 10))


def test_the_confidence_that_is_sent_belongs_to_the_posterior_before_training(
    model: Model, federation: Federation
) -> None:
    algorithm = PFedVEM(lr_head=0.01, head_epochs=3)
    server, client = begin(algorithm, model, [3])
    client, first = train(algorithm, model, federation, server, client, [3])
    assert first.tau.item() == pytest.approx(1.0)
    other = Server(server.w + 1, server.theta)
    _, second = train(algorithm, model, federation, other, client, [3])
    torch.testing.assert_close(second.tau, bayes.confidence(client.q, other.w))


def test_with_equal_confidence_clients_weigh_equally() -> None:
    mu = torch.tensor([[[0.0, 3.0]], [[2.0, 5.0]]])
    up = Up(mu, torch.tensor([4.0, 4.0]), {"a": torch.tensor([0.0, 1.0])}, torch.tensor([1.0, 3.0]))
    merged = PFedVEM().merge(Server(mu[0], {}), up)
    assert merged.w.tolist() == [[1.0, 4.0]]
    assert merged.theta["a"].item() == 0.75


def test_the_server_moves_by_beta_to_what_is_merged() -> None:
    mu = torch.tensor([[[0.0, 3.0]], [[2.0, 5.0]]])
    theta = {"a": torch.tensor([0.0, 1.0]), "seen": torch.tensor([4, 8])}
    up = Up(mu, torch.tensor([4.0, 4.0]), theta, torch.tensor([1.0, 3.0]))
    before = Server(torch.tensor([[5.0, 8.0]]), {"a": torch.tensor(1.75), "seen": torch.tensor(3)})
    after = PFedVEM(beta=0.25).merge(before, up)
    assert after.w.tolist() == [[4.0, 7.0]]
    assert after.theta["a"].item() == 1.5
    assert after.theta["seen"].item() == 7  # a counter of batches, say


@pytest.mark.parametrize("terms", ["uncertainty", "deviation"])
def test_an_ablation_sends_the_confidence_of_its_one_term(model: Model, federation: Federation, terms: str) -> None:
    algorithm = PFedVEM.model_validate({"confidence": terms, "lr_head": 0.01})
    server, client = begin(algorithm, model, [1])
    client, _ = train(algorithm, model, federation, server, client, [1])
    _, up = train(algorithm, model, federation, server, client, [1])
    d = model.dimension
    spread = client.q.sigma.square().sum() if terms == "uncertainty" else (client.q.mu - server.w).square().sum()
    torch.testing.assert_close(up.tau[0], d / spread)


def test_the_deviation_alone_weighs_uploads_and_leaves_heads_as_they_are(model: Model, federation: Federation) -> None:
    both, deviation = PFedVEM(lr_head=0.01), PFedVEM(lr_head=0.01, confidence="deviation")
    server, client = begin(both, model, [0, 1])
    client, _ = train(both, model, federation, server, client, [0, 1])
    expected, with_both = train(both, model, federation, server, client, [0, 1])
    found, up = train(deviation, model, federation, server, client, [0, 1])
    assert torch.equal(found.q.mu, expected.q.mu)
    assert torch.equal(found.q.pi, expected.q.pi)
    assert (up.tau > with_both.tau).all()


def test_a_client_with_one_sample_moves(model: Model, federation: Federation) -> None:
    algorithm = PFedVEM(lr_head=0.01, lr_base=0.05)
    server, client = begin(algorithm, model, [2])
    after, up = train(algorithm, model, federation, server, client, [2])
    assert not torch.equal(after.q.mu, client.q.mu)
    assert not torch.equal(after.q.pi, client.q.pi)
    assert any(not torch.equal(up.theta[key][0], value) for key, value in server.theta.items())


def test_training_that_overflows_is_thrown_away_for_that_client_alone(model: Model, federation: Federation) -> None:
    algorithm = PFedVEM(lr_head=0.01)
    server, client = begin(algorithm, model, [0, 1])
    data = federation.cohort([0, 1])
    data.x[0, 0, 0] = float("nan")
    after, _ = algorithm.adapt(model, server, client, data, Rng(0, 0, [0, 1]))
    assert torch.equal(after.q.mu[0], client.q.mu[0])
    assert torch.equal(after.q.pi[0], client.q.pi[0])
    assert not torch.equal(after.q.mu[1], client.q.mu[1])
    assert after.discarded.tolist() == [1, 0]


def test_values_that_are_passed_in_stay_as_they_are(model: Model, federation: Federation) -> None:
    algorithm = PFedVEM(lr_head=0.01, lr_base=0.05)
    server, client = begin(algorithm, model, [0, 1])
    before = copy.deepcopy((server, client))
    _, up = train(algorithm, model, federation, server, client, [0, 1])
    algorithm.merge(server, up)
    for old, new in zip(before, (server, client), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(old), tree.leaves(new), strict=True))


def test_more_data_makes_a_client_more_certain(model: Model) -> None:
    federation = drifting([4, 400])
    algorithm = PFedVEM(lr_head=0.002, head_epochs=60)
    server, client = begin(algorithm, model, [0, 1])
    after, _ = train(algorithm, model, federation, server, client, [0, 1])
    small, large = bayes.uncertainty(after.q).tolist()
    assert large < 0.9 * small


def test_prediction_is_by_the_mean_or_by_samples_of_the_posterior(model: Model, federation: Federation) -> None:
    mean, average = PFedVEM(), PFedVEM(prediction="average", prediction_samples=6)
    server, client = begin(mean, model, [0, 1])
    data, rng = federation.cohort([0, 1]), Rng(0, 0, [0, 1])
    client, carry = mean.adapt(model, server, client, data, rng)
    up, client, carry = mean.contribute(model, server, client, carry, data, rng)
    personal = mean.personal(model, server, client, carry, data, rng)
    assert torch.equal(personal.w, client.q.mu)
    assert all(torch.equal(personal.theta[key], up.theta[key]) for key in up.theta)
    heads = average.personal(model, server, client, carry, data, rng).w
    assert heads.shape == (2, 6, *server.w.shape)
    noise = (heads - client.q.mu.unsqueeze(1)) / client.q.sigma.unsqueeze(1)
    torch.testing.assert_close(noise, Rng(0, 0, [0, 1]).stream("prediction").normal(6, *server.w.shape))


def test_what_is_to_see_of_a_client_fits_together(model: Model, federation: Federation) -> None:
    algorithm = PFedVEM(lr_head=0.01)
    server, client = begin(algorithm, model, [0, 1])
    client, _ = train(algorithm, model, federation, server, client, [0, 1])
    seen = algorithm.inspect(server, client)
    torch.testing.assert_close(seen["tau"] * (seen["uncertainty"] + seen["deviation"]), torch.ones(2))
    assert torch.equal(Gaussian(seen["mu"], client.q.pi).sigma, seen["sigma"])
