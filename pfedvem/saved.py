"""The folder of a trained federation, written and read.

model/model.json                    what the model is: method, network, classes, clients, inputs
model/server.safetensors            what the server keeps
model/clients.safetensors           what there is to see of the clients
model/general.safetensors           the global model, where it is an average and not the server's last
model/personal/00003.safetensors    a client's personalised model: mean and, where it has them, standard deviations

model.json has a checksum of itself and of the files beside it, a personalised model has its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pfedvem import tree
from pfedvem.algorithms import METHODS, AnyAlgorithm, method
from pfedvem.data.inputs import Inputs
from pfedvem.errors import Damaged, UserError
from pfedvem.models import Model, Posterior
from pfedvem.networks import build
from pfedvem.rng import SERVER, START, Rng
from pfedvem.simulation import checkpoints
from pfedvem.trained import Personal, Trained

FORMAT = 2  # 1 had no checksums and is still read
LARGEST = 2**24  # numbers of one input: more is no input, but a damaged file
AGAIN = "`pfedvem run --resume` writes a run's model again."


class _About(BaseModel):
    """What a client's file says of itself, which may be damaged."""

    format: int
    client: str
    numbers: dict[str, float]


class _Card(BaseModel):
    """model.json, which may be damaged."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    method: str
    algorithm: dict[str, Any]
    network: str | None
    head: str
    classes: list[str] = Field(min_length=1)
    clients: list[str]
    seed: int = Field(ge=0, lt=2**63)
    input_shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    images: bool
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]
    columns: list[str]
    backbone: bool
    sha256: dict[str, str] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if math.prod(self.input_shape) > LARGEST or {len(self.mean), len(self.std)} - {1, self.input_shape[0]}:
            raise ValueError("the shape of inputs")
        return self


def write(trained: Trained, folder: Path, seen: dict[str, Tensor]) -> None:
    """Writes what the model is, what the server keeps and what there is to see of the clients."""
    checksums, files = {}, {"server": tree.named(trained.server), "clients": seen}
    if trained.average is not None:
        files["general"] = tree.named(trained.average)
    else:
        (folder / "general.safetensors").unlink(missing_ok=True)  # of another run
    for name, tensors in files.items():
        content = safetensors.torch.save({key: value.contiguous() for key, value in tensors.items()})
        checksums[name] = hashlib.sha256(content).hexdigest()
        checkpoints.replace(folder / f"{name}.safetensors", content)
    inputs = trained.inputs
    card = {
        "format": FORMAT,
        "sha256": checksums,
        "method": trained.algorithm.name,
        "algorithm": {"class": _where(trained.algorithm), **trained.algorithm.model_dump(mode="json")},
        "network": trained.model.name if inputs.backbone is None else None,
        "head": trained.model.head,
        "classes": trained.classes,
        "clients": trained.clients,
        "seed": trained.seed,
        "features": trained.model.features_dim,
        "input_shape": inputs.shape,
        "images": inputs.images,
        "mean": inputs.mean,
        "std": inputs.std,
        "columns": inputs.columns,
        "backbone": inputs.backbone is not None,
    }
    # Last: where it is that of an earlier run, the checksums tell that the files are not.
    checkpoints.replace(folder / "model.json", checkpoints.sealed(json.dumps(card, indent=1) + "\n"))


def load(folder: Path | str, model: nn.Module | None = None, backbone: nn.Module | None = None) -> Trained:
    """Reads what ``Result.save`` or a run has written.

    Args:
        folder: the folder of a run, or its ``model``.
        model: the network, where it was your own; one of the paper's networks is built again.
        backbone: the frozen network that the federation's inputs went through, if they did.
    """
    place = model_folder(Path(folder))
    card = read_card(place)
    algorithm = _algorithm(dict(card["algorithm"]), place)
    classes, shape = tuple(card["classes"]), tuple(card["input_shape"])
    if card["backbone"] and backbone is None:
        raise UserError(f"The inputs of {place} go through a backbone; pass it as load(..., backbone=...).")
    if backbone is not None and not card["backbone"]:
        raise UserError(f"The inputs of {place} go through no backbone; leave backbone= out.")
    if card["network"] is None and model is None:
        raise UserError(
            f"{place} is of a network of your own; pass it as load(..., model=...), or name it with --network."
        )
    split = Model(model, card["head"]) if model is not None else build(card["network"], shape, len(classes), 0)
    backbone = backbone.eval().requires_grad_(False) if backbone is not None else None
    inputs = Inputs(shape, card["images"], tuple(card["mean"]), tuple(card["std"]), tuple(card["columns"]), backbone)
    like = algorithm.server_init(split, len(card["clients"]), Rng(card["seed"], START, [SERVER]))
    for name, wanted in card["sha256"].items():
        _refuse_damaged(place / f"{name}.safetensors", wanted)
    server = _filled(like, place / "server.safetensors")
    average = _filled(split.initial, place / "general.safetensors") if "general" in card["sha256"] else None
    clients = tuple(card["clients"])
    files = {name: path for path, name in _personal_files(place)}

    def find(client: str) -> Personal:
        if client in files:
            return read_personal(files[client], split)
        if client in clients:
            raise UserError(
                f"{place} has no personalised model of client {client}: train with --keep-models, or fit one to its "
                "data with `pfedvem personalize` under another name."
            )
        known = [*clients, *(name for name in files if name not in clients)]
        some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        raise UserError(f"There is no client {client!r} in {place}; there are {some}.")

    return Trained(algorithm, split, server, classes, inputs, clients, card["seed"], find, average=average)


def model_folder(folder: Path) -> Path:
    """The folder of the model itself: that of a run has it inside."""
    for place in (folder / "model", folder):
        if (place / "model.json").is_file():
            return place
    raise UserError(f"{folder} holds no model: give the folder of a finished run, or one that Result.save wrote.")


def read_card(place: Path) -> dict[str, Any]:
    """model.json."""
    try:
        card = checkpoints.unsealed((place / "model.json").read_bytes())
    except (OSError, Damaged) as error:
        raise UserError(f"{place / 'model.json'} cannot be read ({error}). {AGAIN}") from error
    if card.get("format") not in (1, FORMAT):
        raise UserError(f"{place} was written by another version. {AGAIN}")
    try:
        return _Card(**card).model_dump()
    except ValidationError as error:
        what = " ".join(map(str, error.errors()[0]["loc"])) or "input_shape"
        raise UserError(f"{place / 'model.json'} is damaged: its {what} is not what a run writes. {AGAIN}") from error


def write_personal(place: Path, number: int, personal: Personal) -> Path:
    """Writes one client's model into the folder of a model; gives the file."""
    folder = place / "personal"
    tensors = {name: leaf.contiguous() for name, leaf in tree.named(personal.posterior).items()}
    about = {"format": FORMAT, "client": personal.client, "numbers": personal.numbers}
    about["sha256"] = checkpoints.digest(about, tensors)
    path = folder / f"{number:05d}.safetensors"
    # As one text: safetensors writes several in no fixed order, and equal models are to be equal files.
    checkpoints.replace(path, safetensors.torch.save(tensors, {"about": json.dumps(about)}))
    return path


