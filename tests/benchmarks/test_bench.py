"""The benchmark compares like with like, and notices what became slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pfedvem import tree
from pfedvem.algorithms import METHODS, PFedVEM
from pfedvem.benchmarks import measure, plain
from pfedvem.benchmarks.measure import difference, regressions, spread_over
from pfedvem.benchmarks.run import chosen, read_figures
from pfedvem.cli.app import app
from pfedvem.data import from_arrays
from pfedvem.errors import UserError
from pfedvem.networks import build
from pfedvem.simulation.rounds import start
from pfedvem.simulation.work import Job, Setup, perform


@pytest.fixture
def setup() -> Setup:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (160, 3, 16, 16), generator=rng, dtype=torch.uint8)
    y = torch.arange(160) % 4
    federation = from_arrays(x[:120], y[:120], x[120:], y[120:], clients=4, labels_per_client=2)
    return Setup(PFedVEM(lr_base=1e-2), build("lenet", (3, 16, 16), 4, 0), federation, 0)


def test_the_plain_way_ends_with_the_weights_of_the_engine(setup: Setup) -> None:
    state = start(setup)
    assert difference(setup, state, 0) < 1e-5


def test_the_plain_way_tests_as_the_engine_does(setup: Setup) -> None:
    state = start(setup)
    own = plain.pfedvem(setup, state.server, state.clients, 1, 0)
    outcome = perform(setup, state.server, tree.take(state.clients, [1]), Job(0, (1,), evaluate=True))
    assert outcome.scores is not None
    assert plain.evaluate(setup, own.network, 1) == pytest.approx(float(outcome.scores.accuracy[0]))


def test_clients_are_spread_over_the_sizes(setup: Setup) -> None:
    sizes = setup.federation.sizes
    assert spread_over(setup.federation, 4) == sorted(range(4), key=lambda j: sizes[j])


def test_only_ratios_are_compared_and_only_if_they_fell() -> None:
    before = {"networks": {"mlp": {"processes": {"round": 1.0, "ratio_at_end": 20.0, "ratio_every_5": 10.0}}}}
    now = {"networks": {"mlp": {"processes": {"round": 99.0, "ratio_at_end": 13.0, "ratio_every_5": 9.0}}, "new": {}}}
    assert regressions(now, before, 0.7) == ["networks.mlp.processes.ratio_at_end was 20.0 and is 13.0"]


def test_a_whole_benchmark_gives_tables_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(measure.NETWORKS, "mlp", ("fmnist", (1, 4, 4), 600, 100, 10, 5))
    out = tmp_path / "bench.json"
    command = ["bench", "--networks", "mlp", "--methods", "fedavg,pfedvem", "--growth", "fedavg", "--clients", "20"]
    command += ["--growth-to", "100", "--workers", "2", "--out", str(out)]
    monkeypatch.setattr(measure, "METHOD_CLIENTS", 20)
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in ("pFedVEM, mlp, 20 clients", "All methods", "processes", "100"))
    figures = json.loads(out.read_text())
    assert figures["networks"]["mlp"]["difference"] < 1e-5
    assert figures["growth"]["fedavg"]["100"]["growth_all"] == 1
    assert figures["methods"]["pfedvem"]["ratio"] > 0
    figures["networks"]["mlp"]["processes"]["ratio_at_end"] = 1e9
    out.write_text(json.dumps(figures))
    again = ["bench", "--networks", "mlp", "--methods", "none", "--growth", "none", "--clients", "20", "--against"]
    slower = CliRunner().invoke(app, [*again, str(out), "--workers", "2"])
    assert slower.exit_code == 1
    assert "networks.mlp.processes.ratio_at_end was" in slower.output.replace("\n", " ")


def test_growth_begins_with_a_hundred_clients() -> None:
    command = ["bench", "--networks", "none", "--methods", "none", "--growth", "fedavg", "--growth-to", "50"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "100" in result.output


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no network 'vgg' to measure; there are mlp"):
        chosen(["vgg"], list(measure.NETWORKS), "network")
    assert chosen(["all"], list(METHODS), "method") == list(METHODS)
    with pytest.raises(UserError, match="run pfedvem bench --out"):
        read_figures(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="holds no figures"):
        read_figures(tmp_path / "other.json")
