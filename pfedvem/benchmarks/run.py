"""A whole benchmark: what ``pfedvem bench`` runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfedvem.algorithms import METHODS
from pfedvem.benchmarks.measure import GROWTH, NETWORKS, Step, growth, machine, method_costs, network_costs
from pfedvem.errors import UserError
from pfedvem.simulation import checkpoints


def benchmark(
    networks: Sequence[str],
    methods: Sequence[str],
    growing: Sequence[str],
    *,
    clients: int,
    growth_to: int,
    workers: int | None,
    step: Step,
    out: Path | None,
) -> dict[str, Any]:
    """All measurements that were asked for; ``out`` has those that are done, whenever it is looked at."""
    networks = chosen(networks, list(NETWORKS), "network")
    methods, growing = (chosen(names, list(METHODS), "method") for names in (methods, growing))
    counts = [count for count in GROWTH if count <= growth_to]
    count = workers if workers is not None else (os.cpu_count() or 1)
    figures: dict[str, Any] = {"machine": machine(), "workers": count, "networks": {}, "methods": {}, "growth": {}}

    def done(kind: str, name: str, costs: dict[str, Any]) -> None:
        figures[kind][name] = rounded(costs)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            checkpoints.replace(out, (json.dumps(figures, indent=1) + "\n").encode())

    for name in networks:
        done("networks", name, network_costs(name, clients, count, figures["machine"]["peak_gflops"], step))
    for name in methods:
        done("methods", name, method_costs(name, count, step))
    for name in growing:
        done("growth", name, growth(name, counts, count, step))
    return figures


def chosen(names: Sequence[str], known: Sequence[str], kind: str) -> list[str]:
    """The names that were asked for; ``all`` and ``none`` are what they say."""
    unknown = [name for name in names if name not in (*known, "all", "none")]
    if unknown:
        raise UserError(f"There is no {kind} {unknown[0]!r} to measure; there are {', '.join(known)}, all and none.")
    return list(known) if "all" in names else [name for name in names if name != "none"]


def read_figures(file: Path) -> dict[str, Any]:
    """The figures of an earlier benchmark."""
    try:
        figures = json.loads(file.read_text(encoding="utf-8"), parse_int=float)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no readable file of figures: run pfedvem bench --out {file} first.") from error
    if not isinstance(figures, dict) or "networks" not in figures:
        raise UserError(f"{file} holds no figures of pfedvem bench.")
    return figures


def rounded(value: Any) -> Any:
    """Numbers with the digits that a measurement has."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
