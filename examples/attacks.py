"""What hostile clients do to a federation, with and without the guard.

    python examples/attacks.py --dataset fmnist --data-root DIR --clients 50 --rounds 40 --train-samples 10000

Prints tables of Markdown: the mean accuracy of honest clients' models (PM) after the last round, and of the global
model (GM) over the last ten rounds, since who uploads in a single round changes it by points. Finished runs are kept
in --out, one JSON a line, so that it can be stopped and started again. Methods have the presets of `pfedvem run`.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from pfedvem import DataSettings, Guard, Progress, fit, load_federation
from pfedvem.attacks import ATTACKS, hostile, mislabelled
from pfedvem.errors import UserError
from pfedvem.experiments.config import load
from pfedvem.networks import build
from pfedvem.simulation.rounds import State
from pfedvem.simulation.work import Setup, score_general

METHODS = ("pfedvem", "fedavg")
GUARDS = {
    "none": Guard(bounds=False),
    "guard": Guard(),
    "clip": Guard(clip=2.0),
    "trimmed": Guard(merge="trimmed", trim=0.35),
    "median": Guard(merge="median"),
}
WORDS = {
    "sign": "sign flip",
    "scale": "update times 10",
    "labels": "labels flipped",
    "head": "constant head",
    "nan": "NaN",
    "inf": "Inf",
    "n": "huge n",
    "tau": "huge tau",
    "tau+sign": "huge tau, sign flip",
    "tau+head": "huge tau, constant head",
}
LAST = 10  # rounds that the accuracy of the global model is the mean of
Key = tuple[str, str, float, str, int]
Scores = tuple[float | None, float | None]


class General(Progress):
    """Tests the global model after each of the last rounds."""

    def __init__(self, setup: Setup, rounds: int) -> None:
        self.setup, self.rounds, self.accuracies = setup, rounds, list[float]()

    def round(self, state: State) -> None:
        if state.round > self.rounds - LAST:
            general = self.setup.algorithm.general(state.server)
            assert general is not None
            self.accuracies.append(100 * score_general(self.setup, general).accuracy)


def attacked(given: argparse.Namespace, method: str, attack: str, share: float, guard: str, seed: int) -> Scores:
    """PM of the honest clients, and GM, in percent; None where there is none, or where training ended in nothing."""
    settings = DataSettings(
        dataset=given.dataset, root=given.data_root, clients=given.clients, train_samples=given.train_samples
    )
    federation = load_federation(settings, seed)
    config = load(flags={"method": method, "data": {"dataset": given.dataset}})
    model = build(config.network, federation.shape, len(federation.classes), seed)
    everyone = np.random.default_rng(seed).permutation(given.clients)
    liars = {int(j) for j in everyone[: round(share * given.clients)]}
    algorithm = config.algorithm
    for part in attack.split("+"):
        if part in ATTACKS:
            algorithm = hostile(algorithm, part, liars)
        elif part == "labels":
            federation = mislabelled(federation, liars)
    tests = General(Setup(algorithm, model, federation, seed), given.rounds)
    try:
        result = fit(
            algorithm,
            model,
            federation,
            rounds=given.rounds,
            participation=given.participation,
            seed=seed,
            eval_every=0,
            guard=GUARDS[guard],
            workers=given.workers,
            progress=tests,
        )
    except UserError:  # nothing is left to merge
        return None, None
    honest = result.state.scores.accuracy[[j not in liars for j in range(given.clients)]]
    pm = float(honest.mean()) * 100 if algorithm.personalised else None
    return pm, fmean(tests.accuracies)


def table(found: dict[Key, Scores], method: str, share: float, guards: list[str], seeds: int) -> str:
    """The attacks against the guards, as PM / GM."""
    lines = [f"| {share:.0%} hostile | {' | '.join(guards)} |", "|---|" + "---:|" * len(guards)]
    for attack in WORDS if share else ["none"]:
        if not any(key[:3] == (method, attack, share) for key in found):
            continue
        cells = []
        for guard in guards:
            runs = [found[key] for seed in range(seeds) if (key := (method, attack, share, guard, seed)) in found]
            columns = zip(*runs, strict=True) if runs else ()
            means = ["-" if None in values else f"{fmean(values):.1f}" for values in columns]
            cells.append(" / ".join(means[-1:] if method == "fedavg" else means))
        lines.append(f"| {WORDS.get(attack, 'nobody')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--participation", type=float, default=0.2)
    parser.add_argument("--train-samples", type=int, help="use only so many training samples")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--attacks", nargs="+", default=list(WORDS), choices=list(WORDS))
    parser.add_argument("--guards", nargs="+", default=list(GUARDS), choices=list(GUARDS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.3], help="of hostile clients")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("attacks.jsonl"))
    given = parser.parse_args()
    found: dict[Key, Scores] = {}
    if given.out.exists():
        for line in given.out.read_text().splitlines():
            *key, pm, gm = json.loads(line)
            found[tuple(key)] = (pm, gm)
    wanted = [("none", 0.0), *product(given.attacks, given.shares)]
    for seed, (attack, share), method, guard in product(range(given.seeds), wanted, METHODS, given.guards):
        key = (method, attack, share, guard, seed)
        if key in found or (method == "fedavg" and "tau" in attack):  # which it does not have
            continue
        found[key] = attacked(given, *key)
        print(*key, *found[key], flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps([*key, *found[key]]) + "\n")
    for method, share in product(METHODS, (0.0, *given.shares)):
        print(f"\n{method}\n", table(found, method, share, given.guards, given.seeds), sep="\n")


if __name__ == "__main__":
    main()
