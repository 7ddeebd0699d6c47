"""A run on the terminal: the live progress bar and the table at its end."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pfedvem.simulation.results import Result, spread
from pfedvem.simulation.rounds import Progress, State

LINE_EVERY = 60.0  # seconds from one line of progress to the next, in a file


def shown(value: float | None, digits: int = 1) -> str:
    """A number for people; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def counted(number: object, what: str) -> str:
    """1 round, 2 rounds, ? rounds."""
    return f"{number} {what}{'' if str(number) == '1' else 's'}"


def duration(seconds: float) -> str:
    """A time for people."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


class LiveProgress(Progress):
    """A bar with the round, PM and GM accuracy and the time left; fractions of a round count too.

    In a file, where bars do not move, it is a line now and then.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.fields[round]}/{task.total:.0f}"),
            TextColumn("{task.fields[scores]}", style="green"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,  # a round may take minutes, and its clients differ in length
        )
        self._task: TaskID | None = None
        self._round = 0
        self._due = monotonic() + LINE_EVERY

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, title: str, done: int, rounds: int) -> None:
        self._round = done
        self._task = self._bar.add_task(title, total=rounds, completed=done, round=done, scores="")

    def note(self, text: str) -> None:
        self._console.print(f"[yellow]note[/] {escape(text)}", highlight=False, soft_wrap=True)

    def client(self, done: int, clients: int) -> None:
        assert self._task is not None
        self._bar.update(self._task, completed=self._round + done / clients)
        self._line()

    def round(self, state: State) -> None:
        assert self._task is not None
        self._round = state.round
        last: dict[str, Any] = state.history[-1] if state.history else {}
        scores = "  ".join(f"{key.upper()} {last[key]:.1f}%" for key in ("pm", "gm") if last.get(key) is not None)
        self._bar.update(self._task, completed=state.round, round=state.round, scores=scores)
        self._line()

    def _ahead(self) -> list[str]:
        """What a line says before it comes to the current run."""
        return []

    def _line(self) -> None:
        if self._console.is_terminal or self._console.is_jupyter or monotonic() < self._due:
            return
        self._due = monotonic() + LINE_EVERY
        (task,) = (task for task in self._bar.tasks if task.id == self._task)
        at = f"{task.description}: round {task.completed:.4g} of {task.total:.0f}"
        times = ((task.elapsed, "so far"), (task.time_remaining, "left"))  # None while there is nothing to go by
        said = [*self._ahead(), at, task.fields["scores"]]
        said += [f"{duration(seconds)} {what}" for seconds, what in times if seconds is not None]
        self._console.print(", ".join(filter(None, said)), highlight=False, markup=False, soft_wrap=True)


class LiveRuns(LiveProgress):
    """A bar for many runs, with the time left, above the bar of the current one."""

    def __init__(self, console: Console, what: str, *above: RenderableType) -> None:
        super().__init__(console)
        self._overall = Bar(
            TextColumn(f"all {what}"),
            BarColumn(),
            TextColumn("{task.fields[done]} of {task.total:.0f} done"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=1e9,  # they differ in length: estimate by all that was done
        )
        self._live = Live(Group(*above, self._overall, self._bar), console=console)
        self._all: TaskID | None = None
        self._done, self._rounds = 0, 1

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if not self._console.is_interactive and not self._console.is_jupyter:
            self._console.line()  # after the bars' last state, which is all that a file has of them

    def ended(self, done: int, total: int) -> None:
        """So many runs of all are done."""
        self._done = done
        if self._all is None:
            self._all = self._overall.add_task("", total=total, done=done)
        self._overall.update(self._all, completed=done, done=done)

    def _ahead(self) -> list[str]:
        return [f"{task.fields['done']} of {task.total:.0f} done" for task in self._overall.tasks]

    def stage(self, title: str, done: int, rounds: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._rounds = rounds
        super().stage(title, done, rounds)

    def round(self, state: State) -> None:
        super().round(state)
        if self._all is not None:
            done = self._done + state.round / self._rounds
            self._overall.update(self._all, completed=done, done=int(done))


def summary_table(result: Result) -> Table:
    """The end of a run: personalised models, global model, small clients, clients alone, time."""
    summary, setup = result.summary, result.setup
    size = f"{counted(summary['clients'], 'client')}, {counted(summary['rounds'], 'round')}"
    title = f"{setup.algorithm.title} on {summary['dataset']}: {size}"
    table = Table(title=escape(title), title_justify="left", show_header=True, header_style="bold")
    table.add_column("")
    table.add_column("accuracy (%)", justify="right")
    table.add_column("over clients")
    pm = result.state.scores.accuracy
    if summary["pm"] is not None:
        known = 100 * pm[~pm.isnan()].double()
        low, middle, high = (float(known.quantile(q)) for q in (0.0, 0.5, 1.0))
        over = f"sd {100 * spread(pm):.1f}, min {low:.1f}, median {middle:.1f}, max {high:.1f}"
        table.add_row("personalised models (PM)", f"[bold]{shown(summary['pm'])}[/]", over)
        small = f"the {len(result.small_clients)} with the least data"
        table.add_row("  smallest 10% of clients", shown(summary["small_clients_pm"]), small)
    if summary["alone_pm"] is not None and result.alone is not None:
        alone = result.alone.accuracy
        gains, both = int((pm > alone).sum()), int((~(pm + alone).isnan()).sum())
        over = f"{gains} of {both} clients gain by joining" if summary["pm"] is not None else "their own models"
        table.add_row("clients alone (Local)", shown(summary["alone_pm"]), over)
    if summary["gm"] is not None:
        over = "on the complete test set" + (", average of about ten rounds" if setup.gm == "average" else "")
        table.add_row("global model (GM)", shown(summary["gm"]), over)
    table.add_row(
        "wall-clock", f"{summary['seconds']:.1f} s", f"{summary['seconds'] / summary['rounds']:.2f} s a round"
    )
    return table
