"""``pfedvem compare`` and ``pfedvem methods``."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pfedvem.cli.app import (
    Assignments,
    ClientColumn,
    Clients,
    Cohort,
    ConfigFile,
    DataRoot,
    Dataset,
    Device,
    Executor,
    ImageColumn,
    Json,
    LabelColumn,
    Logging,
    MLflow,
    Option,
    Participation,
    Partition,
    Rounds,
    Seed,
    SubclassColumn,
    TensorBoard,
    Train,
    Workers,
    app,
    data_flags,
    given,
)


@app.command(
    cls=Logging, epilog="Example:  pfedvem compare --methods pfedvem,fedavg,local --seeds 3 --out compare/mine"
)
def compare(
    methods: Annotated[str, Option(help="Names of `pfedvem methods` with commas between them, or all.")] = "all",
    seeds: Annotated[int, Option(help="How many seeds: --seed and those that follow it.")] = 1,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    clients: Clients = None,
    partition: Partition = None,
    rounds: Rounds = None,
    participation: Participation = None,
    seed: Seed = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    subclass_column: SubclassColumn = None,
    client_column: ClientColumn = None,
    train: Train = None,
    executor: Executor = None,
    workers: Workers = None,
    cohort: Cohort = None,
    device: Device = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    out: Annotated[Path | None, Option(help="Folder of the runs and tables; by default a new one in compare/.")] = None,
    tensorboard: TensorBoard = None,
    mlflow: MLflow = None,
    as_json: Json = False,
) -> None:
    """Compare methods on the same clients, initial weights and client stream, over several seeds.

    What is finished is kept: the same command with the same --out runs only what is missing. A setting can be for one
    method alone: --set fedprox.mu=1.
    """
    from pfedvem.experiments.compare import cells
    from pfedvem.experiments.compare import compare as run_cells
    from pfedvem.experiments.run import next_folder
    from pfedvem.report.compare import LiveComparison, comparison_table
    from pfedvem.report.logs import Logs
    from pfedvem.simulation.fit import Interrupted

    flags = given(rounds=rounds, participation=participation, seed=seed, train=train)
    flags |= given(executor=executor, workers=workers, cohort=cohort, device=device)
    flags |= data_flags(
        dataset, data_root, clients, partition, image_column, label_column, subclass_column, client_column
    )
    names = [name.strip() for name in methods.split(",") if name.strip()]
    plan = cells(names, seeds=seeds, file=config, flags=flags, assignments=assignments or ())
    folder = out if out is not None else next_folder(Path("compare"), plan[0].data.dataset)
    logs, console = Logs(tensorboard, mlflow), Console(stderr=as_json)
    try:
        with LiveComparison(console) as live:
            comparison = run_cells(plan, folder, progress=live, on_cell=live.cell, logs=logs)
    except (Interrupted, KeyboardInterrupt):
        again = f"Stopped. Go on with the same command and --out {shlex.quote(str(folder))}"
        console.print(Text(again), soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(comparison_table(comparison, console.width))
    for failure in comparison.failures:
        console.print(f"[red]failed[/] {escape(failure)}", highlight=False, soft_wrap=True)
    console.print(f"Tables and runs are in [bold]{escape(str(folder))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(asdict(comparison)))
    if comparison.failures:
        raise typer.Exit(1)


@app.command(epilog="Example:  pfedvem methods pfedvem")
def methods(
    name: Annotated[str | None, typer.Argument(help="Show the hyper-parameters of this method.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what is personal, what is sent, which models they give, and their hyper-parameters."""
    from pfedvem.report.methods import method_rows, methods_view

    if as_json:
        print(json.dumps(method_rows(name)))
    else:
        Console().print(methods_view(name))
