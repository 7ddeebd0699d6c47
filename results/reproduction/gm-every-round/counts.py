"""How the accuracy of a round's global model goes with the number of those who uploaded in it.

    python results/reproduction/gm-every-round/counts.py

For each method, data set and number of clients of the finished runs: the number of uploads in the last round of each
seed, and the accuracy in the tested rounds after the 60th, apart for rounds with fewer uploads than expected (a tenth
of the clients) and with at least so many: mean ± standard deviation over rounds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, pstdev

from pfedvem.rng import uploaders

RUNS = Path(__file__).parent.parent / "runs"
AFTER, SHARE = 60, 0.1


def shown(values: list[float]) -> str:
    return f"{fmean(values):.1f} ± {pstdev(values):.1f} ({len(values)})"


cells = defaultdict(list)
for file in sorted(RUNS.glob("*.json")):
    cell, _, seed = file.stem.rpartition("-")
    course = json.loads(file.read_text())["gm_by_round"]
    if course and cell.count("-") == 2:  # not the runs with limited data
        cells[cell].append((int(seed), course))
print("| run | uploads in the last round | last round | fewer than expected | at least as expected |")
print("|---|---|---:|---:|---:|")
for cell, runs in cells.items():
    clients = int(cell.split("-")[1])
    few, many, last = list[float](), list[float](), list[tuple[int, float]]()
    for seed, course in runs:
        for number, accuracy in sorted((int(key), value) for key, value in course.items()):
            uploads = len(uploaders(seed, number - 1, clients, SHARE))
            if number > AFTER:
                (many if uploads >= SHARE * clients else few).append(accuracy)
        last.append((uploads, accuracy))
    counts = ", ".join(str(uploads) for uploads, _ in last)
    print(f"| {cell} | {counts} | {fmean(value for _, value in last):.1f} | {shown(few)} | {shown(many)} |")
