"""How the accuracy of a round's global model goes with the labels of those who uploaded in it.

    python results/reproduction/gm-every-round/labels.py DATA_ROOT

For each file beside this one: its rounds after the 60th in four equal groups, by how far the labels of the round's
uploads are from those of all data (their Kullback-Leibler divergence), and the accuracy in each group.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from pfedvem.data.loading import load_federation
from pfedvem.experiments.config import load
from pfedvem.rng import uploaders

HERE = Path(__file__).parent


def points(file: Path, root: str) -> list[tuple[float, float]]:
    """Divergence and accuracy of each round."""
    dataset, clients, _, seed = file.stem.split("-")
    data = load(None, {"data": {"dataset": dataset, "clients": int(clients), "root": root}}, []).data
    federation = load_federation(data, int(seed))
    labels = np.asarray(federation.train.y)
    counts = np.stack([np.bincount(labels[shard.train], minlength=10) for shard in federation.shards])
    whole = counts.sum(0) / counts.sum()
    out = []
    for line in file.read_text().splitlines():
        number, accuracy, _ = json.loads(line)
        if number > 60:
            uploaded = counts[uploaders(int(seed), number - 1, int(clients), 0.1)].sum(0)
            share = uploaded[uploaded > 0] / uploaded.sum()
            out.append((float((share * np.log(share / whole[uploaded > 0])).sum()), accuracy))
    return out


cells = defaultdict(list)
for one in sorted(HERE.glob("*.jsonl")):
    cells[one.stem.rsplit("-", 1)[0]] += points(one, sys.argv[1])
print("| run | rounds | correlation | nearest quarter | second | third | farthest quarter |")
print("|---|---:|---:|---:|---:|---:|---:|")
for name, found in cells.items():
    ordered = np.array(sorted(found))
    groups = [f"{part[:, 1].mean():.1f} ± {part[:, 1].std(ddof=1):.1f}" for part in np.array_split(ordered, 4)]
    print(f"| {name} | {len(found)} | {np.corrcoef(ordered.T)[0, 1]:.2f} | {' | '.join(groups)} |")
