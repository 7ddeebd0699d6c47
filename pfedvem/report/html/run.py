"""The page of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tomli_w

from pfedvem.report import plots
from pfedvem.report.html.folders import Row, Run, number
from pfedvem.report.html.page import MINUS, Drawing, File, Page, Section, Table, Tile, signed
from pfedvem.report.run import counted, duration, shown

MOST = 1000  # rows of the table of clients; the file has them all
JOINING = "Who gains and who loses by joining"
DEVIATION = f"|μ {MINUS} w|²/d"
# What makes clients confident, by the setting of the method, and the formula.
TAU = {
    "both": ("narrow and near the global head", f"(Tr Σ + |μ {MINUS} w|²)"),
    "uncertainty": ("narrow", "Tr Σ"),
    "deviation": ("near the global head", f"|μ {MINUS} w|²"),
}
ECE = "The expected calibration error, the mean distance between how sure predictions are and how often they are right"
RELIABILITY = (
    "On the dashed line, predictions are as often right as they are sure; larger points stand for more of them."
)

DECLINED = (
    "Where a model may pass the cases that it is least sure of to a person, this is how often it is right on the "
    "others; each point declines one more bin of predictions."
)


def run_page(run: Run) -> Page:
    """The page of one run."""
    draw = Drawing()
    rows = [with_gain(row, row.get("alone")) for row in run.clients]
    sections = [_accuracy(run, draw), _joining(run, rows, draw), confidence([run], draw), _calibration(run, draw)]
    seconds = run.last("seconds")
    facts = [counted(run.size, "client"), counted(run.rounds, "round"), f"seed {run.seed}"]
    command, about = _command(run)
    return Page(
        kind="Run",
        title=f"{run.title} on {run.dataset}",
        facts=[*facts, duration(seconds)] if seconds is not None else facts,
        tiles=_tiles(run, rows),
        problems=run.problems,
        sections=[section for section in (*sections, _clients(rows)) if section is not None],
        command=command,
        about_command=about,
        file=File("config.toml", tomli_w.dumps(run.config)) if run.config else None,
    )


def with_gain(row: Row, alone: float | None) -> Row:
    """A client with what it reaches alone and what it gains by joining, where both are known."""
    known = row.get("pm") is not None and alone is not None
    return {**row, "alone": alone, "gain": row["pm"] - alone} if known else row


def confidence(runs: Sequence[Run], draw: Drawing, name: str = "Confidence") -> Section | None:
    """How confident clients are, if the method says so; runs are of one method, and their clients are put together."""
    found = [plots.known(run.clients, "tau") for run in runs]
    rows = [row for some in found for row in some]
    if not rows:
        return None
    # A client's share of the confidence of its own federation, as in the paper.
    shares = [100 * row["tau"] / total for some in found if (total := sum(r["tau"] for r in some)) for row in some]
    equal = 100 * sum(map(bool, found)) / len(rows)  # a run that has no clients yet adds none
    deviations = [row["deviation"] for row in plots.known(rows, "deviation")]
    figures = []
    if plots.known(rows, "n_train"):
        about = linked(rows, "n_train", "tau")
        figures.append(draw("Confidence against data size", about, plots.confidence_by_size, rows))
    if deviations:
        about = linked(rows, "deviation", "tau")
        figures.append(draw("Confidence against deviation", about, plots.confidence_by_deviation, rows))
    for values, kind, about, label in (
        (shares, "confidence", f"All equal, each share would be {equal:.3g} %.", "τ / Σ τ (%)"),
        (deviations, "deviation", "How far heads are from the global one.", DEVIATION),
    ):
        if plots.varied(values):
            figures.append(draw(f"Distribution of {kind}", about, plots.distribution, values, f"{kind} {label}"))
    algorithm = runs[0].config.get("algorithm")
    term = TAU.get(str(algorithm.get("confidence")) if isinstance(algorithm, dict) else "")
    text = "A client's confidence τ is its weight when heads are merged."
    text += f" It is high where the posterior of its head is {term[0]}: τ = d / {term[1]}." if term else ""
    return Section(name, [text], figures)


def linked(rows: Sequence[Row], x: str, y: str) -> str:
    """A sentence on how two columns go together: Spearman's rank correlation."""
    from scipy.stats import spearmanr

    a, b = ([row[key] for row in plots.known(rows, x, y)] for key in (x, y))
    if not (plots.varied(a) and plots.varied(b)):
        return "Each point is a client."
    return f"Each point is a client. Rank correlation {signed(float(spearmanr(a, b).statistic), 2)}."


def _command(run: Run) -> tuple[str, str]:
    """The command that repeats a run, and a word about it. It repeats only what the command line has started."""
    if "data" in run.config:
        return "pfedvem run --config config.toml --out NEW", "Save the settings below as config.toml."
    if "experiment" in run.config:
        return "", "This run was at real sites, by flwr run: only they have the data. These were its settings."
    return "", "This run was started from Python: the same call of fit repeats it. These were its settings."


def _tiles(run: Run, rows: Sequence[Row]) -> list[Tile]:
    sem, tiles = run.last("pm_sem"), []
    general = ", average of about ten rounds" if run.config.get("gm") == "average" else ""
    for key, name, about in (
        ("pm", "Personalised models", "mean over clients" + (f", SEM {shown(sem)}" if sem is not None else "")),
        ("gm", "Global model", f"on the complete test set{general}"),
        ("small_clients_pm", "Smallest 10%", "personalised, clients with the least data"),
        ("alone_pm", "Clients alone", "mean, without the federation"),
    ):
        if (value := run.last(key)) is not None:
            tiles.append(Tile(name, f"{value:.1f} %", about))
    gains = [row["gain"] for row in rows if "gain" in row]
    if gains:
        better = sum(gain > 0 for gain in gains)
        tiles.append(Tile("Gain by joining", f"{better} of {len(gains)}", "clients do better than alone"))
    return tiles


