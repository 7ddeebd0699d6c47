"""A comparison as people see it: the table in its four forms, and the progress of many runs."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pfedvem.experiments.compare import Comparison, Measure, Row
from pfedvem.guard import Counts
from pfedvem.report.compare import (
    LiveComparison,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    comparison_table,
    plain,
    size,
    tex,
    write_tables,
)
from pfedvem.simulation.rounds import State
from pfedvem.simulation.work import Scores

OURS = Row("pfedvem", "pFedVEM", 2, Measure(71.94, 0.12), Measure(60.0, 1.0), Measure(65.5, 2.25), 12.5, 243_000, 9,
           Measure(3.14, 0.2), Measure(0.456, 0.011))  # fmt: skip
TIED = Row("other", "Other_1 [x] & 5%|", 2, Measure(71.9, 0.3), None, Measure(60.0, 0.5), 1.0, 1_250_000, 0)
MEAN = Row("fedavg", "FedAvg", 1, None, Measure(60.06, None), None, 3.25, 812, 999_600)

OURS_SHOWN = ["71.9 ± 0.1", "60.0 ± 1.0", "65.5 ± 2.2", "3.1 ± 0.2", "0.46 ± 0.01"]


@pytest.fixture
def comparison() -> Comparison:
    return Comparison("digits", 20, (OURS, TIED, MEAN))


def screen(view: object, width: int = 110) -> tuple[str, str]:
    """What a terminal shows: plain, and with its styles."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console.print(view)
    return console.export_text(clear=False), console.export_text(styles=True)


def test_a_number_is_mean_and_sem_to_one_decimal_the_mean_alone_or_a_dash() -> None:
    assert plain(Measure(71.94, 0.16)) == "71.9 ± 0.2"
    assert plain(Measure(71.94, None)) == "71.9"
    assert plain(None) == "-"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (243_210, "243 kB"),
        (999_600, "1 MB"),
        (1_254_000, "1.25 MB"),
        (5 * 10**16, "5e+04 TB"),
    ],
)
def test_bytes_are_shown_to_three_digits(count: int, text: str) -> None:
    assert size(count) == text


def test_the_terminal_shows_every_method_and_the_best_are_bold(comparison: Comparison) -> None:
    text, styled = screen(comparison_table(comparison), width=130)
    assert "digits: 20 clients" in text
    lines = {line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]] for line in text.splitlines()[4:7]}
    assert lines["pFedVEM"] == [*OURS_SHOWN, "243 kB", "9 B", "2"]
    assert lines["Other_1 [x] & 5%|"] == ["71.9 ± 0.3", "-", "60.0 ± 0.5", "-", "-", "1.25 MB", "0 B", "2"]
    assert lines["FedAvg"] == ["-", "60.1", "-", "-", "-", "812 B", "1 MB", "1"]
    bold = re.findall(r"\x1b\[1m([\d.][^\x1b]*)\x1b", styled)
    assert bold == ["71.9 ± 0.1", "71.9 ± 0.3", "60.1"], "ties in the decimal that is shown are all the best"


def test_the_table_of_eleven_methods_fits_an_ordinary_terminal() -> None:
    rows = tuple(replace(OURS, title="PerFedAvg", down=60_100, up=60_100) for _ in range(11))
    text, _ = screen(comparison_table(Comparison("digits", 20, rows), 80), width=80)
    assert text.count("71.9 ± 0.1") == 11
    assert len(text.splitlines()) == 1 + 3 + 11 + 1 + 1, "no line is broken"
    wide = tuple(replace(row, pm=Measure(71.9, 10.1)) for row in rows)
    text, _ = screen(comparison_table(Comparison("digits", 20, wide), 80), width=80)
    assert text.count("71.9 ± 10.1") == text.count("60.1 kB │ 60.1 kB") == 11, "a name is broken before a number is"


def test_the_csv_reads_back_as_plain_numbers_empty_where_there_are_none(comparison: Comparison) -> None:
    ours, _, mean = csv.DictReader(io.StringIO(comparison_csv(comparison)))
    assert (ours["method"], ours["title"], ours["seeds"]) == ("pfedvem", "pFedVEM", "2")
    assert (float(ours["pm"]), float(ours["pm_sem"]), float(ours["small_clients_pm_sem"])) == (71.94, 0.12, 2.25)
    assert (float(ours["ece"]), float(ours["nll"]), mean["nll"]) == (3.14, 0.456, "")
    assert (int(ours["bytes_down"]), int(ours["bytes_up"]), float(ours["seconds"])) == (243_000, 9, 12.5)
    assert (mean["pm"], mean["pm_sem"], float(mean["gm"]), mean["gm_sem"]) == ("", "", 60.06, "")


