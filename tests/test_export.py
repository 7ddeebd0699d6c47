"""Models for other programs give the same numbers there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfedvem import Federation, PFedVEM, Result, UserError, fit
from pfedvem.algorithms import FedPer, PFedBayes
from pfedvem.export import export
from tests.conftest import blobs

CNN = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))


@pytest.fixture(scope="module")
def images() -> Result:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), rng.integers(0, 2, 40)
    federation = Federation.from_datasets({"a": (x[::2], y[::2]), "b": (x[1::2], y[1::2])}, classes=("no", "yes"))
    return fit(PFedVEM(scale=0.3), CNN, federation, rounds=1, workers=1)


def numbers(method: Any) -> Result:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    return fit(method, network, blobs((9, 12)), rounds=1, workers=1)


def run(path: Path, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """What another program computes."""
    if path.suffix == ".onnx":
        import onnxruntime

        found: list[np.ndarray[Any, Any]] = onnxruntime.InferenceSession(path).run(None, {"x": x})
        return found
    module = torch.export.load(path).module()
    return [out.numpy() for out in module(torch.from_numpy(x))]


@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("samples", [3, 7])
@pytest.mark.parametrize("client", ["a", None])
def test_an_exported_model_predicts_the_same(
    images: Result, form: str, samples: int, client: str | None, tmp_path: Path
) -> None:
    path = tmp_path / f"model.{form}"
    about = export(images.trained, client, path, form)
    x = np.random.default_rng(1).integers(0, 256, (samples, 1, 8, 8), dtype=np.uint8)
    made = images.predict(client, x)
    expected = [made.probabilities, made.entropy, *([made.mutual_information] if client else [])]
    found = run(path, x)
    assert about["outputs"] == ["probabilities", "entropy", "mutual_information"][: len(found)]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert b is not None
        np.testing.assert_allclose(a, b.numpy(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("method", [FedPer(), PFedBayes()])
def test_plain_networks_and_whole_posteriors_are_exported_too(form: str, method: Any, tmp_path: Path) -> None:
    result, path = numbers(method), tmp_path / f"model.{form}"
    export(result.trained, "1", path, form, samples=5)
    x = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    np.testing.assert_allclose(run(path, x)[0], result.predict("1", x, samples=5).probabilities, atol=1e-5, rtol=1e-4)


def test_a_file_says_what_its_outputs_mean(images: Result, tmp_path: Path) -> None:
    import onnx

    export(images.trained, "b", tmp_path / "m.onnx", "onnx")
    said = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(said["classes"]) == ["no", "yes"]
    assert said["client"] == "b"
    export(images.trained, "b", tmp_path / "m.pt2", "pt2")
    extra = {"about.json": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    assert json.loads(extra["about.json"])["classes"] == ["no", "yes"]


def test_formats_that_are_not_there_are_refused(
    images: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no format 'torchscript'; there are onnx, pt2"):
        export(images.trained, "a", tmp_path / "m", "torchscript")
    monkeypatch.setattr("pfedvem.export.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install \"pfedvem\[export\]\""):
        export(images.trained, "a", tmp_path / "m", "onnx")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x if bool(x.mean() > 100) else 2 * x)
        return out


def test_a_network_that_pytorch_cannot_export_is_refused(tmp_path: Path) -> None:
    result = fit(FedPer(), Branching(), blobs((9, 12)), rounds=1, workers=1)
    with pytest.raises(UserError, match="must not branch on the values of its inputs"):
        export(result.trained, "0", tmp_path / "m", "pt2")
