"""What fuzzing has found, and the good files that it starts from, once more and without a fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.fuzz import CORPUS, TARGETS, Ready

SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == "drawn" else name for name in TARGETS]


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_whatever_is_in_a_file_is_read_or_refused_by_an_error_that_is_meant(name: str, tmp_path: Path) -> None:
    ready = Ready(name, tmp_path)
    ready.target.read(ready.folder)  # what is good is read
    inputs = sorted((CORPUS / name).iterdir())
    assert len(inputs) >= len(ready.target.files)
    for file in inputs:
        try:
            ready(file.read_bytes())
        except Exception as error:
            raise AssertionError(f"{file.name} was not refused as it should be") from error
