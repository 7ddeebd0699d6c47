"""``pfedvem reproduce``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pfedvem.cli.app import Assignments, DataRoot, Executor, Json, Option, Rounds, Seed, Workers, app, given
from pfedvem.errors import UserError

if TYPE_CHECKING:
    from pfedvem.experiments.studies import Study

NAMES = (
    "table1, ablation-uncertainty, ablation-deviation, small-clients, limited-data, digit5, fig-accuracy-vs-size, "
    "fig-confidence, fig-deviation, fig-convergence, fig-partition-sizes"
)


@app.command(epilog="Example:  pfedvem reproduce table1 --datasets digits --seeds 2 --rounds 10")
def reproduce(
    name: Annotated[str, typer.Argument(help=f"A table or figure of the paper: {NAMES}.")],
    datasets: Annotated[str, Option(help="Data sets with commas between them; by default the paper's.")] = "",
    methods: Annotated[str, Option(help="Methods with commas between them; by default the paper's.")] = "",
    clients: Annotated[str, Option(help="Numbers of clients with commas between them; by default the paper's.")] = "",
    columns: Annotated[
        str,
        Option(
            help="Columns of a table that differ in their data, with commas between them: 5000, 10000 or 50000; hetero "
            "or homo; random or equal."
        ),
    ] = "",
    seeds: Annotated[
        int | None, Option(help="How many seeds: --seed and those that follow it.", show_default="5")
    ] = None,
    rounds: Rounds = None,
    seed: Seed = None,
    draws: Annotated[int, Option(help="Random partitions of fig-partition-sizes.")] = 1000,
    data_root: DataRoot = None,
    executor: Executor = None,
    workers: Workers = None,
    assignments: Assignments = None,
    finished: Annotated[
        bool, Option("--finished", help="Run nothing: write the tables and pictures of what is finished in --out.")
    ] = False,
    out: Annotated[Path, Option(help="Folder of the runs, tables and pictures.")] = Path("reproduction"),
    as_json: Json = False,
) -> None:
    """Run a table or figure of the paper, and show our numbers beside the published ones.

    Finished runs are kept in --out and shared by all tables and figures there: the same command goes on where it was
    stopped. Tables are written after every run, pictures at the end.
    """
    from pfedvem.experiments.reproduce import Reproduction
    from pfedvem.experiments.reproduce import reproduce as run_study
    from pfedvem.experiments.studies import grid, others, study
    from pfedvem.report.compare import LiveComparison
    from pfedvem.report.reproduction import reproduction_view, table_csv, write_reproduction, write_tables
    from pfedvem.simulation.fit import Interrupted

    chosen = study(name, words(datasets), words(methods), numbers(clients), words(columns))
    flags = given(rounds=rounds, seed=seed, executor=executor, workers=workers)
    console, folder = Console(stderr=as_json), out / name
    if name == "fig-partition-sizes":
        if useless := [f"--{option}" for option in (*flags, *given(seeds=seeds, finished=finished or None))]:
            raise UserError(f"{name} trains nothing; leave out {', '.join(useless)}.")
        _partitions(chosen, draws, data_root, assignments or (), folder, console, as_json)
        return
    flags["data"] = given(root=str(data_root) if data_root is not None else None)
    cells = grid(chosen, seeds=5 if seeds is None else seeds, flags=flags, assignments=assignments or ())
    latest: list[Reproduction] = []

    def save(reproduction: Reproduction) -> None:
        latest[:] = [reproduction]
        write_tables(reproduction, folder)

    try:
        with LiveComparison(console) as live:
            run_study(chosen, cells, out, finished_only=finished, progress=live, on_cell=live.cell, save=save)
    except (Interrupted, KeyboardInterrupt):
        console.print(Text("Stopped. Go on with the same command."), soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        if latest:
            write_reproduction(latest[0], folder, command())
    console.print(reproduction_view(latest[0]))
    console.print(f"Tables and pictures are in [bold]{escape(str(folder))}[/]", highlight=False, soft_wrap=True)
    if left := sum((out / "runs" / f"{run}.json").exists() for run in others(chosen, cells)):
        runs = "1 more finished run" if left == 1 else f"{left} more finished runs"
        console.print(
            f"They show only what was asked for: {escape(str(out))} has {runs} of {name}. For one table of everything, "
            "add --finished and name no methods, clients or seeds, or all of them.",
            highlight=False,
            soft_wrap=True,
        )
    if as_json:
        print(json.dumps({"folder": str(folder), "table": table_csv(latest[0])}))
    if latest[0].failures:
        raise typer.Exit(1)


def _partitions(
    chosen: Study,
    draws: int,
    root: Path | None,
    assignments: Sequence[str],
    folder: Path,
    console: Console,
    as_json: bool,
) -> None:
    """Draws partitions only; nothing is trained."""
    from rich.progress import Progress

    from pfedvem.experiments.config import load
    from pfedvem.experiments.reproduce import partition_sizes
    from pfedvem.experiments.studies import refuse_columns
    from pfedvem.report.figures import draw_partition_sizes
    from pfedvem.report.reproduction import write_card

    if draws < 1:
        raise UserError(f"--draws must be at least 1, not {draws}.")
    refuse_columns(assignments)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with Progress(console=console) as bar:
        for dataset in chosen.datasets:
            shared = given(dataset=dataset, root=str(root) if root is not None else None)
            settings = [
                load(None, {"data": {**shared, "clients": count}}, assignments).data for count in chosen.counts(dataset)
            ]
            task = bar.add_task(dataset, total=draws * len(settings))
            sizes = partition_sizes(settings, draws, lambda task=task: bar.advance(task))  # type: ignore[misc]
            drawn += draw_partition_sizes(dataset, sizes, draws, folder)
    write_card(chosen, folder, command(), [], drawn)
    console.print(f"The pictures are in [bold]{escape(str(folder))}[/]", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"folder": str(folder), "figures": [name for name, _, _ in drawn]}))


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """The whole numbers of a list with commas."""
    try:
        return [int(word) for word in words(text)]
    except ValueError as error:
        raise UserError(f"--clients takes whole numbers with commas between them, not {text!r}.") from error


def command() -> str:
    """The command that was given, to repeat it."""
    return shlex.join(["pfedvem", *sys.argv[1:]])
