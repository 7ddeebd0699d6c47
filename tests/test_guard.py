"""The guard on uploads, by closed forms; and hostile clients, with and without it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms import IFCA, METHODS, AnyAlgorithm, FedAvg, PFedVEM, Scaffold
from pfedvem.algorithms.base import NetworkUp
from pfedvem.algorithms.pfedvem import Server, Up
from pfedvem.attacks import ATTACKS, hostile, mislabelled
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import load
from pfedvem.guard import Admitted, Counts, Guard, admit
from pfedvem.models import Model, Params
from pfedvem.simulation.fit import fit
from pfedvem.simulation.rounds import Progress, merged, start
from pfedvem.simulation.work import Job, Setup, perform
from tests.conftest import blobs

NOTHING: dict[str, Tensor] = {}
W = torch.zeros(2, 3)
SERVER = Server(W, NOTHING)  # d = 6


def heads(mu: list[float], tau: list[float], n: list[float] | None = None) -> Up:
    """Uploads whose heads have the same number everywhere."""
    means = torch.tensor(mu).view(-1, 1, 1).expand(-1, 2, 3).clone()
    return Up(means, torch.tensor(tau), NOTHING, torch.tensor(n or [10.0] * len(mu)))


def judge(ups: Up, guard: Guard | None = None, algorithm: AnyAlgorithm | None = None) -> Admitted:
    return admit(guard or Guard(), algorithm or PFedVEM(), SERVER, ups, 10.0)


def uploads(setup: Setup, clients: tuple[int, ...]) -> tuple[Any, Any]:
    """What was sent down in the first round, and what these clients send back."""
    state = start(setup)
    down = setup.algorithm.down(state.server)
    return down, perform(setup, down, tree.take(state.clients, list(clients)), Job(0, clients, upload=True)).up


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_honest_uploads_pass_as_they_are(method: str, model: Model, federation: Federation) -> None:
    setup = Setup(METHODS[method](), model, federation, 0)
    down, ups = uploads(setup, (0, 1, 2, 3))
    found = admit(Guard(), setup.algorithm, down, ups, 9.5)
    assert same(found.ups, ups)
    assert found.rows == [0, 1, 2, 3]
    assert found.notes == {}


def test_nobody_is_more_confident_than_its_distance_from_w_allows() -> None:
    """|mu - w|^2 = 6 * 5^2 and d = 6, so tau is at most 2 / 25."""
    found = judge(heads([0.1, 0.1, 5.0], [2.0, 2.0, 7.0]))
    assert found.ups.tau.tolist() == pytest.approx([2.0, 2.0, 0.08])
    assert found.counts.capped.tolist() == [0, 0, 1]
    assert found.notes == {2: "claims tau = 7 (counts as 0.08)"}


def test_nobody_is_far_more_confident_than_most() -> None:
    found = judge(heads([0.0, 0.1, 0.1, 0.1], [1e12, 2.0, 3.0, 4.0]))
    assert found.ups.tau.tolist() == [8.0, 2.0, 3.0, 4.0]  # twice the upper median
    assert found.counts.capped.tolist() == [1, 0, 0, 0]


def test_a_claim_that_its_method_sets_no_bound_to_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PFedVEM, "bounds", lambda self, down, ups: {})
    assert judge(heads([0.1, 0.1], [1.0, 1e6])).ups.tau.tolist() == [1.0, 1e6]


def test_of_two_the_more_confident_is_believed() -> None:
    """Who of them is usual, nobody can tell: an honest client beside an outlier would have next to nothing."""
    found = judge(heads([0.1, 1.0], [16.0, 0.2]))
    assert found.ups.tau.tolist() == pytest.approx([16.0, 0.2])
    assert found.notes == {}


def test_a_confidence_without_deviation_is_not_bounded_by_it() -> None:
    found = judge(heads([0.1, 5.0], [2.0, 4.0]), algorithm=PFedVEM(confidence="uncertainty"))
    assert found.ups.tau.tolist() == [2.0, 4.0]


def test_nobody_has_far_more_data_than_is_usual() -> None:
    found = judge(heads([0.1, 0.1], [1.0, 1.0], [1e9, 150.0]))
    assert found.ups.n.tolist() == [200.0, 150.0]
    assert found.notes == {0: "claims n = 1e+09 (counts as 200)"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -3.0])
def test_a_weight_that_is_none_is_left_out(bad: float) -> None:
    found = judge(heads([0.1, 0.1, 0.1], [1.0, bad, 1.0]))
    assert found.rows == [0, 2]
    assert found.ups.tau.tolist() == [1.0, 1.0]
    assert found.counts.left_out.tolist() == [0, 1, 0]


def test_without_bounds_everything_passes() -> None:
    ups = heads([math.nan, 5.0], [1e12, -1.0])
    assert judge(ups, Guard(bounds=False)).ups is ups


def test_where_most_means_have_moved_far_only_the_farthest_is_incredible() -> None:
    found = judge(heads([1.0, 1.0, 1.2, 5.0], [10.0] * 4))  # as in a first round: all equally sure, and far from w
    assert found.ups.tau.tolist() == pytest.approx([10.0, 10.0, 10.0, 2 * 10 * 1.2**2 / 5**2])
    assert found.counts.capped.tolist() == [0, 0, 0, 1]


def test_a_change_is_clipped_to_so_many_times_the_median_length() -> None:
    found = judge(heads([1.0, -2.0, 2.5, 50.0], [1.0] * 4), Guard(bounds=False, clip=1.5))
    assert found.ups.mu[:, 0, 0].tolist() == [1.0, -2.0, 2.5, 3.0]  # 1.5 times the lower median 2
    assert found.counts.clipped.tolist() == [0, 0, 0, 1]


def test_head_and_base_are_clipped_each_by_itself() -> None:
    base = {"layer": torch.tensor([[100.0], [100.0], [1000.0]])}
    ups = replace(heads([1.0, 5.0, 1.0], [1.0] * 3), theta=base)
    server = Server(W, {"layer": torch.zeros(1)})
    found = admit(Guard(clip=1.0), PFedVEM(), server, ups, 10.0)
    assert found.ups.mu[:, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert found.ups.theta["layer"].tolist() == [[100.0], [100.0], [100.0]]
    assert found.counts.clipped.tolist() == [0, 1, 1]


def test_changes_are_clipped_from_zero_and_clusters_from_their_own_head(model: Model, federation: Federation) -> None:
    for algorithm in (Scaffold(lr=0.1), IFCA(lr=0.1)):
        down, ups = uploads(Setup(algorithm, model, federation, 0), (0, 1, 3))
        found = admit(Guard(clip=1e-6), algorithm, down, ups, 10.0).ups
        before, leaves, clipped = algorithm.before(down, ups), tree.named(ups), tree.named(found)
        moved = [float((leaves[name] - start).abs().max()) for name, start in before.items()]
        left = [float((clipped[name] - start).abs().max()) for name, start in before.items()]
        assert max(moved) > 1e-3
        assert max(left) < 1e-5


@pytest.mark.parametrize(
    ("guard", "expected"),
    [(Guard(merge="median"), 2.5), (Guard(merge="trimmed", trim=0.25), 2.5), (Guard(merge="trimmed", trim=0.1), 26.5)],
)
def test_median_and_trimmed_mean_hold_whatever_the_weights(guard: Guard, expected: float) -> None:
    unbounded = guard.model_copy(update={"bounds": False})
    found = judge(heads([1.0, 2.0, 3.0, 100.0], [1.0, 5.0, 1.0, 1e9]), unbounded)
    assert PFedVEM().merge(SERVER, found.ups).w.unique().tolist() == pytest.approx([expected])


def test_a_counter_stays_a_whole_number() -> None:
    ups = NetworkUp(Params({"count": torch.tensor([[1], [2], [2], [9]])}, torch.zeros(4, 2, 3)), torch.ones(4))
    merged = FedAvg().merge(ups.params, admit(Guard(merge="median"), FedAvg(), ups.params, ups, 1.0).ups)
    assert merged.theta["count"].tolist() == [2]
    assert merged.theta["count"].dtype == torch.int64


def test_clusters_have_no_median_and_say_so() -> None:
    with pytest.raises(UserError, match="IFCA does not merge all uploads into one"):
        load(flags={"method": "ifca", "guard": {"merge": "median"}})


def test_the_guard_is_a_section_of_the_configuration() -> None:
    config = load(assignments=["guard.merge=trimmed", "trim=0.3"])
    assert config.guard == Guard(merge="trimmed", trim=0.3)
    with pytest.raises(UserError, match=r"guard.merge should be 'mean', 'median' or 'trimmed', not 'mode'"):
        load(assignments=["guard.merge=mode"])
    with pytest.raises(UserError, match=r"no setting 'guard.median'; the nearest is 'guard"):
        load(assignments=["guard.median=true"])


# Hostile clients


@pytest.mark.parametrize(
    ("attack", "algorithm"),
    [(attack, algorithm) for attack in ATTACKS for algorithm in (PFedVEM(), FedAvg())][:-1],  # FedAvg has no tau
)
def test_only_liars_send_something_else(
    attack: str, algorithm: AnyAlgorithm, model: Model, federation: Federation
) -> None:
    setup = Setup(algorithm, model, federation, 0)
    _, honest = uploads(setup, (0, 1, 3))
    _, sent = uploads(replace(setup, algorithm=hostile(algorithm, attack, {1})), (0, 1, 3))
    assert same(tree.take(sent, [0, 2]), tree.take(honest, [0, 2]))
    assert not same(tree.take(sent, [1]), tree.take(honest, [1]))


def test_a_method_that_sends_no_head_cannot_be_attacked_by_one(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match="SCAFFOLD sends no head"):
        uploads(Setup(hostile(Scaffold(), "head", {1}), model, federation, 0), (0, 1))


def test_a_liar_that_claims_all_the_weight_owns_the_head_without_the_guard_and_not_with_it(
    model: Model, federation: Federation
) -> None:
    algorithm = hostile(hostile(PFedVEM(), "head", {3}), "tau", {3})
    down, ups = uploads(Setup(algorithm, model, federation, 0), (0, 1, 2, 3))
    torch.testing.assert_close(algorithm.merge(down, ups).w, ups.mu[3])
    found = admit(Guard(), algorithm, down, ups, 9.5)
    assert found.rows == [0, 1, 2, 3]
    share = found.ups.tau / found.ups.tau.sum()
    assert float(share[3]) < 0.5
    assert found.notes.keys() == {3}


def test_wrong_labels_are_those_of_the_liars_alone() -> None:
    federation = blobs((5, 6, 7))
    wrong = mislabelled(federation, {1})
    for j, shard in enumerate(federation.shards):
        expected = 2 - federation.train.y[shard.train] if j == 1 else federation.train.y[shard.train]
        assert torch.equal(wrong.train.y[shard.train], expected)
    assert torch.equal(wrong.test.y, federation.test.y)


class Heard(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_who_was_capped_or_left_out_is_said_once_and_counted_every_time(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    algorithm = hostile(hostile(PFedVEM(), "tau", {0}), "nan", {2})
    heard = Heard()
    fit(algorithm, model, federation, rounds=2, participation=1.0, out=tmp_path, progress=heard, workers=1)
    result = fit(algorithm, model, federation, rounds=3, participation=1.0, out=tmp_path, resume=True, workers=1)
    assert heard.notes[0].startswith("Round 1: the upload of client 0 claims tau = 1e+12")
    assert heard.notes[1] == "Round 1: the upload of client 2 has overflowed and was left out."
    assert len(heard.notes) == 2
    table = pd.read_csv(tmp_path / "clients.csv")
    assert table.uploads.tolist() == [3, 3, 3, 3]
    assert table.capped.tolist() == [3, 0, 0, 0]
    assert table.left_out.tolist() == [0, 0, 3, 0]
    assert len(result.warnings) == 2
    assert "1 clients claimed incredible weights, which were capped (3 times)" in result.warnings[1]


def test_a_round_without_a_usable_upload_leaves_the_server_as_it_is(model: Model) -> None:
    federation = blobs((9, 9, 9, 9))
    algorithm, heard = hostile(PFedVEM(), "nan", {0, 1}), Heard()
    setup = Setup(algorithm, model, federation, 0)
    before = start(setup)
    counts = before.counts.plus([2, 3], replace(Counts.none(2), uploads=torch.ones(2)))
    clients = tree.take(before.clients, [0, 1])
    outcome = perform(setup, algorithm.down(before.server), clients, Job(0, (0, 1), upload=True))
    server, after = merged(setup, replace(before, counts=counts), [outcome], heard)
    assert server is before.server
    assert after.left_out.tolist() == [1, 1, 0, 0]
    assert "no upload to merge" in heard.notes[-1]
    with pytest.raises(UserError, match="diverged in round 1"):  # nobody else has ever sent anything
        merged(setup, before, [outcome], heard)


@pytest.mark.parametrize("attack", ["nan", "tau"])
def test_a_federation_learns_in_spite_of_liars_where_it_is_guarded(attack: str, model: Model) -> None:
    federation = blobs((20,) * 9)
    honest = PFedVEM(lr_head=0.01, lr_base=0.01)
    algorithm = hostile(hostile(honest, "head", {7, 8}), attack, {7, 8})
    settings: dict[str, Any] = {"rounds": 10, "participation": 0.6, "eval_every": 0, "workers": 1}
    alone = fit(honest, model, federation, **settings).summary["gm"]
    guarded = fit(algorithm, model, federation, **settings).summary["gm"]
    bare = fit(algorithm, model, federation, guard=Guard(bounds=False), **settings).summary["gm"]
    assert guarded > alone - 5
    assert bare < alone - 20
