"""The command line: words in, words out. What it does is in the library."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pfedvem.errors import UserError

app = typer.Typer(
    help="Personalised federated learning by variational expectation maximisation.",
    epilog="Example:  pfedvem run",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="Look at data sets and at how they are dealt to clients.",
    epilog="Example:  pfedvem data show --dataset digits",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")
flower_app = typer.Typer(
    help="Run the methods at real sites, on Flower.",
    epilog="Example:  pfedvem flower new hospitals",
    no_args_is_help=True,
)
app.add_typer(flower_app, name="flower")

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
Json = Annotated[bool, Option("--json", help="Print the result as JSON on standard output, and nothing else there.")]


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


@app.command(epilog="Example:  pfedvem run --dataset cifar10 --clients 100 --set lr_head=0.001 --out runs/mine")
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
    train: Train = None,
    executor: Executor = None,
    workers: Workers = None,
    cohort: Cohort = None,
    device: Device = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    out: Annotated[Path | None, Option(help="Folder of the run's files; by default a new one in runs/.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Train a federation and see how its personalised and global models do.

    Settings come from the data set's preset, then --config, then flags, then --set; the later ones win.
    """
    from pfedvem.experiments.config import load
    from pfedvem.experiments.run import next_folder
    from pfedvem.experiments.run import run as run_config
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
        train=train,
        executor=executor,
        workers=workers,
        cohort=cohort,
        device=device,
    )
    flags |= data_flags(
        dataset, data_root, clients, partition, image_column, label_column, subclass_column, client_column
    )
    settings = load(config, flags, assignments or ())
    folder = out if out is not None else next_folder(Path("runs"), f"{settings.data.dataset}-{settings.method}")
    console = Console(stderr=as_json)
    try:
        with LiveProgress(console) as progress:
            result = run_config(settings, out=folder, resume=resume, progress=progress)
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


@app.command(epilog="Example:  pfedvem compare --methods pfedvem,fedavg,local --seeds 3 --out compare/mine")
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
    from pfedvem.simulation.fit import Interrupted

    flags = given(rounds=rounds, participation=participation, seed=seed, train=train)
    flags |= given(executor=executor, workers=workers, cohort=cohort, device=device)
    flags |= data_flags(
        dataset, data_root, clients, partition, image_column, label_column, subclass_column, client_column
    )
    names = [name.strip() for name in methods.split(",") if name.strip()]
    plan = cells(names, seeds=seeds, file=config, flags=flags, assignments=assignments or ())
    folder = out if out is not None else next_folder(Path("compare"), plan[0].data.dataset)
    console = Console(stderr=as_json)
    try:
        with LiveComparison(console) as live:
            comparison = run_cells(plan, folder, progress=live, on_cell=live.cell)
    except (Interrupted, KeyboardInterrupt):
        again = f"Stopped. Go on with the same command and --out {shlex.quote(str(folder))}"
        console.print(Text(again), soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(comparison_table(comparison))
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


@app.command(epilog="Example:  pfedvem bench --networks mlp --methods none --growth none")
def bench(
    networks: Annotated[str, Option(help="mlp, lenet, cnn6 with commas between them, all or none.")] = "all",
    methods: Annotated[str, Option(help="Names of `pfedvem methods` with commas between them, all or none.")] = "all",
    growth: Annotated[
        str, Option(help="Methods whose cost with more clients is measured, or none.")
    ] = "pfedvem,fedavg",
    clients: Annotated[int, Option(help="Clients of the networks' benchmarks.")] = 100,
    growth_to: Annotated[int, Option(help="The most clients of the benchmarks of growth.")] = 10_000,
    workers: Workers = None,
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


@flower_app.command("new", epilog="Example:  pfedvem flower new hospitals --sites 3")
def flower_new(
    folder: Annotated[Path, typer.Argument(help="The new folder of the app.")],
    sites: Annotated[int, Option(help="Number of sites.")] = 3,
) -> None:
    """Write a small app that `flwr run` accepts; a site changes one file of it."""
    _need_flower()
    from pfedvem.flower.new import new_app

    new_app(folder, sites)
    console = Console()
    console.print(
        f"The app is in [bold]{escape(str(folder))}[/]: change mysite.py, and go on by README.md there.",
        highlight=False,
        soft_wrap=True,
    )


@flower_app.command("keys", epilog="Example:  pfedvem flower keys keys --sites 3")
def flower_keys(
    folder: Annotated[Path, typer.Argument(help="The new folder of the keys.")],
    sites: Annotated[int, Option(help="Number of sites.")] = 3,
    host: Annotated[
        list[str] | None, Option(help="A name or address of the server besides localhost; may repeat.")
    ] = None,
    port: Annotated[int, Option(help="The server's port.")] = 8000,
    days: Annotated[int, Option(help="How long the certificates are valid.")] = 30,
) -> None:
    """Make an authority, the server's certificate and the sites' keys, for a test federation."""
    _need_flower()
    from pfedvem.flower.keys import make_keys

    made = make_keys(folder, sites, host or (), port, days)
    Console().print(f"{len(made)} files are in [bold]{escape(str(folder))}[/].", highlight=False, soft_wrap=True)


@flower_app.command("watch", epilog="Example:  pfedvem flower watch hospitals/out")
def flower_watch(
    out: Annotated[Path, typer.Argument(help="The folder of the server's files: the app's setting `out`.")],
    once: Annotated[bool, Option("--once", help="Show it once instead of following it.")] = False,
) -> None:
    """Show a running federation: rounds, sites, replies, and each site's confidence tau."""
    _need_flower()
    from pfedvem.flower.watch import watch

    watch(out, Console(), once=once)


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise UserError('This needs Flower: pip install "pfedvem[flower]".')


@app.command(epilog="Example:  pfedvem version")
def version() -> None:
    """Print the version."""
    print(f"pfedvem {installed_version('pfedvem')}")


def main() -> None:
    """Runs the command line; what a user can mend is a sentence and exit code 2, never a traceback."""
    try:
        app(prog_name="pfedvem")
    except UserError as error:
        _fail(str(error))
    except OSError as error:  # no permission, no space left, and the like
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")


def _fail(sentence: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("error", "bold red"), f" {sentence}"), soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
