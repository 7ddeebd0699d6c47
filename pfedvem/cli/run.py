"""``pfedvem run``."""

from __future__ import annotations

import json
import shlex
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
    Method,
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
from pfedvem.errors import UserError


@app.command(
    cls=Logging, epilog="Example:  pfedvem run --dataset cifar10 --clients 100 --set lr_head=0.001 --out runs/mine"
)
def run(
    method: Method = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    clients: Clients = None,
    partition: Partition = None,
    rounds: Rounds = None,
    participation: Participation = None,
    seed: Seed = None,
    eval_every: Annotated[int | None, Option(help="Rounds between evaluations; 0: after the last only.")] = None,
    eval_clients: Annotated[int | None, Option(help="Test only so many clients, always the same ones.")] = None,
    checkpoint_every: Annotated[int | None, Option(help="Rounds between checkpoints.")] = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    subclass_column: SubclassColumn = None,
    client_column: ClientColumn = None,
    alone: Annotated[bool | None, Option(help="Also train every client alone, to compare.")] = None,
    keep_models: Annotated[bool | None, Option(help="Also write every client's personalised model.")] = None,
    train: Train = None,
    executor: Executor = None,
    workers: Workers = None,
    cohort: Cohort = None,
    device: Device = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    out: Annotated[Path | None, Option(help="Folder of the run's files; by default a new one in runs/.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    tensorboard: TensorBoard = None,
    mlflow: MLflow = None,
    as_json: Json = False,
) -> None:
    """Train a federation and see how its personalised and global models do.

    Settings come from the data set's preset, then --config, then flags, then --set; the later ones win.
    """
    from pfedvem.experiments.config import load
    from pfedvem.experiments.run import next_folder
    from pfedvem.experiments.run import run as run_config
    from pfedvem.report.logs import Logs
    from pfedvem.report.run import LiveProgress, summary_table
    from pfedvem.simulation.fit import Interrupted

    if resume and out is None:
        raise UserError("Say with --out which run to resume.")
    if resume and config is None and out is not None and (out / "config.toml").is_file():
        config = out / "config.toml"
    flags = given(
        method=method,
        rounds=rounds,
        participation=participation,
        seed=seed,
        eval_every=eval_every,
        eval_clients=eval_clients,
        checkpoint_every=checkpoint_every,
        alone=alone,
        keep_models=keep_models,
        train=train,
        executor=executor,
        workers=workers,
        cohort=cohort,
        device=device,
    )
    flags |= data_flags(
        dataset, data_root, clients, partition, image_column, label_column, subclass_column, client_column
    )
    bare = config is None and flags == {"data": {}} and not assignments
    if resume and bare and out is not None and not (out.is_file() or (out / "checkpoint").exists()):
        raise UserError(f"There is no run in {out} to go on with.")
    settings = load(config, flags, assignments or ())
    folder = out if out is not None else next_folder(Path("runs"), f"{settings.data.dataset}-{settings.method}")
    logs, console = Logs(tensorboard, mlflow), Console(stderr=as_json)
    try:
        with LiveProgress(console) as progress:
            result = run_config(settings, out=folder, resume=resume, progress=progress, logs=logs)
    except Interrupted as stopped:
        command = f"pfedvem run --out {shlex.quote(str(folder))} --resume"
        console.print(Text(f"{stopped} Go on with: {command}"), soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(summary_table(result))
    for warning in result.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", highlight=False, soft_wrap=True)
    console.print(f"Files are in [bold]{escape(str(folder))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(result.summary))
