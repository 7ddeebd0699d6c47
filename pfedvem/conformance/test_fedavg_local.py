"""FedAvg and Local against plain PyTorch training."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pfedvem import tree
from pfedvem.algorithms import FedAvg, Local
from pfedvem.algorithms.base import NetworkUp
from pfedvem.data.federation import ClientData, Federation
from pfedvem.models import Model, Params
from pfedvem.rng import START, Rng
from pfedvem.solvers import minibatches


def plain_training(
    model: Model,
    federation: Federation,
    j: int,
    lr: float,
    epochs: int,
    own: Params | None = None,
    rule: str = "sgd",
) -> nn.Module:
    network = model.module(own or model.initial).train()
    weights = network.parameters()
    optimiser = torch.optim.Adam(weights, lr=lr) if rule == "adam" else torch.optim.SGD(weights, lr=lr, momentum=0.9)
    data = federation.cohort([j])
    for batch in minibatches(data, Rng(0, 0, [j]).stream("batches"), batch_size=5, epochs=epochs):
        optimiser.zero_grad()
        F.cross_entropy(network(batch.x[0]), batch.y[0]).backward()
        optimiser.step()
    return network


def test_a_round_of_fedavg_is_plain_training_averaged_by_size(model: Model, federation: Federation) -> None:
    algorithm, clients = FedAvg(lr=0.05, epochs=3, batch_size=5), [0, 1, 2, 3]
    rng = Rng(0, 0, clients)
    up, _, _ = algorithm.contribute(model, model.initial, torch.empty(4, 0), None, federation.cohort(clients), rng)
    merged = algorithm.merge(model.initial, up)
    states = [plain_training(model, federation, j, 0.05, 3).state_dict() for j in clients]
    expected = {key: sum(n * s[key] for n, s in zip((7, 12, 1, 23), states, strict=True)) / 43 for key in states[0]}
    actual = model.module(merged).state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value)


def test_fedavg_averages_the_running_statistics_of_all_clients_by_size() -> None:
    theta = {"running_mean": torch.tensor([[0.0], [4.0]]), "num_batches_tracked": torch.tensor([2, 6])}
    up = NetworkUp(Params(theta, torch.zeros(2, 1, 1)), torch.tensor([1.0, 3.0]))
    merged = FedAvg().merge(Params({}, torch.zeros(1, 1)), up)
    assert merged.theta["running_mean"].item() == 3.0
    assert merged.theta["num_batches_tracked"].item() == 5


def test_fedavg_trains_networks_with_batch_norm(federation: Federation) -> None:
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    data = federation.cohort([0])
    up, _, _ = FedAvg(batch_size=7).contribute(model, model.initial, torch.empty(1, 0), None, data, Rng(0, 0, [0]))
    assert up.params.theta["1.num_batches_tracked"].item() == 5
    assert not torch.equal(up.params.theta["1.running_mean"][0], model.initial.theta["1.running_mean"])
    assert model.initial.theta["1.num_batches_tracked"].item() == 0


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_local_is_plain_training_of_each_client_from_where_it_was(
    model: Model, federation: Federation, rule: Literal["sgd", "adam"]
) -> None:
    # The largest first, as in a cohort of a run: smaller clients are left out of steps once they are done.
    algorithm, clients = Local(lr=(0.05,), epochs=2, batch_size=(5,), optimiser=rule), [3, 1, 0, 2]
    first = algorithm.client_init(model, None, Rng(0, START, clients))
    noise = torch.Generator().manual_seed(0)
    moved = tree.map(lambda leaf: leaf + 0.1 * torch.randn(leaf.shape, generator=noise), first.params)
    after, _ = algorithm.adapt(
        model, None, replace(first, params=moved), federation.cohort(clients), Rng(0, 0, clients)
    )
    for row, j in enumerate(clients):
        own, trained = (tree.map(lambda leaf, row=row: leaf[row], params) for params in (moved, after.params))
        expected = plain_training(model, federation, j, 0.05, 2, own, rule).state_dict()
        for key, value in model.module(trained).state_dict().items():
            torch.testing.assert_close(value, expected[key])


def test_local_chooses_what_predicts_held_out_training_data_best(model: Model, federation: Federation) -> None:
    """One candidate learns and one hardly moves; each client finds out by itself, without its test data."""
    algorithm = Local(lr=(1e-7, 0.05), batch_size=(5,), epochs=15)
    clients = [1, 3]
    blind = replace(federation, test=type(federation.test)(federation.test.x * torch.nan, federation.test.y))
    start = algorithm.client_init(model, None, Rng(0, START, clients))
    after, _ = algorithm.adapt(model, None, start, blind.cohort(clients), Rng(0, 0, clients))
    assert after.choice.tolist() == [1, 1]
    assert algorithm.inspect(None, after)["lr"].tolist() == pytest.approx([0.05, 0.05])
    chosen = Local(lr=(0.05,), batch_size=(5,), epochs=15)
    direct, _ = chosen.adapt(model, None, start, blind.cohort(clients), Rng(0, 0, clients))
    for a, b in zip(tree.leaves(after.params), tree.leaves(direct.params), strict=True):
        torch.testing.assert_close(a, b)  # trained on all of its data in the end


def test_local_trains_each_client_once_by_what_it_chose(model: Model, federation: Federation) -> None:
    trained = []

    class Watched(Local):
        def _train(self, model: Model, start: Params, data: ClientData, rng: Rng, candidate: int) -> Params:
            trained.append((candidate, rng.clients, data.sizes))
            return super()._train(model, start, data, rng, candidate)

    algorithm, clients = Watched(lr=(0.01, 0.05), epochs=2, batch_size=(5,)), [3, 1, 0, 2]
    start = algorithm.client_init(model, None, Rng(0, START, clients))
    chosen = replace(start, choice=torch.tensor([1, 0, 1, 0]))
    after, _ = algorithm.adapt(model, None, chosen, federation.cohort(clients), Rng(0, 0, clients))
    assert trained == [(0, (1, 2), (12, 1)), (1, (3, 0), (23, 7))]
    for row, (j, lr) in enumerate(zip(clients, (0.05, 0.01, 0.05, 0.01), strict=True)):
        expected = plain_training(model, federation, j, lr, 2).state_dict()
        own = tree.map(lambda leaf, row=row: leaf[row], after.params)
        for key, value in model.module(own).state_dict().items():
            torch.testing.assert_close(value, expected[key])


def test_local_sends_nothing(model: Model, federation: Federation) -> None:
    algorithm = Local()
    state = algorithm.client_init(model, None, Rng(0, START, [0]))
    up, _, _ = algorithm.contribute(model, None, state, None, federation.cohort([0]), Rng(0, 0, [0]))
    assert sum(leaf.numel() for leaf in tree.leaves(up)) == 0
