"""Does a long run stay as it began? Time, memory, open files and checkpoint size over thousands of rounds.

    python examples/soak.py --rounds 2000 --out DIR

Prints a table of Markdown, a row for each tenth of the rounds, and the slopes over all rounds but the first tenth, in
which caches fill. The data is that of `pfedvem run`; there is a checkpoint after every round.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

from pfedvem import Progress, load_federation
from pfedvem.experiments.config import load
from pfedvem.experiments.run import train
from pfedvem.simulation.rounds import State

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """How a run was after a round: how long that took, and what the run held."""

    round: int
    milliseconds: float
    memory: float
    files: int
    checkpoint: int


class Watch(Progress):
    """Takes a sample after every round."""

    def __init__(self, out: Path) -> None:
        self.samples: list[Sample] = []
        self._out, self._began = out, time.perf_counter()

    def stage(self, title: str, done: int, rounds: int) -> None:
        self._began = time.perf_counter()

    def round(self, state: State) -> None:
        took = 1000 * (time.perf_counter() - self._began)
        processes = [os.getpid(), *children()]
        memory = sum(resident(process) for process in processes) / 2**20
        files = sum(len(os.listdir(f"/proc/{process}/fd")) for process in processes)
        newest = self._out / "checkpoint" / f"round-{state.round:05d}"
        size = sum(file.stat().st_size for file in newest.iterdir())
        self.samples.append(Sample(state.round, took, memory, files, size))
        self._began = time.perf_counter()


def children() -> list[int]:
    """The processes that this one has started, its workers."""
    return [int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def resident(process: int) -> int:
    """The bytes of a process that are in memory; pages that processes share count for each."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE


def table(samples: list[Sample]) -> str:
    """A row for each tenth of the rounds, and the slopes."""
    lines = [
        "| rounds | ms a round (median) | memory (MB) | open files | checkpoint (bytes) |",
        "|---|---:|---:|---:|---:|",
    ]
    length = max(1, len(samples) // 10)
    for begin in range(0, len(samples), length):
        part = samples[begin : begin + length]
        took, memory = median(one.milliseconds for one in part), median(one.memory for one in part)
        numbers = f"{took:.1f} | {memory:.1f} | {max(one.files for one in part)} | {part[-1].checkpoint:,}"
        lines.append(f"| {part[0].round}-{part[-1].round} | {numbers} |")
    later = samples[length:]
    rounds = [one.round for one in later]
    slopes = [
        1000 * linear_regression(rounds, values).slope
        for values in ([one.milliseconds for one in later], [one.memory for one in later])
    ]
    return "\n".join([*lines, "", f"Over 1,000 rounds: {slopes[0]:+.2f} ms a round, {slopes[1]:+.2f} MB."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--executor", default="vectorised")
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    flags = {"rounds": given.rounds, "eval_every": given.eval_every, "executor": given.executor, "alone": False}
    flags |= {"workers": given.workers, "data": {"clients": given.clients}}
    config = load(flags={key: value for key, value in flags.items() if value is not None})
    watch = Watch(given.out)
    result = train(config, out=given.out, progress=watch, federation=load_federation(config.data, config.seed))
    print(table(watch.samples), f"{result.summary}", sep="\n\n")


if __name__ == "__main__":
    main()
