"""Processes that do cohorts, one at a time each.

Every worker has a pipe of its own, and its parent no thread. A pool whose workers share a queue hangs when one of them
is killed while it writes: half a message, or a lock, stays behind. Here the end of a worker is the end of its pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from pfedvem.simulation import memory
from pfedvem.simulation.work import Job, Outcome, Setup, perform


class Died(Exception):
    """The worker has ended, whatever it was at."""


def packed(down: Any) -> bytes:
    """What the server sends, as bytes that all workers can be given.

    Plain ones: PyTorch would open a shared file for each of its tensors.
    """
    return pickle.dumps(down)


class Worker:
    """A process of one thread, in which the data of the federation is shared, not copied (on Linux)."""

    def __init__(self, setup: Setup) -> None:
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(setup, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends with the worker
        self._down = b""

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def begin(self, down: bytes, clients: Any, job: Job) -> None:
        """Hands over a job and the clients as they are; what the server sends, only once a round."""
        news = None if down is self._down else down
        self._down = down
        with suppress(OSError):  # it is found dead when its answer is read
            self.pipe.send_bytes(pickle.dumps((news, clients, job)))

    def finish(self) -> Outcome:
        """Waits for what came of the job; an error of the worker is raised here."""
        try:
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise Died from None
        if isinstance(answer, Outcome):
            return answer
        raise answer

    def end(self) -> None:
        """Ends the process at once, whatever it is at."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(setup: Setup, pipe: Connection, parent: int) -> None:
    torch.set_num_threads(1)
    memory.keep()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the parent's command line has it
    threading.Thread(target=follow, args=(parent,), daemon=True).start()
    down: Any = None
    while True:
        news, clients, job = pickle.loads(pipe.recv_bytes())
        if news is not None:
            down = pickle.loads(news)
        pipe.send_bytes(_answer(setup, down, clients, job))


def _answer(setup: Setup, down: Any, clients: Any, job: Job) -> bytes:
    try:
        return pickle.dumps(perform(setup, down, clients, job))
    except Exception as error:  # whatever a method or a network raises is raised in the parent
        told = traceback.format_exc()
        error.add_note(f"In a worker:\n{told}")
        try:
            said = pickle.dumps(error)
            pickle.loads(said)
        except Exception:  # of a class that does not go through a pipe
            return pickle.dumps(RuntimeError(told))
        return said


def follow(parent: int) -> None:
    """Ends a process whose parent was killed; nobody else would."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
