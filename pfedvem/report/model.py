"""Predictions on the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from pfedvem.uncertainty import Calibration, Prediction


def prediction_view(made: Prediction, judged: Calibration | None) -> Table:
    """How many samples of each class, how sure, and, where there are labels, how right."""
    table = Table(title=f"{len(made.label)} samples", title_justify="left", header_style="bold")
    table.add_column("predicted")
    for name in ("samples", "mean probability", "mean entropy"):
        table.add_column(name, justify="right")
    sure = made.probabilities.max(1).values
    for number, name in enumerate(made.classes):
        chosen = made.label == number
        if bool(chosen.any()):
            means = (f"{float(values[chosen].mean()):.3f}" for values in (sure, made.entropy))
            table.add_row(escape(name), str(int(chosen.sum())), *means)
    if judged is not None:
        table.caption_justify = "left"
        table.caption = (
            f"accuracy {100 * judged.accuracy:.1f}%, NLL {judged.nll:.3f}, Brier {judged.brier:.3f}, "
            f"ECE {100 * judged.ece:.1f}%"
        )
    return table
