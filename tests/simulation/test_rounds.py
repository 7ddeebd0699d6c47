"""The round loop: who trains, what is skipped, and that skipping changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pfedvem import tree
from pfedvem.algorithms import METHODS, FedAvg, Local, PFedVEM
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.models import Model
from pfedvem.rng import Rng, uploaders
from pfedvem.simulation.executors import Sequential
from pfedvem.simulation.fit import fit
from pfedvem.simulation.rounds import Progress, State, average, one_round, plan, play, simulate, start
from pfedvem.simulation.work import Job, Scores, Setup, perform, score, score_general
from tests.conftest import blobs


def run(setup: Setup, rounds: int, eval_every: int = 0, participation: float = 0.3) -> State:
    return simulate(
        start(setup),
        rounds=rounds,
        participation=participation,
        eval_every=eval_every,
        executor=Sequential(setup),
        progress=Progress(),
        after_round=lambda state: None,
    )


def same(a: object, b: object) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(torch.equal(x.nan_to_num(-1), y.nan_to_num(-1)) for x, y in pairs)


def test_only_uploaders_work_for_a_method_without_client_state(model: Model, federation: Federation) -> None:
    setup = Setup(FedAvg(), model, federation, 0)
    assert plan(setup, 0, [1, 3], ()) == [Job(0, (1, 3), upload=True, evaluate=False)]


def test_everyone_adapts_but_only_uploaders_contribute_where_clients_have_state(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    contributed: list[int] = []
    original = PFedVEM.contribute

    def spy(self, model, down, client, carry, data, rng):  # type: ignore[no-untyped-def]
        contributed.extend(rng.clients)
        return original(self, model, down, client, carry, data, rng)

    monkeypatch.setattr(PFedVEM, "contribute", spy)
    setup = Setup(PFedVEM(), model, federation, 0)
    before = start(setup)
    after = one_round(before, 0.3, False, Sequential(setup), Progress())
    assert sorted(contributed) == uploaders(0, 0, 4, 0.3)
    assert len(contributed) < 4
    assert all(not torch.equal(after.clients.q.mu[j], before.clients.q.mu[j]) for j in range(4))


def test_state_that_counts_only_with_the_upload_is_dropped_without_one(model: Model, federation: Federation) -> None:
    class Marking(FedAvg):
        def client_init(self, model, server, rng):  # type: ignore[no-untyped-def]
            return torch.zeros(len(rng))

        def contribute(self, model, down, client, carry, data, rng):  # type: ignore[no-untyped-def]
            up, client, carry = super().contribute(model, down, client, carry, data, rng)
            return up, client + 1, carry

    setup = Setup(Marking(), model, federation, 0)
    for upload in (True, False):
        job = Job(0, (0,), upload=upload, evaluate=True)
        outcome = perform(setup, model.initial, torch.zeros(1), job)
        assert outcome.client.item() == float(upload)
        assert (outcome.up is not None) == upload


def test_personal_models_are_tested_before_merging_and_the_global_model_after(
    model: Model, federation: Federation
) -> None:
    setup = Setup(PFedVEM(lr_head=0.01, lr_base=0.05), model, federation, 0)
    first = start(setup)
    state = one_round(first, 1.0, True, Sequential(setup), Progress())
    down = setup.algorithm.down(first.server)
    job = Job(0, (1,), upload=True, evaluate=True)
    scores = perform(setup, down, tree.take(first.clients, [1]), job).scores
    assert scores is not None
    assert state.scores.accuracy[1] == scores.accuracy[0]
    accuracy, loss, *_ = score_general(setup, setup.algorithm.general(state.server))  # type: ignore[arg-type]
    assert state.history[0]["gm"] == round(100 * accuracy, 4)
    assert state.history[0]["gm_loss"] == round(loss, 4)


def test_the_mean_over_clients_is_unweighted_and_passes_over_clients_without_test_data(model: Model) -> None:
    empty = torch.empty(0, 4), torch.empty(0, dtype=torch.long)
    full = blobs((9, 9, 9))
    parts = [(full.train.x[s.train], full.train.y[s.train]) for s in full.shards]
    tests = [(full.test.x[:7], full.test.y[:7]), empty, (full.test.x[7:60], full.test.y[7:60])]
    federation = Federation.from_clients(
        [(*train, *test) for train, test in zip(parts, tests, strict=True)], full.classes
    )
    state = run(Setup(Local(), model, federation, 0), 1)
    assert state.scores.accuracy.isnan().tolist() == [False, True, False]
    expected = 50 * float(state.scores.accuracy[0] + state.scores.accuracy[2])
    assert state.history[0]["pm"] == pytest.approx(expected, abs=1e-3)
    assert state.history[0]["gm"] is None


def test_where_a_tested_client_has_diverged_the_mean_loss_is_unknown_and_not_that_of_the_others() -> None:
    nan = torch.nan
    scores = replace(Scores.unknown(3), accuracy=torch.tensor([0.5, 0.0, nan]), nll=torch.tensor([1.0, nan, nan]))
    accuracy, loss, *_ = average(scores)
    assert accuracy == 0.25
    assert math.isnan(loss)


def test_local_chooses_for_the_clients_that_have_not_chosen_and_for_no_others(
    model: Model, federation: Federation
) -> None:
    algorithm = Local(lr=(0.05, 1e-7), batch_size=(5,), epochs=3)
    setup = Setup(algorithm, model, federation, 0)
    rng, data = Rng(0, 0, range(4)), federation.cohort(range(4))
    fresh, _ = algorithm.adapt(model, None, start(setup).clients, data, rng)
    other = torch.where(torch.arange(4) == 1, -1, 1 - fresh.choice)  # all but one have chosen, and otherwise
    mixed, _ = algorithm.adapt(model, None, replace(start(setup).clients, choice=other), data, rng)
    assert mixed.choice.tolist() == torch.where(other < 0, fresh.choice, other).tolist()


def test_local_leaves_itself_something_to_train_on_however_much_is_held_out(model: Model) -> None:
    algorithm = Local(lr=(1e-30, 0.5), batch_size=(5,), epochs=20, validation=0.8)
    seen: list[tuple[int, ...]] = []

    class Watched(Local):
        def _train(self, model: Model, start: Any, data: Any, rng: Rng, candidate: int) -> Any:
            seen.append(data.sizes)
            return super()._train(model, start, data, rng, candidate)

    setup = Setup(Watched(**algorithm.model_dump()), model, blobs((2, 1)), 0)
    run(setup, 1)
    assert min(min(sizes) for sizes in seen) == 1


def test_a_run_that_diverges_stops_with_a_sentence(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match=r"diverged in round \d+.*smaller learning rate"):
        run(Setup(FedAvg(lr=1e30), model, federation, 0), 3)


def test_an_upload_that_overflowed_is_left_out_as_if_its_client_had_not_uploaded(
    model: Model, federation: Federation
) -> None:
    setup = Setup(FedAvg(), model, federation, 0)
    federation.train.x[federation.shards[3].train] = torch.inf
    state = one_round(start(setup), 1.0, False, Sequential(setup), Progress())
    assert same(state.server, setup.algorithm.merge(model.initial, tree.cat(_uploads(setup, [0, 1, 2]))))


def _uploads(setup: Setup, clients: list[int]) -> list[object]:
    jobs = [Job(0, (j,), upload=True, evaluate=False) for j in clients]
    return [perform(setup, setup.model.initial, torch.empty(1, 0), job).up for job in jobs]


def test_federation_beats_training_alone_on_scarce_data(model: Model) -> None:
    federation = blobs((4, 4, 5, 3, 4, 5, 4, 40))
    alone = run(Setup(Local(lr=0.01), model, federation, 0), 1)
    together = run(Setup(PFedVEM(lr_head=0.01, lr_base=0.01), model, federation, 0), 25)
    assert together.history[-1]["pm"] > alone.history[-1]["pm"] + 3  # type: ignore[operator]


@pytest.mark.parametrize("method", ["pfedvem", "fedavg", "fedper"])
def test_where_only_uploaders_train_the_others_stay_as_they_are(
    method: str, model: Model, federation: Federation
) -> None:
    setup = Setup(METHODS[method](), model, federation, 0)
    for tested in (None, range(4)):
        before = start(setup)
        changes = play(before, 0.3, tested, Sequential(setup), Progress(), "uploaders")
        after = changes.after(tree.put(before.clients, changes.visited, changes.rows))
        everyone = one_round(before, 0.3, tested is not None, Sequential(setup), Progress())
        for j in range(4):
            expected = everyone if j in uploaders(0, 0, 4, 0.3) else before
            pairs = zip(tree.leaves(tree.take(after.clients, [j])), tree.leaves(expected.clients), strict=True)
            assert all(torch.equal(row[0], whole[j]) for row, whole in pairs)
        # What is sent, merged and tested is what it is where all train.
        pairs = zip(tree.leaves(after.server), tree.leaves(everyone.server), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(after.scores.accuracy.nan_to_num(), everyone.scores.accuracy.nan_to_num())


@pytest.mark.parametrize("method", ["pfedvem", "ifca"])
def test_a_sample_of_clients_can_be_tested(method: str, model: Model, federation: Federation) -> None:
    result = fit(METHODS[method](), model, federation, rounds=2, eval_every=1, eval_clients=2, workers=1)
    whole = fit(METHODS[method](), model, federation, rounds=2, eval_every=1, workers=1)
    tested = ~result.state.scores.accuracy.isnan()
    assert int(tested.sum()) == 2
    assert torch.allclose(result.state.scores.accuracy[tested], whole.state.scores.accuracy[tested], atol=1e-6)
    assert result.summary["pm"] is not None


def test_the_calibration_error_is_the_distance_of_confidence_from_accuracy(federation: Federation) -> None:
    """A network that gives its first class 0.8 everywhere is off by the difference to how often that class is right."""
    network = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(network.weight)
    with torch.no_grad():
        network.bias.copy_(torch.tensor([0.8, 0.1, 0.1]).log())
    setup = Setup(FedAvg(), Model(network), federation, 0)
    test = torch.arange(len(federation.test))
    accuracy, _, ece, _, _ = score(setup, tree.expand(setup.model.initial, 1), test)
    share = float((federation.test.y == 0).double().mean())
    assert accuracy == pytest.approx(share)
    assert ece == pytest.approx(abs(0.8 - share), abs=1e-6)


def test_errors_of_calibration_in_different_bins_do_not_cancel() -> None:
    """Half of the samples are given 0.9 and are wrong, half are given 0.6 and are right: 0.5 * 0.9 + 0.5 * 0.4."""
    network = torch.nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0], [0.0]]))
        network.bias.zero_()
    sure, unsure = torch.logit(torch.tensor([0.9, 0.6])).tolist()
    x, y = torch.tensor([[sure], [unsure]] * 5), torch.tensor([1, 0] * 5)
    federation = Federation.from_clients([(x, y, x, y)], classes=("a", "b"))
    setup = Setup(FedAvg(), Model(network), federation, 0)
    _, _, ece, _, _ = score(setup, tree.expand(setup.model.initial, 1), torch.arange(10))
    assert ece == pytest.approx(0.65, abs=1e-6)


def test_a_row_is_finite_even_where_its_sum_is_not() -> None:
    huge = torch.full((3, 2, 2), 3e38)
    huge[1, 0, 1], huge[2, 1, 0] = math.nan, math.inf
    assert tree.finite(huge).tolist() == [True, False, False]
    assert tree.finite(torch.tensor([1.0, math.inf])).tolist() == [True, False]
