"""What a federation has learned, in use: modules, predictions, files, and clients that come later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from pfedvem import FedAvg, Federation, Local, Model, PFedVEM, Result, UserError, fit, load
from pfedvem.algorithms import METHODS
from pfedvem.saved import add_personal, model_folder
from pfedvem.simulation.work import score_clients
from tests.conftest import blobs, small_network

QUICK = PFedVEM(lr_head=0.01, lr_base=0.02, base_epochs=2, scale=0.3)


def trained(
    model: Model | nn.Module | None = None, federation: Federation | None = None, method: Any = QUICK, **options: Any
) -> Result:
    own = federation or blobs((7, 12, 9, 23))
    return fit(method, model or small_network(), own, rounds=4, participation=0.5, eval_every=2, workers=1, **options)


def plain(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = module(x)
    return out


# Modules


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.personalised])
def test_every_methods_personal_models_are_modules_about_as_good_as_those_that_were_tested(name: str) -> None:
    result = trained(method=METHODS[name]())
    for j in range(4):
        module = result.personal(j)
        assert isinstance(module, nn.Module)
        test = result.setup.federation.test_indices(j)
        x, y = result.setup.federation.test.x[test], result.setup.federation.test.y[test]
        found = float((plain(module, x).argmax(1) == y).double().mean())
        assert found == pytest.approx(float(result.state.scores.accuracy[j]), abs=0.31)


@pytest.mark.parametrize("name", ["local", "ifca", "perfedavg", "pfedbayes"])
def test_models_that_need_no_further_training_are_exactly_those_that_were_tested(name: str) -> None:
    result = trained(method=METHODS[name]())
    found = {one.client: one.posterior.mean for one in result.take_home(range(4))}
    for j in range(4):
        params = found[str(j)]
        batched = type(params)({key: leaf.unsqueeze(0) for key, leaf in params.theta.items()}, params.w.unsqueeze(0))
        scores = score_clients(result.setup, batched, (j,))
        assert float(scores.nll[0]) == pytest.approx(float(result.state.scores.nll[j]), abs=1e-5)


def test_the_personal_model_is_the_one_that_another_round_would_test() -> None:
    longer = fit(QUICK, small_network(), blobs((7, 12, 9, 23)), rounds=5, participation=0.5, eval_every=0, workers=1)
    result = trained()
    for one in result.take_home(range(4)):
        j, params = int(one.client), one.posterior.mean
        batched = type(params)({key: leaf.unsqueeze(0) for key, leaf in params.theta.items()}, params.w.unsqueeze(0))
        scores = score_clients(result.setup, batched, (j,))
        assert float(scores.nll[0]) == pytest.approx(float(longer.state.scores.nll[j]), abs=1e-4)


def test_asking_for_models_changes_nothing_of_the_run() -> None:
    result = trained()
    before = [leaf.clone() for leaf in (result.state.server.w, result.state.clients.q.mu)]
    result.personal(0)
    result.personalize(blob_pair(20))
    result.calibration()
    assert torch.equal(before[0], result.state.server.w)
    assert torch.equal(before[1], result.state.clients.q.mu)


def test_the_general_model_is_a_module_with_the_servers_weights() -> None:
    result, x = trained(), torch.randn(5, 4)
    h = result.setup.model.features(result.state.server.theta, x.unsqueeze(0))[0]
    w = result.state.server.w
    torch.testing.assert_close(plain(result.general(), x), h @ w[:, :-1].T + w[:, -1])


def test_a_model_that_a_method_does_not_have_is_refused() -> None:
    averaged = trained(method=FedAvg())
    with pytest.raises(UserError, match="FedAvg has no personalised models; general"):
        averaged.personal(0)
    with pytest.raises(UserError, match="nothing that a client which comes later could start from"):
        averaged.personalize(blob_pair(5))
    with pytest.raises(UserError, match="Local has no global model"):
        trained(method=Local(lr=0.01)).general()
    with pytest.raises(UserError, match=r"There is no client '9'; there are 0, 1, 2, 3\."):
        trained().personal(9)


def test_modules_take_raw_images() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8), rng.integers(0, 2, 40)
    federation = Federation.from_datasets([(x[::2], y[::2]), (x[1::2], y[1::2])])
    result = trained(nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 2)), federation)
    module, raw = result.personal(0), torch.from_numpy(x)
    inner = module.get_submodule("network")
    torch.testing.assert_close(plain(module, raw), plain(inner, federation.inputs(raw)))
    p = result.predict(0, x, samples=0).probabilities
    torch.testing.assert_close(p, plain(module, raw).softmax(1))
    assert torch.equal(result.predict(0, x[:, 0]).label, result.predict(0, x).label), "grey images need no channel"


def test_predictions_of_client_and_federation() -> None:
    result = trained()
    x = result.setup.federation.test.x
    own, general = result.predict("0", x), result.predict(None, x)
    assert own.classes == result.setup.federation.classes
    assert own.mutual_information is not None
    assert general.mutual_information is None, "w is one head, not a distribution"
    torch.testing.assert_close(general.probabilities, plain(result.general(), x).softmax(1))


@pytest.mark.parametrize("method", [QUICK, FedAvg(lr=0.01)])
def test_the_calibration_of_a_run_is_over_all_tests(method: Any) -> None:
    result = trained(method=method)
    found = result.calibration(samples=0)
    assert found.samples == 80
    reported = result.summary["pm"] if method is QUICK else result.summary["gm"]
    assert 100 * found.accuracy == pytest.approx(reported, abs=8 if method is QUICK else 1e-3)


def test_clients_are_a_table() -> None:
    result = trained(alone=Local(lr=0.01))
    assert isinstance(result.clients, pd.DataFrame)
    assert result.clients.index.to_list() == ["0", "1", "2", "3"]
    assert {"n_train", "copies", "pm", "pm_nll", "pm_ece", "pm_brier", "tau", "alone"} <= set(result.clients.columns)


# Files


def test_what_is_saved_predicts_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    result = trained(network)
    result.personalize(blob_pair(20), "late")
    again = load(result.save(tmp_path / "m"), model=network)
    x = torch.randn(9, 4)
    for client in ("0", "3", "late", None):
        was, now = result.predict(client, x), again.predict(client, x)
        torch.testing.assert_close(was.probabilities, now.probabilities, atol=1e-5, rtol=1e-4)
    assert again.client("0").numbers["tau"] == pytest.approx(result.clients["tau"].iloc[0])
    assert again.classes == ("class 0", "class 1", "class 2")
    assert (tmp_path / "m" / "clients.csv").is_file()


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    result = trained(network, method=METHODS[name]())
    again = load(result.save(tmp_path), model=network)
    x, method = torch.randn(3, 4), METHODS[name]
    for client in [*(["2"] if method.personalised else []), *([None] if method.global_model else [])]:
        was, now = result.predict(client, x), again.predict(client, x)
        torch.testing.assert_close(was.probabilities, now.probabilities, atol=1e-5, rtol=1e-4)


def test_a_run_that_keeps_models_can_be_loaded_and_one_that_does_not_says_so(tmp_path: Path) -> None:
    trained(out=tmp_path / "a", keep_models=True)
    trained(out=tmp_path / "b")
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert len(list((tmp_path / "a" / "model" / "personal").iterdir())) == 4
    load(tmp_path / "a", network).personal(1)
    bare = load(tmp_path / "b" / "model", network)
    bare.general()
    with pytest.raises(UserError, match="no personalised model of client 1: train with --keep-models"):
        bare.personal(1)
    with pytest.raises(UserError, match=r"There is no client 'x' in .*; there are 0, 1, 2, 3"):
        bare.personal("x")


def test_models_that_would_fill_the_disk_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedvem.simulation.fit.MODELS_BYTES", 100)
    trained(out=tmp_path, keep_models=True)
    assert not (tmp_path / "model" / "personal").exists()


def test_what_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    trained(network).save(tmp_path)
    with pytest.raises(UserError, match="holds no model"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"network of your own; pass it as load\(..., model=...\)"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"is of another network: theta.0.bias"):
        load(tmp_path, nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    del card["seal"]
    (tmp_path / "model" / "model.json").write_text(json.dumps({**card, "format": 0}))
    with pytest.raises(UserError, match="another version"):
        load(tmp_path, network)
    (tmp_path / "model" / "model.json").write_text("{")
    with pytest.raises(UserError, match=r"model.json cannot be read"):
        load(tmp_path, network)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    trained(network).save(tmp_path)
    file = tmp_path / "model" / "server.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UserError, match=r"server.safetensors is damaged: its checksum"):
        load(tmp_path, network)


# Clients that come later


def blob_pair(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of the blobs of ``blobs``, as another client has them."""
    federation = blobs((n, 5), seed=0)
    index = torch.from_numpy(federation.shards[0].train)
    return federation.train.x[index], federation.train.y[index]


