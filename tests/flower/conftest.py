"""Federations in one process, whose nodes a test can make misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from pfedvem.data.federation import Federation
from pfedvem.flower import Settings, client_app, serve
from pfedvem.flower.local import LocalGrid
from pfedvem.models import Model
from pfedvem.simulation.results import Result
from tests.conftest import blobs

SIZES = (7, 12, 2, 23)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class Place:
    """A folder with a server's files and those of its sites, and the settings of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.federation = blobs(SIZES)
        self.config: dict[str, Any] = {
            "experiment": "test",
            "clients": len(SIZES),
            "rounds": 3,
            "participation": 0.6,
            "eval-every": 2,
            "wait": 0.2,
            "out": str(folder / "out"),
        }

    @property
    def settings(self) -> Settings:
        return Settings.read(self.config)

    @property
    def model(self) -> Model:
        return self.settings.build(network)

    def data(self, context: Context) -> Federation:
        return self.federation.only(int(str(context.node_config["partition-id"])))

    def app(self, **options: Any) -> ClientApp:
        return client_app(self.data, network, **options)

    def grid(self, app: ClientApp | None = None) -> LocalGrid:
        nodes = [
            {"partition-id": j, "state-dir": str(self.folder / f"site-{j}"), "name": f"site {j}"}
            for j in range(len(SIZES))
        ]
        return LocalGrid(app or self.app(), self.config, nodes)

    def run(self, grid: LocalGrid | None = None, **options: Any) -> Result:
        return serve(self.settings, network, grid or self.grid(), **options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
