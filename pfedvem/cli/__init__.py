"""The command line: words in, words out. What it does is in the library."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from importlib.metadata import version as installed_version
from typing import NoReturn

from rich.console import Console
from rich.text import Text

# Importing a module of commands adds them.
from pfedvem.cli import bench, compare, data, flower, model, report, reproduce, run, sweep  # noqa: F401
from pfedvem.cli.app import app
from pfedvem.errors import UserError
from pfedvem.simulation import memory


@app.command(epilog="Example:  pfedvem version")
def version() -> None:
    """Print the version."""
    print(f"pfedvem {installed_version('pfedvem')}")


def main() -> None:
    """Runs the command line; what a user can mend is a sentence and exit code 2, never a traceback."""
    if threading.current_thread() is threading.main_thread():
        # By it schedulers, and machines that shut down, end a command: it keeps its rounds as after Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    memory.keep()
    try:
        app(prog_name="pfedvem")
    except UserError as error:
        _fail(str(error))
    except OSError as error:  # no permission, no space left, and the like
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        again = " Free some space and give the command again, for a run with --resume." if full else ""
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.{again}")


def _fail(sentence: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("error", "bold red"), f" {sentence}"), soft_wrap=True)
    sys.exit(2)
