"""The solver: SGD as PyTorch does it, for one client or many, whatever their sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pfedvem import tree
from pfedvem.algorithms import METHODS
from pfedvem.data.federation import ClientData
from pfedvem.models import Params
from pfedvem.rng import Rng
from pfedvem.simulation.fit import fit
from pfedvem.solvers import (
    Adam,
    Batch,
    Descent,
    Moments,
    as_batch,
    count,
    descend,
    gradient,
    gradient_of_parts,
    in_parts,
    minibatches,
    nll,
    sgd,
)
from tests.conftest import blobs, small_network


def numbered(*sizes: int) -> ClientData:
    """Clients whose inputs are the numbers of their samples."""
    width = max(sizes)
    x = torch.arange(width).expand(len(sizes), width).float()
    return ClientData(x, x.long(), sizes)


def test_every_sample_comes_once_an_epoch_and_no_batch_is_dropped() -> None:
    batches = list(minibatches(numbered(7), Rng(0, 0, [0]).stream("o"), batch_size=3, epochs=2))
    assert [batch.y.shape[1] for batch in batches] == [3, 3, 1, 3, 3, 1]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(torch.cat([batch.y[0] for batch in epoch]).tolist()) == list(range(7))
    assert torch.cat([b.y[0] for b in batches[:3]]).tolist() != torch.cat([b.y[0] for b in batches[3:]]).tolist()


def test_a_client_with_one_sample_gets_a_batch_an_epoch() -> None:
    assert len(list(minibatches(numbered(1), Rng(0, 0, [0]).stream("o"), batch_size=10, epochs=4))) == 4


def test_in_a_cohort_each_client_sees_the_batches_that_it_sees_alone() -> None:
    sizes = (7, 1, 12, 3)
    cohort = list(minibatches(numbered(*sizes), Rng(0, 0, range(4)).stream("o"), batch_size=5, epochs=2))
    for row, n in enumerate(sizes):
        order = Rng(0, 0, [row]).stream("o")
        alone = [b.y[0].tolist() for b in minibatches(numbered(n), order, batch_size=5, epochs=2)]
        there = [b for b in cohort if row < b.clients]
        padded = [b.y[row][b.mask[row]].tolist() if b.mask is not None else b.y[row].tolist() for b in there]
        assert [batch for batch in padded if batch] == alone


def test_steps_go_on_without_the_last_clients_of_a_cohort_once_they_are_done() -> None:
    steps = minibatches(numbered(12, 7, 3), Rng(0, 0, range(3)).stream("o"), batch_size=5, epochs=2)
    assert [(b.clients, b.active) for b in steps] == [(3, None)] * 2 + [(2, None)] * 2 + [(1, None)] * 2


def test_sgd_takes_the_steps_of_torch_optim() -> None:
    target = torch.tensor([[1.0, -2.0, 3.0]])
    mine = torch.zeros(1, 3)
    theirs = torch.zeros(1, 3, requires_grad=True)
    optimiser = torch.optim.SGD([theirs], lr=0.05, momentum=0.9)

    def loss(v: Tensor) -> Tensor:
        return ((v - target) ** 4).sum(1)

    for _ in range(6):
        optimiser.zero_grad()
        loss(theirs).sum().backward()
        optimiser.step()
    steps = [Batch(torch.empty(1, 1), torch.empty(1, 1))] * 6
    torch.testing.assert_close(sgd(lambda v, batch: loss(v), mine, steps, lr=0.05, momentum=0.9), theirs.detach())


def test_adam_goes_on_from_the_moments_of_each_client() -> None:
    """One client has taken three steps before and the other none; both take two more, as torch.optim's would."""
    target = torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.5, -1.0]])
    theirs = torch.zeros(2, 3)
    for client, steps in enumerate((5, 2)):
        value = theirs[client].clone().requires_grad_()
        optimiser = torch.optim.Adam([value], lr=0.05)
        for _ in range(steps):
            optimiser.zero_grad()
            ((value - target[client]) ** 4).sum().backward()
            optimiser.step()
        theirs[client] = value.detach()

    def steps_of(adam: Adam, start: Tensor, of: Tensor, count: int) -> Tensor:
        batch = Batch(torch.empty(len(start), 1), torch.empty(len(start), 1))
        return descend(lambda v, batch: ((v - of) ** 4).sum(1), start, [batch] * count, adam)

    before = torch.zeros(2, 3)
    adam = Adam(0.05, Moments.zero(before[:1]))
    begun = torch.cat([steps_of(adam, before[:1], target[:1], 3), before[1:]])
    adam = Adam(0.05, tree.cat([adam.moments, Moments.zero(before[1:])]))
    torch.testing.assert_close(steps_of(adam, begun, target, 2), theirs)
    assert adam.moments.steps.tolist() == [5, 2]


def test_sgd_without_momentum_follows_the_closed_form_on_a_quadratic() -> None:
    """f = a/2 (v - b)^2 from v: after k steps v = b + (1 - lr a)^k (v - b); a=2, b=3, v=1, lr=0.1, k=5 -> 2.34464."""
    steps = [Batch(torch.empty(1, 1), torch.empty(1, 1))] * 5
    end = sgd(lambda v, batch: (v[:, 0] - 3) ** 2, torch.ones(1, 1), steps, lr=0.1)
    assert end.item() == pytest.approx(2.34464, abs=1e-5)


