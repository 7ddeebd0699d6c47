"""Does a long run stay as it began? Time, memory, open files and checkpoint size over thousands of rounds.

    python examples/soak.py --rounds 2000 --out DIR

Prints a table of Markdown, a row for each tenth of the rounds as it is done, and then the slopes over all rounds but
those of the first tenth, in which caches fill. The data is that of `pfedvem run`; there is a checkpoint after every
round. Processor time and memory are those of the process and its workers; the former is the one to compare on a machine
that does other things as well. It reads /proc and so runs on Linux.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

from pfedvem import Progress, load_federation
from pfedvem.experiments.config import load
from pfedvem.experiments.run import train
from pfedvem.simulation.rounds import State

PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), 1000 / os.sysconf("SC_CLK_TCK")
HEAD = "| rounds | ms a round (median) | processor ms a round (mean) | memory (MB) | open files | checkpoint (bytes) |"


@dataclass(frozen=True)
class Sample:
    """How a run was after a round: how long that took, and what the run held."""

    round: int
    milliseconds: float
    processor: float
    memory: float
    files: int
    checkpoint: int


class Watch(Progress):
    """Takes a sample after every round, and prints a row for every so many."""

    def __init__(self, out: Path, length: int) -> None:
        self.samples: list[Sample] = []
        self._out, self._length = out, length
        self._began, self._used = time.perf_counter(), 0.0

    def stage(self, title: str, done: int, rounds: int) -> None:
        print(HEAD, "|---|" + "---:|" * 5, sep="\n")
        self._began, self._used = time.perf_counter(), used(children())

    def round(self, state: State) -> None:
        took, workers = 1000 * (time.perf_counter() - self._began), children()
        processor, everyone = used(workers), [os.getpid(), *workers]
        memory = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in everyone) * PAGE / 2**20
        files = sum(len(os.listdir(f"/proc/{one}/fd")) for one in everyone)
        newest = self._out / "checkpoint" / f"round-{state.round:05d}"
        size = sum(file.stat().st_size for file in newest.iterdir())
        self.samples.append(Sample(state.round, took, processor - self._used, memory, files, size))
        if state.round % self._length == 0:
            print(row(self.samples[-self._length :]), flush=True)
        self._began, self._used = time.perf_counter(), used(workers)


def children() -> list[int]:
    """The processes that this one has started, its workers."""
    return [int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def used(workers: Iterable[int]) -> float:
    """The milliseconds of processor time that this process and its workers have used."""
    ticks = [Path(f"/proc/{one}/stat").read_text().rpartition(") ")[2].split()[11:13] for one in workers]
    return 1000 * time.process_time() + TICK * sum(int(number) for pair in ticks for number in pair)


def row(part: list[Sample]) -> str:
    took, memory = median(one.milliseconds for one in part), median(one.memory for one in part)
    processor, files = sum(one.processor for one in part) / len(part), max(one.files for one in part)
    numbers = f"{took:.0f} | {processor:.0f} | {memory:.1f} | {files} | {part[-1].checkpoint:,}"
    return f"| {part[0].round}-{part[-1].round} | {numbers} |"


def slopes(samples: list[Sample]) -> str:
    """By how much a round takes longer, and memory grows, in a thousand rounds."""
    rounds = [one.round for one in samples]
    columns = [[one.milliseconds, one.processor, one.memory] for one in samples]
    by = [1000 * linear_regression(rounds, values).slope for values in zip(*columns, strict=True)]
    return f"Over 1,000 rounds: {by[0]:+.1f} ms and {by[1]:+.1f} ms of processor time a round, {by[2]:+.2f} MB."


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
    length = max(1, given.rounds // 10)
    watch = Watch(given.out, length)
    result = train(config, out=given.out, progress=watch, federation=load_federation(config.data, config.seed))
    print("", slopes(watch.samples[length:]), "", result.summary, sep="\n")


if __name__ == "__main__":
    main()
