"""A sweep for people and programs: its progress, the table of the best trials, trials.csv and best.toml."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pfedvem.report.run import LiveRuns, counted, shown
from pfedvem.simulation import checkpoints

if TYPE_CHECKING:  # the sweep itself writes these files
    from pfedvem.experiments.plan import Plan, Settings
    from pfedvem.experiments.trials import Found, Row

BEST = 10
MODELS = {"pm": "PM", "gm": "GM", "mean": "mean of PM and GM"}
WARNING = "Settings were chosen on the test data, as in the literature: their scores are too good."


def judged(plan: Plan) -> str:
    """What the score is."""
    held = f"{100 * plan.share:g}% of each client's training data, held out"
    return f"{MODELS[plan.objective]} (%) on {'the test data' if plan.select_on == 'test' else held}"


def sweep_table(found: Found) -> Table:
    """The best trials."""
    plan, counts = found.plan, Counter(row.state for row in found.rows)
    states = ", ".join(f"{counts[state]} {state}" for state in ("complete", "pruned", "failed") if counts[state])
    title = (
        f"{plan.config.algorithm.title} on {plan.config.data.dataset}: {counted(plan.config.rounds, 'round')}, {states}"
    )
    caption = f"score: {judged(plan)}"
    table = Table(
        title=escape(title), title_justify="left", caption=caption, caption_justify="left", header_style="bold"
    )
    for name in ("trial", "score", "PM", "GM", *plan.space, "seconds"):
        table.add_column(name, justify="right")
    for row in [row for row in found.rows if row.state == "complete"][:BEST]:
        numbers = [f"{row.trial}", *(shown(value, 2) for value in (row.score, row.pm, row.gm))]
        style = "bold" if row is found.best else None
        table.add_row(*numbers, *(text(value) for value in row.settings.values()), shown(row.seconds), style=style)
    return table


def trials_csv(found: Found) -> str:
    """All trials that have ended, best first: their settings, and the score at each evaluated round."""
    rounds = sorted({at for row in found.rows for at in row.scores})
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    after = [f"score_{at}" for at in rounds]
    writer.writerow(["trial", "state", "score", "pm", "gm", *found.plan.space, "seconds", *after, "reason"])
    for row in found.rows:
        scores = [number(row.scores.get(at)) for at in rounds]
        values = [text(value) for value in row.settings.values()]
        measured = [number(value) for value in (row.score, row.pm, row.gm)]
        writer.writerow([row.trial, row.state, *measured, *values, row.seconds, *scores, row.reason or ""])
    return table.getvalue()


def best_toml(found: Found, best: Row) -> str:
    """The best settings as a configuration, with what they were chosen by as a comment."""
    plan = found.plan
    lines = [
        f"The best of {counted(len(found.rows), 'trial')} after {counted(plan.config.rounds, 'round')}, "
        f"trial {best.trial}.",
        f"Score: {number(best.score)}, {judged(plan)}.",
    ]
    if plan.select_on == "test":
        lines.append(WARNING)
    comment = "".join(f"# {line}\n" for line in lines)
    return f"{comment}\n{tomli_w.dumps(plan.best(best.settings).dump())}"


def sweep_values(found: Found) -> dict[str, Any]:
    """All of it as plain values."""
    plan, best = found.plan, found.best
    return {
        "method": plan.config.method,
        "dataset": plan.config.data.dataset,
        "rounds": plan.config.rounds,
        "objective": plan.objective,
        "select_on": plan.select_on,
        "best": best.settings if best is not None else None,
        "score": best.score if best is not None else None,
        "trials": [asdict(row) for row in found.rows],
    }


def write_sweep(found: Found, out: Path) -> None:
    """Writes trials.csv and, once there is one that is complete, best.toml."""
    checkpoints.replace(out / "trials.csv", trials_csv(found).encode())
    if found.best is not None:
        checkpoints.replace(out / "best.toml", best_toml(found, found.best).encode())


def number(value: float | None) -> str:
    """A number for a table of plain numbers; empty where there is none."""
    return "" if value is None else f"{value:.4f}"


def text(value: Any) -> str:
    """A setting as a person writes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def described(settings: Settings) -> str:
    return ", ".join(f"{key} {text(value)}" for key, value in settings.items())


class LiveSweep(LiveRuns):
    """The progress of trials, and the best so far."""

    def __init__(self, console: Console) -> None:
        self._best = Text("best so far: none", style="green", overflow="ellipsis", no_wrap=True)
        super().__init__(console, "trials", self._best)
        self._told: set[str] = set()

    def found(self, found: Found) -> None:
        """So much has been found."""
        if found.best is not None:
            self._best.plain = f"best so far {shown(found.best.score, 2)}: {described(found.best.settings)}"
        self.ended(len(found.rows), found.plan.total)

    def note(self, text: str) -> None:
        if text not in self._told:  # what is to say about the data is the same for every trial
            self._told.add(text)
            super().note(text)
