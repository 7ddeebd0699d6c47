"""What a run leaves: numbers for people and programs, and the folder of files."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from pfedvem import tree
from pfedvem.simulation import checkpoints
from pfedvem.simulation.rounds import State, mean, number
from pfedvem.simulation.work import Scores, Setup

SMALL = 0.1  # the share of clients that counts as small, as in the paper


@dataclass(frozen=True)
class Result:
    """A finished run. ``alone`` are the scores of clients that train without the federation, if asked for."""

    setup: Setup
    state: State
    alone: Scores | None
    out: Path | None

    @property
    def history(self) -> list[dict[str, float | None]]:
        """A record for each evaluated round: round, pm, gm, their losses and calibration errors, seconds."""
        return list(self.state.history)

    @property
    def summary(self) -> dict[str, Any]:
        """The run in one line; accuracies in percent, null where the method has no such model."""
        pm, last = self.state.scores.accuracy, self.state.history[-1]
        return {
            "method": self.setup.algorithm.name,
            "dataset": self.setup.federation.name,
            "clients": len(self.setup.federation),
            "rounds": self.state.round,
            "seed": self.setup.seed,
            "pm": last["pm"],
            "pm_sem": number(100 * spread(pm) / math.sqrt(max(1, int((~pm.isnan()).sum())))),
            "gm": last["gm"],
            "small_clients_pm": number(100 * mean(pm[self.small_clients])),
            "alone_pm": number(100 * mean(self.alone.accuracy)) if self.alone is not None else None,
            "seconds": round(self.state.seconds, 3),
        }

    @property
    def small_clients(self) -> list[int]:
        """The tenth of the clients with the least data, at least one."""
        sizes = self.setup.federation.sizes
        by_size = sorted(range(len(sizes)), key=lambda j: (sizes[j], j))
        return by_size[: max(1, round(SMALL * len(sizes)))]

    @property
    def clients(self) -> list[dict[str, Any]]:
        """A row for each client: its data, its scores, and what the method has to say of it."""
        seen = {name: values for name, values in self._inspected().items() if values.ndim == 1}
        scores = self.state.scores
        rows = []
        for j, shard in enumerate(self.setup.federation.shards):
            row = {
                "client": shard.id,
                "n_train": shard.n,
                "labels": "; ".join(shard.owns),
                "pm": number(100 * float(scores.accuracy[j])),
                "pm_nll": number(float(scores.nll[j])),
                "pm_ece": number(100 * float(scores.ece[j])),
                **{name: float(values[j]) for name, values in seen.items()},
            }
            if self.alone is not None:
                row["alone"] = number(100 * float(self.alone.accuracy[j]))
            rows.append(row)
        return rows

    @property
    def warnings(self) -> list[str]:
        """What a user should know about the training."""
        discarded = self._inspected().get("discarded")
        if discarded is None or not bool(discarded.any()):
            return []
        count, total = int((discarded > 0).sum()), int(discarded.sum())
        return [
            f"{count} clients overflowed in training ({total} times) and kept what they had; try a smaller lr_head."
        ]

    def write(self, out: Path) -> None:
        """Writes metrics.jsonl, clients.csv, summary.json and model/ into a folder."""
        write_metrics(out, self.state)
        table = io.StringIO()
        rows = self.clients
        writer = csv.DictWriter(table, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        checkpoints.replace(out / "clients.csv", table.getvalue().encode())
        self._write_model(out / "model")
        # The summary comes last: where it is, everything is.
        checkpoints.replace(out / "summary.json", (json.dumps(self.summary, indent=2) + "\n").encode())

    def _inspected(self) -> dict[str, Tensor]:
        algorithm = self.setup.algorithm
        return algorithm.inspect(algorithm.down(self.state.server), self.state.clients)

    def _write_model(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        federation, model = self.setup.federation, self.setup.model
        card = {
            "method": self.setup.algorithm.name,
            "classes": federation.classes,
            "clients": [shard.id for shard in federation.shards],
            "input_shape": federation.shape,
            "mean": federation.mean,
            "std": federation.std,
            "features": model.features_dim,
        }
        checkpoints.replace(folder / "model.json", (json.dumps(card, indent=1) + "\n").encode())
        for name, tensors in (("server", tree.named(self.state.server)), ("clients", self._inspected())):
            content = safetensors.torch.save({key: value.contiguous() for key, value in tensors.items()})
            checkpoints.replace(folder / f"{name}.safetensors", content)


def write_metrics(out: Path, state: State) -> None:
    """metrics.jsonl: the history so far, a line for each evaluated round."""
    lines = "".join(json.dumps(line) + "\n" for line in state.history)
    checkpoints.replace(out / "metrics.jsonl", lines.encode())


def spread(values: Tensor) -> float:
    """The standard deviation over the clients that have a value; 0 for a single one."""
    known = values[~values.isnan()].double()
    return float(known.std()) if len(known) > 1 else 0.0
