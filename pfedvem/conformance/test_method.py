"""What every method must do, whatever its maths."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms import AnyAlgorithm, FedAvg
from pfedvem.conformance.conftest import drifting, small_network
from pfedvem.data.federation import Federation, Split
from pfedvem.models import Model
from pfedvem.rng import Rng, uploaders
from pfedvem.simulation.executors import Executor, Processes, Sequential, Vectorised
from pfedvem.simulation.fit import Interrupted, fit
from pfedvem.simulation.rounds import Progress, State, one_round, simulate, start
from pfedvem.simulation.work import Job, Setup, perform, score, score_clients

PARTICIPATION = 0.4
LEARNERS = [40, 30, 50, 20]


def one(setup: Setup, state: State | None = None, *, evaluate: bool = False) -> State:
    return one_round(state or start(setup), PARTICIPATION, evaluate, Sequential(setup), Progress())


def several(setup: Setup, rounds: int, eval_every: int = 0, place: Executor | None = None) -> State:
    return simulate(
        start(setup),
        rounds=rounds,
        participation=PARTICIPATION,
        eval_every=eval_every,
        executor=place or Sequential(setup),
        progress=Progress(),
        after_round=lambda state: None,
    )


def equal(a: Any, b: Any) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(torch.equal(x.nan_to_num(-1), y.nan_to_num(-1)) for x, y in pairs)


def local(setup: Setup, state: State, clients: list[int]) -> Any:
    """What local training of a whole cohort gives: upload, clients, personalised models."""
    algorithm, data = setup.algorithm, setup.federation.cohort(clients)
    rng, down = Rng(setup.seed, state.round, clients), setup.algorithm.down(state.server)
    kept, carry = algorithm.adapt(setup.model, down, tree.take(state.clients, clients), data, rng)
    up, kept, carry = algorithm.contribute(setup.model, down, kept, carry, data, rng)
    return up, kept, algorithm.personal(setup.model, down, kept, carry, data, rng) if algorithm.personalised else None


def test_it_says_what_it_is(algorithm: AnyAlgorithm) -> None:
    cls = type(algorithm)
    assert all(isinstance(getattr(cls, name), str) for name in ("name", "title", "reference", "keeps", "sends"))
    assert cls.personalised or cls.global_model
    assert all(field.description for field in cls.model_fields.values())


def test_it_has_the_models_that_it_claims(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    state = one(Setup(algorithm, model, federation, 0), evaluate=True)
    assert (state.history[-1]["pm"] is not None) == algorithm.personalised
    assert (state.history[-1]["gm"] is not None) == algorithm.global_model


def test_unknown_settings_are_refused(algorithm: AnyAlgorithm) -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        type(algorithm).model_validate({"no_such_setting": 1})


def test_nothing_that_is_passed_in_is_changed(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    setup = Setup(algorithm, model, federation, 0)
    before = one(setup)
    frozen = copy.deepcopy((before.server, before.clients))
    up, _, _ = local(setup, before, [0, 1, 3])
    algorithm.merge(before.server, up)
    assert equal(frozen[0], before.server)
    assert equal(frozen[1], before.clients)


def test_values_that_are_returned_share_no_memory_with_what_clients_keep(
    algorithm: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    """Writing over an upload or a personalised model must not reach the next round."""
    setup = Setup(algorithm, model, federation, 0)
    state = one(setup)
    server, clients = copy.deepcopy((state.server, state.clients))
    up, kept, personal = local(setup, state, [0, 1])
    merged = algorithm.merge(state.server, up)
    after = copy.deepcopy(merged)
    for leaf in [*tree.leaves(up), *tree.leaves(personal), *tree.leaves(kept)]:
        if leaf.numel() and leaf.is_contiguous():
            leaf.fill_(0)
    assert equal(server, state.server)
    assert equal(clients, state.clients)
    assert equal(after, merged)


def test_a_client_can_start_from_what_is_sent(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    """A real site knows nothing else of the server."""
    server, rng = start(Setup(algorithm, model, federation, 0)).server, Rng(0, 0, [0, 3])
    sent = algorithm.client_init(model, algorithm.down(server), rng)
    assert equal(sent, algorithm.client_init(model, server, rng))


def test_all_numbers_are_float32(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    setup = Setup(algorithm, model, federation, 0)
    state = one(setup)
    up, kept, personal = local(setup, state, [0, 1])
    for part in (state.server, state.clients, algorithm.down(state.server), up, kept, personal):
        assert all(leaf.dtype in (torch.float32, torch.int64) for leaf in tree.leaves(part))


def test_clients_in_a_cohort_train_as_each_alone(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    setup = Setup(algorithm, model, federation, 0)
    state = one(setup)
    everyone = list(range(len(federation)))
    together = local(setup, state, everyone)
    for j in everyone:
        for whole, alone in zip(together, local(setup, state, [j]), strict=True):
            for a, b in zip(tree.leaves(tree.take(whole, [j])), tree.leaves(alone), strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


def test_all_executors_agree_on_ragged_clients(algorithm: AnyAlgorithm, model: Model) -> None:
    """From one sample to two thousand; padding, cohorts and workers leave no trace but rounding."""
    quick = {name: 1 for name in type(algorithm).model_fields if "epochs" in name}
    ragged = drifting([2000, 1, 310, 37, 3, 290, 12, 300, 9, 1, 34, 11])
    setup = Setup(algorithm.model_copy(update=quick), model, ragged, 0)
    reference = several(setup, 2, place=Sequential(setup))
    with Processes(setup, 2) as processes:
        for place in (processes, Vectorised(setup), Vectorised(setup, 3)):
            state = several(setup, 2, place=place)
            for part in ("server", "clients", "scores"):
                pairs = zip(tree.leaves(getattr(reference, part)), tree.leaves(getattr(state, part)), strict=True)
                for a, b in pairs:
                    torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3, equal_nan=True)


def test_the_order_of_clients_does_not_matter(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    class Backwards(Sequential):
        def run(self, down: Any, clients: Any, jobs: Any) -> Any:
            return super().run(down, clients, [replace(job, clients=job.clients[::-1]) for job in jobs[::-1]])

    setup = Setup(algorithm, model, federation, 0)
    forwards = one(setup, evaluate=True)
    backwards = one_round(start(setup), PARTICIPATION, True, Backwards(setup), Progress())
    assert equal(forwards.server, backwards.server)
    assert equal(forwards.clients, backwards.clients)
    assert equal(forwards.scores, backwards.scores)


def test_merging_does_not_depend_on_the_order_of_uploads(
    algorithm: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    setup = Setup(algorithm, model, federation, 0)
    state = one(setup)
    up, _, _ = local(setup, state, [0, 1, 3])
    there, back = algorithm.merge(state.server, up), algorithm.merge(state.server, tree.take(up, [2, 0, 1]))
    for a, b in zip(tree.leaves(there), tree.leaves(back), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_client_that_does_not_upload_leaves_the_server_as_if_it_were_absent(
    algorithm: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    """The others' data can be anything at all."""
    changed = federation.train.x.clone()
    for j in set(range(len(federation))) - set(uploaders(0, 0, len(federation), PARTICIPATION)):
        changed[federation.shards[j].train] += 1
    tampered = replace(federation, train=Split(changed, federation.train.y))
    first, second = (one(Setup(algorithm, model, data, 0)) for data in (federation, tampered))
    assert not torch.equal(changed, federation.train.x)
    assert equal(first.server, second.server)