def test_sgd_leaves_its_start_alone() -> None:
    start = torch.ones(1, 1)
    sgd(lambda v, batch: v[:, 0] ** 2, start, [Batch(start, start)] * 3, lr=0.1, momentum=0.9)
    assert start.item() == 1
    assert not start.requires_grad


def test_a_cohort_of_clients_of_any_size_trains_as_each_alone() -> None:
    sizes = (7, 1, 12, 3)
    federation, model = blobs(sizes), small_network()

    def train(clients: list[int]) -> Params:
        data, rng = federation.cohort(clients), Rng(0, 0, clients)

        def loss(params: Params, batch: Batch) -> Tensor:
            return nll(model.logits(params, batch.x), batch) / count(batch)

        steps = minibatches(data, rng.stream("o"), batch_size=5, epochs=3)
        return sgd(loss, tree.expand(model.initial, len(clients)), steps, lr=0.1, momentum=0.9)

    together = train([0, 1, 2, 3])
    for j in range(4):
        alone = train([j])
        assert not torch.equal(alone.w[0], model.initial.w)  # also the client with one sample moves
        for a, b in zip(tree.leaves(tree.take(together, [j])), tree.leaves(alone), strict=True):
            torch.testing.assert_close(a, b)


def test_a_full_batch_leaves_padding_out_of_the_loss() -> None:
    federation, model = blobs((3, 8)), small_network()
    batch = as_batch(federation.cohort([0, 1]))
    losses = nll(model.logits(tree.expand(model.initial, 2), batch.x), batch)
    for j in range(2):
        single = as_batch(federation.cohort([j]))
        torch.testing.assert_close(losses[j], nll(model.logits(model.initial, single.x), single)[0])


@pytest.mark.parametrize("sizes", [(9, 9), (9, 4, 0), (4, 9, 3), (2, 1)])
def test_a_gradient_found_in_parts_is_that_of_the_whole_batch(sizes: tuple[int, ...]) -> None:
    model, widths = small_network(), []
    torch.manual_seed(0)
    x, y = torch.randn(len(sizes), max(sizes), 4), torch.randint(3, (len(sizes), max(sizes)))
    batch = as_batch(ClientData(x, y, sizes))
    at = tree.map(lambda leaf: leaf + torch.randn(len(sizes), *leaf.shape), model.initial)

    def loss(params: Params, batch: Batch) -> Tensor:
        widths.append(tuple(batch.y.shape))
        return nll(model.logits(params, batch.x), batch)

    whole, parts = gradient(loss, at, batch), gradient_of_parts(loss, at, in_parts(batch, 3))
    for a, b in zip(tree.leaves(parts), tree.leaves(whole), strict=True):
        torch.testing.assert_close(a, b)
    clients = [max(c + 1 for c, n in enumerate(sizes) if n > start) for start in range(0, max(sizes), 3)]
    assert [rows for rows, _ in widths[1:]] == (clients if max(sizes) > 3 else [len(sizes)])


def test_parts_of_a_cohorts_images_lie_channels_last_in_one_piece_as_the_batch_does() -> None:
    x = torch.randn(2, 7, 3, 5, 5).flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (2, 7))
    parts = in_parts(as_batch(ClientData(x, torch.zeros(2, 7).long(), (7, 7))), 3)
    assert torch.equal(torch.cat([part.x for part in parts], dim=1), x)
    for part in parts:
        images = part.x.flatten(0, 1)
        assert images.data_ptr() == part.x.data_ptr()
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_known_gradient_moves_clients_as_their_loss_does_and_leaves_idle_ones() -> None:
    start, active = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False])
    batch = Batch(torch.zeros(2, 1), torch.zeros(2, 1).long(), active=active)
    by_loss, known = Descent(start, Adam(0.1)), Descent(start, Adam(0.1))
    for _ in range(3):
        by_loss.step(lambda at, _: at.square().sum(1), batch)
        known.follow(2 * known.value, active)
    torch.testing.assert_close(known.value, by_loss.value)
    assert torch.equal(known.value[1], start[1])
    assert not torch.equal(known.value[0], start[0])


def test_nll_of_several_samples_of_the_head_is_one_loss_each() -> None:
    logits, y = torch.randn(2, 5, 4, 3), torch.randint(3, (2, 4))
    losses = nll(logits, Batch(logits, y))
    assert losses.shape == (2, 5)
    expected = torch.nn.functional.cross_entropy(logits[1, 3], y[1], reduction="sum")
    torch.testing.assert_close(losses[1, 3], expected)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "pfedvem"])
def test_a_base_that_has_buffers_alone_learns_its_statistics(method: str) -> None:
    network = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    result = fit(METHODS[method](), network, blobs((9, 8)), rounds=1, participation=1.0, workers=1)
    found = next(leaf for name, leaf in tree.named(result.state.server).items() if name.endswith("running_mean"))
    assert bool(found.isfinite().all())
    assert bool((found != 0).all())  # where it started
