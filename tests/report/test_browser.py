"""The page in a real browser: it opens without errors, fits a phone, and prints. Without Chromium this is skipped."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from pfedvem.report.html import report
from tests.report.folders import clients, write_comparison, write_reproduction, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 390
METHODS = ("local", "fedavg", "fedprox", "scaffold", "fedper", "fedrep", "ifca", "perfedavg", "pfedme", "pfedvem")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: apt-get install chromium")

# A frame is as wide as a phone whatever the window is. What is too wide is named.
MEASURE = """<!doctype html><iframe id="phone" style="width: %dpx; height: 800px; border: 0" src="%s"></iframe><script>
document.getElementById("phone").onload = (event) => {
  const page = event.target.contentDocument, wide = page.documentElement.clientWidth
  const inside = (element) => element.closest(".scroll, pre, svg") !== null
  const beyond = [...page.body.querySelectorAll("*")].filter(
    (element) => !inside(element) && element.getBoundingClientRect().right > wide + 0.5)
  const boxes = [...page.querySelectorAll(".scroll")].filter((box) => box.getBoundingClientRect().right > wide + 0.5)
  document.body.dataset.scroll = page.documentElement.scrollWidth
  document.body.dataset.beyond = [...beyond, ...boxes].map((element) => element.tagName).join(" ")
  document.body.dataset.pictures = [...page.querySelectorAll("svg, img")].filter(
    (picture) => picture.getBoundingClientRect().height > 20).length
}
</script>"""


def chromium(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    fixed += [f"--user-data-dir={place / 'profile'}", "--enable-logging=stderr", "--disable-background-networking"]
    return subprocess.run([BROWSER, *fixed, *words], capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module", params=["run", "comparison", "reproduction"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "a folder"
    long = "a name without any place where it could be broken ".replace(" ", "-")
    if request.param == "run":
        write_run(folder, [{**row, "client": long} for row in clients()])
    elif request.param == "comparison":
        write_comparison(folder, METHODS, seeds=1)
    else:
        write_reproduction(folder, title=long, command=f"pfedvem reproduce {long} {long}")
    return report(folder)[1]


def test_the_page_opens_without_an_error_and_asks_for_nothing(page: Path, tmp_path: Path) -> None:
    opened = chromium(tmp_path, "--dump-dom", page.as_uri())
    assert "</html>" in opened.stdout
    assert "CONSOLE" not in opened.stderr


def test_the_console_would_be_heard(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text('<meta http-equiv="Content-Security-Policy" content="img-src data:"><img src=x>')
    assert "CONSOLE" in chromium(tmp_path, "--dump-dom", (tmp_path / "bad.html").as_uri()).stderr


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Path, tmp_path: Path) -> None:
    frame = page.with_name("frame.html")
    frame.write_text(MEASURE % (PHONE, page.name))
    words = ["--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    measured = dict(re.findall(r'data-(\w+)="([^"]*)"', chromium(tmp_path, *words).stdout))
    assert measured["scroll"] == str(PHONE)
    assert measured["beyond"] == ""
    assert int(measured["pictures"]) == len(re.findall("<svg|<img", page.read_text())) > 0


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_light_or_dark_as_the_reader_likes_it(page: Path, tmp_path: Path, dark: bool) -> None:
    words = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    chromium(tmp_path, *words, f"--screenshot={tmp_path / 'page.png'}", "--window-size=1000,800", page.as_uri())
    with Image.open(tmp_path / "page.png") as seen:
        corner = seen.convert("L").getpixel((3, 3))
    assert isinstance(corner, int)
    assert (corner < 60) is dark
    assert (corner > 200) is not dark


def test_the_page_prints(page: Path, tmp_path: Path) -> None:
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer", page.as_uri())
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 8
