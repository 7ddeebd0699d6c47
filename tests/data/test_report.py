"""What people see of the data: the list, the summary and the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from pfedvem.data import DataSettings, from_arrays, load_federation
from pfedvem.data.catalogue import CATALOGUE
from pfedvem.errors import UserError
from pfedvem.report.data import catalogue_rows, catalogue_table, draw, label_counts, summary, summary_view


def shown(view: object) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_every_data_set_is_listed_with_its_defaults() -> None:
    text = shown(catalogue_table())
    assert all(name in text for name in CATALOGUE)
    assert json.loads(json.dumps(catalogue_rows()))[0]["name"] == "digits"


def test_the_summary_counts_every_sample_once() -> None:
    federation = load_federation(DataSettings(dataset="digits", clients=12), 0)
    facts = json.loads(json.dumps(summary(federation)))
    assert sum(client["train"] for client in facts["clients"]) == facts["train_samples"] == len(federation.train)
    assert sum(sum(client["labels"].values()) for client in facts["clients"]) == facts["train_samples"]
    assert label_counts(federation).sum() == len(federation.train)


def test_the_summary_shows_the_first_clients_and_how_many_more_there_are() -> None:
    federation = load_federation(DataSettings(dataset="digits", clients=12), 0)
    text = shown(summary_view(federation, first=5))
    assert "and 7 more clients" in text
    assert "held out" in text
    assert "more clients" not in shown(summary_view(federation, first=12))


def test_names_with_brackets_are_shown_as_they_are() -> None:
    y = np.tile([0, 1], 10)
    federation = from_arrays(np.ones((20, 1)), y, clients=2, partition="iid", classes=["[bold]", "b"])
    assert "[bold]" in shown(summary_view(federation))


@pytest.mark.parametrize("clients", [1, 20, 200])
def test_the_picture_is_drawn_for_any_number_of_clients(clients: int, tmp_path: Path) -> None:
    federation = from_arrays(np.ones((2000, 1)), np.tile(np.arange(50), 40), clients=clients, partition="iid")
    draw(federation, tmp_path / "partition.png")
    with Image.open(tmp_path / "partition.png") as image:
        assert image.width > 500


def test_a_picture_of_an_unknown_kind_or_in_no_folder_is_refused(tmp_path: Path) -> None:
    federation = from_arrays(np.ones((20, 1)), np.tile([0, 1], 10), clients=2, partition="iid")
    with pytest.raises(UserError, match=r"end its name in \.png"):
        draw(federation, tmp_path / "partition.doc")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="could not be written"):
        draw(federation, tmp_path / "file" / "partition.png")