@pytest.mark.parametrize("name", ["fedper", "fedrep", "ifca", "perfedavg", "pfedme", "pfedbayes", "pfedvem"])
def test_a_client_that_comes_later_gets_a_model_that_fits_its_data(name: str) -> None:
    method = QUICK if name == "pfedvem" else METHODS[name]()
    result = fit(method, small_network(), blobs((30, 30, 30)), rounds=8, participation=1.0, eval_every=0, workers=1)
    x, y = blob_pair(40)
    made = result.personalize((x[:20], y[:20]), "late", rounds=10)
    assert made.numbers["n_train"] == 20
    accuracy = result.predict("late", x[20:]).against(y[20:]).accuracy
    general = result.setup.algorithm.global_model and result.predict(None, x[20:]).against(y[20:]).accuracy
    assert accuracy >= (general or 0.5) - 0.1
    assert isinstance(result.personal("late"), nn.Module)


def test_the_confidence_of_a_late_client_is_that_of_its_posterior() -> None:
    result = fit(QUICK, small_network(), blobs((30, 30, 30)), rounds=5, participation=1.0, eval_every=0, workers=1)
    for n in (3, 200):
        late = result.personalize(blob_pair(n), f"with {n}").numbers
        assert late["tau"] * (late["uncertainty"] + late["deviation"]) == pytest.approx(1, rel=1e-4)


