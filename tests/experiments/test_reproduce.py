"""The paper's tables and figures: which runs they are made of, what is kept of them, and how they are judged."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock
from matplotlib.figure import Figure

from pfedvem import Progress, UserError
from pfedvem.algorithms import METHODS
from pfedvem.cli import main
from pfedvem.data.settings import DataSettings
from pfedvem.experiments import reproduce as module
from pfedvem.experiments.compare import Measure
from pfedvem.experiments.config import Config
from pfedvem.experiments.reproduce import Found, Recorder, Reproduction, partition_sizes, reproduce, snapshots
from pfedvem.experiments.studies import STUDIES, Cell, Line, Study, grid, published, study
from pfedvem.report import figures
from pfedvem.report.figures import draw, draw_partition_sizes, running_mean
from pfedvem.report.html import make
from pfedvem.report.reproduction import (
    agreement,
    table_csv,
    table_latex,
    table_markdown,
    write_card,
    write_reproduction,
    write_tables,
)
from pfedvem.simulation.checkpoints import sealed, unsealed
from pfedvem.simulation.fit import Interrupted
from pfedvem.simulation.rounds import State
from tests.test_cli import call

TINY = {"rounds": 2, "participation": 0.5, "executor": "vectorised", "data": {"train_samples": 200}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "cache"))


def tiny(
    name: str = "table1", methods: tuple[str, ...] = ("fedavg", "pfedvem"), seeds: int = 1
) -> tuple[Study, list[Cell]]:
    chosen = study(name, ["digits"], () if STUDIES[name].lines else methods, [4])
    own = [f"{one}.epochs=1" for one in chosen.methods if one in ("fedavg", "local") and not chosen.lines]
    return chosen, grid(chosen, seeds=seeds, flags=TINY, assignments=own)


def no_training(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing was to be trained")


def test_only_a_small_data_set_has_fewer_clients() -> None:
    both = grid(study("table1", ["digits", "fmnist"], ["fedavg"]), seeds=1)
    assert [(cell.dataset, cell.configs[0].data.clients) for cell in both] == [
        *(("digits", count) for count in (5, 10, 20)),
        *(("fmnist", count) for count in (50, 100, 200)),
    ]
    given = grid(study("table1", ["digits", "fmnist"], ["fedavg"], [40]), seeds=1)
    assert [cell.configs[0].data.clients for cell in given] == [40, 40]


def test_every_number_of_the_papers_tables_has_its_cell() -> None:
    for chosen in STUDIES.values():
        if chosen.figure:
            continue
        for cell in grid(chosen, seeds=1):
            numbers = [
                published(chosen.name, cell.dataset, cell.line.key, cell.column, kind) for kind in chosen.measures
            ]
            assert any(number is not None for number in numbers), (chosen.name, cell.dataset, cell.line, cell.column)
    assert published("table1", "cifar100", "pfedvem", "50", "pm") == Measure(61.0, 0.4)
    assert published("table1", "fmnist", "fedavg", "200", "gm") == Measure(85.9, 0.2)
    assert published("table1", "fmnist", "fedavg", "200", "pm") is None


def test_what_is_the_same_run_in_two_studies_is_run_once() -> None:
    def names(name: str) -> dict[str, Any]:
        return {
            n: c.dump() for cell in grid(STUDIES[name], seeds=2) for n, c in zip(cell.names, cell.configs, strict=True)
        }

    table = names("table1")
    for other in ("ablation-uncertainty", "ablation-deviation", "limited-data", "small-clients", "fig-confidence"):
        shared = names(other).keys() & table.keys()
        assert shared, other
        assert all(names(other)[name] == table[name] for name in shared)
    assert names("ablation-deviation").keys() - table.keys() == {
        f"cifar100-50{middle}-{seed}"
        for middle in ("-equal-pfedvem", "-equal-pfedvem-deviation", "-pfedvem-deviation")
        for seed in (0, 1)
    }


def test_the_ablations_change_what_they_say() -> None:
    cells = {(cell.line.key, cell.column): cell.configs[0] for cell in grid(STUDIES["ablation-uncertainty"], seeds=1)}
    assert cells["pfedvem", "homo"].data.subclasses_per_client == 5
    assert cells["pfedvem", "hetero"].data.subclasses_per_client == 1
    assert cells["pfedvem-uncertainty", "hetero"].algorithm.model_dump()["confidence"] == "uncertainty"
    assert cells["pfedvem", "hetero"].algorithm.model_dump()["confidence"] == "both"
    equal = {(cell.line.key, cell.column): cell.configs[0] for cell in grid(STUDIES["ablation-deviation"], seeds=1)}
    assert equal["pfedvem-deviation", "equal"].data.sizes == "equal"
    assert equal["pfedvem-deviation", "equal"].algorithm.model_dump()["confidence"] == "deviation"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        ({"name": "table9"}, "There is no 'table9' in the paper; there are table1"),
        ({"name": "ablation-deviation", "methods": ["fedavg"]}, "leave out --methods"),
        ({"name": "fig-partition-sizes", "methods": ["fedavg"]}, "trains nothing"),
        ({"name": "limited-data", "clients": [50, 100]}, "give one number of clients"),
        ({"name": "limited-data", "columns": ["5,000"]}, "no column '5,000'; it has 5000, 10000, 50000"),
        ({"name": "table1", "columns": ["50"]}, "choose them by --clients"),
        ({"name": "table1", "methods": ["fedavgg"]}, "fedavgg"),
        ({"name": "table1", "datasets": ["a/b", "a-b"]}, "Of a/b, a-b, two would have the same files"),
    ],
)
def test_what_the_paper_does_not_have_is_refused(ask: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        study(**ask)


@pytest.mark.parametrize(
    ("assignment", "option"),
    [("clients=7", "--clients"), ("data.clients = 7", "--clients"), ("dataset=fmnist", "--datasets")],
)
def test_what_headings_and_names_say_is_not_for_set(assignment: str, option: str) -> None:
    with pytest.raises(UserError, match=f"by {option}"):
        grid(study("table1", ["digits"], ["fedavg"], [4]), seeds=1, assignments=[assignment])


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("digits", "digits"),
        ("owner/name", "owner-name"),
        ("/home/me/images", "home-me-images"),
        ("../images", "images"),
    ],
)
def test_runs_and_pictures_of_a_folder_anywhere_are_files_of_their_own_folder(
    dataset: str, name: str, tmp_path: Path, pictures: dict[str, Figure]
) -> None:
    chosen = study("table1", [dataset], ["fedavg"], [4])
    (cell,) = grid(chosen, seeds=1, flags=TINY)
    assert cell.names == (f"{name}-4-fedavg-0",)
    summary = {"pm": None, "gm": 80.0, "seconds": 9, "rounds": 2}
    drawn = draw(Reproduction(chosen, (cell,), {cell.names[0]: {"summary": summary}}), tmp_path)
    drawn += draw_partition_sizes(dataset, {4: [1, 2, 3]}, 1, tmp_path)
    assert [one for one, *_ in drawn] == list(pictures) == [f"table1-{name}", f"fig-partition-sizes-{name}"]


def test_a_column_can_be_run_alone_and_is_the_same_run() -> None:
    alone = grid(study("limited-data", columns=["5000"]), seeds=1)
    assert {cell.column for cell in alone} == {"5000"}
    assert [cell for cell in grid(STUDIES["limited-data"], seeds=1) if cell.column == "5000"] == alone


def test_finished_runs_are_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, cells = tiny(seeds=2)
    first = reproduce(chosen, cells, tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(
        n for c in cells for n in (f"{m}.json" for m in c.names)
    )
    assert list((tmp_path / "unfinished").iterdir()) == []
    monkeypatch.setattr(module, "train", no_training)
    again = reproduce(chosen, cells, tmp_path)
    assert again.records == first.records
    fewer = grid(study("table1", ["digits"], ["pfedvem"], [4]), seeds=1, flags=TINY)
    assert reproduce(chosen, fewer, tmp_path).found[0].seeds == 1


@pytest.mark.parametrize("ends", ["finished", "killed"])
def test_a_run_that_another_process_is_at_comes_last(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, cells = tiny()
    theirs, ours = (cell.names[0] for cell in cells)
    (tmp_path / "unfinished").mkdir()
    other = FileLock(tmp_path / "unfinished" / f"{theirs}.lock")
    other.acquire()
    real, order = module.run_one, []

    def run_one(config: Config, file: Path, folder: Path, progress: Progress) -> Any:
        order.append(file.stem)
        if file.stem == ours:  # meanwhile, the other process
            if ends == "finished":
                real(cells[0].configs[0], tmp_path / "runs" / f"{theirs}.json", tmp_path / "elsewhere", Progress())
            other.release()
        return real(config, file, folder, progress)

    monkeypatch.setattr(module, "run_one", run_one)
    progress, seen = Mock(Progress), []
    done = reproduce(chosen, cells, tmp_path, progress=progress, on_cell=lambda *at: seen.append(at[1:]))
    assert order == ([ours] if ends == "finished" else [ours, theirs])
    assert set(done.records) == {theirs, ours}
    assert "Another process is at this run" in progress.note.call_args_list[0].args[0]
    assert seen == [(0, 2), (0, 2), (1, 2)]
    assert list((tmp_path / "unfinished").iterdir()) == []


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=NotImplementedError("no flock here")))
    chosen, cells = tiny(methods=("fedavg",))
    assert len(reproduce(chosen, cells, tmp_path).records) == 1


def test_what_is_finished_can_be_shown_without_running_the_rest(tmp_path: Path) -> None:
    chosen, cells = tiny()
    with pytest.raises(UserError, match="None of these runs is finished"):
        reproduce(chosen, cells, tmp_path, finished_only=True)
    reproduce(chosen, cells[:1], tmp_path)
    shown = reproduce(chosen, cells, tmp_path, finished_only=True)
    assert len(cells) > 1
    assert [len(shown.of(cell)) for cell in cells] == [1] + [0] * (len(cells) - 1)


def test_a_record_tells_everything_but_where_the_data_lay(tmp_path: Path) -> None:
    chosen, cells = tiny(methods=("pfedvem",))
    found = reproduce(chosen, cells, tmp_path / "out")
    (record,) = found.records.values()
    assert "root" not in record["config"]["data"]
    assert str(tmp_path) not in json.dumps(record)
    assert record["summary"]["pm"] == record["history"][-1]["pm"]
    assert len(record["clients"]["tau"]) == len(record["snapshots"]["2"]["tau"]) == 4
    assert record["snapshots"]["2"]["tau"] == record["clients"]["tau"]


def test_snapshots_are_taken_in_the_papers_rounds() -> None:
    _, (cell,) = tiny(methods=("pfedvem",))
    config = cell.configs[0]
    assert snapshots(config.model_copy(update={"rounds": 100})) == (5, 30, 60, 100)
    assert snapshots(config.model_copy(update={"rounds": 31})) == (5, 30, 31)


def test_a_study_that_was_stopped_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    class Stop(Progress):
        def round(self, state: State) -> None:
            if state.round == 1:
                raise KeyboardInterrupt

    chosen, cells = tiny(methods=("pfedvem",))
    straight = reproduce(chosen, cells, tmp_path / "straight")
    with pytest.raises(Interrupted):
        reproduce(chosen, cells, tmp_path / "stopped", progress=Stop())
    assert (tmp_path / "stopped" / "unfinished" / cells[0].names[0] / "checkpoint").is_dir()
    resumed = reproduce(chosen, cells, tmp_path / "stopped")
    for name, record in straight.records.items():
        assert resumed.records[name]["clients"] == record["clients"]
        assert resumed.records[name]["snapshots"] == record["snapshots"]


def test_what_a_kill_kept_from_being_recorded_is_recorded_on_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, cells = tiny(methods=("pfedvem",))
    straight = reproduce(chosen, cells, tmp_path / "straight").records[cells[0].names[0]]
    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "round", Mock(side_effect=KeyboardInterrupt))  # its checkpoint is there already
        with pytest.raises(Interrupted):
            reproduce(chosen, cells, tmp_path / "killed")
    resumed = reproduce(chosen, cells, tmp_path / "killed").records[cells[0].names[0]]
    assert resumed["gm_by_round"] == straight["gm_by_round"]
    assert list(resumed["gm_by_round"]) == ["1", "2"]
    assert resumed["snapshots"] == straight["snapshots"]


def test_a_run_of_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    chosen, cells = tiny(methods=("fedavg",))
    reproduce(chosen, cells, tmp_path)
    other = grid(chosen, seeds=1, flags=TINY, assignments=["fedavg.epochs=2"])
    with pytest.raises(UserError, match=r"algorithm.epochs \(was 1, now 2\)"):
        reproduce(chosen, other, tmp_path)
    (tmp_path / "runs" / f"{cells[0].names[0]}.json").write_text("{")
    with pytest.raises(UserError, match=r"is damaged \(it is no JSON.*delete it"):
        reproduce(chosen, cells, tmp_path)


def test_a_setting_that_came_later_had_its_default_in_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, cells = tiny(methods=("fedavg",))
    reproduce(chosen, cells, tmp_path)
    file = tmp_path / "runs" / f"{cells[0].names[0]}.json"
    record = unsealed(file.read_bytes())
    del record["config"]["algorithm"]["momentum"]
    file.write_bytes(sealed(json.dumps(record)))
    monkeypatch.setattr(module, "train", no_training)
    assert len(reproduce(chosen, cells, tmp_path).of(cells[0])) == 1
    with pytest.raises(UserError, match=r"algorithm.momentum \(was 0.9, now 0.5\)"):
        reproduce(
            chosen, grid(chosen, seeds=1, flags=TINY, assignments=["fedavg.epochs=1", "fedavg.momentum=0.5"]), tmp_path
        )


def test_a_run_that_was_evaluated_more_often_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, cells = tiny(methods=("fedper",))
    often = grid(chosen, seeds=1, flags={**TINY, "eval_every": 1})
    reproduce(chosen, cells, tmp_path)
    assert len(reproduce(chosen, often, tmp_path, finished_only=True).of(often[0])[0]["history"]) == 1
    found = reproduce(chosen, often, tmp_path)
    assert len(found.of(often[0])[0]["history"]) == 2
    monkeypatch.setattr(module, "train", no_training)
    assert len(reproduce(chosen, cells, tmp_path).of(cells[0])[0]["history"]) == 2


def test_convergence_of_a_global_model_needs_no_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, cells = tiny(methods=("fedavg",))
    reproduce(chosen, cells, tmp_path)
    monkeypatch.setattr(module, "train", no_training)
    figure = study("fig-convergence", ["digits"], ["fedavg"], [4])
    (cell,) = grid(figure, seeds=1, flags=TINY, assignments=["fedavg.epochs=1"])
    assert reproduce(figure, [cell], tmp_path).of(cell)[0]["gm_by_round"]


def test_convergence_shows_the_accuracy_that_was_followed(tmp_path: Path, pictures: dict[str, Figure]) -> None:
    """PM where it was evaluated in several rounds, else the course of the GM; of several seeds the rounds of all."""
    cells = grid(
        study("fig-convergence", ["digits"], ["local", "pfedvem", "fedper", "fedavg"], [4]), seeds=2, flags=TINY
    )
    often, once = [{"round": 5, "pm": 80.0}, {"round": 7, "pm": 90.0}], [{"round": 7, "pm": 85.0}]
    none = [{"round": 7, "pm": None}]
    gm = {"5": 60.0, "6": 61.0, "7": 62.0}
    kept = {"local": (once, {}), "pfedvem": (once, gm), "fedper": (often, {}), "fedavg": (none, gm)}
    records = {
        name: {"history": kept[cell.line.key][0], "gm_by_round": kept[cell.line.key][1]}
        for cell in cells
        for name in cell.names
    }
    draw(Reproduction(STUDIES["fig-convergence"], tuple(cells), records), tmp_path)
    lines = {str(line.get_label()): line for line in pictures["fig-convergence-digits"].axes[0].lines}
    shown = {
        label: (line.get_linestyle(), np.asarray(line.get_ydata(), dtype=float).tolist())
        for label, line in lines.items()
    }
    assert shown == {
        "Local": (":", [85.0, 85.0]),
        "pFedVEM": ("--", [60.0, 62.0]),
        "FedPer": ("-", [80.0, 90.0]),
        "FedAvg": ("--", [60.0, 62.0]),
    }


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    chosen = study("table1", ["digits"], ["fedavg", "pfedvem"], [4])
    cells = grid(chosen, seeds=1, flags=TINY, assignments=["fedavg.lr=1e30"])
    found = reproduce(chosen, cells, tmp_path)
    assert list(found.records) == ["digits-4-pfedvem-0"]
    assert "digits, 4 clients, FedAvg, seed 0: Training diverged" in found.failures[0]
    assert found.failures[0] in table_markdown(found)


def test_runs_that_end_for_the_same_reason_are_told_of_once(tmp_path: Path) -> None:
    chosen = study("table1", ["digits", str(tmp_path / "none")], ["fedavg", "pfedvem"], [4, 5])
    found = reproduce(chosen, grid(chosen, seeds=1, flags=TINY), tmp_path / "out")
    assert len(found.records) == 4
    (said,) = found.failures
    assert "4 clients, FedAvg, seed 0 and 3 more: There is no data set or folder" in said


def found_with(ours: Measure | None, paper: Measure | None) -> Found:
    _, cells = tiny()
    return Found(cells[0], "pm", ours, 2, paper)


def test_agreement_is_two_joint_standard_errors() -> None:
    assert found_with(Measure(90.0, 0.3), Measure(91.0, 0.4)).within  # 2 * 0.5
    assert not found_with(Measure(89.9, 0.3), Measure(91.0, 0.4)).within
    assert found_with(Measure(89.9, None), Measure(91.0, 0.4)).within is None
    assert found_with(None, Measure(91.0, 0.4)).difference is None
    ordered = [found_with(Measure(a, None), Measure(b, 0.1)) for a, b in ((1, 10), (2, 20), (3, 15))]
    assert agreement(ordered) == pytest.approx(0.5)


def test_tables_show_ours_beside_the_papers(tmp_path: Path) -> None:
    chosen = study("table1", ["fmnist"], ["fedavg", "pfedme"], [100])
    cells = grid(chosen, seeds=2)
    scores = {"fedavg": (None, None, 85.0, 85.2), "pfedme": (91.0, 91.4, 80.0, 80.0)}
    records = {
        cell.names[i]: {
            "summary": {"pm": scores[cell.line.key][i], "gm": scores[cell.line.key][2 + i], "seconds": 9, "rounds": 100}
        }
        for cell in cells
        for i in (0, 1)
    }
    done = Reproduction(chosen, tuple(cells), records)
    lines = list(csv.DictReader(io.StringIO(table_csv(done))))
    fedavg = next(line for line in lines if line["method"] == "fedavg")
    assert (fedavg["measure"], fedavg["ours"], fedavg["paper"], fedavg["within_2_sem"]) == (
        "gm",
        "85.1",
        "85.4",
        "true",
    )
    worse = next(line for line in lines if line["method"] == "pfedme" and line["measure"] == "gm")
    assert (worse["difference"], worse["within_2_sem"]) == ("-4.4", "false")
    markdown = table_markdown(done)
    assert "| FedAvg | - | 85.1 ± 0.1 (85.4 ± 0.3; -0.3 =) |" in markdown
    assert "| pFedMe | 91.2 ± 0.2 (91.4 ± 0.1; -0.2 =) | 80.0 ± 0.0 (84.4 ± 0.6; -4.4) |" in markdown
    assert "2 of 3 numbers lie within 1.5 points" in markdown
    assert r"\shortstack{$85.1 \pm 0.1$\\{\scriptsize $85.4 \pm 0.3$}}" in table_latex(done)
    write_reproduction(done, tmp_path, "pfedvem reproduce table1")
    card = json.loads((tmp_path / "reproduction.json").read_bytes())
    assert all((tmp_path / one["file"]).is_file() for one in (*card["tables"], *card["figures"]))
    assert (tmp_path / "table1-fmnist.pdf").is_file()


def test_the_global_model_is_followed_from_round_to_round(tmp_path: Path) -> None:
    chosen, cells = tiny(methods=("fedavg", "fedper"))
    found = reproduce(chosen, cells, tmp_path)
    run = found.records["digits-4-fedavg-0"]
    assert list(run["gm_by_round"]) == ["1", "2"]
    assert run["gm_by_round"]["2"] == run["summary"]["gm"]
    assert run["gm_average"] is not None
    assert found.records["digits-4-fedper-0"]["gm_by_round"] == {}  # it has none
    assert found.records["digits-4-fedper-0"]["gm_average"] is None
    assert {one.cell.line.key for one in found.courses} == {"fedavg"}


def test_a_course_has_a_mean_of_the_last_ten_rounds_a_best_of_every_fifth_and_an_average_model() -> None:
    chosen = study("table1", ["fmnist"], ["fedavg"], [100])
    cells = grid(chosen, seeds=1)
    gm = {"85": 10.0, "90": 90.0} | {str(number): 80.0 for number in range(91, 101)} | {"92": 99.0}
    summary = {"pm": None, "gm": 80.0, "seconds": 9, "rounds": 100}
    run = {"summary": summary, "gm_by_round": gm, "gm_average": 85.0}
    done = Reproduction(chosen, tuple(cells), {cells[0].names[0]: run})
    numbers = {one.measure: one.ours.mean for one in done.courses if one.ours}
    assert numbers == {"gm_recent": 81.9, "gm_best": 90.0, "gm_average": 85.0}
    shown = "| FedAvg | 81.9 (85.4 ± 0.3; -3.5) | 90.0 (85.4 ± 0.3; +4.6) | 85.0 (85.4 ± 0.3; -0.4) |"
    assert shown in table_markdown(done)
    assert "fmnist,fedavg,100,gm_recent,81.9,,1,85.4,0.3,-3.5," in table_csv(done)


@pytest.mark.parametrize("name", [name for name, one in STUDIES.items() if one.figure and one.methods])
def test_every_figure_is_drawn_with_our_data(name: str, tmp_path: Path) -> None:
    chosen, cells = tiny(name, methods=("local", "pfedvem") if name.startswith("fig-a") else ("pfedvem",), seeds=2)
    write_reproduction(reproduce(chosen, cells, tmp_path), tmp_path / name, "")
    card = json.loads((tmp_path / name / "reproduction.json").read_bytes())
    (figure,) = card["figures"]
    assert (tmp_path / name / figure["file"]).stat().st_size > 10_000


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """What is drawn, by its name; nothing is written, which takes longer."""
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "_save", lambda figure, folder, name: drawn.update({name: figure}))
    return drawn


def finished(name: str, cells: Sequence[Cell]) -> Reproduction:
    """A figure's runs, of which none was run."""
    scores = {"n_train": [10, 20, 30], "pm": [80.0, 85.0, 90.0]}
    kept = {"tau": [1.0, 2.0, 4.0], "deviation": [0.1, 0.2, 0.5]}
    record = {"clients": scores, "history": [{"round": 1, "pm": 80.0}, {"round": 2, "pm": 90.0}]}
    records = {
        cell.names[0]: {**record, "snapshots": {"2": kept if cell.line.method == "pfedvem" else {}}} for cell in cells
    }
    return Reproduction(STUDIES[name], tuple(cells), records)


