"""What is remarkable about clients: found where it is, and not where it is not."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from pfedvem import FedAvg, Federation, Local, PFedVEM, UserError, fit
from pfedvem.data import from_arrays
from pfedvem.report.data import draw as draw_data
from pfedvem.report.inspect import Inspection, _remarks, draw, inspection, inspection_view, outliers, rows, telling
from tests.conftest import small_network


def frame(**columns: Any) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    sizes = np.array([20, 40, 60, 80, 120, 200, 300, 400])
    values: dict[str, Any] = {
        "n_train": sizes,
        "copies": 0.0,
        "pm": 90.0,
        "gain": 2.0,
        "uncertainty": 2.0 / sizes * np.exp(0.1 * rng.normal(size=8)),
        "deviation": np.exp(0.1 * rng.normal(size=8)),
    }
    table = pd.DataFrame({**values, **columns}, index=pd.Index([f"c{j}" for j in range(8)], name="client"))
    return table.assign(tau=1 / (table["uncertainty"] + table["deviation"]), alone=table["pm"] - table["gain"])


def test_clients_that_are_alike_are_not_remarkable() -> None:
    assert all(not said for said in _remarks(frame()).values())


def test_a_client_that_deviates_far_more_than_the_others_is_named() -> None:
    deviation = frame()["deviation"].to_numpy(copy=True)
    deviation[3] = 8
    found = _remarks(frame(deviation=deviation))
    assert [client for client, said in found.items() if said] == ["c3"]
    assert found["c3"][0].startswith("deviates 8.")


def test_a_client_as_uncertain_as_smaller_ones_is_named_and_a_small_one_is_not() -> None:
    uncertainty = frame()["uncertainty"].to_numpy(copy=True)
    assert uncertainty[0] > 10 * uncertainty[7]
    uncertainty[7] *= 5
    found = _remarks(frame(uncertainty=uncertainty))
    assert [client for client, said in found.items() if said] == ["c7"]
    assert re.fullmatch(r"as uncertain as others with (6|7|8|9)\d samples: near-copies\?", found["c7"][0])


def test_copies_overflows_and_losses_are_named() -> None:
    copies, gain = np.zeros(8), np.full(8, 2.0)
    copies[1], gain[2] = 0.5, -1.25
    found = _remarks(frame(copies=copies, gain=gain, discarded=[0, 0, 0, 0, 3, 0, 0, 0]))
    assert found["c1"] == ["50% of its samples are copies of others"]
    assert found["c2"] == ["1.2 points better alone"]
    assert found["c4"] == ["training overflowed 3 times"]


def test_with_few_clients_or_without_numbers_nothing_is_judged() -> None:
    assert outliers(np.array([1.0, 1.0, 9.0])).tolist() == [0, 0, 0]
    nothing, sizes = np.full(8, np.nan), np.arange(1.0, 9.0)
    assert outliers(nothing).tolist() == telling(nothing, sizes).tolist() == [0] * 8
    assert telling(sizes, np.full(8, 10.0)).tolist() == [0] * 8, "clients of one size"
    assert telling(sizes, sizes).tolist() == [0] * 8, "more data that do not make surer"


def test_an_outlier_is_not_taken_for_one_with_near_copies_too() -> None:
    table = frame()
    deviation, uncertainty = (table[name].to_numpy(copy=True) for name in ("deviation", "uncertainty"))
    deviation[7], uncertainty[7] = 50, 1.0
    assert len(_remarks(frame(deviation=deviation, uncertainty=uncertainty))["c7"]) == 1


def run(tmp_path: Path, method: Any, **options: Any) -> Path:
    rng = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 4, generator=rng)

    def client(j: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(3, (n,), generator=rng)
        return centres[y] + torch.randn(n, 4, generator=rng), (y + 1) % 3 if j == 5 else y

    clients = [client(j, 20 + 10 * j) for j in range(8)]
    x, y = clients[2]
    clients[2] = torch.cat([x, x]), torch.cat([y, y])
    federation = Federation.from_datasets({f"site {j}": data for j, data in enumerate(clients)})
    fit(method, small_network(), federation, rounds=30, participation=1.0, eval_every=0, out=tmp_path, **options)
    return tmp_path


def test_a_run_with_a_client_of_other_labels_and_one_with_copies_says_so(tmp_path: Path) -> None:
    method = PFedVEM(lr_head=0.01, lr_base=0.02, base_epochs=2, scale=0.3)
    found = inspection(run(tmp_path, method, alone=Local(lr=0.01)))
    assert found.method == "pFedVEM"
    assert any("deviates" in said for said in found.remarks["site 5"])
    assert any("copies" in said for said in found.remarks["site 2"])
    assert sum("deviates" in said for client in found.remarks.values() for said in client) == 1
    record = next(row for row in rows(found) if row["client"] == "site 5")
    assert json.loads(json.dumps(record))["deviation"] == pytest.approx(found.table.loc["site 5", "deviation"])
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(inspection_view(found))
    text = console.export_text()
    assert "site 5" in text
    assert "clients gain by joining" in text
    draw(found, tmp_path / "clients.png")
    assert (tmp_path / "clients.png").read_bytes().startswith(b"\x89PNG")


def test_methods_without_confidences_are_inspected_too(tmp_path: Path) -> None:
    found = inspection(run(tmp_path, FedAvg(lr=0.01)))
    assert all(row["tau"] is None for row in rows(found))
    with pytest.raises(UserError, match="nothing to draw"):
        draw(found, tmp_path / "clients.png")
    (tmp_path / "clients.csv").unlink()
    with pytest.raises(UserError, match=r"no clients.csv beside"):
        inspection(tmp_path)


def test_names_with_dollars_are_names(tmp_path: Path) -> None:
    table = frame().set_axis(["$\\frac{$", *(str(j) for j in range(7))])
    found = Inspection("my $_$ method", table, {str(client): ["deviates"] for client in table.index})
    draw(found, tmp_path / "clients.png")
    x, y = np.zeros((40, 2), dtype=np.float32), np.arange(40) % 2
    names: dict[str, Any] = {"name": "img$5%_$", "classes": ("$\\frac{$", "b")}
    draw_data(from_arrays(x, y, x, y, clients=2, labels_per_client=2, **names), tmp_path / "data.png")
    assert all((tmp_path / name).stat().st_size > 9_000 for name in ("clients.png", "data.png"))


def test_many_clients_are_shown_in_part() -> None:
    table = pd.concat([frame()] * 4).set_axis([str(j) for j in range(32)])
    found = Inspection("pFedVEM", table, {str(j): [] for j in range(32)})
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(inspection_view(found))
    assert "12 more with --all" in console.export_text()
