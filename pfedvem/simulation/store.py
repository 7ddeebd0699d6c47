"""What all clients keep, as stacked arrays: in memory or, where that is too much, in memory-mapped files."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pfedvem import tree

SPILL_BYTES = 2 * 2**30  # what clients keep is in files from so many bytes on
CHUNK = 256  # clients that are made at a time

T = TypeVar("T")


def stacked(make: Callable[[Sequence[int]], T], clients: int, folder: Path | None = None) -> T:
    """The rows of all clients, of which ``make`` gives some; files lie in ``folder``, by default a temporary one."""
    first = make([0])
    if tree.size(first) * clients <= SPILL_BYTES:
        # Rows are written in place later on, so none may be a view of something else.
        return tree.map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), make(range(clients)))
    out = tree.map(lambda leaf: mapped((clients, *leaf.shape[1:]), leaf.dtype, folder), first)
    for begin in range(0, clients, CHUNK):
        rows = range(begin, min(begin + CHUNK, clients))
        tree.write(out, rows, make(rows))
    return out


def mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None = None) -> Tensor:
    """A tensor whose memory is a file: the system keeps in memory what it has room for.

    The file has no name from the start and so is gone when the tensor is, however the process ends.
    """
    count = torch.Size(shape).numel()
    linux = sys.platform == "linux"  # where a file without a name can still be opened
    make = tempfile.TemporaryFile if linux else tempfile.NamedTemporaryFile
    with make(dir=folder, prefix=".clients-") as file:
        if hasattr(os, "posix_fallocate"):  # on a full disk, writing to a file with holes would kill the process
            os.posix_fallocate(file.fileno(), 0, max(1, count * dtype.itemsize))
        file.truncate(count * dtype.itemsize)
        name = f"/proc/self/fd/{file.fileno()}" if linux else file.name
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is done, where there is somebody to handle them."""
    came: list[int] = []
    with ExitStack() as afterwards:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):  # neither ignored nor left to the system
                    afterwards.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, _: came.append(number))
        yield
    for waited in came:
        signal.raise_signal(waited)
