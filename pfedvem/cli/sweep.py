"""``pfedvem sweep``."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
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
    Method,
    Option,
    Participation,
    Partition,
    Rounds,
    Seed,
    SubclassColumn,
    Train,
    Workers,
    app,
    data_flags,
    given,
)
from pfedvem.errors import UserError


@app.command(epilog="Example:  pfedvem sweep --method fedavg --space lr=0.1,0.01 --space epochs=5,10 --out sweeps/mine")
def sweep(
    method: Method = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    clients: Clients = None,
    partition: Partition = None,
    rounds: Rounds = None,
    participation: Participation = None,
    seed: Seed = None,
    space: Annotated[
        list[str] | None,
        Option(metavar="KEY=V1,V2,...", help="Values of a hyper-parameter; may repeat. By default the paper's ranges."),
    ] = None,
    sampler: Annotated[
        str, Option(help="What is tried: the whole grid, some of it at random, or some by tpe.")
    ] = "grid",
    trials: Annotated[int | None, Option(help="How many trials random and tpe have; by default 30.")] = None,
    prune: Annotated[bool, Option("--prune", help="Stop trials that are below the median of earlier ones.")] = False,
    objective: Annotated[
        str | None, Option(help="The score: pm, gm or mean. By default the mean of the models that there are.")
    ] = None,
    select_on: Annotated[
        str, Option(help="What trials are scored on: validation or, only to mirror the literature, test.")
    ] = "validation",
    share: Annotated[float, Option(help="Share of each client's training data that validation holds out.")] = 0.2,
    jobs: Annotated[int, Option(min=1, help="Trials at the same time; they share the processors.")] = 1,
    ray: Annotated[
        str | None, Option(metavar="ADDRESS", help="Run trials on this Ray cluster, or on a `local` one.")
    ] = None,
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
    out: Annotated[Path | None, Option(help="Folder of the sweep; by default a new one in sweeps/.")] = None,
    as_json: Json = False,
) -> None:
    """Search for the hyper-parameters of a method on a data set; the best are a file that `run --config` takes.

    Trials train on a part of each client's training data and are scored on the rest of it; test data plays no part.
    What has ended is kept: the same command with the same --out goes on, and may run several times at once.
    """
    if find_spec("optuna") is None:
        raise UserError("Sweeps need Optuna: pip install 'pfedvem[sweep]'.")
    if ray is not None and find_spec("ray") is None:
        raise UserError("Trials on Ray need it: pip install ray.")
    if ray is not None and (prune or jobs > 1):
        raise UserError("Ray runs as many trials at a time as it has room for, to their end: no --jobs or --prune.")
    from pfedvem.experiments.config import load
    from pfedvem.experiments.plan import plan
    from pfedvem.experiments.run import next_folder
    from pfedvem.experiments.sweep import sweep as search
    from pfedvem.report.sweep import WARNING, LiveSweep, sweep_table, sweep_values
    from pfedvem.simulation.fit import Interrupted

    flags = given(method=method, rounds=rounds, participation=participation, seed=seed, train=train)
    flags |= given(executor=executor, workers=workers, cohort=cohort, device=device)
    flags |= data_flags(
        dataset, data_root, clients, partition, image_column, label_column, subclass_column, client_column
    )
    settings = load(config, flags, assignments or ())
    searched = plan(
        settings,
        space=space or (),
        objective=objective,
        sampler=sampler,
        trials=trials,
        prune=prune,
        select_on=select_on,
        share=share,
    )
    folder = out if out is not None else next_folder(Path("sweeps"), f"{settings.data.dataset}-{settings.method}")
    console = Console(stderr=as_json)
    try:
        with LiveSweep(console) as live:
            found = search(searched, folder, progress=live, on_change=live.found, jobs=jobs, ray=ray)
    except (Interrupted, KeyboardInterrupt):
        again = f"Stopped. Go on with the same command and --out {shlex.quote(str(folder))}"
        console.print(Text(again), soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(sweep_table(found))
    for row in found.rows:
        if row.reason is not None:
            console.print(f"[red]failed[/] trial {row.trial}: {escape(row.reason)}", highlight=False, soft_wrap=True)
    if select_on == "test":
        console.print(f"[yellow]warning[/] {WARNING}", highlight=False, soft_wrap=True)
    best = shlex.quote(str(folder / "best.toml"))
    console.print(Text(f"Run the best with: pfedvem run --config {best}"), soft_wrap=True)
    if as_json:
        print(json.dumps(sweep_values(found)))
