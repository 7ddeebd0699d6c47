"""The ClientApp of a site: it trains what it keeps on data that never leave it, and answers with an upload or numbers.

There is no maths here: a site is a cohort of one, with the random numbers of its place among the clients, so the
simulator and a deployment compute the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.logger import log

from pfedvem import tree
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.flower import wire
from pfedvem.flower.keeping import Keeping
from pfedvem.flower.settings import Network, Settings
from pfedvem.models import Model
from pfedvem.rng import SERVER, START, Rng
from pfedvem.simulation.executors import one_thread
from pfedvem.simulation.work import Job, Outcome, Setup, perform, score

Data = Callable[[Context], Federation]


def client_app(data: Data, network: Network, mods: Sequence[Mod] = ()) -> ClientApp:
    """The app of a site.

    Args:
        data: gives this site's samples, as a federation of one client; ``context.node_config`` says which site it is.
        network: makes the network, the same at all sites and at the server.
        mods: Flower's mods around every upload, such as ``LocalDpMod``; replies without an upload are not for them.
    """
    for mod in mods:
        if getattr(mod, "__name__", "") in ("secagg_mod", "secaggplus_mod"):
            raise UserError(f"Flower's {mod.__name__} would let our uploads pass unmasked; see docs/deployment.md.")
    app = ClientApp()

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return Site.open(context, data, network).introduce(message)

    @app.train("upload", mods=list(mods))
    def upload(message: Message, context: Context) -> Message:
        return Site.open(context, data, network).train(message, upload=True)

    @app.train("adapt")
    def adapt(message: Message, context: Context) -> Message:
        return Site.open(context, data, network).train(message, upload=False)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Site.open(context, data, network).evaluate(message)

    return app


def place(context: Context, clients: int) -> int:
    """Which of the clients this node is: ``partition-id`` of its --node-config."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < clients:
        raise UserError(
            f"This node needs --node-config 'partition-id=N' with N from 0 to {clients - 1}, not {number!r}."
        )
    return number


def folder(context: Context) -> Path:
    """Where this node keeps its files: ``state-dir`` of its --node-config, or PFEDVEM_STATE, or in the home."""
    default = os.environ.get("PFEDVEM_STATE", str(Path.home() / ".pfedvem" / "state"))
    return Path(str(context.node_config.get("state-dir", default))).expanduser()


@dataclass(frozen=True)
class Site:
    """One client at work."""

    client: int
    name: str
    setup: Setup
    keeping: Keeping

    @staticmethod
    def open(context: Context, data: Data, network: Network) -> Site:
        """The site of this node, with its data."""
        settings = Settings.read(context.run_config)
        client = place(context, settings.clients)
        federation = data(context)
        if len(federation) != 1:
            raise UserError(f"A site has the data of one client, not of {len(federation)}.")
        model = settings.build(network)
        model.check(federation.inputs(federation.train.x[:2]))
        # Work is addressed by a client's place in the federation; a site's own data stands at every place.
        seen = replace(federation, shards=federation.shards * settings.clients)
        keeping = Keeping(folder(context), settings.experiment, client, settings.algorithm.name)
        name = str(context.node_config.get("name", client))
        return Site(client, name, Setup(settings.algorithm, model, seen, settings.seed), keeping)

    @property
    def model(self) -> Model:
        return self.setup.model

    def introduce(self, message: Message) -> Message:
        """Says who this is: its place, its name, and the sizes that the server has to know."""
        wire.check_format(wire.config(message.content, wire.JOB))
        federation = self.setup.federation
        about = ConfigRecord(
            {
                "format": wire.FORMAT,
                "client": self.client,
                "name": self.name,
                "n": federation.shards[self.client].n,
                "shape": list(federation.shape),
            }
        )
        return Message(RecordDict({wire.SITE: about}), reply_to=message)

    def train(self, message: Message, *, upload: bool) -> Message:
        """One round of local training, once: a message that comes again gives the same answer."""
        job, down = self._read(message)
        round, evaluate = int(str(job["round"])), bool(job["evaluate"])
        client, anew = self._recall(down, round)
        with one_thread():
            outcome = perform(self.setup, down, client, Job(round, (self.client,), upload=upload, evaluate=evaluate))
        self.keeping.save(round + 1, outcome.client)
        numbers = {**self._scores(outcome), **self._inspect(down, outcome.client), "anew": float(anew)}
        records = RecordDict()
        if upload:
            layout = wire.Layout.of(self.setup.algorithm, down, outcome.up)
            records[wire.UP], weights = layout.write(outcome.up)
            numbers |= weights
        records[wire.NUMBERS] = MetricRecord(dict(numbers))
        return Message(records, reply_to=message)

    def evaluate(self, message: Message) -> Message:
        """Tests what was merged, and the personalised model where the method makes it from that."""
        job, down = self._read(message)
        round = int(str(job["round"]))
        client, _ = self._recall(down, round + 1)
        algorithm, federation = self.setup.algorithm, self.setup.federation
        numbers = self._inspect(down, client)
        with one_thread():
            if algorithm.personalised and algorithm.personal_after_merge:
                todo = Job(round, (self.client,), evaluate=True, train=False)
                numbers |= self._scores(perform(self.setup, down, client, todo))
            if algorithm.global_model:
                params = wire.unpack(wire.arrays(message.content, wire.GENERAL), self.model.initial)
                test = federation.test_indices(self.client)
                scores = zip(wire.SCORES, score(self.setup, tree.expand(params, 1), test)[:4], strict=True)
                numbers |= {**{f"gm.{name}": value for name, value in scores}, "gm.samples": float(len(test))}
        return Message(RecordDict({wire.NUMBERS: MetricRecord(dict(numbers))}), reply_to=message)

    def _read(self, message: Message) -> tuple[Mapping[str, Any], Any]:
        """What is asked for, and what was sent down."""
        job = wire.config(message.content, wire.JOB)
        wire.check_format(job)
        # Only the structure of what is sent matters here, so any server of this method and network will do.
        algorithm, clients = self.setup.algorithm, len(self.setup.federation)
        server = algorithm.server_init(self.model, clients, Rng(self.setup.seed, START, [SERVER]))
        return job, wire.unpack(wire.arrays(message.content, wire.DOWN), algorithm.down(server))

    def _recall(self, down: Any, round: int) -> tuple[Any, bool]:
        """What this client kept when the round began, and whether it had to start anew from what was sent."""
        fresh = self.setup.algorithm.client_init(self.model, down, Rng(self.setup.seed, START, [self.client]))
        client, warnings = self.keeping.load(round, fresh)
        for warning in warnings:
            log(WARNING, "Client %d: %s.", self.client, warning)
        if client is not None:
            return client, False
        if round == 0 and self.keeping.newest > 1:  # after one round only, the first may well be repeated
            log(WARNING, "Client %d writes over what it kept of an earlier run of this experiment.", self.client)
        if round > 0:
            log(WARNING, "Client %d kept nothing of the last %d rounds and starts anew.", self.client, round)
        return fresh, round > 0

    def _scores(self, outcome: Outcome) -> dict[str, float]:
        if outcome.scores is None:
            return {}
        return {f"pm.{name}": float(getattr(outcome.scores, name)) for name in wire.SCORES}

    def _inspect(self, down: Any, client: Any) -> dict[str, float]:
        """What there is to see of this client: numbers only, never what it keeps."""
        seen = self.setup.algorithm.inspect(down, client)
        return {f"seen.{name}": float(value) for name, value in seen.items() if value.shape == (1,)}
