"""Nothing is fetched from or sent to the network unless a user asked for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CUT_OFF = """
import socket, sys

def refuse(self, address, *rest):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        raise SystemExit(f"somebody wants to talk to {address}")
    return connect(self, address, *rest)

def unknown(host, *rest, **options):
    raise SystemExit(f"somebody asks for {host}")

connect, socket.socket.connect, socket.getaddrinfo = socket.socket.connect, refuse, unknown
from pfedvem.cli import main
for words in WORDS:
    sys.argv = ["pfedvem", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_training_and_reporting_need_no_network(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    words = [["run", "--clients", "4", "--rounds", "1", "--out", run], ["inspect", run], ["report", run]]
    code = CUT_OFF.replace("WORDS", repr(words))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "run" / "report.html").exists()
