"""The ServerApp: a run from its newest checkpoint to its last round, with the files of the simulator."""

from __future__ import annotations

import fcntl
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.flower import wire
from pfedvem.flower.settings import FREE, Network, Settings
from pfedvem.flower.sites import KNOWN, Status, read_sites
from pfedvem.flower.strategy import FederatedStrategy
from pfedvem.flower.watch import STATUS
from pfedvem.guard import Counts
from pfedvem.models import Model
from pfedvem.rng import SERVER, START, Rng
from pfedvem.simulation import checkpoints
from pfedvem.simulation.fit import lasting
from pfedvem.simulation.results import Result, write_metrics
from pfedvem.simulation.rounds import State, averaged
from pfedvem.simulation.work import Scores

SITES = "sites.json"  # who the sites are that the server has met, so that it knows them when it is started again


def server_app(network: Network, wrap: Callable[[Strategy], Strategy] = lambda strategy: strategy) -> ServerApp:
    """The app of the server.

    Args:
        network: makes the network, the same as at the sites.
        wrap: puts another of Flower's strategies around ours, such as one that adds noise to what is merged.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(Settings.read(context.run_config), network, grid, wrap)

    return app


def serve(
    settings: Settings,
    network: Network,
    grid: Grid,
    wrap: Callable[[Strategy], Strategy] = lambda strategy: strategy,
) -> Result:
    """Runs a federation from its newest checkpoint, or from the start, to its last round."""
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    with only_server(out):
        return _serve(settings, network, grid, out, wrap)


@contextmanager
def only_server(out: Path) -> Iterator[None]:
    """Refuses a second server in the same folder: a ServerApp may outlive a SuperLink that was killed."""
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"Another server is at work in {out}; end its flwr-serverapp process first.") from error
        yield


def _serve(settings: Settings, network: Network, grid: Grid, out: Path, wrap: Callable[[Strategy], Strategy]) -> Result:
    model = settings.build(network)
    state = start(settings, model)
    identity = _identity(settings, model)
    found, warnings = checkpoints.load(out / "checkpoint", state, identity)
    for warning in warnings:
        log(WARNING, "Passed over: %s.", warning)
    if found is not None:
        log(INFO, "Going on after round %d.", found.round)
        state = found
    if state.round > settings.rounds:
        raise UserError(f"{out} has {state.round} rounds already; ask for more than that, not for {settings.rounds}.")
    checkpoints.replace(out / "config.toml", tomli_w.dumps(settings.dump()).encode())

    def after_round(latest: State, status: Status) -> None:
        checkpoints.replace(out / SITES, KNOWN.dump_json(tuple(strategy.met.values())))
        checkpoints.save(out / "checkpoint", latest, identity)
        write_metrics(out, latest)
        checkpoints.replace(out / STATUS, status.dump())

    strategy = FederatedStrategy(settings, model, state, after_round)
    if found is not None:
        strategy.met |= read_sites(out / SITES, settings.clients)
    left = settings.rounds - state.round
    if left > 0:
        (out / "summary.json").unlink(missing_ok=True)
        wrapped = wrap(strategy)
        wrapped.start(grid, wire.pack(settings.algorithm.down(state.server)), left, timeout=settings.round_timeout)
    result = strategy.result(out)
    if left > 0 or not (out / "summary.json").exists():
        result.write(out)
    log(INFO, "The files of the run are in %s.", out)
    return result


def start(settings: Settings, model: Model) -> State:
    """The state before the first round. Of the clients, the server keeps the numbers that they show."""
    algorithm, everyone = settings.algorithm, settings.clients
    server = algorithm.server_init(model, everyone, Rng(settings.seed, START, [SERVER]))
    down = algorithm.down(server)
    seen = algorithm.inspect(down, algorithm.client_init(model, down, Rng(settings.seed, START, [0])))
    unknown = torch.full((everyone,), math.nan)
    numbers = {name: unknown.clone() for name, value in seen.items() if value.shape == (1,)}
    average = averaged(algorithm, None, server, 0)
    return State(0, server, numbers, Scores.unknown(everyone), (), 0.0, Counts.none(everyone), average)


def _identity(settings: Settings, model: Model) -> dict[str, Any]:
    """What a checkpoint must share with the run that goes on from it."""
    same = lasting(settings.dump(), FREE)
    return {**same, "network shapes": {name: list(leaf.shape) for name, leaf in tree.named(model.initial).items()}}
