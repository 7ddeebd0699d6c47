"""The documentation is run: every Python block, and every ``pfedvem`` command of the shell blocks.

Blocks that need a download or minutes are marked by a comment on the line before: ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.test_cli import call

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"(?P<skip>^ *<!-- not run: [^\n]+ -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)


def commands(code: str) -> list[list[str]]:
    """The words of each ``pfedvem`` command of a shell block. Where some lines have a prompt, the others are output."""
    lines = code.replace("\\\n", " ").splitlines()
    typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
    words = [shlex.split(line, comments=True) for line in typed if re.match(r"(\S*/)?pfedvem( |$)", line)]
    return [rest for _, *rest in words]


def run(text: str, name: str) -> None:
    """Runs the blocks of a document in order; its Python blocks share their names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for found in BLOCK.finditer(text):
        code, where = dedent(found["code"]), f"{name}, line {text.count(chr(10), 0, found.start('code')) + 1}"
        if found["skip"]:
            continue
        if found["language"] == "python":
            exec(compile(code, where, "exec"), names)
        elif found["language"] in ("console", "sh", "bash"):
            for words in commands(code):
                assert call(*words) == 0, f"{where}: pfedvem {shlex.join(words)}"


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", [README, *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda path: path.name)
def test_the_code_of_the_documentation_runs(path: Path) -> None:
    run(path.read_text(encoding="utf-8"), path.name)


def test_the_readme_starts_with_the_two_commands_that_do_everything() -> None:
    first = BLOCK.search(README.read_text(encoding="utf-8"))
    assert first is not None
    assert {"make run", "make test"} <= {line.partition("#")[0].strip(" $") for line in first["code"].splitlines()}


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {project['version']}" in lines
    assert f"license: {project['license']}" in lines


SAMPLE = """
```python
from pathlib import Path
rows = [1, 2]
```
```console
$ pfedvem data list \\
    --json    # a comment
pfedvem is no command here, but output
$ ls
```
1. A step:
   ```python
   rows.append(3)
   Path("rows").write_text(str(rows))
   ```

<!-- not run: takes minutes -->
```python
rows.clear()
Path("rows").write_text("wrong")
```
```
pfedvem nonsense
```
"""


def test_blocks_run_in_order_and_share_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(SAMPLE, "sample.md")
    assert (tmp_path / "rows").read_text() == "[1, 2, 3]"
    assert capsys.readouterr().out.startswith("[{")


@pytest.mark.parametrize("shell", ["console", "sh", "bash"])
def test_a_command_that_fails_is_an_error_that_says_where(shell: str) -> None:
    with pytest.raises(AssertionError, match=r"sample.md, line 3: pfedvem run --rounds -1"):
        run(f"Text.\n```{shell}\n.venv/bin/pfedvem run --rounds -1\n```\n", "sample.md")


def test_python_that_fails_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "sample.md")