def test_markdown_has_a_row_for_each_method_with_the_best_in_bold(comparison: Comparison) -> None:
    lines = comparison_markdown(comparison).splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(row) for row in cells} == {9}
    assert cells[2] == ["pFedVEM", "**71.9 ± 0.1**", *OURS_SHOWN[1:], "243 kB", "9 B", "2"]
    assert cells[3][:3] == [r"Other_1 [x] & 5%\|", "**71.9 ± 0.3**", "-"]
    assert cells[4][:3] == ["FedAvg", "-", "**60.1**"]


def test_latex_is_a_booktabs_tabular_with_names_escaped(comparison: Comparison) -> None:
    lines = comparison_latex(comparison).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrr}"
    assert [lines[1], lines[3], lines[-2], lines[-1]] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    assert lines[2].startswith(r"Method & PM (\%) & GM (\%) & ")
    assert lines[4].startswith(r"pFedVEM & $\textbf{71.9} \pm 0.1$ & $60.0 \pm 1.0$ & $65.5 \pm 2.2$ & ")
    assert lines[4].endswith(r" & $3.1 \pm 0.2$ & $0.46 \pm 0.01$ & 243 kB & 9 B & 2 \\")
    assert lines[5].startswith(r"Other\_1 [x] \& 5\%| & $\textbf{71.9} \pm 0.3$ & -- & ")
    assert lines[6].startswith(r"FedAvg & -- & $\textbf{60.1}$ & -- & ")
    assert all(len(re.split(r"(?<!\\)&", line)) == 9 and line.endswith(r" \\") for line in (lines[2], *lines[4:7]))
    assert tex(r"a\b~{c}^$#") == r"a\textbackslash{}b\textasciitilde{}\{c\}\textasciicircum{}\$\#"


def test_a_comparison_without_a_finished_run_is_an_empty_table(tmp_path: Path) -> None:
    empty = Comparison("digits", 20, ())
    write_tables(empty, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.csv", "comparison.md", "comparison.tex"]
    assert len(comparison_csv(empty).splitlines()) == 1
    assert "Method" in screen(comparison_table(empty))[0]


def state(round: int) -> State:
    scores = Scores.unknown(1)
    return State(round, None, None, scores, ({"round": round, "pm": 71.9, "gm": None},), 1.0, Counts.none(1), None)


def test_progress_shows_all_runs_and_the_current_one_alone_and_says_what_is_new_of_each() -> None:
    console = Console(width=110, record=True, file=io.StringIO(), force_terminal=True)
    with LiveComparison(console) as live:
        live.cell("FedAvg, seed 0", 0, 4)
        live.note("The data [of digits] is small.")
        live.stage("FedAvg", 0, 10)
        live.note("Round 1: client 3 has overflowed.")
        live.round(state(10))
        live.cell("pFedVEM, seed 0", 1, 4)
        live.note("The data [of digits] is small.")
        live.stage("pFedVEM", 0, 10)
        live.note("Round 1: client 3 has overflowed.")
        live.note("Round 1: client 3 has overflowed.")
        live.client(1, 2)
        live.round(state(5))
        text, _ = screen(live._live.renderable, width=110)
        (overall,) = live._overall.tasks
        assert overall.completed == 1.5
        assert overall.time_remaining is not None
        live.cell("pFedVEM, seed 1", 3, 4)
        live.stage("pFedVEM", 0, 2)
        live.round(state(2))
        assert "4 of 4 done" in screen(live._live.renderable, width=110)[0]
    assert "1 of 4 done" in text
    assert re.search(r"pFedVEM, seed 0 .*round 5/10 *PM 71.9%", text)
    assert "FedAvg" not in text
    told = re.findall(r"note .*\.", console.export_text())
    assert told == [
        "note FedAvg, seed 0: The data [of digits] is small.",  # which is the same for all
        "note FedAvg, seed 0: Round 1: client 3 has overflowed.",
        "note pFedVEM, seed 0: Round 1: client 3 has overflowed.",
    ]


@pytest.mark.parametrize(("every", "lines"), [(0.0, 3), (3600.0, 0)])
def test_progress_in_a_file_is_a_line_now_and_then(every: float, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedvem.report.run.LINE_EVERY", every)
    file = io.StringIO()
    with LiveComparison(Console(file=file, width=40)) as live:
        live.cell("pFedVEM, [seed 1]", 1, 4)
        live.stage("pFedVEM", 4, 10)
        live.client(1, 2)
        live.round(state(5))
        live.client(2, 2)
        said = file.getvalue().splitlines()
    assert len(said) == lines
    if lines:
        assert said[0].startswith("1 of 4 done, pFedVEM, [seed 1]: round 4.5 of 10, 0.0 s so far")
        assert ", PM 71.9%, " in said[1]
        assert "round 6 of 10, PM 71.9%, " in said[2]
        assert said[2].endswith(" s left")


def test_progress_on_a_terminal_writes_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedvem.report.run.LINE_EVERY", 0.0)
    file = io.StringIO()
    with LiveComparison(Console(file=file, force_terminal=True)) as live:
        live.cell("pFedVEM", 1, 4)
        live.stage("pFedVEM", 4, 10)
        live.round(state(5))
    assert "so far" not in file.getvalue()
