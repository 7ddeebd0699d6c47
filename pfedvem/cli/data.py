"""``pfedvem data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pfedvem.cli.app import (
    Assignments,
    ClientColumn,
    Clients,
    ConfigFile,
    DataRoot,
    Dataset,
    ImageColumn,
    Json,
    LabelColumn,
    Option,
    Partition,
    Seed,
    SubclassColumn,
    app,
    data_flags,
    given,
)

data_app = typer.Typer(
    help="Look at data sets and at how they are dealt to clients.",
    epilog="Example:  pfedvem data show --dataset digits",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")


@data_app.command("list", epilog="Example:  pfedvem data list")
def data_list(as_json: Json = False) -> None:
    """List the data sets that are known by name."""
    from pfedvem.report.data import catalogue_rows, catalogue_table

    if as_json:
        print(json.dumps(catalogue_rows()))
    else:
        Console().print(catalogue_table())


@data_app.command("show", epilog="Example:  pfedvem data show --dataset digits --clients 20 --plot partition.png")
def data_show(
    dataset: Dataset = None,
    data_root: DataRoot = None,
    clients: Clients = None,
    partition: Partition = None,
    seed: Seed = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    subclass_column: SubclassColumn = None,
    client_column: ClientColumn = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    plot: Annotated[Path, Option(help="Where the picture goes (.png or .pdf).")] = Path("partition.png"),
    as_json: Json = False,
) -> None:
    """Show how a data set is dealt to clients: sizes and labels, as a table and a picture."""
    from pfedvem.data import load_federation
    from pfedvem.experiments.config import load
    from pfedvem.report.data import draw, summary, summary_view

    flags = given(seed=seed)
    flags |= data_flags(
        dataset, data_root, clients, partition, image_column, label_column, subclass_column, client_column
    )
    settings = load(config, flags, assignments or ())
    federation = load_federation(settings.data, settings.seed)
    draw(federation, plot)
    if as_json:
        print(json.dumps({**summary(federation), "plot": str(plot)}))
    else:
        console = Console()
        console.print(summary_view(federation))
        console.print(f"The picture is in [bold]{escape(str(plot))}[/]", highlight=False, soft_wrap=True)
