"""How a process that trains deals with memory."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def keep() -> None:
    """Keeps freed memory in the process: giving it back after every step and asking again costs page faults."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than GNU's
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: from so many bytes on, memory is asked for and given back each time
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: so many bytes may lie free
