"""Which global model the paper's tables may show: rules, each against the paper's numbers.

    python results/reproduction/gm-every-round/rules.py

For Fashion-MNIST, every method with a global model and at least two finished seeds: what each rule makes of our runs
(mean ± standard error over seeds), and over all of these cells how far it is from the paper, on average and by the root
of the mean square, and how large its standard errors are beside the paper's. The average of the weights over about ten
rounds is known of newer runs only: its numbers are of those seeds that have it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from pfedvem.experiments.compare import measure
from pfedvem.experiments.studies import published

RUNS = Path(__file__).parent.parent / "runs"
RULES = {
    "last round": lambda run: run["gm_by_round"]["100"],
    "mean of the last ten": lambda run: fmean(run["gm_by_round"][str(number)] for number in range(91, 101)),
    "best of every fifth": lambda run: max(run["gm_by_round"][str(number)] for number in range(5, 101, 5)),
    "weights averaged": lambda run: run.get("gm_average"),
}

cells = defaultdict(list)
for file in sorted(RUNS.glob("fmnist-*.json")):
    _, clients, method, _ = file.stem.split("-")
    run = json.loads(file.read_text())
    if run["gm_by_round"]:
        cells[method, int(clients)].append(run)
cells = {cell: runs for cell, runs in sorted(cells.items()) if len(runs) > 1}

print(f"| | seeds | {' | '.join(RULES)} | the paper |")
print(f"|---|---:|{'---:|' * (len(RULES) + 1)}")
misses, errors = defaultdict(list), defaultdict(list)
for (method, clients), runs in cells.items():
    paper = published("table1", "fmnist", method, str(clients), "gm")
    shown = []
    for name, rule in RULES.items():
        found = [value for value in map(rule, runs) if value is not None]
        if len(found) < 2:
            shown.append("")
            continue
        ours = measure(found)
        misses[name].append(ours.mean - paper.mean)
        errors[name].append(ours.sem)
        shown.append(f"{ours.mean:.1f} ± {ours.sem:.1f}")
    errors["the paper"].append(paper.sem)
    print(f"| {method}, {clients} | {len(runs)} | {' | '.join(shown)} | {paper.mean} ± {paper.sem} |")
for name in misses:
    root = math.sqrt(fmean(miss * miss for miss in misses[name]))
    print(f"{name}: {fmean(misses[name]):+.2f} on average, {root:.2f} by the root of the mean square", end="")
    print(f" ({len(misses[name])} cells)")
print("mean standard errors:", ", ".join(f"{name} {fmean(found):.2f}" for name, found in errors.items()))
