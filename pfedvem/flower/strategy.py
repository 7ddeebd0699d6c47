"""One strategy for every method. It sends ``down`` and merges what comes back.

A reply that is late, failed, doubled or malformed is counted, named by its site and left out; the round goes on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from pfedvem import tree
from pfedvem.data.federation import Federation, Shard, Split
from pfedvem.errors import UserError
from pfedvem.flower import wire
from pfedvem.flower.settings import Settings
from pfedvem.flower.sites import Deployed, Known, Sites, SiteStatus, Status
from pfedvem.guard import admit
from pfedvem.models import Model
from pfedvem.rng import START, Rng, uploaders
from pfedvem.simulation.results import Result
from pfedvem.simulation.rounds import State, averaged, global_model, mean, number, plan, record
from pfedvem.simulation.work import Job, Setup, perform

HELLO = 30.0  # seconds for a node to say who it is


def _value(numbers: Mapping[str, Any], name: str) -> float:
    """A number that a site reports; nan where it is none, or no possible score."""
    value = numbers.get(name)
    if not isinstance(value, int | float) or not abs(value) <= torch.finfo(torch.float32).max:
        return math.nan
    score = name.startswith(("pm.", "gm."))
    most = {"nll": math.inf, "samples": math.inf, "brier": 2.0}.get(name.partition(".")[2], 1.0)
    possible = not score or 0 <= value <= most
    return float(value) if possible else math.nan


class FederatedStrategy(Strategy):
    """Runs any method of ours by Flower's loop.

    A round is complete, and ``after_round`` hears of it, when its evaluation is. What Flower hands from step to step
    is taken over as the server's state, so a strategy around this one may change it (to add noise, say).
    """

    def __init__(
        self, settings: Settings, model: Model, state: State, after_round: Callable[[State, Status], None]
    ) -> None:
        self.settings, self.model, self.state = settings, model, state
        self.known: dict[int, Known] = {}  # the sites that are there, by node
        self.met: dict[int, Known] = {}  # all that ever were, by client
        self.faults: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self._after_round = after_round
        self._layout: wire.Layout | None = None
        self._asked: dict[int, bool] = {}
        self._last_reply: dict[int, int] = {}
        self._asked_for = self._replies = self._uploads = 0
        self._merged: State | None = None
        self._began = 0.0

    # -- a round, in Flower's order

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Every site that has something to do gets ``down``; those that are drawn are asked for an upload."""
        self._began, self._merged = time.perf_counter(), None
        self.state = replace(self.state, server=self._taken_over(self.state.server, arrays))
        self._gather(grid)
        algorithm, round = self.settings.algorithm, self.state.round
        evaluate = self._evaluates and algorithm.personalised and not algorithm.personal_after_merge
        drawn = uploaders(self.settings.seed, round, self.settings.clients, self.settings.participation)
        jobs = plan(self._setup, round, drawn, range(self.settings.clients) if evaluate else ())
        wanted = {client: job.upload for job in jobs for client in job.clients}
        self._asked = {site.node: wanted[site.client] for site in self.known.values() if site.client in wanted}
        self._asked_for = len(self._asked)
        message = self._job(evaluate, config)
        return [
            Message(
                RecordDict({wire.DOWN: arrays, wire.JOB: message}),
                node,
                f"{MessageType.TRAIN}.{'upload' if upload else 'adapt'}",
                group_id=str(round),
                ttl=self.settings.round_timeout,
            )
            for node, upload in self._asked.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merges the uploads that can be used."""
        state, ups, usable = self.state, {}, self._usable(replies)
        self._replies = len(usable)
        for client, records in usable:
            numbers = wire.numbers(records)
            if self._asked[self._node(client)]:
                ups[client] = self._upload(records)
            state = self._noted(state, client, numbers)
            if numbers.get("anew"):
                self._note(f"{self._name(client)} had kept nothing and started anew from what was sent.")
        if self._replies < min(self.settings.min_replies, len(self._asked)):
            raise UserError(
                f"Round {state.round + 1} has {self._replies} usable replies of {len(self._asked)} where "
                f"min-replies is {self.settings.min_replies}; run again to go on after round {state.round}."
            )
        state = self._merge(state, ups)
        self._merged = state
        return wire.pack(self.settings.algorithm.down(state.server)), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Where an evaluation is due, every site gets what was merged, to test it on its own data."""
        self._asked = {}
        if self._merged is None:  # a strategy around this one did not let the round be merged
            return []
        server = self._taken_over(self._merged.server, arrays)
        average = averaged(self.settings.algorithm, self.state.average, server, self.state.round + 1)
        self._merged = replace(self._merged, server=server, average=average)
        if not self._evaluates:
            return []
        records = RecordDict({wire.DOWN: arrays, wire.JOB: self._job(True, config)})
        general = global_model(self._setup, server, average)
        if general is not None:
            records[wire.GENERAL] = wire.pack(general)
        self._asked = {site.node: False for site in self.known.values()}
        return [
            Message(
                records,
                node,
                MessageType.EVALUATE,
                group_id=str(self.state.round),
                ttl=self.settings.round_timeout,
            )
            for node in self._asked
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Puts the sites' numbers together; the round is complete."""
        if self._merged is None:
            return None
        state, general = self._merged, []
        for client, records in self._usable(replies):
            numbers = wire.numbers(records)
            state = self._noted(state, client, numbers)
            row = [_value(numbers, f"gm.{name}") for name in (*wire.SCORES, "samples")]
            if not any(math.isnan(value) for value in row):  # a site without test data has none
                general.append(row)
        measured = self._measured(state, general) if self._evaluates else None
        seconds = state.seconds + time.perf_counter() - self._began
        history = state.history
        if measured is not None:
            history = (*history, {"round": state.round + 1, **measured, "seconds": round(seconds, 3)})
        self.state = replace(state, round=state.round + 1, history=history, seconds=seconds)
        self._merged = None
        self._after_round(self.state, self.status())
        return MetricRecord({name: value for name, value in (measured or {}).items() if value is not None}) or None

    def summary(self) -> None:
        """Says what runs."""
        settings = self.settings
        log(INFO, "\t%s, %d sites, rounds %d to %d", settings.algorithm.title, settings.clients, self.state.round + 1,
            settings.rounds)  # fmt: skip

    # -- sites

    def _gather(self, grid: Grid) -> None:
        """Gets to know the nodes that are there; waits, but not for ever, for as many sites as a round needs."""
        patience = time.monotonic() + self.settings.wait
        refused: set[int] = set()
        while True:
            connected = set(grid.get_node_ids())
            self.known = {node: site for node, site in self.known.items() if node in connected}
            refused |= self._greet(grid, sorted(connected - set(self.known) - refused))
            if len(self.known) >= self.settings.min_sites:
                return
            if time.monotonic() > patience:
                names = ", ".join(site.name for site in self.known.values()) or "none"
                raise UserError(
                    f"After {self.settings.wait:g} s, {len(self.known)} of {self.settings.min_sites} sites (min-sites) "
                    f"are there: {names}. Start the others and run again to go on after round {self.state.round}."
                )
            time.sleep(min(1.0, self.settings.wait / 10))

    def _greet(self, grid: Grid, nodes: list[int]) -> set[int]:
        """Asks nodes who they are; gives those that were turned away. Others may be slow, and can be asked again."""
        if not nodes:
            return set()
        hello = ConfigRecord({"format": wire.FORMAT, "round": self.state.round})
        messages = [Message(RecordDict({wire.JOB: hello}), node, MessageType.QUERY) for node in nodes]
        answered, refused = set(), set()
        patience = min(HELLO, self.settings.round_timeout, self.settings.wait)
        for reply in grid.send_and_receive(messages, timeout=patience):
            node = reply.metadata.src_node_id
            answered.add(node)
            try:
                self._meet(node, wire.config(wire.content(reply), wire.SITE))
            except (wire.Malformed, KeyError, ValueError, TypeError) as error:
                refused.add(node)
                self._fault(f"node {node}", f"it was turned away: {error}")
        for node in sorted(set(nodes) - answered):
            self._fault(f"node {node}", "it did not say in time who it is")
        return refused

    def _meet(self, node: int, about: Mapping[str, Any]) -> None:
        wire.check_format(about)
        client, n, shape = wire.whole(about, "client"), wire.whole(about, "n"), wire.shape(about, "shape")
        site = Known(node, client, str(about.get("name", ""))[:64], n, shape)
        if not 0 <= site.client < self.settings.clients or site.n < 1:
            raise wire.Malformed(f"there is no client {site.client} with {site.n} samples")
        for other in self.known.values():
            if other.client == site.client:
                raise wire.Malformed(f"node {other.node} is client {site.client} already")
        if any(other.name == site.name for client, other in self.met.items() if client != site.client):
            site = replace(site, name=f"{site.name} ({site.client})")
        if self._layout is None:
            self._layout = self._imagined(site.shape)
        self.known[node] = self.met[site.client] = site

    def _imagined(self, shape: tuple[int, ...]) -> wire.Layout:
        """What uploads look like: that of a client with two blank samples, to compare others with."""
        blank = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long)
        classes = [str(label) for label in range(self.model.classes)]
        setup = Setup(self.settings.algorithm, self.model, Federation.from_clients([(*blank, *blank)], classes), 0)
        down = self.settings.algorithm.down(self.state.server)
        client = self.settings.algorithm.client_init(self.model, down, Rng(0, START, [0]))
        try:
            outcome = perform(setup, down, client, Job(0, (0,), upload=True))
        except (RuntimeError, ValueError, IndexError) as error:
            raise wire.Malformed(f"its inputs of shape {shape} do not fit the network") from error
        return wire.Layout.of(self.settings.algorithm, down, outcome.up)

    def _node(self, client: int) -> int:
        return self.met[client].node

    def _name(self, client: int) -> str:
        return self.met[client].name

    # -- replies

    def _usable(self, replies: Iterable[Message]) -> list[tuple[int, RecordDict]]:
        """The replies that say something, one for each site that was asked, in the order of the clients."""
        found: dict[int, RecordDict] = {}
        answered = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            answered.add(node)
            site = self.known.get(node)
            try:
                if site is None or node not in self._asked:
                    raise wire.Malformed("nobody asked it")
                if reply.metadata.group_id != str(self.state.round):
                    raise wire.Malformed(f"it answers for round {reply.metadata.group_id}")
                if site.client in found:
                    raise wire.Malformed("it answered twice; the first answer counts")
                records = wire.content(reply)
                wire.numbers(records)
                if self._asked[node]:
                    self._upload(records)
                found[site.client] = records
            except wire.Malformed as error:
                self._fault(site.name if site is not None else f"node {node}", f"its reply was left out: {error}")
        for node in self._asked:
            if node not in answered:
                self._fault(self.known[node].name, "its reply did not come in time")
        for client in found:
            self._last_reply[client] = self.state.round + 1
        return sorted(found.items())

    def _upload(self, records: RecordDict) -> Any:
        assert self._layout is not None
        return self._layout.read(wire.arrays(records, wire.UP), wire.numbers(records))

    def _merge(self, state: State, ups: dict[int, Any]) -> State:
        """The state with the uploads merged that pass the guard."""
        algorithm, clients, self._uploads = self.settings.algorithm, sorted(ups), 0
        if ups:
            typical = statistics.median(site.n for site in self.met.values())
            stacked = tree.cat([ups[client] for client in clients])
            found = admit(self.settings.guard, algorithm, algorithm.down(state.server), stacked, typical)
            state = replace(state, counts=state.counts.plus(clients, found.counts))
            for row, text in found.notes.items():
                self._fault(self._name(clients[row]), f"its upload {text}")
            self._uploads = len(found.rows)
            if found.rows:
                return replace(state, server=algorithm.merge(state.server, found.ups))
        self._note("there was no upload to merge; what the server keeps stays as it is.")
        return state

    def _noted(self, state: State, client: int, numbers: Mapping[str, Any]) -> State:
        """The state with what a site says of itself."""

        def put(values: Tensor, name: str) -> Tensor:
            value = _value(numbers, name)
            return values if math.isnan(value) else values.index_fill(0, torch.tensor([client]), value)

        seen = {name: put(values, f"seen.{name}") for name, values in state.clients.items()}
        scores = {name: put(getattr(state.scores, name), f"pm.{name}") for name in wire.SCORES}
        return replace(state, clients=seen, scores=replace(state.scores, **scores))

    @property
    def _prefix(self) -> str:
        return f"Round {self.state.round + 1}: "

    def _fault(self, name: str, what: str) -> None:
        self.faults.setdefault(name, []).append(f"{self._prefix}{what}")
        self._note(f"{name}: {what}.")

    def _note(self, text: str) -> None:
        self.notes.append(f"{self._prefix}{text}")
        log(WARNING, "%s", self.notes[-1])

    # -- results

    @property
    def _evaluates(self) -> bool:
        """Whether the round that runs is evaluated."""
        done, every = self.state.round + 1, self.settings.eval_every
        return done == self.settings.rounds or (every > 0 and done % every == 0)

    def _measured(self, state: State, general: list[list[float]]) -> dict[str, float | None]:
        """The clients' mean scores; the global model's over all of their test samples."""
        table = torch.tensor(general, dtype=torch.float64).view(-1, len(wire.SCORES) + 1)
        tested = ((table[:, :-1] * table[:, -1:]).sum(0) / table[:, -1].sum()).tolist()
        return record([mean(values) for values in state.scores.numbers], tested)

    def _taken_over(self, server: Any, arrays: ArrayRecord) -> Any:
        """The server with what Flower hands on in place of what was sent down."""
        sent = wire.unpack(arrays, self.settings.algorithm.down(server))
        changed = tree.named(sent)
        return tree.rebuild(server, [changed.get(name, leaf) for name, leaf in tree.named(server).items()])

    def _job(self, evaluate: bool, config: ConfigRecord) -> ConfigRecord:
        own = {"format": wire.FORMAT, "round": self.state.round, "evaluate": evaluate}
        return ConfigRecord({**config, **own})

    @property
    def _setup(self) -> Setup:
        """The federation as the server knows it."""
        names = {client: site.name for client, site in self.met.items()}
        sizes = {client: site.n for client, site in self.met.items()}
        shards = tuple(
            Shard(names.get(j, str(j)), np.broadcast_to(np.int64(0), (sizes.get(j, 0),)), (), ())
            for j in range(self.settings.clients)
        )
        shape = next((site.shape for site in self.met.values()), ())
        nothing = Split(torch.empty(0, *shape), torch.empty(0, dtype=torch.long))
        classes = tuple(str(label) for label in range(self.model.classes))
        sites = Sites(self.settings.experiment, nothing, nothing, shards, classes)
        return Setup(self.settings.algorithm, self.model, sites, self.settings.seed, gm=self.settings.gm)

    def result(self, out: Path | None = None) -> Result:
        """What the run has come to."""
        return Deployed(self._setup, self.state, None, out)

    def status(self) -> Status:
        """What there is to see."""
        taus = self.state.clients.get("tau")
        by_client = {site.client: site for site in self.known.values()}
        sites = []
        for client, shard in enumerate(self._setup.federation.shards):
            found = self.faults.get(shard.id, [])
            tau = number(float(taus[client])) if taus is not None else None
            last = self._last_reply.get(client, 0)
            sites.append(
                SiteStatus(
                    shard.id, client, shard.n, client in by_client, last, tau, len(found), found[-1] if found else ""
                )
            )
        last_scores: Mapping[str, float | None] = self.state.history[-1] if self.state.history else {}
        return Status(
            self.settings.experiment,
            self.settings.algorithm.title,
            self.state.round,
            self.settings.rounds,
            self._asked_for,
            self._replies,
            self._uploads,
            last_scores.get("pm"),
            last_scores.get("gm"),
            tuple(sites),
            tuple(self.notes[-20:]),
        )
