"""The eight baselines against closed forms, and against FedAvg where they must equal it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from pfedvem import tree
from pfedvem.algorithms import IFCA, FedAvg, FedPer, FedProx, FedRep, PerFedAvg, PFedBayes, PFedMe, Scaffold
from pfedvem.algorithms.base import AnyAlgorithm
from pfedvem.algorithms.ifca import Server as Heads
from pfedvem.algorithms.ifca import Up as Uploaded
from pfedvem.algorithms.pfedbayes import Belief, Up
from pfedvem.bayes import inverse_softplus
from pfedvem.conformance.quadratic import Quadratic, clients, value
from pfedvem.data.federation import ClientData, Federation
from pfedvem.models import Model, Params
from pfedvem.rng import SERVER, START, Rng
from pfedvem.simulation.executors import Sequential
from pfedvem.simulation.rounds import Progress, one_round, start
from pfedvem.simulation.work import Setup
from pfedvem.solvers import as_batch, gradient, minibatches

NOBODY = torch.empty(1, 0)


def contribute(algorithm: AnyAlgorithm, model: Model, down: Any, data: ClientData, client: Any = NOBODY) -> Any:
    """The upload, the client and the carry of one local training of all these clients."""
    rng = Rng(0, 0, range(len(data.sizes)))
    client, carry = algorithm.adapt(model, down, client, data, rng)
    return algorithm.contribute(model, down, client, carry, data, rng)


def converge(algorithm: AnyAlgorithm, model: Model, data: ClientData, rounds: int) -> Any:
    """The server after so many rounds in which everyone uploads."""
    everyone = range(len(data.sizes))
    server = algorithm.server_init(model, len(data.sizes), Rng(0, START, [SERVER]))
    kept = algorithm.client_init(model, server, Rng(0, START, everyone))
    for _ in range(rounds):
        up, kept, _ = contribute(algorithm, model, algorithm.down(server), data, kept)
        server = algorithm.merge(server, up)
    return server


def same_round(one: AnyAlgorithm, other: AnyAlgorithm, model: Model, federation: Federation) -> None:
    """Both methods give the same network to the server after three rounds with the same clients."""
    states = []
    for algorithm in (one, other):
        setup = Setup(algorithm, model, federation, 0)
        state = start(setup)
        for _ in range(3):
            state = one_round(state, 0.6, False, Sequential(setup), Progress())
        states.append(state.server)
    first, second = ({key.split(".", 1)[-1]: leaf.squeeze() for key, leaf in tree.named(s).items()} for s in states)
    for key, leaf in second.items():
        torch.testing.assert_close(first["heads" if key == "w" and "heads" in first else key], leaf)


# FedProx


@pytest.mark.parametrize(("mu", "expected"), [(1.0, 2.10924), (0.0, 2.34464)])
def test_fedprox_takes_the_steps_of_the_proximal_quadratic(mu: float, expected: float) -> None:
    algorithm = FedProx(mu=mu, lr=0.1, epochs=5, momentum=0)
    up, _, _ = contribute(algorithm, Quadratic(1), Quadratic.at(1), clients([2], [3]))
    assert value(up.params) == pytest.approx([expected], abs=1e-5)


def test_fedprox_with_exact_local_solves_stops_at_its_fixed_point() -> None:
    algorithm = FedProx(mu=1, lr=0.15, epochs=50, batch_size=3, momentum=0)
    server = converge(algorithm, Quadratic(1), clients([1, 4], [0, 1], [3, 1]), 25)
    assert value(server) == pytest.approx([0.347826], abs=1e-4)


def test_fedprox_without_its_term_is_fedavg(model: Model, federation: Federation) -> None:
    same_round(FedProx(mu=0, lr=0.05), FedAvg(lr=0.05), model, federation)


# SCAFFOLD


def test_scaffold_with_one_full_batch_step_keeps_the_clients_gradient() -> None:
    algorithm = Scaffold(lr=0.1, epochs=1)
    model, data = Quadratic(1), clients([2, 4], [3, -1])
    down = algorithm.down(algorithm.server_init(model, 2, Rng(0, START, [SERVER])))
    kept = {"w": torch.full((2, 1, 2), 0.7)}  # whatever it was
    _, kept, _ = contribute(algorithm, model, down, data, kept)
    assert kept["w"][:, 0, 1].tolist() == pytest.approx([2 * (1 - 3), 4 * (1 + 1)], abs=1e-5)


def test_scaffolds_new_variate_is_the_mean_gradient_along_the_steps_that_were_run() -> None:
    """Three samples in batches of one, twice: six steps v_k = b + (1 - eta a)^k (v - b), whatever c and c_j were."""
    algorithm, model, data = Scaffold(lr=0.1, epochs=2, batch_size=1), Quadratic(1), clients([2], [3], [3])
    down = algorithm.down(algorithm.server_init(model, 1, Rng(0, START, [SERVER])))
    _, kept, _ = contribute(algorithm, model, down, data, {"w": torch.zeros(1, 1, 2)})
    gradients = [2 * (0.8**k * (1 - 3)) for k in range(6)]
    assert kept["w"][0, 0, 1].item() == pytest.approx(sum(gradients) / 6, abs=1e-5)


@pytest.mark.parametrize("sizes", [[1, 1], [1, 4]])
def test_scaffold_reaches_the_optimum_where_fedavg_stops_short(sizes: list[int]) -> None:
    data = clients([1, 4], [0, 1], sizes)  # with sizes (1, 4), the second client takes 20 steps instead of 5
    settings: dict[str, Any] = {"lr": 0.1, "epochs": 5, "batch_size": 1}
    corrected = converge(Scaffold(**settings), Quadratic(0), data, 150)
    assert value(corrected.x) == pytest.approx([0.8], abs=1e-4)
    if sizes == [1, 1]:
        plain = converge(FedAvg(**settings, momentum=0, weights="uniform"), Quadratic(0), data, 150)
        assert value(plain) == pytest.approx([0.692502], abs=1e-4)


def test_the_first_round_of_scaffold_is_fedavg_with_equal_weights(model: Model, federation: Federation) -> None:
    results = []
    for algorithm in (Scaffold(lr=0.05), FedAvg(lr=0.05, momentum=0, weights="uniform")):
        setup = Setup(algorithm, model, federation, 0)
        state = one_round(start(setup), 0.6, False, Sequential(setup), Progress())
        results.append(algorithm.general(state.server))
    for a, b in zip(tree.leaves(results[0]), tree.leaves(results[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_scaffolds_server_variate_stays_the_mean_of_all_clients_variates(model: Model, federation: Federation) -> None:
    setup = Setup(Scaffold(), model, federation, 0)
    state = start(setup)
    for number in range(4):
        state = one_round(state, 0.4, number % 2 == 0, Sequential(setup), Progress())
    for key, mean in state.server.c.items():
        torch.testing.assert_close(mean, state.clients[key].mean(0))
        assert mean.abs().sum() > 0


# FedPer and FedRep


def own_heads(model: Model) -> Tensor:
    """Heads that four clients may have kept from an earlier round."""
    return model.initial.w + 0.3 * torch.randn(4, *model.initial.w.shape, generator=torch.Generator().manual_seed(2))


def base_and_head(model: Model, own: Tensor) -> tuple[nn.Module, nn.Linear]:
    *base, head = model.module(Params(model.initial.theta, own)).train().children()
    assert isinstance(head, nn.Linear)
    return nn.Sequential(*base), head


def step(modules: list[nn.Module], base: nn.Module, head: nn.Module, batches: Any, lr: float) -> None:
    optimiser = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=lr, momentum=0.9)
    for batch in batches:
        optimiser.zero_grad()
        F.cross_entropy(head(base(batch.x[0])), batch.y[0]).backward()
        optimiser.step()


def check_head_and_base(up: Any, kept: Tensor, j: int, base: nn.Module, head: nn.Linear) -> None:
    for key, leaf in base.state_dict().items():
        torch.testing.assert_close(up.theta[key][j], leaf)
    torch.testing.assert_close(kept[j, :, :-1], head.weight.detach())
    torch.testing.assert_close(kept[j, :, -1], head.bias.detach())


def test_fedper_trains_base_and_head_jointly_and_sends_the_base_alone(model: Model, federation: Federation) -> None:
    algorithm, data = FedPer(lr=0.05, epochs=2, batch_size=5), federation.cohort([0, 1, 2, 3])
    heads = own_heads(model)
    up, kept, carry = contribute(algorithm, model, model.initial.theta, data, heads)
    assert set(tree.named(up)) == {"n", *(f"theta.{key}" for key in model.initial.theta)}
    for j in range(4):
        base, head = base_and_head(model, heads[j])
        single = federation.cohort([j])
        batches = minibatches(single, Rng(0, 0, [j]).stream("batches"), batch_size=5, epochs=2)
        step([base, head], base, head, batches, 0.05)
        check_head_and_base(up, kept, j, base, head)
    personal = algorithm.personal(model, model.initial.theta, kept, carry, data, Rng(0, 0, range(4)))
    assert torch.equal(personal.w, kept)
    assert personal.theta is up.theta


def test_fedper_averages_bases_by_size_over_those_that_upload() -> None:
    algorithm = FedPer()
    up = tree.take(type_up(torch.tensor([1.2, 2.0, 9.0]), torch.tensor([10.0, 30.0, 60.0])), [0, 1])
    assert algorithm.merge({}, up)["b"].item() == pytest.approx(1.8)


def type_up(bases: Tensor, sizes: Tensor) -> Any:
    from pfedvem.algorithms.fedper import Up as BaseUp

    return BaseUp({"b": bases}, sizes)


def test_the_base_of_fedpers_first_round_is_that_of_fedavg(model: Model, federation: Federation) -> None:
    """All heads are still the common one, so nothing personal has had an effect yet."""
    bases = []
    for algorithm in (FedPer(lr=0.05), FedAvg(lr=0.05)):
        setup = Setup(algorithm, model, federation, 0)
        server = one_round(start(setup), 0.6, False, Sequential(setup), Progress()).server
        bases.append(server if isinstance(server, dict) else server.theta)
    for key in model.initial.theta:
        torch.testing.assert_close(bases[0][key], bases[1][key])


def test_fedrep_trains_the_head_first_and_then_the_base(model: Model, federation: Federation) -> None:
    algorithm, data = FedRep(lr=0.05, head_epochs=3, epochs=2, batch_size=5), federation.cohort([0, 1, 2, 3])
    heads = own_heads(model)
    up, kept, _ = contribute(algorithm, model, model.initial.theta, data, heads)
    for j in range(4):
        base, head = base_and_head(model, heads[j])
        single, rng = federation.cohort([j]), Rng(0, 0, [j])
        step([head], base, head, minibatches(single, rng.stream("head"), batch_size=5, epochs=3), 0.05)
        step([base], base, head, minibatches(single, rng.stream("batches"), batch_size=5, epochs=2), 0.05)
        check_head_and_base(up, kept, j, base, head)


@pytest.mark.parametrize("method", [FedPer(), FedRep()], ids=lambda a: a.title)
def test_heads_of_clients_that_do_not_upload_train_too(
    method: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    setup = Setup(method, model, federation, 0)
    state = one_round(start(setup), 0.3, False, Sequential(setup), Progress())
    assert all(not torch.equal(state.clients[j], model.initial.w) for j in range(4))


# IFCA


@pytest.mark.parametrize(
    ("heads", "weights", "expected"),
    [
        ([1.0, 4.0], "size", [0.15, 5.2]),
        ([1.0, 4.0], "uniform", [0.1, 5.2]),
        ([1.0, 40.0], "size", [1.833333, 40.0]),  # an empty cluster keeps its model
    ],
)
def test_ifca_averages_by_cluster(heads: list[float], weights: str, expected: list[float]) -> None:
    algorithm = IFCA.model_validate({"weights": weights, "lr": 0.3, "epochs": 80, "momentum": 0})
    server = Heads({}, torch.stack([Quadratic.at(v).w for v in heads]))
    up, _, _ = contribute(algorithm, Quadratic(0), server, clients([1] * 4, [0, 0.2, 5, 5.4], [1, 3, 1, 1]))
    assert algorithm.merge(server, up).heads[:, 0, 1].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("vote", [[1e9, 0.0], [-3.0, -4.0]])
def test_in_ifca_a_client_has_one_vote_whatever_it_sends(vote: list[float]) -> None:
    server = Heads({}, torch.zeros(2, 1, 1))
    w = torch.tensor([100.0, 0.0, 0.0, 0.0]).view(4, 1, 1)
    cluster = torch.tensor([vote, [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    merged = IFCA().merge(server, Uploaded(Params({}, w), cluster, torch.ones(4)))
    assert merged.heads.flatten().tolist() == [25.0, 0.0]


def test_ifca_with_one_cluster_is_fedavg(model: Model, federation: Federation) -> None:
    same_round(IFCA(clusters=1, lr=0.05), FedAvg(lr=0.05), model, federation)


def test_ifcas_personal_model_is_the_merged_model_of_the_best_cluster_untrained() -> None:
    algorithm, model = IFCA(), Quadratic(0)
    down = Heads({}, torch.stack([Quadratic.at(v).w for v in (0.0, 5.0)]))
    personal = algorithm.personal(model, down, NOBODY, None, clients([1, 1], [4.0, 1.0]), Rng(0, 0, [0, 1]))
    assert value(personal) == [5.0, 0.0]


def test_ifca_takes_the_first_of_equally_good_clusters() -> None:
    down = Heads({}, torch.stack([Quadratic.at(v).w for v in (1.0, -1.0)]))
    assert IFCA().pick(Quadratic(0), down, clients([1], [0])).tolist() == [0]


# PerFedAvg


@pytest.mark.parametrize(("first_order", "expected"), [(False, 0.64), (True, 0.8)])
def test_perfedavgs_step_is_the_exact_meta_gradient_on_a_quadratic(first_order: bool, expected: float) -> None:
    algorithm = PerFedAvg(alpha=0.1, beta=0.5, steps=1, first_order=first_order, delta=0.1)
    up, _, _ = contribute(algorithm, Quadratic(0), Quadratic.at(0), clients([2], [1]))
    assert value(up.params) == pytest.approx([expected], abs=1e-5)


def test_perfedavg_converges_to_its_fixed_point_and_adapts_from_there() -> None:
    algorithm, model, data = PerFedAvg(alpha=0.1, beta=0.1, steps=1, delta=0.1), Quadratic(0), clients([1, 4], [0, 1])
    server = converge(algorithm, model, data, 200)
    assert value(server) == pytest.approx([0.64], abs=1e-4)
    personal = algorithm.personal(model, server, NOBODY, None, data, Rng(0, 0, [0, 1]))
    assert value(personal) == pytest.approx([0.576, 0.784], abs=1e-4)


def test_perfedavg_uses_three_different_batches(federation: Federation, model: Model) -> None:
    """With one batch for all three, the step would differ."""
    data = federation.cohort([3])
    up, _, _ = contribute(PerFedAvg(steps=1, batch_size=4, alpha=0.1), model, model.initial, data)
    rng = Rng(0, 0, [0])
    orders = [tuple(rng.stream(name).permutations([23])[0][:4].tolist()) for name in ("adapt", "meta", "hessian")]
    assert len(set(orders)) == 3
    loss = lambda p, batch: model.nll(model.logits(p, batch.x), batch) / 4  # noqa: E731
    d, d1, d2 = (as_batch(data.select([torch.tensor(order).numpy()])) for order in orders)
    v = tree.expand(model.initial, 1)
    u = gradient(loss, tree.add(v, gradient(loss, v, d), -0.1), d1)
    ahead, behind = (gradient(loss, tree.add(v, u, s * 1e-3), d2) for s in (1, -1))
    expected = tree.add(v, tree.add(u, tree.add(ahead, behind, -1.0), -0.1 / 2e-3), -0.01)
    for a, b in zip(tree.leaves(up.params), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


def test_perfedavg_without_adaptation_is_fedavg_with_full_batches(model: Model, federation: Federation) -> None:
    meta = PerFedAvg(alpha=0, beta=0.05, steps=4, batch_size=100, weights="size")
    same_round(meta, FedAvg(lr=0.05, epochs=4, batch_size=100, momentum=0), model, federation)


# pFedMe


@pytest.mark.parametrize(
    ("settings", "w", "theta"),
    [
        ({"steps": 1, "inner_steps": 5, "lr_personal": 0.01}, None, 1.142611),
        ({"steps": 1, "inner_steps": 300, "lr_personal": 0.02}, None, 1.235294),  # the Moreau proximal point
        ({"steps": 20, "inner_steps": 5, "lr_personal": 0.01}, 1.303955, 1.482319),  # warm start
        ({"steps": 20, "inner_steps": 300, "lr_personal": 0.02}, 1.324866, 1.508782),
    ],
)
def test_pfedme_finds_the_proximal_point_and_moves_w_to_it(
    settings: dict[str, Any], w: float | None, theta: float
) -> None:
    algorithm = PFedMe(lr=0.005, lam=15, **settings)
    model, data = Quadratic(1), clients([2], [3])
    up, kept, carry = contribute(algorithm, model, Quadratic.at(1), data)
    personal = algorithm.personal(model, Quadratic.at(1), kept, carry, data, Rng(0, 0, [0]))
    assert value(personal) == pytest.approx([theta], abs=2e-5)
    if w is not None:
        assert value(up.params) == pytest.approx([w], abs=2e-5)
    assert value(personal) != value(up.params)


def test_pfedme_in_passes_takes_a_step_a_batch_and_stops_where_a_client_has_no_more() -> None:
    """Sizes 4 and 1 in batches of one, five times: the first client takes 20 local rounds, the second 5."""
    settings: dict[str, Any] = {"lr": 0.005, "lam": 15, "lr_personal": 0.01, "batch_size": 1}
    model, down = Quadratic(1), Quadratic.at(1)
    up, _, theta = contribute(PFedMe(epochs=5, **settings), model, down, clients([2, 2], [3, 3], [4, 1]))
    few, _, few_theta = contribute(PFedMe(steps=5, **settings), model, down, clients([2], [3]))
    assert value(up.params) == pytest.approx([1.303955, *value(few.params)], abs=2e-5)
    assert value(theta) == pytest.approx([1.482319, *value(few_theta)], abs=2e-5)


def test_pfedmes_server_moves_by_beta_to_the_plain_mean() -> None:
    up, _, _ = contribute(PFedMe(), Quadratic(1), Quadratic.at(1), clients([2, 2], [3, 3], [1, 9]))
    mean = sum(value(up.params)) / 2
    for beta in (1.0, 0.5):
        merged = PFedMe(beta=beta).merge(Quadratic.at(1), up)
        assert value(merged) == pytest.approx([1 + beta * (mean - 1)], abs=1e-6)


# pFedBayes


def test_pfedbayes_is_its_two_coupled_adam_descents(model: Model, federation: Federation) -> None:
    """Against a plain program with torch.optim.Adam and torch.distributions."""
    algorithm = PFedBayes(lr=0.01, epochs=2, samples=3, lam=2.0, sigma=0.1)
    server = algorithm.server_init(model, 4, Rng(0, START, [SERVER]))
    client = algorithm.client_init(model, server, Rng(0, START, [1]))
    data, rng = federation.cohort([1]), Rng(0, 0, [1])
    kept, carry = algorithm.adapt(model, server, client, data, rng)

    network = model.module(model.initial)
    names = [*model.initial.theta, "w"]
    start_mu = [*model.initial.theta.values(), model.initial.w]
    q = [[mu.clone().requires_grad_(), torch.full_like(mu, inverse_softplus(0.1)).requires_grad_()] for mu in start_mu]
    w = [[leaf.detach().clone().requires_grad_() for leaf in pair] for pair in q]
    adam_q, adam_w = (torch.optim.Adam([leaf for pair in g for leaf in pair], lr=0.01) for g in (q, w))

    def kl(first: list[list[Tensor]], second: list[list[Tensor]]) -> Tensor:
        terms = []
        for (m1, r1), (m2, r2) in zip(first, second, strict=True):
            terms.append(kl_divergence(Normal(m1, F.softplus(r1)), Normal(m2, F.softplus(r2))).sum())
        return torch.stack(terms).sum()

    def fixed(group: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[leaf.detach() for leaf in pair] for pair in group]

    noise = rng.stream("noise")
    for _ in range(2):
        for _ in range(3):
            draw = [mu + F.softplus(rho) * noise.normal(1, *mu.shape)[0, 0] for mu, rho in q]
            weights = dict(zip(names, draw, strict=True))
            head = weights.pop("w")
            state = {**weights, "2.weight": head[:, :-1], "2.bias": head[:, -1]}
            logits = torch.func.functional_call(network, state, (data.x[0],))
            adam_q.zero_grad()
            (F.cross_entropy(logits, data.y[0], reduction="sum") + 2.0 * kl(q, fixed(w))).backward()
            adam_q.step()
        adam_w.zero_grad()
        (2.0 * kl(fixed(q), w)).backward()
        adam_w.step()
    for belief, group in ((kept.q, q), (carry, w)):
        pairs = zip(tree.leaves(belief.mu), tree.leaves(belief.rho), group, strict=True)
        for mu, rho, (expected_mu, expected_rho) in pairs:
            torch.testing.assert_close(mu[0], expected_mu.detach(), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(rho[0], expected_rho.detach(), atol=1e-5, rtol=1e-4)


def belief(mu: float, sigma: float) -> Belief:
    def filled(number: float) -> Params:
        return Params({}, torch.full((1, 1, 1), number))

    return Belief(filled(mu), filled(inverse_softplus(sigma)))


def test_pfedbayes_averages_rho_not_sigma() -> None:
    ups = tree.cat([Up(belief(0, 0.01), torch.ones(1)), Up(belief(0, 1.0), torch.ones(1))])
    server = tree.map(lambda leaf: leaf[0], belief(0, 0.5))
    merged = PFedBayes().merge(server, ups)
    assert F.softplus(merged.rho.w).item() == pytest.approx(0.12347, abs=1e-5)


def test_pfedbayes_sends_the_local_copy_and_keeps_the_posterior(model: Model, federation: Federation) -> None:
    algorithm = PFedBayes(lr=0.01)
    server = algorithm.server_init(model, 4, Rng(0, START, [SERVER]))
    client = algorithm.client_init(model, server, Rng(0, START, range(4)))
    up, kept, carry = contribute(algorithm, model, server, federation.cohort([0, 1, 2, 3]), client)
    assert torch.equal(up.w.mu.w, carry.mu.w)
    assert not torch.equal(up.w.mu.w, kept.q.mu.w)
    assert not torch.equal(kept.q.mu.w, client.q.mu.w)
