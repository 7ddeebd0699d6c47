"""The global model of a method when those upload who do in the published code.

    python uploads.py DATA_ROOT DATASET CLIENTS METHOD SEEDS [CLIENTS_SEED]    runs 100 rounds for each seed
    python uploads.py                                                          shows all finished ones

The published code draws who uploads from a generator of its own, whose seed is 1234 in every run, and tests in rounds
1, 6, ..., 96 and 100. It draws the clients' labels and sizes by numpy's generator of the run's seed, which is 42 in its
configurations: with CLIENTS_SEED, clients are those that it draws by this seed, in every run. A file has a line for
each round: its number and the accuracy of the global model.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfedvem.data import loading
from pfedvem.data.settings import DataSettings
from pfedvem.data.sources import Source
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


def published_clients(seed: int) -> Callable[..., tuple[list[list[int]], list[np.ndarray]]]:
    """Deals labels and cuts them as the published code does by this seed."""

    def deal(source: Source, types: object, settings: DataSettings, rng: object) -> tuple[list[list[int]], list]:
        labels, hands = source.train.y, []
        kinds, each = len(source.classes), settings.labels_per_client
        draw = np.random.default_rng(seed)
        for _ in range(settings.clients * each // kinds):
            order = np.arange(kinds)
            draw.shuffle(order)
            hands += np.split(order, kinds // each)
        draw, samples = np.random.default_rng(seed), []
        for kind in range(kinds):
            samples.append(np.flatnonzero(labels == kind))
            draw.shuffle(samples[-1])
        owners = settings.clients * each // kinds
        cuts = np.sort(draw.choice(np.arange(1, len(samples[0])), owners - 1, replace=False))
        blocks = [np.split(own, cuts) for own in samples]
        parts = [np.sort(np.concatenate([blocks[kind].pop() for kind in hand])) for hand in hands]
        return [sorted(map(int, hand)) for hand in hands], parts

    return deal


class Course(Progress):
    """Writes the accuracy of the global model after every round."""

    def __init__(self, probe: Probe, file: Path) -> None:
        self._probe, self._file = probe, file
        file.write_text("")

    def round(self, state: State) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps([state.round, self._probe.global_model(state)]) + "\n")


def run(root: str, dataset: str, clients: int, method: str, seeds: int, clients_seed: int | None = None) -> None:
    """Runs a method with the uploads of the published code, and with its clients where their seed is given."""
    stream = published(clients)
    if clients_seed is not None:
        loading._deal = published_clients(clients_seed)
    rounds.uploaders = lambda seed, number, total, participation: stream[number]  # no setting has this
    chosen = study("table1", [dataset], [method], [clients])
    (cell,) = grid(chosen, seeds=seeds, flags={"rounds": ROUNDS, "data": {"root": root}})
    for name, config in zip(cell.names, cell.configs, strict=True):
        federation = loading.load_federation(config.data, config.seed)
        if clients_seed is not None:
            cell_name, _, seed = name.rpartition("-")
            name = f"{cell_name}_{clients_seed}-{seed}"
        train(config, federation=federation, progress=Course(Probe(config, federation), HERE / f"{name}.jsonl"))


def show() -> None:
    """Round by round as the published code tests, over the seeds; the last round, and that with the best mean."""
    cells = defaultdict(list)
    for file in sorted(HERE.glob("*.jsonl")):
        course = dict(map(json.loads, file.read_text().splitlines()))
        if ROUNDS in course:  # else the run is not finished
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
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
    else:
        show()
