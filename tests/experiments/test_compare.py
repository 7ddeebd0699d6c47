"""A comparison: which settings go to which method, what is run and what is kept, and the numbers over seeds."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from pfedvem import FedAvg, Federation, Local, Model, PFedVEM, Progress, Result, UserError
from pfedvem.algorithms import METHODS
from pfedvem.experiments import compare as module
from pfedvem.experiments.compare import Comparison, Measure, cells, compare, measure, wire_bytes
from pfedvem.experiments.config import Config, load
from pfedvem.experiments.run import next_folder, run
from pfedvem.simulation.fit import Interrupted
from pfedvem.simulation.rounds import State
from pfedvem.simulation.work import Setup
from tests.conftest import blobs

TINY = {"rounds": 2, "participation": 0.5, "data": {"clients": 4, "train_samples": 200}}
TWO = ("fedavg", "local")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and no pictures of the runs, which take longer than the runs."""
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pfedvem.experiments.run.draw_run", lambda result, path: None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Result]:
    """The results of the cells that are run, by their names."""
    results: dict[str, Result] = {}

    def watched(config: Config, **options: Any) -> Result:
        result = results[f"{config.method}-{config.seed}"] = run(config, **options)
        return result

    monkeypatch.setattr(module, "run", watched)
    return results


def plan(*assignments: str, methods: tuple[str, ...] = TWO, seeds: int = 1) -> list[Config]:
    settings = {"fedavg.epochs=1", "local.epochs=1", "local.lr=0.01", "local.batch_size=10"}
    own = [text for text in sorted(settings) if text.partition(".")[0] in methods]
    return cells(methods, seeds=seeds, flags=TINY, assignments=[*own, *assignments])


def by_name(configs: list[Config]) -> dict[str, Any]:
    return {config.method: config.algorithm for config in configs}


def row(comparison: Comparison, name: str) -> module.Row:
    return next(row for row in comparison.rows if row.name == name)


# Settings


def test_a_cell_is_a_method_with_a_seed_and_the_seeds_go_on_from_the_first() -> None:
    made = plan("seed=5", seeds=3)
    assert [(c.method, c.seed) for c in made] == [(m, s) for s in (5, 6, 7) for m in TWO]


def test_all_stands_for_every_method_and_none_is_taken_twice() -> None:
    assert [config.method for config in cells(["all"])] == list(METHODS)
    assert [config.method for config in cells(["local", "all"])] == ["local", *(m for m in METHODS if m != "local")]


def test_each_method_starts_from_its_own_preset_for_the_data_set() -> None:
    for config in cells(["all"], flags={"data": {"dataset": "digits"}}):
        assert config.algorithm == load(None, {"method": config.method}).algorithm


def test_everything_but_the_algorithm_is_the_same_for_all_methods() -> None:
    def common(config: Config) -> dict[str, Any]:
        return {k: v for k, v in config.dump().items() if k not in ("method", "algorithm")}

    made = cells(["pfedvem", "fedavg"], flags={**TINY, "eval_every": 3}, assignments=["network=lenet"])
    assert common(made[0]) == common(made[1])
    assert (made[0].network, made[0].eval_every, made[0].alone) == ("lenet", 3, False)


@pytest.mark.parametrize("key", ["lr_head", "algorithm.lr_head"])
def test_a_setting_goes_to_the_methods_that_have_it(key: str) -> None:
    made = by_name(cells(["pfedvem", "fedavg"], assignments=[f"{key}=0.5", "batch_size=7"]))
    assert made["pfedvem"].lr_head == 0.5
    assert made["pfedvem"].batch_size == made["fedavg"].batch_size == 7


def test_a_methods_own_setting_wins_over_the_common_one() -> None:
    made = by_name(cells(["pfedvem", "fedavg"], assignments=["fedavg.batch_size=3", "batch_size=7"]))
    assert (made["pfedvem"].batch_size, made["fedavg"].batch_size) == (7, 3)


@pytest.mark.parametrize("given", [{"flags": {"rounds": 9}}, {"assignments": ["rounds=9"]}])
def test_common_rounds_are_not_for_a_method_that_needs_a_number_of_its_own(given: dict[str, Any]) -> None:
    assert [config.rounds for config in cells(TWO, **given)] == [9, 1]
    own = {**given, "assignments": [*given.get("assignments", ()), "local.rounds=4"]}
    assert [config.rounds for config in cells(TWO, **own)] == [9, 4]


