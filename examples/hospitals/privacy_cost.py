"""What clipping and noise at the sites cost in accuracy, on digits: the numbers of docs/deployment.md.

    python examples/hospitals/privacy_cost.py

Ten sites in one process, all of which upload in each of 20 rounds; a table comes out, a row for each privacy setting.
"""

import logging
import tempfile
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.clientapp.mod import LocalDpMod
from torch import nn

from pfedvem.data import load_federation
from pfedvem.data.federation import Federation
from pfedvem.data.settings import DataSettings
from pfedvem.flower import Settings, client_app, serve
from pfedvem.flower.local import LocalGrid
from pfedvem.networks import mlp

SITES, ROUNDS, DELTA = 10, 20, 1e-5


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    everyone = load_federation(DataSettings(dataset="digits", clients=SITES), seed=0)

    def data(context: Context) -> Federation:
        return everyone.only(int(context.node_config["partition-id"]))

    def network() -> nn.Module:
        return mlp((1, 8, 8), classes=10)

    print("| clipping norm | epsilon | noise sd | PM | GM |\n|---:|---:|---:|---:|---:|")
    for clip, epsilon in (
        (None, None),
        (10.0, None),
        (1.0, None),
        (1.0, 10_000.0),
        (1.0, 1000.0),
        (1.0, 100.0),
        (1.0, 10.0),
    ):
        np.random.seed(0)  # the mod draws from NumPy's global generator
        # Another site in this one's place moves what is sent by at most twice the norm.
        mods = (
            [LocalDpMod(clip, sensitivity=2 * clip if epsilon else 0.0, epsilon=epsilon or 1.0, delta=DELTA)]
            if clip
            else []
        )
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "experiment": "privacy",
                "clients": SITES,
                "rounds": ROUNDS,
                "eval-every": 0,
                "out": str(Path(folder) / "out"),
                "algorithm.lr-head": 0.01,
                "algorithm.lr-base": 0.01,
            }
            nodes = [{"partition-id": j, "state-dir": str(Path(folder) / str(j))} for j in range(SITES)]
            grid = LocalGrid(client_app(data, network, mods), config, nodes)
            summary = serve(Settings.read(config), network, grid).summary
        noise = 2 * clip * np.sqrt(2 * np.log(1.25 / DELTA)) / epsilon if clip and epsilon else 0
        row = (clip or "none", epsilon or "none", f"{noise:.1g}", f"{summary['pm']:.1f}", f"{summary['gm']:.1f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
