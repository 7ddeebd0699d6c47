"""What can be done with a trained model: ``pfedvem predict``, ``personalize``, ``export`` and ``inspect``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pfedvem.cli.app import Json, Option, app
from pfedvem.errors import UserError

if TYPE_CHECKING:
    from pfedvem.trained import Trained

Folder = Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a finished run, or of Result.save.")]
Client = Annotated[str | None, Option(help="The client whose model it is, by its id.")]
General = Annotated[bool, Option("--general", help="The global model instead of a client's.")]
Data = Annotated[
    Path, Option(help="A .csv or .parquet table, an .npz or .safetensors file with x and y, or a folder of images.")
]
Label = Annotated[str, Option(help="The column of the labels, in a table.")]
Network = Annotated[
    str | None, Option(help="Your own network, where it is none of ours: package.module:function that makes it.")
]
Samples = Annotated[int, Option(min=0, help="Samples of the posterior to average over; 0 predicts by its mean.")]


@app.command(epilog="Example:  pfedvem predict runs/mine --client 3 --data new.npz --out predictions.csv")
def predict(
    model: Folder,
    data: Data,
    client: Client = None,
    general: General = False,
    label: Label = "label",
    samples: Samples = 100,
    network: Network = None,
    out: Annotated[Path, Option(help="Where the predictions go, as CSV.")] = Path("predictions.csv"),
    as_json: Json = False,
) -> None:
    """Predict with a trained model: class, probabilities, and how uncertain it is, for every sample.

    Entropy is what is uncertain in all; mutual information the part of it that more data would remove, and expected
    entropy the part that it would not. Where the data has labels, the predictions are also judged by them.
    """
    from pfedvem.data.files import read_samples
    from pfedvem.report.model import prediction_view
    from pfedvem.simulation.checkpoints import replace

    who, trained = _whose(client, general), _load(model, network)
    x, y = read_samples(data, trained.inputs, label)
    made = trained.predict(who, x, samples=samples)
    judged = made.against(y) if y is not None else None
    replace(out, made.frame().to_csv(index=False).encode())
    numbers = {"samples": len(x), "mean_entropy": round(float(made.entropy.mean()), 4)}
    if made.mutual_information is not None:
        numbers["mean_mutual_information"] = round(float(made.mutual_information.mean()), 4)
    if judged is not None:
        scores = {"accuracy": 100 * judged.accuracy, "nll": judged.nll, "brier": judged.brier, "ece": 100 * judged.ece}
        numbers |= {key: round(value, 4) for key, value in scores.items()}
    console = Console(stderr=as_json)
    console.print(prediction_view(made, judged))
    console.print(f"Predictions are in [bold]{escape(str(out))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({**numbers, "out": str(out)}))


@app.command(epilog="Example:  pfedvem personalize runs/mine --client clinic --data clinic.csv --label diagnosis")
def personalize(
    model: Folder,
    data: Data,
    client: Annotated[str, Option(help="The name of the new client.")],
    label: Label = "label",
    rounds: Annotated[int, Option(min=1, help="Rounds of local training, from what the federation has learned.")] = 30,
    network: Network = None,
    as_json: Json = False,
) -> None:
    """Fit a model for a client that comes later, from what the federation has learned.

    It takes seconds and needs the new client's data alone. The model is kept beside those of the other clients:
    `pfedvem predict` and `pfedvem export` know the client from then on.
    """
    from pfedvem.data.files import read_samples
    from pfedvem.saved import add_personal, model_folder

    trained = _load(model, network)
    x, y = read_samples(data, trained.inputs, label)
    if y is None:
        raise UserError(f"{data} has no labels to learn from; name the column of a table with --label.")
    console = Console(stderr=as_json)
    with console.status("Fitting"):
        personal = trained.personalize((x, y), client, rounds=rounds)
    path = add_personal(model_folder(model), personal)
    said = f"Client {client} has {len(x)} samples"
    if "tau" in personal.numbers:
        said += f" and confidence tau {personal.numbers['tau']:.3g}"
    console.print(f"{escape(said)}. Its model is in [bold]{escape(str(path))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"client": client, **personal.numbers, "file": str(path)}))


@app.command(epilog="Example:  pfedvem export runs/mine --client 3 --format onnx --out client3.onnx")
def export(
    model: Folder,
    client: Client = None,
    general: General = False,
    form: Annotated[str, Option("--format", help="onnx, or pt2 for PyTorch's own (torch.export).")] = "onnx",
    samples: Samples = 100,
    network: Network = None,
    out: Annotated[Path | None, Option(help="The file; by default named after the client.")] = None,
    as_json: Json = False,
) -> None:
    """Write a model for other programs: inputs as the client has them, probabilities and uncertainty out."""
    from pfedvem.export import FORMATS
    from pfedvem.export import export as write

    who, trained = _whose(client, general), _load(model, network)
    name = "general" if who is None else "client-" + "".join(c if c.isalnum() else "-" for c in who)
    path = out if out is not None else Path(f"{name}{FORMATS.get(form, '')}")
    about = write(trained, who, path, form, samples)
    console = Console(stderr=as_json)
    console.print(f"The model is in [bold]{escape(str(path))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({**about, "file": str(path)}))


@app.command(epilog="Example:  pfedvem inspect runs/mine --plot clients.png")
def inspect(
    model: Folder,
    every: Annotated[bool, Option("--all", help="Show all clients, not only the most remarkable.")] = False,
    plot: Annotated[Path | None, Option(help="Also draw a picture (.png or .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Show which clients need what: how confident they are, who deviates, who gains, what looks wrong."""
    from pfedvem.report.inspect import draw, inspection, inspection_view, rows

    found = inspection(model)
    if plot is not None:
        draw(found, plot)
    console = Console(stderr=as_json)
    console.print(inspection_view(found, every))
    if plot is not None:
        console.print(f"The picture is in [bold]{escape(str(plot))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(rows(found)))


def _whose(client: str | None, general: bool) -> str | None:
    if general == (client is not None):
        raise UserError("Say whose model: --client ID, or --general for the global model.")
    return client


def _load(folder: Path, network: str | None) -> Trained:
    from torch import nn

    from pfedvem.algorithms import imported
    from pfedvem.saved import load

    if network is None:
        return load(folder)
    make = imported(network, "network")
    try:
        made = make if isinstance(make, nn.Module) else make() if callable(make) else None
    except Exception as error:  # whatever a user's function raises
        raise UserError(f"{network} could not make the network: {type(error).__name__}: {error}.") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"{network} makes no network; name a function, as package.module:function, that gives one.")
    return load(folder, made)