def _accuracy(run: Run, draw: Drawing) -> Section | None:
    figures, alone = [], number(run.summary.get("alone_pm"))
    if any(row.get(key) is not None for row in run.history for key in ("pm", "gm")):
        about = "Test accuracy after each round that was evaluated."
        figures.append(draw("Over the rounds", about, plots.accuracy_by_round, run.history, alone))
    if plots.known(run.clients, "n_train", "pm"):
        about = "Each point is a client" + ("; the line joins it to what it reaches alone." if alone else ".")
        figures.append(draw("Against local data size", about, plots.accuracy_by_size, run.clients))
    single = run.finished and run.last("pm") is None
    text = [f"{run.title} gives one model for all clients and no personalised ones."] if single else []
    return Section("Accuracy", text, figures) if figures else None


def _joining(run: Run, rows: Sequence[Row], draw: Drawing) -> Section | None:
    """Who gains and who loses against training alone."""
    judged = plots.known(rows, "n_train", "gain")
    if not judged:
        if run.last("pm") is None or run.method == "local":
            return None
        unknown = "Clients were not trained alone in this run, so what joining is worth is not known."
        return Section(JOINING, [f"{unknown} Run it with --alone, or compare it with the method local."])
    gains = [float(row["gain"]) for row in judged]
    rate = number(run.config.get("alone_lr"))
    text = [_verdict(gains)]
    text += [f"Alone, every client trains with the same learning rate of {rate:g}."] if rate is not None else []
    figures = [
        draw("Client by client", "Gain in points of accuracy.", plots.gains_in_order, gains),
        draw("Against local data size", linked(judged, "n_train", "gain"), plots.gains_by_size, judged),
    ]
    best_first = sorted(judged, key=lambda row: -float(row["gain"]))
    keys = ["client", "n_train", "alone", "pm", "gain"]
    most = [row for row in best_first[:5] if row["gain"] > 0]
    least = [row for row in best_first[:-6:-1] if row["gain"] < 0]
    tables = [_table(part, keys, name) for part, name in ((most, "Gain most"), (least, "Lose most")) if part]
    return Section(JOINING, text, figures, tables)


def _verdict(gains: Sequence[float]) -> str:
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    same = len(gains) - better - worse
    parts = [f"{better} of {len(gains)} clients gain by joining", f"{worse or 'none'} lose{'' if worse > 1 else 's'}"]
    parts += [f"{same} {'are' if same > 1 else 'is'} as good alone"] if same else []
    return f"{', '.join(parts)}; the mean gain is {signed(float(np.mean(gains)))} points."


def _calibration(run: Run, draw: Drawing) -> Section | None:
    names = {"pm": ("personalised models", plots.PM), "gm": ("global model", plots.GM)}
    bins = {name: (run.calibration[key], colour) for key, (name, colour) in names.items() if key in run.calibration}
    figures = []
    if bins:
        figures.append(draw("Reliability", RELIABILITY, plots.reliability, bins))
        figures.append(draw("Accuracy against declined cases", DECLINED, plots.declined, bins))
    if plots.known(run.clients, "n_train", "pm_ece"):
        about = linked(run.clients, "n_train", "pm_ece")
        figures.append(draw("Calibration error against data size", about, plots.calibration_by_size, run.clients))
    errors = {name: run.last(f"{key}_ece") for key, (name, _) in names.items()}
    said = " and ".join(f"{value:.1f} % ({name})" for name, value in errors.items() if value is not None)
    return Section("Calibration", [f"{ECE}, is {said}."] if said else [], figures) if figures or said else None


def _clients(rows: Sequence[Row]) -> Section | None:
    if not rows:
        return None
    # A column is left out where it says nothing: no values, or no overflow.
    saying = [key for key in rows[0] | COLUMNS if any(row.get(key) not in (None, "") for row in rows)]
    keys = [key for key in sorted(saying, key=_place) if key != "discarded" or any(row[key] for row in rows)]
    name = "One client" if len(rows) == 1 else f"All {len(rows):,} clients"
    name = name if len(rows) <= MOST else f"The first {MOST:,} of {len(rows):,} clients"
    return Section("Clients", tables=[_table(rows[:MOST], keys, name, folded=True)])


def _table(rows: Sequence[Row], keys: Sequence[str], name: str, folded: bool = False) -> Table:
    forms = [COLUMNS.get(key, (key, _short)) for key in keys]
    both = list(zip(keys, forms, strict=True))
    lines = [[form(row[key]) if row.get(key) is not None else "-" for key, (_, form) in both] for row in rows]
    return Table([head for head, _ in forms], lines, name, folded=folded)


def _place(key: str) -> int:
    """Where a column stands; those that are not known here come last."""
    return [*COLUMNS, key].index(key)


def _short(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _labels(text: str, most: int = 6) -> str:
    names = text.split("; ")
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# The columns of clients.csv as people read them.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "client": ("Client", str),
    "n_train": ("Samples", _whole),
    "labels": ("Labels", _labels),
    "pm": ("PM (%)", shown),
    "alone": ("Alone (%)", shown),
    "gain": ("Gain", signed),
    "pm_nll": ("NLL", partial(shown, digits=3)),
    "pm_ece": ("ECE (%)", shown),
    "tau": ("Confidence τ", _short),
    "uncertainty": ("Tr(Σ)/d", _short),
    "deviation": (DEVIATION, _short),
    "discarded": ("Overflows", _whole),
    "uploads": ("Uploads", _whole),
    "left_out": ("Left out", _whole),
    "capped": ("Capped", _whole),
    "clipped": ("Clipped", _whole),
}
