"""What Local has where each client chooses its learning rate and batch size by its test data.

    python choices.py DATA_ROOT DATASET CLIENTS SAMPLES SEED    writes a file beside this one; 0 samples: all there are
    python choices.py                                           the table

A file has, for each of the paper's learning rates and batch sizes, every client's accuracy after training with it.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from statistics import fmean

from pfedvem.data.loading import load_federation
from pfedvem.experiments.run import train
from pfedvem.experiments.studies import grid, published, study

HERE = Path(__file__).parent
RATES, SIZES = (1e-3, 1e-4), (10, 50, 100)


def run(root: str, dataset: str, clients: int, samples: int, seed: int) -> None:
    """Trains all clients with each choice."""
    data = {"root": root, **({"train_samples": samples} if samples else {})}
    found, federation = {}, None
    for lr, size in itertools.product(RATES, SIZES):
        own = [f"local.lr={lr}", f"local.batch_size={size}"]
        flags = {"data": data, "seed": seed, "executor": "vectorised"}
        (cell,) = grid(study("table1", [dataset], ["local"], [clients]), seeds=1, flags=flags, assignments=own)
        (config,) = cell.configs
        federation = federation or load_federation(config.data, seed)
        result = train(config, federation=federation)
        found[f"{lr:g}, {size}"] = [round(100 * value, 4) for value in result.state.scores.accuracy.tolist()]
    (HERE / f"{dataset}-{clients}-{samples}-{seed}.json").write_text(json.dumps(found, indent=1) + "\n")


def show() -> None:
    """Means over the clients: each by its own best choice, and all by one."""
    print("| run | chosen by validation data | by test data | one choice for all, the best | the paper |")
    print("|---|---:|---:|---:|---:|")
    for file in sorted(HERE.glob("*.json")):
        dataset, clients, samples, seed = file.stem.split("-")
        choices = json.loads(file.read_text())
        best = fmean(map(max, zip(*choices.values(), strict=True)))
        name, common = max(choices.items(), key=lambda pair: fmean(pair[1]))
        part = "" if samples == "0" else f"-{samples}"
        ours = json.loads((HERE.parent / "runs" / f"{dataset}-{clients}{part}-local-{seed}.json").read_text())
        table, column = ("limited-data", samples) if part else ("table1", clients)
        paper = published(table, dataset, "local", column, "pm")
        assert paper is not None
        columns = [f"{dataset}, {clients} clients{f', {samples} samples' if part else ''}, seed {seed}"]
        columns += [f"{ours['summary']['pm']:.1f}", f"{best:.1f}", f"{fmean(common):.1f} ({name})"]
        print(f"| {' | '.join([*columns, f'{paper.mean:.1f} ± {paper.sem:.1f}'])} |")


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
    else:
        show()
