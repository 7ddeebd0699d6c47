"""The page of several methods on the same clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tomli_w

from pfedvem.experiments.compare import Measure, command, measure, settings
from pfedvem.report import plots
from pfedvem.report.compare import plain, size
from pfedvem.report.html.folders import Comparison, Row, Run, number, title
from pfedvem.report.html.page import Drawing, File, Page, Section, Table, Tile, signed
from pfedvem.report.html.run import DECLINED, JOINING, RELIABILITY, confidence, with_gain
from pfedvem.report.run import counted, shown
from pfedvem.simulation.results import SMALL

MEASURES = {
    "pm": "PM (%)",
    "gm": "GM (%)",
    "small_clients_pm": "Smallest 10% (%)",
    "pm_ece": "ECE of PM (%)",
    "gm_ece": "ECE of GM (%)",
}
ABOUT = (
    "Mean ± standard error over seeds, the best in bold. PM: personalised models, mean over clients; GM: global model "
    "on the complete test set; ECE: expected calibration error; down and up: what a client gets and sends in a round."
)
GROUPS = "Clients in groups of about the same size; a point is the mean of its group."


def comparison_page(found: Comparison) -> Page:
    """The page of several methods on the same clients."""
    draw, runs = Drawing(), found.runs
    seeds, methods = len({run.seed for run in runs}), f"{len(found.cells)} methods"
    rounds = max((run.rounds for run in runs), default="?", key=lambda text: number(text) or 0)
    sections = [_results(found), _accuracy(found, draw), _joining(found, draw)]
    sections += [confidence(own, draw, f"Confidence of {title(name)}") for name, own in found.cells.items()]
    sections += [_calibration(found, draw), _runs(runs)]
    repeat, file = _repeat(found)
    return Page(
        kind="Comparison",
        title=f"{methods if len(found.cells) != 1 else runs[0].title} on {runs[0].dataset}" if runs else "Comparison",
        facts=[counted(runs[0].size, "client"), counted(rounds, "round"), counted(seeds, "seed")] if runs else [],
        tiles=_best(found),
        problems=found.problems,
        sections=[section for section in sections if section is not None],
        command=repeat,
        about_command="Save the settings below as comparison.toml." if file is not None else "",
        file=file,
    )


def _repeat(found: Comparison) -> tuple[str, File | None]:
    """The command that repeats a comparison, and the file of its settings; older ones have theirs in their runs."""
    if found.settings and found.about.get("command"):
        return str(found.about["command"]), File("comparison.toml", found.settings)
    kinds = {"method": str, "rounds": int, "seed": int, "data": dict, "algorithm": dict}
    configs = [run.config for run in found.runs]
    configs = [config for config in configs if all(isinstance(config.get(key), kinds[key]) for key in kinds)]
    if not configs:
        return "", None
    again = command(list(found.cells), len({run.seed for run in found.runs}))
    return again, File("comparison.toml", tomli_w.dumps(settings(configs)))


def _runs(runs: Sequence[Run]) -> Section | None:
    """All runs, each a row."""
    rows = []
    for run in runs:
        seconds = run.last("seconds")
        numbers = [shown(run.last("pm")), shown(run.last("gm")), f"{seconds:,.0f} s" if seconds is not None else "-"]
        state = "finished" if run.finished else "not finished"
        rows.append([run.title, run.dataset, run.size, run.seed, run.rounds, *numbers, state])
    header = ["Method", "Data", "Clients", "Seed", "Rounds", "PM (%)", "GM (%)", "Time", "State"]
    name = f"All {len(runs):,} runs" if len(runs) > 1 else "One run"
    return Section("Runs", tables=[Table(header, rows, name, folded=True)]) if runs else None


def _measured(found: Comparison, key: str) -> dict[str, Measure | None]:
    """Mean and standard error over the finished seeds of each method."""
    return {name: measure(run.last(key) for run in runs if run.finished) for name, runs in found.cells.items()}


def _winners(values: dict[str, Measure | None], key: str) -> list[str]:
    """The methods that are best in the decimal that is shown."""
    means = {name: one.mean for name, one in values.items() if one is not None}
    best = (min if key.endswith("ece") else max)(means.values(), default=None)
    return [name for name, mean in means.items() if shown(mean) == shown(best)]


def _best(found: Comparison) -> list[Tile]:
    tiles = []
    for key, name in (("pm", "personalised"), ("gm", "global model"), ("small_clients_pm", "on the smallest 10%")):
        values = _measured(found, key)
        winners = _winners(values, key)
        if winners and (best := values[winners[0]]):
            tiles.append(Tile(f"Best {name}", f"{best.mean:.1f} %", ", ".join(map(title, winners))))
    return tiles


def _results(found: Comparison) -> Section | None:
    measured = {key: values for key in MEASURES if any((values := _measured(found, key)).values())}
    if not measured:
        return None
    sent = {str(row.get("method")): row for row in found.rows}
    rows, best = [], set()
    for at, (name, runs) in enumerate(found.cells.items()):
        seconds = measure(run.last("seconds") for run in runs if run.finished)
        wire = [number(sent.get(name, {}).get(key)) for key in ("bytes_down", "bytes_up")]
        rest = [size(int(value)) if value is not None else "-" for value in wire]
        rest += [f"{seconds.mean:,.0f} s" if seconds is not None else "-", str(sum(run.finished for run in runs))]
        rows.append([title(name), *(plain(values[name]) for values in measured.values()), *rest])
        best |= {(at, 1 + n) for n, (key, values) in enumerate(measured.items()) if name in _winners(values, key)}
    header = ["Method", *(MEASURES[key] for key in measured), "Down", "Up", "Time", "Seeds"]
    return Section("Results", tables=[Table(header, rows, about=ABOUT, best=frozenset(best))])


def _accuracy(found: Comparison, draw: Drawing) -> Section | None:
    figures, seen, clients = [], set(), _pooled(found, "pm")
    for key, name in (("pm", "Personalised models"), ("gm", "Global model")):
        histories = {n: [run.history for run in runs] for n, runs in found.cells.items()}
        having = {n: some for n, some in histories.items() if any(plots.known(one, "round", key) for one in some)}
        if any(len(plots.known(one, "round", key)) > 1 for some in having.values() for one in some):
            about = "Mean over seeds, and a band from the lowest to the highest."
            figures.append(draw(f"{name} over the rounds", about, plots.convergence, having, key))
            seen |= set(having)
    if clients:
        name = "Personalised models against local data size"
        figures.append(draw(name, GROUPS, plots.by_size, clients, "pm", "test accuracy (%)"))
    methods = [name for name in found.cells if name in {*seen, *clients}]
    return Section("Accuracy", figures=figures, methods=methods) if figures else None


def _pooled(found: Comparison, key: str) -> dict[str, list[Row]]:
    """The clients of all seeds that have a value, by method."""
    rows = {name: [row for run in runs for row in run.clients] for name, runs in found.cells.items()}
    return {name: some for name in rows if (some := plots.known(rows[name], "n_train", key))}


def _gains(found: Comparison) -> dict[str, list[Row]]:
    """The clients with what each method is worth to them against Local with the same seed.

    ``small`` are those of the smallest tenth of their run, as in its summary.
    """
    alone = {
        (run.seed, row.get("client")): row.get("pm") for run in found.cells.get("local", ()) for row in run.clients
    }
    gains = {}
    for name, runs in found.cells.items():
        gains[name] = rows = list[Row]()
        for run in runs:
            named = plots.known(run.clients, "client")
            own = plots.known(
                [with_gain(row, alone.get((run.seed, row["client"]))) for row in named], "n_train", "gain"
            )
            few = max(1, round(SMALL * len(run.clients)))
            own.sort(key=lambda row: float(row["n_train"]))
            rows += [{**row, "small": place < few} for place, row in enumerate(own)]
    return {name: rows for name, rows in gains.items() if rows and name != "local"}


def _joining(found: Comparison, draw: Drawing) -> Section | None:
    gains = _gains(found)
    if not gains:
        unknown = "The method local is no part of this comparison, so what joining is worth is not known."
        return Section(JOINING, [f"{unknown} Add local to --methods."]) if "local" not in found.cells else None
    rows = []
    for name, clients in gains.items():
        values = [float(row["gain"]) for row in clients]
        means = [float(np.mean(values)), float(np.mean([row["gain"] for row in clients if row["small"]]))]
        sides = [f"{sum(side)} of {len(values)}" for side in ([v > 0 for v in values], [v < 0 for v in values])]
        rows.append([title(name), *sides, *map(signed, [*means, min(values), max(values)])])
    header = ["Method", "Gain", "Lose", "Mean gain", "Smallest 10%", "Worst", "Best"]
    about = "Each point is a client, against Local with the same seed; the bar is the mean."
    tall = max(3.1, 1.0 + 0.32 * len(gains))
    figures = [
        draw("Client by client", about, plots.gains_by_method, gains, tall=tall),
        draw("Against local data size", GROUPS, plots.by_size, gains, "gain", "gain by joining (points)"),
    ]
    table = Table(header, rows, about="Clients of all seeds; gains in points of accuracy.")
    absent = [
        title(name)
        for name, runs in found.cells.items()
        if name not in gains and any(run.finished and run.last("pm") is None for run in runs)
    ]
    text = [f"Not shown, since clients have no model of their own: {', '.join(absent)}."] if absent else []
    return Section(JOINING, text, figures, [table], list(gains))


def _calibration(found: Comparison, draw: Drawing) -> Section | None:
    figures, clients = [], _pooled(found, "pm_ece")
    for key, name in (("pm", "personalised models"), ("gm", "global model")):
        bins = {n: [run.calibration[key] for run in runs if key in run.calibration] for n, runs in found.cells.items()}
        lines = {title(n): (plots.pooled_bins(some), plots.colour(n)) for n, some in bins.items() if some}
        if lines:
            figures.append(draw(f"Reliability, {name}", RELIABILITY, plots.reliability, lines))
            figures.append(draw(f"Accuracy against declined cases, {name}", DECLINED, plots.declined, lines))
    if clients:
        label = "expected calibration error (%)"
        figures.append(draw("Calibration error", f"{GROUPS} Lower is better.", plots.by_size, clients, "pm_ece", label))
    return Section("Calibration", figures=figures, methods=list(clients)) if figures else None