@pytest.mark.parametrize("name", ["fig-confidence", "fig-deviation"])
@pytest.mark.parametrize(
    ("datasets", "clients", "labels"),
    [
        (["digits"], [4], ["digits"]),
        (["digits"], [4, 6], ["digits, 4 clients", "digits, 6 clients"]),
        (["digits", "fmnist"], [4], ["digits", "fmnist"]),
    ],
)
def test_every_cell_that_has_confidences_has_a_line_of_its_own(
    name: str, datasets: list[str], clients: list[int], labels: list[str], tmp_path: Path, pictures: dict[str, Figure]
) -> None:
    cells = grid(study(name, datasets, ["pfedvem", "fedavg"], clients), seeds=1, flags=TINY)
    draw(finished(name, cells), tmp_path)
    (axis,) = pictures[name].axes
    assert [line.get_label() for line in axis.lines] == labels
    variant = [replace(cell, line=Line("other", "Other", "pfedvem")) for cell in cells if cell.line.key == "pfedvem"]
    draw(finished(name, [*cells, *variant]), tmp_path)
    assert {str(line.get_label()).split(", ")[1] for line in pictures[name].axes[0].lines} == {"pFedVEM", "Other"}


@pytest.mark.parametrize("name", ["fig-accuracy-vs-size", "fig-convergence"])
def test_a_method_that_is_in_a_later_panel_alone_is_in_the_legend(
    name: str, tmp_path: Path, pictures: dict[str, Figure]
) -> None:
    cells = grid(study(name, ["digits"], ["pfedvem", "fedper"], [4, 6]), seeds=1, flags=TINY)
    done = finished(name, cells)
    records = {run: record for run, record in done.records.items() if run != "digits-4-pfedvem-0"}
    draw(replace(done, records=records), tmp_path)
    (legend,) = pictures[f"{name}-digits"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedPer", "pFedVEM"]


@pytest.mark.parametrize("name", ["fig-accuracy-vs-size", "fig-convergence", "fig-confidence"])
def test_there_may_be_more_lines_than_colours(name: str, tmp_path: Path, pictures: dict[str, Figure]) -> None:
    (cell,) = grid(study(name, ["digits"], ["pfedvem"], [4]), seeds=1, flags=TINY)
    cells = [replace(cell, line=Line(f"m{i}", f"Method {i}", "pfedvem")) for i in range(14)]
    draw(finished(name, cells), tmp_path)
    (figure,) = pictures.values()
    assert len(figure.axes[0].lines) == 14
    draw_partition_sizes("digits", {clients: [1, 2, 3] for clients in range(14)}, 1, tmp_path)


def test_the_page_of_a_table_shows_the_numbers_of_its_markdown(tmp_path: Path) -> None:
    chosen = study("table1", ["cifar100"], ["pfedvem"], [50])
    (cell,) = grid(chosen, seeds=1)
    summary = {"pm": 60.153, "gm": 52.34996, "seconds": 9, "rounds": 100}
    done = Reproduction(chosen, (cell,), {cell.names[0]: {"summary": summary}})
    write_tables(done, tmp_path)
    write_card(chosen, tmp_path, "", [], [])
    assert "| pFedVEM | 60.2 (61.0 ± 0.4; -0.8) | 52.3 (52.8 ± 0.4; -0.5) |" in table_markdown(done)
    (row,) = make(tmp_path).sections[0].tables[0].rows
    assert [cell.splitlines()[0] for cell in row] == ["pFedVEM", "60.2", "52.3"]


def test_partitions_are_drawn_with_the_settings_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: dict[str, Figure]
) -> None:
    given: list[DataSettings] = []

    def watched(settings: list[DataSettings], *_: Any) -> dict[int, list[int]]:
        given.extend(settings)
        return {one.clients: [1, 2, 3] for one in settings}

    monkeypatch.setattr(module, "partition_sizes", watched)
    words = "--datasets digits --clients 4,6 --set labels_per_client=3"
    assert call("reproduce", "fig-partition-sizes", *words.split(), "--out", tmp_path) == 0
    assert [(one.clients, one.labels_per_client) for one in given] == [(4, 3), (6, 3)]
    assert list(pictures) == ["fig-partition-sizes-digits"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--set nonsense=1", "There is no setting 'nonsense'"),
        ("--set clients=5", "choose clients by --clients."),
        ("--finished", "fig-partition-sizes trains nothing; leave out --finished."),
        ("--seeds 5", "fig-partition-sizes trains nothing; leave out --seeds."),
        ("--rounds 3 --workers 2", "fig-partition-sizes trains nothing; leave out --rounds, --workers."),
    ],
)
def test_what_is_of_no_use_to_partitions_is_refused(
    words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "reproduce fig-partition-sizes --datasets digits --clients 4 --draws 1 --out"
    assert call(*command.split(), tmp_path, *words.split()) == 2
    assert sentence in capsys.readouterr().err


def test_partitions_are_drawn_again_and_again() -> None:
    settings = [DataSettings(dataset="digits", clients=clients) for clients in (5, 10)]
    sizes = partition_sizes(settings, 3)
    assert [len(sizes[clients]) for clients in (5, 10)] == [15, 30]
    total = sum(sizes[5][:5])
    assert all(sum(sizes[5][5 * i : 5 * i + 5]) == total for i in range(3))
    assert sizes[5][:5] != sizes[5][5:10]


def test_a_running_mean_of_a_line_stays_on_it() -> None:
    import numpy as np

    x = np.linspace(0, 10, 101)
    grid_of, level = running_mean(x, 2 * x + 1)
    inner = (grid_of > 3) & (grid_of < 7)
    assert np.allclose(level[inner], 2 * grid_of[inner] + 1, atol=0.05)


def table1(words: str, monkeypatch: pytest.MonkeyPatch, out: Path) -> list[dict[str, str]]:
    """The lines of the first table after a command."""
    monkeypatch.setattr("sys.argv", f"pfedvem reproduce table1 {words} --out {out}".split())
    with pytest.raises(SystemExit, match="0"):
        main()
    return list(csv.DictReader(io.StringIO((out / "table1" / "table1.csv").read_text())))


def test_all_methods_pass_through_table_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "--set train_samples=200 --clients 4 --executor vectorised"
    lines = table1(f"--datasets digits --seeds 2 --rounds 2 {few}", monkeypatch, tmp_path)
    assert {line["method"] for line in lines} == set(METHODS)
    assert all(line["seeds"] == "2" and float(line["ours"]) > 0 for line in lines)


def test_a_table_of_a_part_says_that_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--datasets digits --rounds 1 --clients 4 --set train_samples=200 --executor vectorised --seeds"
    table1(f"{few} 2 --methods fedavg", monkeypatch, tmp_path)
    assert "They show only what was asked for" not in capsys.readouterr().out
    table1(f"{few} 1 --methods fedprox", monkeypatch, tmp_path)
    assert "has 2 more finished runs of table1" in capsys.readouterr().out
    table1(f"{few} 2 --methods fedavg,fedprox --finished", monkeypatch, tmp_path)
    assert "They show only what was asked for" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_of_table_1_passes_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table1("--datasets digits --seeds 2 --rounds 10", monkeypatch, tmp_path)
    numbers = {(line["method"], line["column"], line["measure"]): float(line["ours"]) for line in lines}
    assert len({(method, column) for method, column, _ in numbers}) == 33
    assert all(line["seeds"] == "2" for line in lines)
    assert numbers["pfedvem", "5", "pm"] > 80
