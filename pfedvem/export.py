"""Trained models for other programs: ONNX, or PyTorch's own export format.

What is exported is what predicts: from the inputs that a client has (N, ...) to ``probabilities`` (N, classes), their
``entropy`` (N,) and, where there is a posterior, its ``mutual_information`` (N,).
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedvem.errors import UserError
from pfedvem.simulation import checkpoints
from pfedvem.trained import Trained
from pfedvem.uncertainty import SAMPLES

FORMATS = {"onnx": ".onnx", "pt2": ".pt2"}
OUTPUTS = ("probabilities", "entropy", "mutual_information")


def export(
    trained: Trained, client: str | int | None, path: Path, form: str = "onnx", samples: int = SAMPLES
) -> dict[str, Any]:
    """Writes the model of a client, or the global model where that is None; gives what the file says of itself."""
    if form not in FORMATS:
        raise UserError(f"There is no format {form!r}; there are {', '.join(FORMATS)}.")
    if form == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UserError('ONNX needs further packages: pip install "pfedvem[export]".')
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file for the model.")
    predictor = trained.predictor(client, samples)
    example = torch.zeros(2, *trained.inputs.shape, dtype=torch.uint8 if trained.inputs.images else torch.float32)
    with torch.no_grad():
        outputs = OUTPUTS[: len(predictor(example))]
    about = {
        "method": trained.algorithm.name,
        "client": "" if client is None else str(client),
        "classes": list(trained.classes),
        "columns": list(trained.inputs.columns),
        "outputs": list(outputs),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = {"x": {0: torch.export.Dim("samples")}}
    with warnings.catch_warnings():  # PyTorch's exporters warn of their own insides
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(predictor, (example,), dynamic_shapes=batch, strict=False)
            content = _onnx(program, example, outputs, about) if form == "onnx" else _pt2(program, about)
        except Exception as error:  # whatever of the network PyTorch's exporters cannot follow
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"PyTorch cannot export this network: {said} Its forward must not branch on the values of its inputs."
            ) from error
    checkpoints.replace(path, content)
    return about


def _pt2(program: torch.export.ExportedProgram, about: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"about.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx(
    program: torch.export.ExportedProgram, example: Tensor, outputs: tuple[str, ...], about: dict[str, Any]
) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of packages that nothing here needs
    made = torch.onnx.export(
        program,
        (example,),
        dynamo=True,
        input_names=["x"],
        output_names=list(outputs),
        verbose=False,
        optimize=True,
    )
    assert made is not None
    proto = made.model_proto
    for key, value in about.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    content: bytes = proto.SerializeToString()
    return content
