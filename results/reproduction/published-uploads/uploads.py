"""The global model of a method when those upload who do in the published code.

    python uploads.py DATA_ROOT DATASET CLIENTS METHOD SEEDS    runs 100 rounds for each seed and writes a file for each
    python uploads.py                                           shows all files beside this one

The published code draws who uploads from a generator of its own, whose seed is 1234 in every run, and tests in rounds
1, 6, ..., 96 and 100. A file has a line for each round: its number and the accuracy of the global model.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from pfedvem.data.loading import load_federation
from pfedvem.experiments.course import Probe
from pfedvem.experiments.run import train
from pfedvem.experiments.studies import grid, study
from pfedvem.simulation import rounds
from pfedvem.simulation.rounds import Progress, State

HERE = Path(__file__).parent
ROUNDS = 100
TESTED = [*range(1, ROUNDS, 5), ROUNDS]


def published(clients: int) -> list[list[int]]:
    """Who uploads in each round of the published code."""
    rng, found = np.random.default_rng(1234), []
    while len(found) < ROUNDS:
        chosen = np.flatnonzero(rng.uniform(size=clients) < 0.1)
        if len(chosen) > 1:
            found.append(chosen.tolist())
    return found


class Course(Progress):
    """Writes the accuracy of the global model after every round."""

    def __init__(self, probe: Probe, file: Path) -> None:
        self._probe, self._file = probe, file
        file.write_text("")

    def round(self, state: State) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps([state.round, self._probe.global_model(state)]) + "\n")


def run(root: str, dataset: str, clients: int, method: str, seeds: int) -> None:
    """Runs a method with the uploads of the published code."""
    stream = published(clients)
    rounds.uploaders = lambda seed, number, total, participation: stream[number]  # no setting has this
    chosen = study("table1", [dataset], [method], [clients])
    (cell,) = grid(chosen, seeds=seeds, flags={"rounds": ROUNDS, "data": {"root": root}})
    for name, config in zip(cell.names, cell.configs, strict=True):
        federation = load_federation(config.data, config.seed)
        train(config, federation=federation, progress=Course(Probe(config, federation), HERE / f"{name}.jsonl"))


def show() -> None:
    """Round by round as the published code tests, over the seeds; the last round, and that with the best mean."""
    cells = defaultdict(list)
    for file in sorted(HERE.glob("*.jsonl")):
        course = dict(map(json.loads, file.read_text().splitlines()))
        cells[file.stem.rsplit("-", 1)[0]].append([course[number] for number in TESTED])
    print("| run | seeds | last round | uploads in it | best tested round | uploads in it | number of the round |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, found in cells.items():
        values, stream = np.array(found), published(int(name.split("-")[1]))
        best = int(values.mean(0).argmax())
        columns = [name, str(len(values))]
        for at in (-1, best):
            spread = f" ± {values[:, at].std(ddof=1) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
            columns += [f"{values[:, at].mean():.1f}{spread}", str(len(stream[TESTED[at] - 1]))]
        print(f"| {' | '.join(columns)} | {TESTED[best]} |")


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        show()
