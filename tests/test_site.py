"""The documentation site builds without a warning, and its notebook runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=300, kernel_name="python3").execute(cwd=sys.argv[2])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_in_the_menu(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    menu = (site / "index.html").read_text(encoding="utf-8")
    assert {page for page in pages if f'href="{page}/"' not in menu} == set()


def test_maths_is_shown_without_scripts(site: Path) -> None:
    page = (site / "method" / "index.html").read_text(encoding="utf-8")
    assert page.count("<math") > 20
    assert "arithmatex" not in page


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="([^"]+)"', text)
        assert [url for url in loaded if "//" in url] == [], page


def test_the_api_page_has_what_can_be_imported(site: Path) -> None:
    import pfedvem

    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert {name for name in pfedvem.__all__ if f'id="pfedvem.{name}"' not in page} == set()


def test_the_notebook_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXECUTE, str(ROOT / "examples" / "hospitals.ipynb"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