def test_a_file_holds_common_settings_and_sections_of_methods(tmp_path: Path) -> None:
    file = tmp_path / "compare.toml"
    file.write_text(
        'rounds = 9\nseed = 3\n[data]\nclients = 7\ndataset = "digits"\nsizes = [1, 1, 1, 1, 1, 1, 2]\n'
        "[algorithm]\nbatch_size = 8\n[fedavg]\nbatch_size = 2\nrounds = 4\n[pfedvem]\nlr_head = 0.5\n"
    )
    averaged, alone = cells(TWO, file=file, flags={"data": {"clients": 7}})
    assert (averaged.rounds, averaged.seed, averaged.data.clients, averaged.data.sizes[-1]) == (4, 3, 7, 2)
    assert by_name([averaged])["fedavg"].batch_size == 2
    assert alone.algorithm == Local(**{**alone.algorithm.model_dump(), "batch_size": 8})
    assert cells(TWO, file=file, flags={"rounds": 5})[0].rounds == 5, "flags win over the file"


def test_the_algorithm_of_a_runs_file_belongs_to_that_runs_method(tmp_path: Path) -> None:
    saved = load(None, {"method": "fedavg", "rounds": 9}, ["epochs=2", "batch_size=3", "seed=4"])
    (tmp_path / "config.toml").write_text(tomli_w.dumps(saved.dump()))
    averaged, alone = cells(TWO, file=tmp_path / "config.toml")
    assert averaged == saved.model_copy(update={"alone": False, "keep_models": False})
    assert alone.algorithm == load(None, {"method": "local"}).algorithm
    assert alone.seed == 4


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("lr_head=1", "'lr_head' is a setting of .*pfedvem.*, not of fedavg"),
        ("nonsense=1", "There is no setting 'nonsense'"),
        ("fedavg.nonsense=1", "There is no setting 'algorithm.nonsense'"),
        ("fedavg.clients=5", "There is no setting 'algorithm.clients'"),
        ("fedavgg.lr=1", "There is no method 'fedavgg'"),
        ("pfedvem.lr_head=1", "A setting is for pfedvem, but the methods that are compared are fedavg, local"),
        ("examples.ditto:Ditto.lam=1", "A setting is for examples.ditto:Ditto, but the methods that are compared are"),
        ("method=fedavg", "A setting is for method, but"),
        ("alone=true", "clients are not trained alone besides. Leave it out, and take the method local too"),
        ("keep_models=true", "clients' models are not kept. Leave it out"),
        ("guard.nonsense=1", "There is no setting 'guard.nonsense'"),
        ("fedavg.lr=-1", "algorithm.lr should be greater than 0"),
        ("lr", "--set takes key=value, not 'lr'"),
        ("rounds=0", "rounds should be greater than or equal to 1"),
    ],
)
def test_settings_that_no_method_has_are_refused(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cells(TWO, assignments=[assignment])


def test_what_the_cells_have_anyhow_may_be_said() -> None:
    assert cells(TWO, assignments=["alone=false", "keep_models=false"]) == cells(TWO)


def test_settings_of_the_guard_are_for_all_methods() -> None:
    made = cells(TWO, assignments=["guard.largest=7", "guard.bounds=false"])
    assert [(config.guard.largest, config.guard.bounds) for config in made] == [(7, False), (7, False)]


def test_unknown_methods_no_methods_and_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no method 'fedavgg'"):
        cells(["fedavgg"])
    for methods, seeds in (([], 1), (TWO, 0)):
        with pytest.raises(UserError, match="at least one method and one seed"):
            cells(methods, seeds=seeds)
    (tmp_path / "odd.toml").write_text("algorithm = 5\nmethod = 'fedavg'")
    with pytest.raises(UserError, match="algorithm is a section of settings"):
        cells(TWO, file=tmp_path / "odd.toml")


# Cells


def test_all_methods_of_a_seed_have_the_same_clients_partition_and_initial_weights(
    calls: dict[str, Result], tmp_path: Path
) -> None:
    compare(plan(seeds=2), tmp_path)
    for seed in (0, 1):
        one, other = calls[f"fedavg-{seed}"].setup, calls[f"local-{seed}"].setup
        assert one.seed == other.seed == seed
        assert one.federation.fingerprint() == other.federation.fingerprint()
        assert torch.equal(one.model.initial.w, other.model.initial.w)
        for name, leaf in one.model.initial.theta.items():
            assert torch.equal(leaf, other.model.initial.theta[name])
    assert calls["local-0"].setup.federation.fingerprint() != calls["local-1"].setup.federation.fingerprint()


def test_what_is_finished_is_not_run_again_and_what_is_missing_is(calls: dict[str, Result], tmp_path: Path) -> None:
    first = compare(plan(seeds=2), tmp_path)
    assert list(calls) == ["fedavg-0", "local-0", "fedavg-1", "local-1"]
    calls.clear()
    assert compare(plan(seeds=2), tmp_path) == first
    assert not calls
    shutil.rmtree(tmp_path / "cells" / "local-0")
    again = compare(plan(seeds=2), tmp_path)
    assert list(calls) == ["local-0"]
    assert row(again, "local").pm == row(first, "local").pm
    calls.clear()
    assert row(compare(plan(seeds=3), tmp_path), "fedavg").seeds == 3
    assert list(calls) == ["fedavg-2", "local-2"], "more seeds are added to those that there are"


class StopIn(Progress):
    """Presses Ctrl-C after the first round of a method."""

    def __init__(self, title: str) -> None:
        self.wanted, self.title = title, ""

    def stage(self, title: str, done: int, rounds: int) -> None:
        self.title = title

    def round(self, state: State) -> None:
        if self.title == self.wanted:
            raise KeyboardInterrupt


def test_a_stopped_comparison_leaves_a_table_and_goes_on_from_the_checkpoint(
    calls: dict[str, Result], tmp_path: Path
) -> None:
    methods = ("local", "fedavg")
    straight = compare(plan(methods=methods), tmp_path / "straight")
    calls.clear()
    with pytest.raises(Interrupted) as stopped:
        compare(plan(methods=methods), tmp_path / "broken", progress=StopIn("FedAvg"))
    assert (stopped.value.rounds, stopped.value.out) == (1, tmp_path / "broken" / "cells" / "fedavg-0")
    table = list(csv.DictReader((tmp_path / "broken" / "comparison.csv").read_text().splitlines()))
    assert [line["method"] for line in table] == ["local"]
    began: list[int] = []

    class Hears(Progress):
        def stage(self, title: str, done: int, rounds: int) -> None:
            began.append(done)

    calls.clear()
    resumed = compare(plan(methods=methods), tmp_path / "broken", progress=Hears())
    assert (list(calls), began) == (["fedavg-0"], [1])
    assert row(resumed, "fedavg").gm == row(straight, "fedavg").gm
    assert len((tmp_path / "broken" / "comparison.md").read_text().splitlines()) == 4


def test_a_cell_that_diverged_at_once_may_be_run_with_other_settings(tmp_path: Path) -> None:
    failed = compare(plan("fedavg.lr=1e30", methods=("fedavg",)), tmp_path)
    assert "Training diverged" in failed.failures[0]
    assert not compare(plan("fedavg.lr=0.01", methods=("fedavg",)), tmp_path).failures


def test_folders_of_other_settings_are_refused_by_name_before_anything_runs(
    calls: dict[str, Result], tmp_path: Path
) -> None:
    compare(plan(methods=("fedavg",)), tmp_path)
    calls.clear()
    for unfinished in (False, True):
        if unfinished:
            (tmp_path / "cells" / "fedavg-0" / "summary.json").unlink()
        differing = r"fedavg-0 was run with other settings: algorithm.lr \(was 0.01, now 0.5\), data.clients \(was 4,"
        with pytest.raises(UserError, match=differing):
            compare(plan("fedavg.lr=0.5", "clients=5", methods=("local", "fedavg")), tmp_path)
        with pytest.raises(UserError, match=r"other settings: rounds \(was 2, now 1\)"):
            compare(plan("rounds=1"), tmp_path)
    assert not calls


def test_settings_that_change_no_number_may_differ(calls: dict[str, Result], tmp_path: Path) -> None:
    compare(plan(), tmp_path)
    calls.clear()
    compare(plan("executor=sequential", "checkpoint_every=2"), tmp_path)
    assert not calls


def test_rounds_can_be_added_and_the_old_summary_does_not_pass_for_the_new(
    calls: dict[str, Result], tmp_path: Path
) -> None:
    alone = ("fedavg",)
    straight = compare(plan("rounds=4", methods=alone), tmp_path / "straight")
    compare(plan(methods=alone), tmp_path / "longer")
    with pytest.raises(Interrupted):
        compare(plan("rounds=4", methods=alone), tmp_path / "longer", progress=StopIn("FedAvg"))
    assert not (tmp_path / "longer" / "cells" / "fedavg-0" / "summary.json").exists()
    assert "FedAvg" not in (tmp_path / "longer" / "comparison.md").read_text()
    calls.clear()
    assert row(compare(plan("rounds=4", methods=alone), tmp_path / "longer"), "fedavg").gm == straight.rows[0].gm
    assert list(calls) == ["fedavg-0"]


def test_a_cell_that_fails_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sometimes(config: Config, **options: Any) -> Result:
        if (config.method, config.seed) == ("fedavg", 0):
            raise UserError("Training diverged.")
        return run(config, **options)

    monkeypatch.setattr(module, "run", sometimes)
    comparison = compare(plan(seeds=2), tmp_path)
    assert comparison.failures == ("FedAvg, seed 0: Training diverged.",)
    assert [(row.name, row.seeds) for row in comparison.rows] == [("fedavg", 1), ("local", 2)]


def test_the_settings_beside_the_tables_repeat_the_comparison(tmp_path: Path) -> None:
    made = plan("local.batch_size=7", "seed=3", seeds=2)
    compare(made, tmp_path)
    about = json.loads((tmp_path / "comparison.json").read_text())
    assert (about["methods"], about["seeds"], about["failures"]) == (list(TWO), [3, 4], [])
    again = "pfedvem compare --config comparison.toml --methods fedavg,local --seeds 2 --out NEW"
    assert about["command"] == again
    assert cells(TWO, seeds=2, file=tmp_path / "comparison.toml") == made


def test_each_cell_is_announced_with_what_is_done_and_to_do(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    compare(plan(methods=("local",)), tmp_path)
    compare(plan(seeds=2), tmp_path, on_cell=lambda *news: heard.append(news))
    assert heard == [("FedAvg, seed 0", 0, 3), ("FedAvg, seed 1", 1, 3), ("Local, seed 1", 2, 3)]


def test_what_was_given_no_folder_gets_the_next_free_one(tmp_path: Path) -> None:
    (tmp_path / "digits-1").mkdir()
    assert next_folder(tmp_path, "digits") == tmp_path / "digits-2"
    assert next_folder(tmp_path, "owner/name-my.module:Class") == tmp_path / "owner-name-my.module-Class-1"


# Numbers


def both(found: Measure | None) -> tuple[float, float]:
    assert found is not None
    assert found.sem is not None
    return found.mean, found.sem


def test_mean_and_standard_error_by_hand() -> None:
    # sd = sqrt((4 + 1 + 9) / 2) = sqrt(7)
    assert both(measure([1.0, 2.0, 6.0])) == pytest.approx((3.0, (7 / 3) ** 0.5))
    assert both(measure([70.0, None, 72.0])) == pytest.approx((71.0, 1.0))
    assert measure([70.0]) == Measure(70.0, None)
    assert measure([None, None]) is None


def test_a_row_holds_the_numbers_of_its_runs(calls: dict[str, Result], tmp_path: Path) -> None:
    comparison = compare(plan(seeds=2), tmp_path)
    alone, averaged = row(comparison, "local"), row(comparison, "fedavg")
    a, b = (calls[f"local-{seed}"].summary for seed in (0, 1))
    assert both(alone.pm) == pytest.approx(((a["pm"] + b["pm"]) / 2, abs(a["pm"] - b["pm"]) / 2))
    assert alone.small is not None
    assert alone.small.mean == pytest.approx((a["small_clients_pm"] + b["small_clients_pm"]) / 2)
    assert alone.seconds == pytest.approx((a["seconds"] + b["seconds"]) / 2)
    assert (alone.gm, averaged.pm, averaged.small) == (None, None, None)
    assert averaged.gm is not None
    assert (comparison.dataset, comparison.clients, alone.seeds, alone.title) == ("digits", 4, 2, "Local")


NETWORK = 4 * (4 * 5 + 5 + 5 * 3 + 3)  # the bytes of the weights of the small network


@pytest.mark.parametrize(
    ("make", "down", "up"),
    [
        (lambda: FedAvg(epochs=1), NETWORK, NETWORK + 4),  # and n_j
        (lambda: PFedVEM(head_epochs=1, base_epochs=1), NETWORK, NETWORK + 8),  # mu_j for w, and n_j and tau_j
        (lambda: Local(epochs=1), 0, 0),
    ],
)
def test_bytes_are_those_of_the_tensors_on_the_wire(
    model: Model, federation: Federation, make: Callable[[], Any], down: int, up: int
) -> None:
    assert wire_bytes(Setup(make(), model, federation, 0)) == (down, up)


def test_the_wire_carries_one_client_however_many_there_are(model: Model, federation: Federation) -> None:
    few, many = (wire_bytes(Setup(FedAvg(epochs=1), model, f, 0)) for f in (federation, blobs((5,) * 30)))
    assert few == many
