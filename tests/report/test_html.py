"""The page: what it holds, what it says is missing, and that nothing in a folder can harm who opens it."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure

from pfedvem.errors import UserError
from pfedvem.experiments.compare import cells, settings
from pfedvem.report.html import make, report
from pfedvem.report.html.page import Page, Section, Table
from pfedvem.report.html.run import linked
from pfedvem.report.plots import accuracy_of_the_rest
from pfedvem.report.run import duration
from tests.report.folders import clients, without, write_comparison, write_csv, write_reproduction, write_run
from tests.test_cli import call

MINUS = "\N{MINUS SIGN}"
BINS = {"bins": 3, "count": [0, 40, 60], "confidence": [None, 0.5, 0.9], "accuracy": [None, 0.4, 0.95]}
EVIL = """<script>alert(1)</script>"><img src=x onerror=alert(2)> $\\frac{ {{ 7*7 }} '\x00"""


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its text without style sheets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self._open != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def parsed(page: Page) -> Parsed:
    return Parsed(page.html)


def section(page: Page, title: str) -> Section:
    return next(one for one in page.sections if one.title == title)


def table(page: Page, title: str) -> dict[str, list[str]]:
    """The rows of a section's first table, by their names."""
    return {row[0]: list(row[1:]) for row in section(page, title).tables[0].rows}


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is drawn, but only tests of pictures wait until matplotlib has written them."""

    def drawn(draw: Callable[[Axes], None], about: str, salt: str, size: tuple[float, float]) -> Markup:
        draw(MatplotlibFigure(figsize=size).subplots())
        return Markup("<svg></svg>")

    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("pfedvem.report.html.page.picture", drawn)


@pytest.fixture
def pictures() -> None:
    """Pictures as they are."""


# A run


def test_the_page_of_a_run_holds_its_numbers_pictures_clients_settings_and_command(tmp_path: Path) -> None:
    page = make(write_run(tmp_path / "mine"))
    assert (page.kind, page.title) == ("Run", "pFedVEM on digits")
    assert list(page.facts) == ["20 clients", "30 rounds", "seed 0", "20.5 s"]
    assert {tile.name: tile.value for tile in page.tiles} == {
        "Personalised models": "96.6 %",
        "Global model": "93.3 %",
        "Smallest 10%": "95.6 %",
        "Clients alone": "92.6 %",
        "Gain by joining": "15 of 20",
    }
    titles = ["Accuracy", "Who gains and who loses by joining", "Confidence", "Calibration", "Clients"]
    assert [one.title for one in page.sections] == titles
    assert [figure.title for one in page.sections for figure in one.figures] == [
        *("Over the rounds", "Against local data size"),
        *("Client by client", "Against local data size"),
        *("Confidence against data size", "Confidence against deviation"),
        *("Distribution of confidence", "Distribution of deviation"),
        "Calibration error against data size",
    ]
    assert page.command == "pfedvem run --config config.toml --out NEW"
    assert page.file is not None
    assert page.file.text == (tmp_path / "mine" / "config.toml").read_text()
    assert not page.problems
    shown = parsed(page)
    assert shown.count("svg") == 9
    assert "lr_head = 0.001" in shown.text
    assert "3.2 % (personalised models) and 4.3 % (global model)" in shown.text


def test_who_gains_and_who_loses_is_counted_and_named(tmp_path: Path) -> None:
    joining = section(make(write_run(tmp_path / "mine")), "Who gains and who loses by joining")
    assert joining.text[0] == "15 of 20 clients gain by joining, 5 lose; the mean gain is +2.5 points."
    most, least = joining.tables
    assert (most.title, least.title) == ("Gain most", "Lose most")
    assert list(most.rows[0]) == ["1", "20", "76.1", "80.1", "+4.0"]
    assert [row[0] for row in least.rows] == ["16", "12", "8", "4", "0"]
    assert list(least.rows[0]) == ["16", "170", "83.6", "81.6", f"{MINUS}2.0"]


@pytest.mark.parametrize(
    ("alone", "sentence"),
    [
        ((70, 90, 80, 80), "1 of 4 clients gain by joining, 1 loses, 2 are as good alone; the mean gain is +0.0"),
        ((70, 70, 70, 80), "3 of 4 clients gain by joining, none loses, 1 is as good alone; the mean gain is +7.5"),
        ((90, 90, 90, 90), f"0 of 4 clients gain by joining, 4 lose; the mean gain is {MINUS}10.0"),
    ],
)
def test_the_verdict_is_a_sentence(tmp_path: Path, alone: tuple[int, ...], sentence: str) -> None:
    rows = [{**row, "pm": 80, "alone": value} for row, value in zip(clients(4), alone, strict=True)]
    joining = section(make(write_run(tmp_path / "mine", rows)), "Who gains and who loses by joining")
    assert joining.text[0] == f"{sentence} points."


@pytest.mark.parametrize(
    ("terms", "end"),
    [("both", f"τ = d / (Tr Σ + |μ {MINUS} w|²)."), ("uncertainty", "τ = d / Tr Σ."), ("?", "merged.")],
)
def test_confidence_is_explained_as_the_method_computes_it(tmp_path: Path, terms: str, end: str) -> None:
    page = make(write_run(tmp_path / "mine", algorithm={"confidence": terms}))
    assert section(page, "Confidence").text[0].endswith(end)


@pytest.mark.usefixtures("pictures")
def test_a_point_names_its_client(tmp_path: Path) -> None:
    shown = parsed(make(write_run(tmp_path / "mine")))
    assert "client 3, 40 samples, 80.3 %, alone 76.3 %, gain +4.0, τ 1.06, deviation 0.12" in shown.text
    assert "client 3, 40 samples, 80.3 %, alone 76.3 %, τ 1.06, deviation 0.12" in shown.text


def test_two_columns_are_linked_by_their_ranks() -> None:
    rows = [{"x": x, "y": y} for x, y in ((1, 10), (2, 10), (3, 400), (None, 3))]
    # ranks 1 2 3 and 1.5 1.5 3: r = 1.5 / sqrt(2 * 1.5)
    assert linked(rows, "x", "y") == "Each point is a client. Rank correlation +0.87."
    assert linked(rows[:2], "x", "y") == linked([], "x", "y") == "Each point is a client."
    assert linked([{**row, "y": 1} for row in rows], "x", "y") == "Each point is a client."


def test_bins_of_calibration_become_a_reliability_diagram(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    (folder / "calibration.json").write_text(json.dumps({"pm": BINS, "gm": BINS, "other": 3}))
    page = make(folder)
    titles = [figure.title for figure in section(page, "Calibration").figures]
    assert titles[:2] == ["Reliability", "Accuracy against declined cases"]
    assert not page.problems
    (folder / "calibration.json").write_text(json.dumps({"pm": {**BINS, "count": [1]}}))
    page = make(folder)
    assert "calibration.json cannot be read" in page.problems[0]
    assert len(section(page, "Calibration").figures) == 1


def test_a_method_without_personalised_models_has_a_page(tmp_path: Path) -> None:
    rows = [{**row, "pm": "", "pm_nll": "", "pm_ece": ""} for row in without(clients(), "tau", "deviation", "alone")]
    page = make(write_run(tmp_path / "mine", rows, method="fedavg", pm=None))
    assert [tile.name for tile in page.tiles] == ["Global model"]
    assert section(page, "Accuracy").text == ["FedAvg gives one model for all clients and no personalised ones."]
    assert [one.title for one in page.sections] == ["Accuracy", "Calibration", "Clients"]


def test_without_clients_alone_the_page_says_how_to_know(tmp_path: Path) -> None:
    page = make(write_run(tmp_path / "mine", without(clients(), "alone")))
    joining = section(page, "Who gains and who loses by joining")
    assert "were not trained alone" in joining.text[0]
    assert not joining.figures


@pytest.mark.parametrize("name", [*clients(1)[0]])
def test_a_column_that_is_missing_takes_only_its_own_pictures(tmp_path: Path, name: str) -> None:
    page = make(write_run(tmp_path / "mine", without(clients(), name)))
    assert section(page, "Clients").tables[0].rows
    assert parsed(page).count("svg") >= 4
    assert not page.problems


def test_columns_that_are_not_known_are_shown_as_they_are_called(tmp_path: Path) -> None:
    page = make(write_run(tmp_path / "mine", clients(brier=0.12345, note="text")))
    (found,) = section(page, "Clients").tables
    assert found.header[-1] == "brier"
    assert found.rows[0][-1] == "0.123"


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    page = make(write_run(tmp_path / "mine", clients(uploads=1234.0, left_out=30.0, capped=0.0, clipped=7.0)))
    (found,) = section(page, "Clients").tables
    assert list(found.header[-4:]) == ["Uploads", "Left out", "Capped", "Clipped"]
    assert list(found.rows[0][-4:]) == ["1,234", "30", "0", "7"]


def test_runs_that_the_command_line_did_not_start_get_no_command_that_would_fail(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    for known, word in (({"method": "pfedvem"}, "Python"), ({"method": "pfedvem", "experiment": "x"}, "real sites")):
        (folder / "config.toml").write_text(tomli_w.dumps(known))
        page = make(folder)
        assert page.command == ""
        assert word in page.about_command


def test_one_client_or_equal_clients_are_no_trouble(tmp_path: Path) -> None:
    for count in (1, 3):
        rows = [{**row, "n_train": 5, "tau": 1.0, "deviation": 0.0, "alone": row["pm"]} for row in clients(count)]
        page = make(write_run(tmp_path / f"{count}", rows))
        assert "Distribution of confidence" not in [figure.title for one in page.sections for figure in one.figures]


@pytest.mark.usefixtures("pictures")
def test_a_large_federation_makes_no_large_page(tmp_path: Path) -> None:
    page = make(write_run(tmp_path / "mine", clients(5000)))
    assert len(page.html) < 3_000_000
    assert section(page, "Clients").tables[0].title == "The first 1,000 of 5,000 clients"


# Folders that are unfinished, damaged or something else


def test_an_unfinished_run_has_a_page_that_says_how_to_go_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run")
    for name in ("summary.json", "clients.csv"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().splitlines()[0] + '\n{"round": 1')
    page = make(folder)
    going_on = f"Go on with: pfedvem run --out '{folder}' --resume"
    assert page.problems[0] == f"The run is not finished: round 5 of 30 is the last that was evaluated. {going_on}"
    assert page.problems[1] == "Line 2 of metrics.jsonl cannot be read."
    assert page.sections[0].title == "Accuracy"
    assert "What is missing" in parsed(page).text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1]", b"[" * 100_000, b'{"pm": {"a": 1}}', b"a = 1\x00"])
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "clients.csv", "summary.json", "calibration.json"])
def test_whatever_is_in_a_file_there_is_a_page(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "mine")
    (folder / name).write_bytes(content)
    assert parsed(make(folder)).count("h1") == 1


def test_values_of_other_kinds_count_as_missing(tmp_path: Path) -> None:
    odd: list[Any] = ["many", None, "", "nan", "inf", "-5", "1e400", "0"]
    rows = [{**row, "n_train": value, "pm": value, "tau": value} for row, value in zip(clients(), odd, strict=False)]
    folder = write_run(tmp_path / "mine", rows)
    (folder / "summary.json").write_text(json.dumps({"pm": "high", "gm": [1], "rounds": {}, "seconds": True}))
    (folder / "config.toml").write_text('method = 3\nrounds = "x"\nalone_lr = "y"\ndata = 1\nalgorithm = []\n')
    assert parsed(make(folder)).count("h1") == 1


def test_a_folder_that_is_none_of_these_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "file").write_text("")
    write_reproduction(tmp_path / "both" / "table1")
    for name, sentence in (
        ("nowhere", "There is no folder .*nowhere."),
        ("file", "is a file; name the folder of a run"),
        ("both", "holds reproductions; name one of them, such as .*both/table1"),
        ("photos", "is not the folder of a run, a comparison or a reproduction: it has none of config.toml"),
    ):
        with pytest.raises(UserError, match=sentence):
            make(tmp_path / name)


# A comparison


def test_the_page_of_a_comparison_holds_the_table_with_the_best_in_bold(tmp_path: Path) -> None:
    page = make(write_comparison(tmp_path / "c"))
    assert (page.kind, page.title) == ("Comparison", "4 methods on digits")
    assert list(page.facts) == ["20 clients", "30 rounds", "2 seeds"]
    rows = table(page, "Results")
    assert rows["pFedVEM"] == ["93.5 ± 0.5", "85.0 ± 0.0", "92.5 ± 0.5", "3.2 ± 0.0", "4.3 ± 0.0",
                               "30 kB", "31 kB", "20 s", "2"]  # fmt: skip
    assert rows["Local"][:2] == ["90.5 ± 0.5", "-"]
    bold = re.findall(r"<strong>([\d.]+) ± [\d.]+</strong>", page.html)
    assert Counter(bold) == {"93.5": 1, "92.5": 1, "85.0": 2, "3.2": 3, "4.3": 2}
    assert [tile.about for tile in page.tiles] == ["pFedVEM", "FedAvg, pFedVEM", "pFedVEM"]
    titles = ["Results", "Accuracy", "Who gains and who loses by joining", "Confidence of pFedVEM", "Calibration"]
    assert [one.title for one in page.sections] == [*titles, "Runs"]
    assert [name for name, *_ in section(page, "Accuracy").legend] == ["FedAvg", "FedPer", "Local", "pFedVEM"]
    assert section(page, titles[2]).text == ["Not shown, since clients have no model of their own: FedAvg."]
    assert len(section(page, "Runs").tables[0].rows) == 8


def test_gains_are_against_local_with_the_same_seed(tmp_path: Path) -> None:
    rows = table(make(write_comparison(tmp_path / "c")), "Who gains and who loses by joining")
    assert rows == {
        "FedPer": ["40 of 40", "0 of 40", "+1.5", "+1.5", "+1.0", "+2.0"],
        "pFedVEM": ["40 of 40", "0 of 40", "+3.5", "+3.5", "+3.0", "+4.0"],
    }


def test_where_each_run_was_tested_once_nothing_is_drawn_over_the_rounds(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    assert len(section(make(folder), "Accuracy").figures) == 3
    for file in folder.glob("cells/*/metrics.jsonl"):
        file.write_text(file.read_text().splitlines()[-1] + "\n")
    (figure,) = section(make(folder), "Accuracy").figures
    assert figure.title == "Personalised models against local data size"


def test_small_clients_are_the_tenth_of_each_run_as_in_its_summary(tmp_path: Path) -> None:
    """With seed 1 all clients have less data than any with seed 0, and gain a point more."""
    folder = write_comparison(tmp_path / "c")
    for name in ("local", "fedper", "pfedvem"):
        file = folder / "cells" / f"{name}-1" / "clients.csv"
        with open(file, newline="") as lines:
            rows = [{**row, "n_train": int(row["n_train"]) / 1000} for row in csv.DictReader(lines)]
        write_csv(file, rows)
    found = table(make(folder), "Who gains and who loses by joining")
    assert [row[3] for row in found.values()] == ["+1.5", "+3.5"]


def test_without_local_the_page_says_how_to_know(tmp_path: Path) -> None:
    page = make(write_comparison(tmp_path / "c", methods=("fedper", "pfedvem")))
    assert "Add local to --methods." in section(page, "Who gains and who loses by joining").text[0]


def test_what_is_missing_in_a_comparison_is_named(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    shutil.rmtree(folder / "cells" / "local-1")
    (folder / "cells" / "fedper-0" / "summary.json").unlink()
    (folder / "comparison.csv").unlink()
    about = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps({**about, "failures": ["FedPer, seed 0: It diverged."]}))
    page = make(folder)
    assert list(page.problems) == [
        "comparison.csv is not there.",
        "A run failed. FedPer, seed 0: It diverged.",
        "Not finished: FedPer (seed 0), Local (seed 1). The same command with the same --out goes on.",
    ]
    assert table(page, "Results")["FedPer"][-1] == "1"
    assert table(page, "Who gains and who loses by joining")["pFedVEM"][0] == "20 of 20"


def test_runs_that_have_no_clients_yet_do_not_count(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    for end in ("summary.json", "clients.csv"):
        (folder / "cells" / "pfedvem-1" / end).unlink()
    shares = section(make(folder), "Confidence of pFedVEM").figures[2]
    assert shares.about == "All equal, each share would be 5 %."


def test_a_method_that_is_not_finished_is_not_taken_for_one_without_personal_models(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    for seed in (0, 1):
        for end in ("summary.json", "clients.csv"):
            (folder / "cells" / f"pfedvem-{seed}" / end).unlink()
    joining = section(make(folder), "Who gains and who loses by joining")
    assert joining.text == ["Not shown, since clients have no model of their own: FedAvg."]


def test_runs_of_other_methods_in_the_same_folder_are_left_out(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    (folder / "comparison.json").write_text(json.dumps({"methods": ["pfedvem", "local"], "seeds": [0]}))
    page = make(folder)
    assert set(table(page, "Results")) == {"pFedVEM", "Local"}
    assert list(page.problems) == ["6 runs in cells/ are of other methods or seeds and are left out."]


def test_a_folder_of_cells_alone_is_a_comparison_too(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    for name in ("comparison.csv", "comparison.json"):
        (folder / name).unlink()
    assert list(table(make(folder), "Results")) == ["Local", "FedAvg", "FedPer", "pFedVEM"]
    shutil.rmtree(folder / "cells")
    (folder / "cells").mkdir()
    page = make(folder)
    assert page.problems[-1] == "There is no run in cells/."
    assert parsed(page).count("h1") == 1


def test_the_settings_on_the_page_repeat_the_comparison(tmp_path: Path) -> None:
    methods = ["pfedvem", "local", "examples.ditto:Ditto"]
    plan = cells(methods, seeds=2, flags={"seed": 3, "rounds": 7}, assignments=["pfedvem.lr_head=0.5", "clients=4"])
    (tmp_path / "comparison.toml").write_text(tomli_w.dumps(settings(config.dump() for config in plan)))
    assert cells(methods, seeds=2, file=tmp_path / "comparison.toml") == plan
    for config in plan:
        cell = write_run(tmp_path / "c" / "cells" / f"{config.method}-{config.seed}".replace(":", "-"))
        (cell / "config.toml").write_text(tomli_w.dumps(config.dump()))
    page = make(tmp_path / "c")
    assert page.file is not None
    (tmp_path / "again.toml").write_text(page.file.text)
    assert cells(methods, seeds=2, file=tmp_path / "again.toml") == plan
    named = "local,pfedvem,examples.ditto:Ditto"
    assert page.command == f"pfedvem compare --config comparison.toml --methods {named} --seeds 2 --out NEW"
    assert "Ditto" in table(page, "Results")


def test_the_bins_of_all_seeds_are_put_together(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    for seed in (0, 1):
        (folder / "cells" / f"pfedvem-{seed}" / "calibration.json").write_text(json.dumps({"pm": BINS}))
    assert [figure.title for figure in section(make(folder), "Calibration").figures] == [
        "Reliability, personalised models",
        "Accuracy against declined cases, personalised models",
        "Calibration error",
    ]


def test_declining_the_least_sure_bins_leaves_the_others() -> None:
    """Of ten, two with 0 right, then three with one right, then five with all right."""
    bins = {"count": [5.0, 2.0, 3.0], "confidence": [0.9, 0.2, 0.5], "accuracy": [1.0, 0.0, 1 / 3]}
    declined, accuracy = accuracy_of_the_rest(bins)
    assert declined.tolist() == pytest.approx([0, 0.2, 0.5])
    assert accuracy.tolist() == pytest.approx([6 / 10, 6 / 8, 1])


# A reproduction


def test_the_page_of_a_reproduction_holds_notes_tables_pictures_and_the_command(tmp_path: Path) -> None:
    page = make(write_reproduction(tmp_path / "r"))
    assert (page.kind, page.title) == ("Reproduction", "Table 1: overall")
    assert list(page.facts) == ["table1"]
    assert [one.title for one in page.sections] == [
        "Notes",
        "Overall: fmnist",
        "Overall: fmnist, from round to round",
        "Fashion-MNIST",
        "Figures",
    ]
    (course,) = section(page, "Overall: fmnist, from round to round").tables
    assert (list(course.header), list(course.rows[0])) == (
        ["Method", "50: GM, best of every 5th round"],
        ["FedAvg", "86.1"],
    )
    assert section(page, "Notes").text == ["Two seeds instead of five."]
    (found,) = section(page, "Fashion-MNIST").tables
    assert [list(row) for row in found.rows] == [
        ["pFedVEM", "71.9 ± 0.2", "71.9 ± 0.1", "yes"],
        ["FedAvg", "-", "", ""],
    ]
    assert found.numeric == [False, True, True, False]
    assert page.command == "pfedvem reproduce table1 --datasets fmnist"
    shown = parsed(page)
    assert "Small clients gain most." in shown.text
    assert [
        a["src"] for tag, a in shown.elements if tag == "img" and str(a["src"]).startswith("data:image/png;base64,")
    ]


def test_ours_is_beside_the_papers_with_the_difference(tmp_path: Path) -> None:
    (found,) = section(make(write_reproduction(tmp_path / "r")), "Overall: fmnist").tables
    assert list(found.header) == ["Method", "50: GM", "50: PM", "100: PM"]
    assert {row[0]: list(row[1:]) for row in found.rows} == {
        "FedAvg": ["85.1", "-", "-"],
        "pFedVEM": [
            f"90.6 ± 0.5\n91.4 ± 0.1, {MINUS}0.8 =",
            "-\n91.4 ± 0.1",
            f"90.6 ± 0.1\n91.4 ± 0.1, {MINUS}0.8",
        ],
    }
    assert found.numeric == [False, True, True, True]


def test_files_that_are_missing_broken_or_elsewhere_are_named_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("password\nhunter2\n")
    files = ["../secret.csv", str(tmp_path / "secret.csv"), "none.csv", "", "broken.csv"]
    tables: list[Any] = [{"file": name, "title": "x"} for name in files]
    figures = [{"file": "none.png"}, {"file": "fmnist.csv"}, "odd"]
    folder = write_reproduction(tmp_path / "r", tables=[*tables, 3], figures=figures, notes="none")
    (folder / "broken.csv").write_bytes(b"\xff")
    (folder / "ragged.csv").write_text("a,b\n1\n1,2,3\n")
    page = make(folder)
    assert "hunter2" not in page.html
    told = " ".join(page.problems)
    for name in ("../secret.csv is not in the folder", "none.csv is not there", "broken.csv cannot be read",
                 "none.png is not there", "fmnist.csv is no PNG picture"):  # fmt: skip
        assert name in told
    (folder / "reproduction.json").write_text(json.dumps({"tables": [{"file": "ragged.csv"}]}))
    page = make(folder)
    assert [list(row) for row in section(page, "ragged").tables[0].rows] == [["1", ""], ["1", "2"]]
    (folder / "reproduction.json").write_text("{")
    assert "reproduction.json cannot be read" in make(folder).problems[0]


# Safe and self-contained


@pytest.fixture(params=["run", "comparison", "reproduction"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Page:
    """A page of a folder in which every name is an attack."""
    name = "<script>alert(0)<"
    if request.param == "run":
        rows = [{**row, "client": EVIL, "labels": EVIL, EVIL: 1.0} for row in clients()]
        folder = write_run(tmp_path / name, rows, method=EVIL.replace("\x00", ""), algorithm={EVIL[:40]: EVIL[:60]})
    elif request.param == "comparison":
        folder = write_comparison(tmp_path / name)
        for cell in sorted((folder / "cells").glob("fedper-*")):
            config = tomli_w.dumps({"method": EVIL[:70], "seed": 0, "data": {"dataset": EVIL[:70]}})
            (cell / "config.toml").write_text(config)
            write_csv(cell / "clients.csv", [{**row, "client": EVIL} for row in clients()])
        about = {"methods": [EVIL[:70], "local", "pfedvem"], "seeds": [0, EVIL], "failures": [EVIL]}
        (folder / "comparison.json").write_text(json.dumps(about))
    else:
        told: dict[str, Any] = dict.fromkeys(("name", "title", "command"), EVIL)
        figures = [{"file": "size.png", "title": EVIL, "about": EVIL}]
        tables = [{"file": "evil.csv", "title": EVIL}]
        folder = write_reproduction(tmp_path / name, **told, notes=[EVIL], figures=figures, tables=tables)
        write_csv(folder / "evil.csv", [{EVIL: EVIL, "b": EVIL}])
    return make(folder)


@pytest.mark.usefixtures("pictures")
def test_hostile_names_are_shown_and_never_run(hostile: Page) -> None:
    shown = parsed(hostile)
    assert "<script>alert(1)</script>" in shown.text
    tags = {tag for tag, _ in shown.elements}
    assert not tags & {"script", "iframe", "object", "embed", "form", "link", "a:href", "base"}
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    assert "49" not in re.findall(r"\{\{|\b49\b", shown.text), "nothing is taken for a template"


@pytest.mark.usefixtures("pictures")
def test_nothing_is_loaded_from_anywhere(hostile: Page) -> None:
    shown = parsed(hostile)
    links = [value for _, attributes in shown.elements for name, value in attributes.items() if name in ("src", "href")]
    assert links
    assert all(str(value).startswith(("data:image/png;base64,", "data:text/plain;base64,", "#")) for value in links)
    assert "@import" not in hostile.html
    assert set(re.findall(r"url\((.)", hostile.html)) <= {"#"}, "clip paths are in the page itself"
    assert "http://" not in hostile.html
    assert "https://" not in hostile.html
    (policy,) = [str(a["content"]) for _, a in shown.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")


@pytest.mark.usefixtures("pictures")
def test_ids_are_unique_and_what_is_referred_to_is_there(tmp_path: Path) -> None:
    page = make(write_run(tmp_path / "mine"))
    shown = parsed(page)
    ids = [str(attributes["id"]) for _, attributes in shown.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = {str(a["href"])[1:] for _, a in shown.elements if str(a.get("href")).startswith("#")}
    referred |= set(re.findall(r"url\(#(\w+)\)", page.html))
    assert referred <= set(ids)


@pytest.mark.usefixtures("pictures")
def test_pictures_take_their_colours_from_the_page(tmp_path: Path) -> None:
    html = make(write_run(tmp_path / "mine")).html
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b(?!\w)", re.sub(r'(href|id)="[^"]*"|url\([^)]*\)', "", drawn))) == set()
    assert "var(--blue)" in drawn
    assert "var(--ink)" in drawn


def test_only_columns_of_numbers_are_aligned_as_numbers() -> None:
    row = ["1", "71.9 ± 0.2", "", "-", f"{MINUS}3.5", "1,234", "18 of 20", "30 kB", "1.2e-05", "5 s", "yes", "1 2"]
    assert Table([""] * 12, [row, row]).numeric == [False, *[True] * 9, False, False]
    assert Table(["a", "b"], []).numeric == [False, True]


def test_times_are_for_people() -> None:
    assert [duration(s) for s in (0.04, 89.94, 90, 5000, 9000)] == ["0.0 s", "89.9 s", "1.5 min", "83.3 min", "2.5 h"]


# The command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_the_page_and_says_where(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(place / "mine")
    assert call("report", "mine") == 0
    assert "The page is in mine/report.html" in capsys.readouterr().out
    assert (place / "mine" / "report.html").read_text().startswith("<!doctype html>")
    assert call("report", "mine", "--out", "new/page.html") == 0
    assert (place / "new" / "page.html").exists()
    assert call("report", "mine", "--out", "new") == 2
    assert "error new is a folder; name a file for the page, such as new/report.html." in capsys.readouterr().err


def test_json_names_the_page_and_what_it_holds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write_run(place / "mine") / "clients.csv").unlink()
    assert call("report", "mine", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "page": "mine/report.html",
        "kind": "run",
        "title": "pFedVEM on digits",
        "sections": ["Accuracy", "Who gains and who loses by joining", "Calibration"],
        "problems": ["clients.csv is not there."],
    }
    assert "missing clients.csv is not there." in err


@pytest.mark.parametrize("there", [True, False])
def test_a_browser_is_opened_if_there_is_one(
    place: Path, there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def browser(address: str) -> bool:
        opened.append(address)
        return there

    monkeypatch.setattr("webbrowser.open", browser)
    write_run(place / "mine")
    assert call("report", "mine", "--open") == 0
    assert opened == [(place / "mine" / "report.html").as_uri()]
    assert ("no browser" in capsys.readouterr().out) is not there


def test_a_folder_that_cannot_be_shown_is_a_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", "nowhere") == 2
    assert capsys.readouterr().err == "error There is no folder nowhere.\n"
    assert call("report", "--help") == 0
    assert "Example: pfedvem report" in " ".join(capsys.readouterr().out.split())


def test_the_page_is_replaced_as_the_run_goes_on(place: Path) -> None:
    folder = write_run(place / "mine")
    first, file = report(folder)
    (folder / "summary.json").unlink()
    second, again = report(folder)
    assert (file, again) == (folder / "report.html", folder / "report.html")
    assert "The run is not finished" in file.read_text()
    assert not first.problems
    assert second.problems