def test_a_late_client_does_not_depend_on_who_else_came() -> None:
    alone, after = trained(), trained()
    after.personalize(blob_pair(30), "first")
    second = [result.personalize(blob_pair(20), "second").numbers["tau"] for result in (alone, after, after)]
    assert second[0] == second[1] == second[2]


def test_a_late_client_is_refused_where_it_cannot_be_fitted() -> None:
    result, (x, y) = trained(), blob_pair(10)
    with pytest.raises(UserError, match="Client '0' took part in training; give the new one another name"):
        result.personalize((x, y), 0)
    with pytest.raises(UserError, match="has the label 5; labels are whole numbers from 0 to 2"):
        result.personalize((x, y + 5))
    with pytest.raises(UserError, match=r"takes inputs of shape \(N, 4\)"):
        result.personalize((x[:, :2], y))
    with pytest.raises(UserError, match="rounds must be at least 1, not 0"):
        result.personalize((x, y), rounds=0)


def test_late_clients_are_written_beside_the_others(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    folder = trained(network).save(tmp_path)
    for rounds in (1, 5):
        model = load(folder, network)
        path = add_personal(folder / "model", model.personalize(blob_pair(9), "clinic / 7", rounds=rounds))
        assert path.name == "00004.safetensors"
    x = torch.randn(3, 4)
    torch.testing.assert_close(load(folder, network).personal("clinic / 7")(x), model.personal("clinic / 7")(x))


# Tables and backbones


def test_a_client_that_came_later_is_still_there_when_a_run_is_written_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 1, "workers": 1, "out": tmp_path, "keep_models": True}
    federation, network = blobs((7, 12, 5)), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    fit(PFedVEM(), network, federation, **options)
    late = load(tmp_path, network).personalize(blob_pair(10), "late", rounds=1)
    add_personal(model_folder(tmp_path), late)
    fit(PFedVEM(), network, federation, resume=True, **options)
    load(tmp_path, network).personal("late")
    assert sorted(path.stem for path in (tmp_path / "model" / "personal").iterdir()) == [f"{n:05d}" for n in range(4)]


def test_a_table_is_predicted_by_its_columns_in_any_order() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": ["a", "b"] * 30, "u": rng.normal(3, 2, 60), "v": rng.normal(0, 5, 60)})
    frame["ill"] = np.where(frame["u"] + frame["v"] > 3, "yes", "no")
    federation = Federation.from_frame(frame, client="site", label="ill")
    result = trained(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), federation)
    ordered, shuffled = frame[["u", "v"]], frame[["v", "ill", "u"]]
    assert torch.equal(result.predict("a", ordered).probabilities, result.predict("a", shuffled).probabilities)
    late = result.personalize(frame.head(12)[["v", "u", "ill"]], "c", label="ill")
    assert late.numbers["n_train"] == 12
    assert result.predict("c", frame).against(frame["ill"]).accuracy > 0.3


def test_a_federation_over_a_frozen_backbone_is_used_with_raw_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone, federation = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), blobs((20, 30))
    weights = [leaf.clone() for leaf in backbone.parameters()]
    result = trained(nn.Linear(6, 3), federation.through(backbone))
    assert all(torch.equal(a, b) for a, b in zip(weights, backbone.parameters(), strict=True))
    x = torch.randn(5, 4)
    torch.testing.assert_close(result.predict(0, x, samples=0).probabilities, plain(result.personal(0), x).softmax(1))
    result.personalize(blob_pair(10), "late")
    result.save(tmp_path)
    with pytest.raises(UserError, match=r"through a backbone; pass it as load\(..., backbone=...\)"):
        load(tmp_path, nn.Linear(6, 3))
    again = load(tmp_path, nn.Linear(6, 3), backbone)
    for client in (0, "late"):
        torch.testing.assert_close(plain(again.personal(client), x), plain(result.personal(client), x))


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_trains_a_network_that_is_its_head_alone(name: str) -> None:
    result = trained(nn.Linear(4, 3), method=METHODS[name]())
    assert result.summary["pm" if METHODS[name].personalised else "gm"] is not None


def test_batch_norm_is_in_the_modules() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    result = trained(network)
    module = result.personal(1)
    assert not torch.equal(module.get_buffer("1.running_mean"), network.get_buffer("1.running_mean"))


def test_a_head_is_named_in_fit() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(6, 3)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.classifier(self.body(x))
            return out

    result = trained(Named(), head="classifier")
    assert plain(result.personal(0), torch.randn(2, 4)).shape == (2, 3)
    with pytest.raises(UserError, match=r"no linear layer named 'head'; it has classifier, body.0"):
        trained(Named(), head="head")


def test_two_classes_need_two_outputs() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    federation = Federation.from_datasets([(x, y)])
    with pytest.raises(UserError, match="1 outputs for 2 classes; end it in one for each"):
        trained(nn.Linear(4, 1), federation)
    assert trained(nn.Linear(4, 2), federation).summary["pm"] is not None
