"""``pfedvem bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pfedvem.cli.app import Json, Option, app


@app.command(epilog="Example:  pfedvem bench --networks mlp --methods none --growth none")
def bench(
    networks: Annotated[str, Option(help="mlp, lenet, cnn6 with commas between them, all or none.")] = "all",
    methods: Annotated[str, Option(help="Names of `pfedvem methods` with commas between them, all or none.")] = "all",
    growth: Annotated[
        str, Option(help="Methods whose cost with more clients is measured, or none.")
    ] = "pfedvem,fedavg",
    clients: Annotated[int, Option(min=1, help="Clients of the networks' benchmarks.")] = 100,
    growth_to: Annotated[int, Option(min=100, help="The most clients of the benchmarks of growth.")] = 10_000,
    workers: Annotated[int | None, Option(min=1, help="Processes; by default one for each processor.")] = None,
    out: Annotated[Path | None, Option(help="Also write the figures into this JSON file.")] = None,
    against: Annotated[Path | None, Option(help="Fail if a ratio has fallen below 70% of that in this file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what a round costs, side by side with the plain way of training one client after the other.

    Everything together takes about half an hour. Data is random, of the shape of the real data sets.
    """
    from pfedvem.benchmarks.measure import regressions
    from pfedvem.benchmarks.run import benchmark, read_figures
    from pfedvem.report.bench import bench_view

    before = read_figures(against) if against is not None else None
    console = Console(stderr=as_json)
    with console.status("Measuring") as status:
        figures = benchmark(
            networks.split(","),
            methods.split(","),
            growth.split(","),
            clients=clients,
            growth_to=growth_to,
            workers=workers,
            step=status.update,
            out=out,
        )
    console.print(bench_view(figures))
    if as_json:
        print(json.dumps(figures))
    found = regressions(figures, before, 0.7) if before is not None else []
    for sentence in found:
        console.print(f"[red]slower[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
