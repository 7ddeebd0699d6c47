"""Tests of how a process that trains deals with memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from pfedvem.simulation import memory
{first}
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(10_000_000).zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)
print(faults(20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than GNU's")
def test_a_process_that_keeps_its_memory_faults_for_it_once() -> None:
    def faults(first: str) -> int:
        program = [sys.executable, "-c", FAULTS.format(first=first)]
        return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)

    assert faults("memory.keep()") < 20 < faults("")
