"""What is left of the spread between seeds when all have the same clients, and the same ones upload.

    python clients.py DATA_ROOT CLIENTS METHOD    five runs on Fashion-MNIST, a file for each beside this one
    python clients.py                             the table, beside that of runs whose seeds draw the clients too

Clients and uploads are those of seed 0; the seed still draws initial weights, batches and noise. A file has the
personalised models' accuracy and, by round from 61 on, that of the global model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

from pfedvem.data.loading import load_federation
from pfedvem.experiments.course import Probe
from pfedvem.experiments.run import train
from pfedvem.experiments.studies import grid, published, study
from pfedvem.simulation import rounds
from pfedvem.simulation.rounds import Progress, State

HERE = Path(__file__).parent
SEEDS, TESTED = 5, range(61, 101)


class Course(Progress):
    """Tests the global model in the last rounds."""

    def __init__(self, probe: Probe) -> None:
        self._probe, self.gm = probe, dict[int, float]()

    def round(self, state: State) -> None:
        accuracy = self._probe.global_model(state) if state.round in TESTED else None
        if accuracy is not None:
            self.gm[state.round] = accuracy


def run(root: str, clients: int, method: str) -> None:
    """Runs a method in five seeds on one draw of the clients and their uploads."""
    drawn = rounds.uploaders
    rounds.uploaders = lambda seed, *others: drawn(0, *others)  # no setting has this
    (cell,) = grid(study("table1", ["fmnist"], [method], [clients]), seeds=SEEDS, flags={"data": {"root": root}})
    federation = load_federation(cell.configs[0].data, 0)
    for name, config in zip(cell.names, cell.configs, strict=True):
        course = Course(Probe(config, federation))
        result = train(config, federation=federation, progress=course)
        (HERE / f"{name}.json").write_text(json.dumps({"pm": result.summary["pm"], "gm": course.gm}) + "\n")


def show() -> None:
    """Standard deviations over the seeds, with the same clients and with clients of their own, and the paper's."""
    print("| method | number | seeds draw their clients | the same clients and uploads | the paper |")
    print("|---|---|---:|---:|---:|")
    for name in sorted({file.stem.rsplit("-", 1)[0] for file in HERE.glob("*.json")}):
        _, clients, method = name.split("-")
        same = [json.loads((HERE / f"{name}-{seed}.json").read_text()) for seed in range(SEEDS)]
        runs = [json.loads((HERE.parent / "runs" / f"{name}-{seed}.json").read_text()) for seed in range(SEEDS)]
        for kind in ("pm", "gm"):
            paper = published("table1", "fmnist", method, clients, kind)
            if paper is None or paper.sem is None:
                continue
            own = stdev(found["summary"][kind] for found in runs)
            one = stdev(found["pm"] for found in same) if kind == "pm" else stdev(found["gm"]["100"] for found in same)
            print(f"| {method}, {clients} clients | {kind} | {own:.2f} | {one:.2f} | {paper.sem * SEEDS**0.5:.2f} |")
        if same[0]["gm"]:
            over = fmean(stdev(found["gm"][str(number)] for found in same) for number in TESTED)
            print(f"| | gm, mean of rounds {TESTED[0]} to {TESTED[-1]} | | {over:.2f} | |")


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        show()