def add_personal(place: Path, personal: Personal) -> Path:
    """Writes the model of a client that came later beside the others; the same name again replaces it."""
    known = {name: path for path, name in _personal_files(place)}
    if personal.client in known:
        return write_personal(place, int(known[personal.client].stem), personal)
    taken = [int(path.stem) for path in known.values()]
    return write_personal(place, max([len(read_card(place)["clients"]) - 1, *taken]) + 1, personal)


def read_personal(path: Path, model: Model) -> Personal:
    """Reads one client's model, for this network."""
    try:
        with safe_open(path, framework="pt") as file:
            about = _about(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        if about["format"] != 1 and about.pop("sha256", None) != checkpoints.digest(about, tensors):
            raise Damaged("its checksum does not match")
    except (OSError, SafetensorError, Damaged) as error:
        raise UserError(f"{path} cannot be read ({error}). {AGAIN}") from error
    mean = {name.removeprefix("mean."): leaf for name, leaf in tensors.items() if name.startswith("mean.")}
    _refuse_other_shapes(mean, tree.named(model.initial), path)
    params = tree.rebuild(model.initial, [mean[name] for name in tree.named(model.initial)])
    sd = {name.removeprefix("sd."): leaf for name, leaf in tensors.items() if name.startswith("sd.")}
    _refuse_other_shapes(sd, {name: leaf for name, leaf in tree.named(model.initial).items() if name in sd}, path)
    return Personal(about["client"], Posterior(params, sd), about["numbers"])


def _personal_files(place: Path) -> Iterator[tuple[Path, str]]:
    """The files of personalised models, and whose they are."""
    for path in sorted((place / "personal").glob("[0-9]*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                yield path, _about(file.metadata())["client"]
        except (OSError, SafetensorError, Damaged) as error:
            raise UserError(f"{path} cannot be read ({error}). {AGAIN}") from error


def _about(metadata: dict[str, str] | None) -> dict[str, Any]:
    """What the file of a personalised model says of itself."""
    try:
        about: dict[str, Any] = json.loads((metadata or {})["about"])
        _About.model_validate(about)
    except (KeyError, ValueError, RecursionError) as error:
        raise Damaged("it does not say whose it is") from error
    if about["format"] not in (1, FORMAT):
        raise Damaged("it was written by another version")
    return about


def _refuse_damaged(path: Path, wanted: str) -> None:
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {AGAIN}") from error
    if found != wanted:
        raise UserError(f"{path} is damaged: its checksum does not match model.json. {AGAIN}")


def _filled(like: Any, path: Path) -> Any:
    """A tree of this structure with the tensors of a file."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}). {AGAIN}") from error
    _refuse_other_shapes(tensors, tree.named(like), path)
    return tree.rebuild(like, [tensors[name] for name in tree.named(like)])


def _refuse_other_shapes(found: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> None:
    shapes: list[dict[str, object]] = [
        {name: tuple(leaf.shape) if leaf.is_floating_point() else leaf.dtype for name, leaf in side.items()}
        for side in (found, wanted)
    ]
    differing = [name for name in sorted({*found, *wanted}) if shapes[0].get(name) != shapes[1].get(name)]
    if differing:
        name = differing[0]
        raise UserError(
            f"{path} is of another network: {name} is {shapes[0].get(name, 'missing')} there and "
            f"{shapes[1].get(name, 'missing')} in the network that was given."
        )


def _where(algorithm: AnyAlgorithm) -> str:
    """How a method can be found again: by its name, or by the place of its class."""
    cls = type(algorithm)
    return algorithm.name if METHODS.get(algorithm.name) is cls else f"{cls.__module__}:{cls.__qualname__}"


def _algorithm(saved: dict[str, Any], place: Path) -> AnyAlgorithm:
    try:
        return method(str(saved.pop("class", "")))(**saved)
    except ValueError as error:
        raise UserError(f"The method of {place} cannot be made again: {error}.") from error
