"""Runs that are killed: a process that is told what to run, and ends it by SIGKILL at a given moment.

It reads a line of JSON for each run, does the run in a process of its own and answers with a line. Runs are forked, so
that PyTorch is imported once. A moment is the n-th event among some files of the run, or a share of a run's time:

    {"method": "pfedvem", "executor": "vectorised", "out": "DIR", "seed": 3, "moment": "checkpoint", "at": 12}

Events are those that Python reports to audit hooks (opening, renaming and removing files, making folders) and
``os.fsync``, before which a part of what was just written is cut off: that is how a kill amid a write leaves a file.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pfedvem import Progress, UserError, fit
from pfedvem.algorithms import METHODS
from pfedvem.simulation import store
from pfedvem.simulation.rounds import State
from tests.conftest import blobs, small_network

ROUNDS = 8
FINAL = ("model", "clients.csv", ".clients.csv", ".calibration.json", ".summary.json")


class Kill:
    """Counts the events of a run, and kills it at one of them."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._out, self._moment, self._at = os.path.abspath(order["out"]), order.get("moment"), order.get("at", 0)
        self._rng, self._process, self.count = random.Random(order.get("seed", 0)), os.getpid(), 0
        self._fsync = os.fsync
        os.fsync = self.fsync  # type: ignore[assignment]
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            self.happen(event, arguments[0])

    def fsync(self, file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if sys.platform == "linux" else ""
        self.happen("fsync", path, lambda: self._cut(file))
        self._fsync(file)

    def happen(self, event: str, path: Any, before: Callable[[], None] = lambda: None) -> None:
        if os.getpid() != self._process or not isinstance(path, str | Path):
            return  # a worker
        inside = os.path.relpath(path, self._out)
        wanted = {"checkpoint": inside.startswith("checkpoint"), "final": inside.startswith(FINAL)}
        if inside.startswith("..") or not wanted.get(self._moment or "", True):
            return
        self.count += 1
        if self.count == self._at and self._moment != "time":
            before()
            answer({"killed": f"{event} {inside}"})
            os.kill(self._process, signal.SIGKILL)

    def _cut(self, file: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{file}"):
            os.ftruncate(file, self._rng.randint(0, os.fstat(file).st_size))


class Limit(Progress):
    """From a round on, no file may be longer than so many bytes, as on a disk that is full."""

    def __init__(self, round: int | None) -> None:
        self._round = round

    def round(self, state: State) -> None:
        if state.round == self._round:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))


def run(order: dict[str, Any]) -> None:
    """One run, from the checkpoint that there is."""
    kill = Kill(order)
    store.SPILL_BYTES = 0 if order.get("spill") else store.SPILL_BYTES
    try:
        fit(
            METHODS[order["method"]](),
            small_network(),
            blobs((7, 12, 1, 23)),
            rounds=ROUNDS,
            participation=0.5,
            eval_every=2,
            out=order["out"],
            resume=True,
            executor=order["executor"],
            workers=2,
            keep_models=True,
            progress=Limit(order.get("full_after")),
        )
        answer({"events": kill.count})
    except UserError as error:
        answer({"error": str(error)})


def answer(line: dict[str, Any]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def main() -> None:
    for line in sys.stdin:
        order, began = json.loads(line), time.perf_counter()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)  # by which its workers are found
            try:
                run(order)
                os._exit(0)
            finally:  # an error that is no sentence
                traceback.print_exc()
                os._exit(1)
        if order.get("moment") == "time":
            time.sleep(order["at"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        answer({"ended": os.waitstatus_to_exitcode(status), "group": child, "seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
