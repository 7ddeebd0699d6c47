"""The application that commands belong to, and the options that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand

app = typer.Typer(
    help="Personalised federated learning by variational expectation maximisation.",
    epilog="Example:  pfedvem run",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Option = typer.Option
Method = Annotated[str | None, Option(help="A name of `pfedvem methods`, or your own as package.module:Class.")]
Dataset = Annotated[str | None, Option(help="A name of `pfedvem data list`, a hub id owner/name, or a folder.")]
DataRoot = Annotated[Path | None, Option(help="Folder with local copies of hub data sets; without it the hub is used.")]
Clients = Annotated[int | None, Option(help="Number of clients.")]
Seed = Annotated[int | None, Option(help="Drives partition, initial weights and all sampling.")]
ConfigFile = Annotated[Path | None, Option(help="A TOML file of settings, such as a run's config.toml.")]
Assignments = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any other setting; may repeat.")]
ImageColumn = Annotated[str | None, Option(help="The column of the images, for a hub id or folder.")]
LabelColumn = Annotated[str | None, Option(help="The column of the labels, for a hub id or folder.")]
SubclassColumn = Annotated[str | None, Option(help="The column of the subclasses, for partition subclasses.")]
ClientColumn = Annotated[str | None, Option(help="The column of the client ids, for partition natural.")]
Partition = Annotated[str | None, Option(help="Who owns what: labels, subclasses, domains, dirichlet, iid or natural.")]
Rounds = Annotated[int | None, Option(help="Communication rounds.")]
Participation = Annotated[float | None, Option(help="Probability that a client uploads in a round.")]
Train = Annotated[str | None, Option(help="Who trains in a round: all, as in the paper, or only uploaders.")]
Executor = Annotated[str | None, Option(help="Where clients train: auto, sequential, vectorised or processes.")]
Workers = Annotated[int | None, Option(help="Processes that train clients; by default one for each processor.")]
Cohort = Annotated[int | None, Option(help="Clients trained together, at most; by default as many as pays.")]
Device = Annotated[str | None, Option(help="Where tensors are computed: cpu, cuda or mps.")]
TensorBoard = Annotated[
    str | None,
    Option(metavar="DIR", help="Log to TensorBoard, in this folder or, where none follows, among the run's files."),
]
MLflow = Annotated[
    str | None, Option(metavar="URI", help="Log to MLflow, at this address or, where none follows, where it is set up.")
]
Json = Annotated[bool, Option("--json", help="Print the result as JSON on standard output, and nothing else there.")]


class Logging(TyperCommand):
    """A command whose --tensorboard and --mlflow may stand without a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = []
        for place, word in enumerate(args, 1):
            alone = word in ("--tensorboard", "--mlflow") and (place == len(args) or args[place].startswith("-"))
            words.append(f"{word}=" if alone else word)
        return super().parse_args(ctx, words)


def given(**values: Any) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in values.items() if value is not None}


def data_flags(
    dataset: str | None,
    data_root: Path | None,
    clients: int | None,
    partition: str | None,
    image_column: str | None,
    label_column: str | None,
    subclass_column: str | None,
    client_column: str | None,
) -> dict[str, Any]:
    """The flags of the data that were given, as their section."""
    columns = {"image_column": image_column, "label_column": label_column, "subclass_column": subclass_column}
    root = str(data_root) if data_root is not None else None
    values = given(
        dataset=dataset, root=root, clients=clients, partition=partition, client_column=client_column, **columns
    )
    return {"data": values}
