"""Which clients need what: confidences, who deviates, who gains, and what looks wrong; as a table and a picture.

The confidence of pFedVEM is tau_j = 1 / (uncertainty + deviation), both per weight of the head. By the paper:

- uncertainty Tr(Sigma_j)/d falls with what a client's data tell. Copies and near-copies tell less than new samples, so
  a client with many of them is as uncertain as others that have fewer samples.
- deviation |mu_j - w|^2/d is large where a client's data differ from the bulk: it is weighed less and held less to w.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pfedvem.algorithms import METHODS
from pfedvem.errors import UserError
from pfedvem.report.data import save_picture
from pfedvem.report.plots import ALONE, GM, PM, plain_ticks
from pfedvem.report.run import shown
from pfedvem.saved import model_folder, read_card

if TYPE_CHECKING:
    import pandas as pd

Values = NDArray[np.float64]

FAR = 3.5  # robust standard deviations from the median that make an outlier (Iglewicz and Hoaglin's)
TIMES = 2.0  # and it must be so many times as usual: where all are alike, nobody is remarkable
FEWEST = 5  # clients that it takes to say what is usual
COPIES = 0.05  # a share of copies that is worth a word
SHOWN = 20
NUMBERS = ("n_train", "copies", "pm", "alone", "gain", "tau", "uncertainty", "deviation")


@dataclass(frozen=True)
class Inspection:
    """A row for each client, by its id, and what is remarkable in it, in words."""

    method: str
    table: pd.DataFrame
    remarks: dict[str, list[str]]


def inspection(folder: Path) -> Inspection:
    """Reads the clients of a run and looks for what is remarkable."""
    import pandas as pd

    place = model_folder(folder)
    card = read_card(place)
    path = place.parent / "clients.csv"
    if not path.is_file():
        raise UserError(f"There is no clients.csv beside {place}; give the folder of a run, or of Result.save.")
    try:
        table = pd.read_csv(path, dtype={"client": str}, keep_default_na=False).set_index("client")
        told = {*NUMBERS, "discarded"} & set(table.columns)
        table = table.assign(**{name: pd.to_numeric(table[name].replace("", math.nan)) for name in told})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); `pfedvem run --resume` writes it again.") from error
    if len(set(table.index)) < len(table) or not {"n_train", "pm"} <= told:
        raise UserError(f"{path} is no table of clients; `pfedvem run --resume` writes it again.")
    table["gain"] = table["pm"] - table["alone"] if "alone" in table.columns else math.nan
    for name in NUMBERS:
        if name not in table.columns:
            table[name] = math.nan
    title = METHODS[card["method"]].title if card["method"] in METHODS else card["method"]
    return Inspection(title, table, _remarks(table))


def _remarks(table: pd.DataFrame) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {str(client): [] for client in table.index}
    deviation, uncertainty = (table[name].to_numpy(dtype=np.float64) for name in ("deviation", "uncertainty"))
    sizes = table["n_train"].to_numpy(dtype=np.float64)
    times = outliers(deviation)
    # What deviates is held less to w and so is uncertain for another reason.
    alike = telling(np.where(times > 0, math.nan, uncertainty), sizes)
    for j, client in enumerate(found):
        row, said = table.iloc[j], found[client]
        if times[j] > 0:
            said.append(f"deviates {times[j]:.1f} times as much as usual: data unlike the others'?")
        if alike[j] > 0:
            said.append(f"as uncertain as others with {alike[j]:.0f} samples: near-copies?")
        if row["copies"] >= COPIES:
            said.append(f"{100 * row['copies']:.0f}% of its samples are copies of others")
        if row.get("discarded", 0) > 0:
            said.append(f"training overflowed {row['discarded']:.0f} times")
        if row["gain"] < 0:
            said.append(f"{-row['gain']:.1f} points better alone")
    return found


def outliers(values: Values) -> Values:
    """How many times the median a value is where that is remarkably much; 0 elsewhere, and where there is no value."""
    out = np.zeros(len(values))
    if _known(values):
        excess = np.log(values) - np.nanmedian(np.log(values))
        far = _far(excess) & (excess > math.log(TIMES))
        out[far] = np.exp(excess[far])
    return out


def telling(uncertainty: Values, sizes: Values) -> Values:
    """How many samples others have with a client's uncertainty, where it has remarkably more of them; 0 elsewhere.

    What is usual is a line through the logarithms of uncertainty and size, by the median slope.
    """
    out = np.zeros(len(sizes))
    if not _known(uncertainty):
        return out
    x, y = np.log(sizes), np.log(uncertainty)
    some = np.flatnonzero(np.isfinite(y))[:: max(1, len(y) // 500)]
    dx, dy = (values[some, None] - values[None, some] for values in (x, y))
    slope = float(np.median(dy[dx > 0] / dx[dx > 0])) if (dx > 0).any() else 0.0
    if slope >= 0:  # where more data do not make surer, nothing can be told
        return out
    excess = y - slope * x
    excess -= np.nanmedian(excess)
    alike = sizes * np.exp(np.nan_to_num(excess) / slope)
    far = _far(excess) & (alike < sizes / TIMES)
    out[far] = np.maximum(alike[far], 1)
    return out


def _far(excess: Values) -> NDArray[np.bool_]:
    """Which values lie remarkably far above zero, their median."""
    spread = 1.4826 * np.nanmedian(np.abs(excess))
    far: NDArray[np.bool_] = excess > FAR * spread
    return far


def _known(values: Values) -> bool:
    return int(np.isfinite(values).sum()) >= FEWEST and bool((values[np.isfinite(values)] > 0).all())


def rows(found: Inspection) -> list[dict[str, Any]]:
    """A record for each client, for programs; null where there is no number."""
    numbers = found.table[list(NUMBERS)]
    records: list[dict[str, Any]] = json.loads(numbers.to_json(orient="records", double_precision=10))
    return [
        {"client": client, **record, "remarks": found.remarks[client]}
        for client, record in zip(found.remarks, records, strict=True)
    ]


def inspection_view(found: Inspection, every: bool = False) -> RenderableType:
    """The table on the terminal: clients with remarks first, then the least confident."""
    table, remarks = found.table, found.remarks
    rank = table["tau"].rank(method="first").fillna(0)
    order = sorted(remarks, key=lambda client: (not remarks[client], rank[client]))
    view = Table(title=f"{escape(found.method)}: {len(table)} clients", title_justify="left", header_style="bold")
    view.add_column("client")
    for name in ("samples", "tau", "uncertainty", "deviation", "PM (%)", "gain"):
        view.add_column(name, justify="right")
    view.add_column("remarks")
    for client in order if every else order[:SHOWN]:
        row = table.loc[client]
        small = (_number(row[name]) for name in ("tau", "uncertainty", "deviation"))
        scores = (shown(None if math.isnan(row[name]) else row[name]) for name in ("pm", "gain"))
        view.add_row(
            escape(client), f"{row['n_train']:.0f}", *small, *scores, escape("\n".join(remarks[client])) or "-"
        )
    parts: list[RenderableType] = [view]
    if not every and len(order) > SHOWN:
        parts.append(f"{len(order) - SHOWN} more with --all.")
    gains = table["gain"].dropna()
    if len(gains):
        parts.append(f"{int((gains > 0).sum())} of {len(gains)} clients gain by joining.")
    if table["tau"].notna().any():
        parts.append("tau = 1 / (uncertainty + deviation): how much a client weighs, and how near it is held to w.")
    return Group(*parts)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def draw(found: Inspection, path: Path) -> None:
    """Uncertainty against deviation, with lines of equal confidence, and what each client gains; as a PNG or PDF."""
    table = found.table
    panels = [_confidences] if table["tau"].notna().any() else []
    panels += [_gains] if table["gain"].notna().any() else []
    if not panels:
        raise UserError("There is nothing to draw: the clients have neither confidences nor results alone.")
    figure = Figure(figsize=(4.8 * len(panels), 3.8), layout="constrained")
    for panel, axis in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axis, found)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{found.method}: {len(table)} clients", fontsize=11)
    save_picture(figure, path)


def _confidences(axis: Axes, found: Inspection) -> None:
    table = found.table.dropna(subset=["uncertainty", "deviation"])
    x, y = table["deviation"], table["uncertainty"]
    axis.set_xscale("log")
    axis.set_yscale("log")
    plain_ticks(axis.xaxis)
    plain_ticks(axis.yaxis)
    odd = np.array(
        [
            any(said.startswith(("deviates", "as uncertain")) for said in found.remarks[str(client)])
            for client in table.index
        ]
    )
    axis.scatter(x[~odd], y[~odd], s=16, color=PM, label="clients", zorder=3)
    if odd.any():
        axis.scatter(x[odd], y[odd], s=22, color=GM, marker="D", label="remarkable", zorder=4)
        for client in table.index[odd][:8]:
            axis.annotate(str(client), (x[client], y[client]), (4, 3), textcoords="offset points", fontsize=8)
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    across = np.geomspace(left, right, 200)
    for tau in np.geomspace(1 / (left + low), 1 / (right + high), 7)[1:-1]:
        line = 1 / tau - across
        seen = (line > low) & (line < high)
        if seen.any():
            axis.plot(across[seen], line[seen], color=ALONE, linewidth=0.8, zorder=1)
            at = int(np.flatnonzero(seen)[0])
            axis.annotate(f"tau {tau:.2g}", (across[at], line[at]), (2, 2), textcoords="offset points", fontsize=7,
                          color="#5d6873")  # fmt: skip
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)
    axis.set_xlabel("deviation |mu - w|² / d")
    axis.set_ylabel("uncertainty Tr(Sigma) / d")


def _gains(axis: Axes, found: Inspection) -> None:
    table = found.table.dropna(subset=["gain"])
    better = table["gain"] >= 0
    axis.axhline(0, color=ALONE, linewidth=1)
    for chosen, colour, name in ((better, PM, "better together"), (~better, GM, "better alone")):
        axis.scatter(table["n_train"][chosen], table["gain"][chosen], s=16, color=colour, label=name, zorder=3)
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.set_xlabel("a client's training samples")
    axis.set_ylabel("accuracy gained by joining (points)")
