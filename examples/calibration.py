"""Are the probabilities right? Scores of four methods and of clients that come later.

    python examples/calibration.py --dataset fmnist --data-root DIR --clients 20 --rounds 25 --train-samples 6000

Prints two tables of Markdown. Every model is judged on the test data of the labels that its client owns; numbers are
means over clients, then over seeds. Methods have the presets of `pfedvem run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from pfedvem import DataSettings, Federation, Local, Result, fit, load_federation, tree
from pfedvem.data.federation import Split
from pfedvem.experiments.config import load
from pfedvem.models import Params, Posterior
from pfedvem.networks import build
from pfedvem.uncertainty import calibration, predictor

METHODS = ("pfedvem", "pfedbayes", "fedper", "fedavg")
COLUMNS = ("accuracy", "nll", "brier", "ece", "declined")
FEW = 20  # samples of a client that comes later
Scores = dict[str, float]


def scores(result: Result, models: Iterable[tuple[int, Posterior]], federation: Federation, samples: int) -> Scores:
    """The mean scores of these models, each on the test data of its client."""
    rows = []
    for j, posterior in models:
        x, y = federation.test_samples(federation.test_indices(j))
        seen = replace(federation.raw, images=False, mean=(0.0,), std=(1.0,))
        made = predictor(result.setup.model, posterior, seen, result.setup.seed, samples).predict(x, federation.classes)
        found = calibration(made.probabilities, y, made.entropy)
        kept = found.declined.set_index("declined")["accuracy"][0.2]
        rows.append((100 * found.accuracy, found.nll, found.brier, 100 * found.ece, 100 * kept))
    return dict(zip(COLUMNS, map(fmean, zip(*rows, strict=True)), strict=True))


def everyone(federation: Federation, params: Params) -> list[tuple[int, Posterior]]:
    """One model for all clients."""
    return [(j, Posterior(params, {})) for j in range(len(federation))]


def judged(result: Result) -> dict[str, Scores]:
    """The ways to predict after a run of one method."""
    federation, algorithm = result.setup.federation, result.setup.algorithm
    out = {}
    if algorithm.personalised:
        home = [(federation.place(one.client), one.posterior) for one in result.take_home(range(len(federation)))]
        out["by its mean"] = scores(result, home, federation, 0)
        if home[0][1].sd:
            whole = set(home[0][1].sd) != {"w"}  # a draw is a whole network, which takes its time
            out["averaged over the posterior"] = scores(result, home, federation, 10 if whole else 100)
    if algorithm.name == "pfedvem":
        heads = [
            (j, Posterior(Params(result.state.server.theta, mu), {})) for j, mu in enumerate(result.state.clients.q.mu)
        ]
        out["kept head on the merged base"] = scores(result, heads, federation, 0)
    general = algorithm.general(result.state.server) if algorithm.global_model else None
    if general is not None:
        out["global model"] = scores(result, everyone(federation, general), federation, 0)
    return out


def newcomers(federation: Federation, count: int, seed: int) -> tuple[Federation, Federation]:
    """The federation without its last clients, and these alone with a few samples each."""
    rng = np.random.default_rng(seed)
    few = [replace(shard, train=rng.permutation(shard.train)[:FEW]) for shard in federation.shards[-count:]]
    return replace(federation, shards=federation.shards[:-count]), replace(federation, shards=tuple(few))


def late(result: Result, new: Federation, seed: int) -> dict[str, Scores]:
    """Clients that come later: fitted from the federation, trained alone, and with the global model."""
    trained, fitted = result.trained, []
    for j, shard in enumerate(new.shards):
        data = Split(new.train.x[shard.train], new.train.y[shard.train])
        fitted.append((j, trained.personalize((data.x, data.y), f"new {j}").posterior))
    lone = fit(Local(lr=(1e-2, 1e-3)), result.setup.model, new, rounds=1, seed=seed)
    alone = [
        (j, Posterior(tree.map(lambda leaf, j=j: leaf[j], lone.state.clients.params), {})) for j in range(len(new))
    ]
    return {
        "personalize, averaged over the posterior": scores(result, fitted, new, 100),
        "personalize, by its mean": scores(result, fitted, new, 0),
        "trained alone": scores(result, alone, new, 0),
        "the global model": scores(result, everyone(new, trained._general()), new, 0),
    }


def table(found: dict[str, list[Scores]], caption: str) -> str:
    head = f"| {caption} | accuracy (%) | NLL | Brier | ECE (%) | accuracy (%) when the least sure fifth is declined |"
    lines = [head, "|---|---:|---:|---:|---:|---:|"]
    for name, rows in found.items():
        mean = {key: fmean(row[key] for row in rows) for key in COLUMNS}
        numbers = f"{mean['accuracy']:.1f} | {mean['nll']:.3f} | {mean['brier']:.3f} | {mean['ece']:.1f}"
        lines.append(f"| {name} | {numbers} | {mean['declined']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--new", type=int, default=10, help="clients that come later")
    parser.add_argument("--train-samples", type=int, help="use only so many training samples")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    first: dict[str, list[Scores]] = {}
    second: dict[str, list[Scores]] = {}
    for seed in range(given.seeds):
        settings = DataSettings(
            dataset=given.dataset,
            root=given.data_root,
            clients=given.clients + given.new,
            train_samples=given.train_samples,
        )
        federation, new = newcomers(load_federation(settings, seed), given.new, seed)
        for name in METHODS:
            config = load(flags={"method": name, "data": {"dataset": given.dataset}})
            model = build(config.network, federation.shape, len(federation.classes), seed)
            result = fit(config.algorithm, model, federation, rounds=given.rounds, seed=seed, eval_every=0)
            print(f"{name}, seed {seed}: {result.summary}", flush=True)
            for way, found in judged(result).items():
                first.setdefault(f"{config.algorithm.title}, {way}", []).append(found)
            if name == "pfedvem":
                for way, found in late(result, new, seed).items():
                    second.setdefault(way, []).append(found)
            print(table(first, "so far"), flush=True)
    print(table(first, "model"), table(second, f"{given.new} new clients with {FEW} samples"), sep="\n\n")


if __name__ == "__main__":
    main()
