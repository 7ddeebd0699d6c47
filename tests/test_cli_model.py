"""A trained model on the command line: predict, personalize, export, inspect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
import torch
from PIL import Image
from torch import nn

from pfedvem import Federation, PFedVEM, fit, load
from tests.test_cli import call

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary run, and data of a client that was not there in all forms."""
    place = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFEDVEM_CACHE", str(place / "cache"))
        words = ("run", "--clients", "6", "--participation", "0.5", "--rounds", "8", "--out", place / "run")
        assert call(*words) == 0
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 17, (12, 1, 8, 8), dtype=np.uint8) * 15, np.arange(12) % 3
    np.savez(place / "data.npz", x=x, y=y)
    safetensors.numpy.save_file({"x": x, "y": y}, place / "data.safetensors")
    safetensors.numpy.save_file({"x": x}, place / "bare.safetensors")
    np.savez(place / "other.npz", inputs=x)
    for i in range(12):
        (place / "images" / str(y[i])).mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i, 0]).save(place / "images" / str(y[i]) / f"{i:02d}.png")
    return place


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("data", ["data.npz", "data.safetensors", "images"])
def test_an_ordinary_run_predicts(folder: Path, data: str, tmp_path: Path, capsys: Printed) -> None:
    assert call("predict", folder / "run", "--client", "3", "--data", folder / data, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["samples"] == 12
    assert set(printed) >= {"accuracy", "nll", "ece", "brier", "mean_entropy", "mean_mutual_information"}
    frame = pd.read_csv(tmp_path / "predictions.csv")
    assert len(frame) == 12
    np.testing.assert_allclose(frame["entropy"], frame["mutual_information"] + frame["expected_entropy"], atol=1e-5)
    with np.load(folder / "data.npz") as file:
        expected = load(folder / "run").predict("3", file["x"])
    order = slice(None) if data != "images" else np.argsort(np.arange(12) % 3, kind="stable")
    np.testing.assert_allclose(frame["p(7)"], expected.probabilities[order, 7], atol=1e-5)


def test_the_global_model_predicts_and_labels_are_not_needed(folder: Path, capsys: Printed) -> None:
    data = folder / "bare.safetensors"
    assert call("predict", folder / "run", "--general", "--data", data, "--out", "g.csv", "--json") == 0
    assert "accuracy" not in json.loads(capsys.readouterr().out)
    assert "mutual_information" not in pd.read_csv("g.csv").columns


def test_a_client_that_comes_later_is_fitted_kept_and_known(folder: Path, capsys: Printed) -> None:
    words = ("personalize", folder / "run", "--client", "late", "--data", folder / "data.npz")
    assert call(*words, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["n_train"] == 12
    assert printed["tau"] * (printed["uncertainty"] + printed["deviation"]) == pytest.approx(1, rel=1e-3)
    assert Path(printed["file"]).is_file()
    assert call("predict", folder / "run", "--client", "late", "--data", folder / "data.npz") == 0
    assert "samples" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_a_model_is_exported(folder: Path, form: str, tmp_path: Path, capsys: Printed) -> None:
    assert call("export", folder / "run", "--client", "2", "--format", form) == 0
    assert f"client-2.{form}" in capsys.readouterr().out
    assert (tmp_path / f"client-2.{form}").stat().st_size > 1000


def test_clients_are_inspected_as_a_table_a_picture_and_json(folder: Path, tmp_path: Path, capsys: Printed) -> None:
    assert call("inspect", folder / "run", "--plot", "clients.png") == 0
    shown = capsys.readouterr().out
    assert "pFedVEM: 6 clients" in shown
    assert "clients gain by joining" in shown
    assert (tmp_path / "clients.png").is_file()
    assert call("inspect", folder / "run", "--json") == 0
    assert [row["client"] for row in json.loads(capsys.readouterr().out)] == list("012345")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("predict RUN --data data.npz", "Say whose model: --client ID, or --general for the global model."),
        ("predict RUN --client 1 --general --data data.npz", "Say whose model"),
        ("predict RUN --client 17 --data data.npz", "There is no client '17' in"),
        ("predict nowhere --client 1 --data data.npz", "nowhere holds no model"),
        ("predict RUN --client 1 --data missing.csv", "There is no file or folder"),
        ("predict RUN --client 1 --data other.npz", "has no array x of inputs; it has inputs."),
        ("predict RUN --client 1 --data run/config.toml", "cannot be read; give a .csv or .parquet table"),
        ("predict RUN --client 1 --data run/clients.csv", "The model does not take tables"),
        ("predict RUN --client 1 --data run/model", "has no images."),
        ("predict RUN --client 1 --data data.npz --network nothing:x", "The network 'nothing:x' cannot be imported"),
        ("personalize RUN --client 1 --data data.npz", "Client '1' took part in training"),
        ("personalize RUN --client x --data bare.safetensors", "has no labels to learn from"),
        ("export RUN --client 1 --format torchscript", "There is no format 'torchscript'; there are onnx, pt2."),
        ("inspect nowhere", "nowhere holds no model"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(folder: Path, words: str, sentence: str, capsys: Printed) -> None:
    (*given,) = (folder / "run" if w == "RUN" else folder / w if (folder / w).exists() else w for w in words.split())
    assert call(*given) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["predict", "personalize", "export", "inspect"])
def test_every_command_explains_itself_with_an_example(command: str, capsys: Printed) -> None:
    assert call(command, "--help") == 0
    assert f"Example: pfedvem {command}" in " ".join(capsys.readouterr().out.split())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))


def test_a_network_of_ones_own_and_a_table_work_from_the_command_line(tmp_path: Path, capsys: Printed) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": list("abc") * 20, "u": rng.normal(size=60), "v": rng.normal(size=60)})
    frame["ill"] = np.where(frame["u"] > frame["v"], "yes", "NA")  # which pandas takes for missing in a CSV
    federation = Federation.from_frame(frame, client="site", label="ill")
    method = PFedVEM(lr_head=0.01, lr_base=0.02, scale=0.3)
    fit(method, network(), federation, rounds=5, participation=1.0, workers=1).save("mine")
    frame.drop(columns="site").to_csv("new.csv", index=False)
    frame.to_parquet("new.parquet")
    own = ("--network", "tests.test_cli_model:network", "--label", "ill")
    assert call("personalize", "mine", "--client", "d", "--data", "new.csv", *own) == 0
    assert call("predict", "mine", "--client", "d", "--data", "new.parquet", *own, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"] > 60
    assert call("predict", "mine", "--client", "d", "--data", "new.csv") == 2
    assert "network of your own" in capsys.readouterr().err
