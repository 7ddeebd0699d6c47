"""Folders of runs, comparisons and reproductions, written by hand: no training, and every number is known."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from PIL import Image

from pfedvem.report.reproduction import HEADER

Row = dict[str, Any]

PFEDVEM = {"lr_head": 0.001, "scale": 0.5}


def clients(count: int = 20, shift: float = 0.0, **more: Any) -> list[Row]:
    """Clients of 10, 20, ... samples. Every fourth loses two points by joining, the others gain four."""
    return [
        {
            "client": str(j),
            "n_train": 10 * (j + 1),
            "labels": "; ".join("abcdefgh"[j % 3 :]),
            "pm": 80.0 + j / 10 + shift,
            "pm_nll": 0.5,
            "pm_ece": 5 + (j * 7 % 11) / 10,
            "tau": 1 + j / 50,
            "uncertainty": 0.8,
            "deviation": 0.1 + (j * 3 % 7) / 100,
            "discarded": 0.0,
            "alone": 80.0 + j / 10 + shift + (2.0 if j % 4 == 0 else -4.0),
            **more,
        }
        for j in range(count)
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]] | None = None,
    method: str = "pfedvem",
    seed: int = 0,
    rounds: int = 30,
    pm: float | None = 96.64,
    gm: float | None = 93.33,
    algorithm: Row = PFEDVEM,
    **config: Any,
) -> Path:
    """A finished run."""
    folder.mkdir(parents=True)
    rows = clients() if rows is None else rows
    data = {"dataset": "digits", "clients": len(rows)}
    settings = {"method": method, "rounds": rounds, "seed": seed, "alone_lr": 0.001, **config}
    (folder / "config.toml").write_text(tomli_w.dumps({**settings, "data": data, "algorithm": algorithm}))
    every = [rounds] if method == "local" else range(5, rounds + 1, 5)
    lines = [
        {"round": at, "pm": pm and pm - (rounds - at) / 5, "gm": gm and gm - (rounds - at), "pm_loss": 0.1,
         "gm_loss": 0.2, "pm_ece": pm and 3.21, "gm_ece": gm and 4.32, "seconds": float(at)}
        for at in every
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_csv(folder / "clients.csv", rows)
    summary = {"method": method, "dataset": "digits", "clients": len(rows), "rounds": rounds, "seed": seed, "pm": pm,
               "pm_sem": 0.27, "gm": gm, "small_clients_pm": pm and pm - 1, "alone_pm": 92.57 if "alone" in rows[0] else
               None, "seconds": 20.5}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def without(rows: Sequence[Mapping[str, Any]], *names: str) -> list[Row]:
    return [{key: value for key, value in row.items() if key not in names} for row in rows]


def write_comparison(
    folder: Path, methods: Sequence[str] = ("fedavg", "fedper", "local", "pfedvem"), seeds: int = 2
) -> Path:
    """A finished comparison. With seed s, clients of FedPer have s + 1 points more than Local's, pFedVEM's s + 3."""
    better = {"fedper": 1.0, "pfedvem": 3.0}
    for seed in range(seeds):
        for name in methods:
            personal = name != "fedavg"
            own = without(clients(shift=better.get(name, 0.0) + (seed if name != "local" else 0)), "alone")
            if name != "pfedvem":
                own = without(own, "tau", "uncertainty", "deviation", "discarded")
            if not personal:
                own = [{**row, "pm": "", "pm_nll": "", "pm_ece": ""} for row in own]
            write_run(
                folder / "cells" / f"{name}-{seed}",
                own,
                method=name,
                seed=seed,
                rounds=1 if name == "local" else 30,
                pm=90.0 + better.get(name, 0.0) + seed if personal else None,
                gm=85.0 if name in ("fedavg", "pfedvem") else None,
                algorithm={"batch_size": 10},
            )
    rows = [{"method": name, "bytes_down": 30_000, "bytes_up": 31_000} for name in methods]
    write_csv(folder / "comparison.csv", rows)
    about = {"methods": list(methods), "seeds": list(range(seeds)), "failures": []}
    (folder / "comparison.json").write_text(json.dumps(about))
    return folder


def write_reproduction(folder: Path, **about: Any) -> Path:
    """A reproduction of a table as `pfedvem reproduce` writes it, with another table and a picture."""
    folder.mkdir(parents=True)
    Image.new("RGB", (40, 30), "white").save(folder / "size.png")
    rows = [{"method": "pFedVEM", "ours": "71.9 ± 0.2", "paper": "71.9 ± 0.1", "within": "yes"},
            {"method": "FedAvg", "ours": "-", "paper": "", "within": ""}]  # fmt: skip
    write_csv(folder / "fmnist.csv", rows)
    number = {"dataset": "fmnist", "seeds": 2, "paper": 91.4, "paper_sem": 0.1, "difference": "", "within_2_sem": ""}
    lines = [
        {**number, "method": "fedavg", "column": "50", "measure": "gm", "ours": 85.06, "ours_sem": "", "paper": ""},
        {**number, "method": "pfedvem", "column": "50", "measure": "pm", "ours": "", "ours_sem": ""},
        {**number, "method": "pfedvem", "column": "50", "measure": "gm", "ours": 90.64, "ours_sem": 0.5,
         "difference": -0.76, "within_2_sem": "true"},
        {**number, "method": "pfedvem", "column": "100", "measure": "pm", "ours": 90.64, "ours_sem": 0.1,
         "difference": -0.76, "within_2_sem": "false"},
        {**number, "method": "fedavg", "column": "50", "measure": "gm_best", "ours": 86.1, "ours_sem": "", "paper": ""},
    ]  # fmt: skip
    write_csv(folder / "table1.csv", [{key: line[key] for key in (*HEADER, "within_2_sem")} for line in lines])
    told = {
        "name": "table1",
        "title": "Table 1: overall",
        "command": "pfedvem reproduce table1 --datasets fmnist",
        "notes": ["Two seeds instead of five."],
        "tables": [{"file": "table1.csv", "title": "Overall"}, {"file": "fmnist.csv", "title": "Fashion-MNIST"}],
        "figures": [{"file": "size.png", "title": "Sizes", "about": "Small clients gain most."}],
        **about,
    }
    (folder / "reproduction.json").write_text(json.dumps(told))
    return folder