def test_what_a_client_keeps_changes_only_by_its_own_training(
    algorithm: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    setup = Setup(algorithm, model, federation, 0)
    before = one(setup)
    after = one(setup, before)
    down, uploading = algorithm.down(before.server), uploaders(0, 1, len(federation), PARTICIPATION)
    for j in range(len(federation)):
        kept = tree.take(before.clients, [j])
        if j in uploading or algorithm.trains_everyone:
            kept = perform(setup, down, kept, Job(1, (j,), upload=j in uploading)).client
        assert equal(kept, tree.take(after.clients, [j]))


def test_evaluating_changes_nothing(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    setup = Setup(algorithm, model, federation, 0)
    rarely, often = several(setup, 3), several(setup, 3, eval_every=1)
    assert equal(rarely.server, often.server)
    assert equal(rarely.clients, often.clients)
    assert equal(rarely.scores, often.scores)


def test_the_personalised_model_is_not_the_broadcast(
    algorithm: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    """A PM that equals what was sent down is the commonest bug of all: it was overwritten, or never stored."""
    if not algorithm.personalised or algorithm.personal_after_merge:
        pytest.skip("there is no PM from local training")
    setup = Setup(algorithm, model, federation, 0)
    state = one(setup)
    _, _, personal = local(setup, state, [0, 1, 3])
    assert not any(torch.equal(personal.w[0], personal.w[row]) for row in (1, 2))
    general = algorithm.general(state.server)
    if algorithm.global_model and general is not None:
        up, _, _ = local(setup, state, [0, 1, 3])
        merged = algorithm.general(algorithm.merge(state.server, up))
        assert merged is not None
        assert not any(torch.equal(model_w, w) for model_w in (general.w, merged.w) for w in personal.w)


def test_a_client_with_one_sample_trains(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    changed = federation.train.x.clone()
    changed[federation.shards[2].train] += 1
    results = []
    for x in (federation.train.x, changed):
        setup = Setup(algorithm, model, replace(federation, train=Split(x, federation.train.y)), 0)
        results.append(tree.leaves(dict(enumerate(local(setup, start(setup), [2])))))
    assert federation.shards[2].n == 1
    assert all(bool(leaf.isfinite().all()) for leaf in results[0])
    assert any(not torch.equal(a, b) for a, b in zip(*results, strict=True)), "its one sample has no effect"


def test_the_wire_carries_exactly_down_and_up(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    """Training works on messages that went through bytes, and gives the same numbers."""

    def sent(message: Any) -> Any:
        named = {name: leaf.contiguous() for name, leaf in tree.named(message).items()}
        received = safetensors.torch.load(safetensors.torch.save({k: v.clone() for k, v in named.items()}))
        return tree.rebuild(message, [received[name] for name in named])

    setup = Setup(algorithm, model, federation, 0)
    state = one(setup)
    clients = uploaders(0, 1, len(federation), PARTICIPATION)
    ups = []
    for j in clients:
        down = sent(algorithm.down(state.server))
        ups.append(sent(perform(setup, down, tree.take(state.clients, [j]), Job(1, (j,), upload=True)).up))
    assert equal(algorithm.merge(sent(state.server), tree.cat(ups)), one(setup, state).server)


def test_interrupted_and_resumed_is_bit_for_bit_the_straight_run(
    algorithm: AnyAlgorithm, model: Model, federation: Federation, tmp_path: Path
) -> None:
    class Stop(Progress):
        def round(self, state: State) -> None:
            if state.round == 2:
                raise KeyboardInterrupt

    def train(out: Path, **options: Any) -> None:
        fit(algorithm, model, federation, rounds=4, participation=PARTICIPATION, eval_every=2, out=out, **options)

    train(tmp_path / "straight")
    with pytest.raises(Interrupted):
        train(tmp_path / "broken", progress=Stop())
    train(tmp_path / "broken", resume=True)
    for file in ("server.safetensors", "clients.safetensors"):
        assert (tmp_path / "straight/model" / file).read_bytes() == (tmp_path / "broken/model" / file).read_bytes()
    assert (tmp_path / "straight/clients.csv").read_text() == (tmp_path / "broken/clients.csv").read_text()


def test_the_seed_decides(algorithm: AnyAlgorithm, model: Model, federation: Federation) -> None:
    def trained(seed: int) -> list[Tensor]:
        setup = Setup(algorithm, model, federation, seed)
        return tree.leaves(dict(enumerate(local(setup, start(setup), [3]))))

    first, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.fixture(scope="session")
def averaged() -> float:
    """How well FedAvg's model does on clients' own data under concept drift."""
    drift = drifting(LEARNERS)
    setup = Setup(FedAvg(lr=0.05), small_network(), drift, 0)
    server = several(setup, 30, place=Vectorised(setup)).server
    scores = score_clients(setup, tree.expand(server, len(drift)), tuple(range(len(drift))))
    return float(scores.accuracy.mean())


def test_it_learns(algorithm: AnyAlgorithm, model: Model, averaged: float) -> None:
    """Under concept drift personalised models beat FedAvg's on clients' own data; without it global models learn."""
    drift = drifting(LEARNERS)
    if algorithm.personalised:
        setup = Setup(algorithm, model, drift, 0)
        state = several(setup, algorithm.default_rounds or 30, place=Vectorised(setup))
        assert float(state.scores.accuracy.mean()) > averaged + 0.1
    else:
        same = replace(drift, shards=drift.shards[::2])
        setup = Setup(algorithm, model, same, 0)
        general = algorithm.general(several(setup, 25, place=Vectorised(setup)).server)
        assert general is not None
        test = torch.cat([same.test_indices(j) for j in range(len(same))])
        one_client = tree.expand(general, 1)
        before = score(setup, tree.expand(model.initial, 1), test)
        after = score(setup, one_client, test)
        assert after[1] < 0.8 * before[1]
        assert after[0] > 0.5
