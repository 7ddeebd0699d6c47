"""The round loop: broadcast, local training, merging, evaluation; the same for every method."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from pfedvem import tree
from pfedvem.algorithms.base import AnyAlgorithm
from pfedvem.errors import UserError
from pfedvem.guard import Counts, admit
from pfedvem.models import Params
from pfedvem.rng import SERVER, START, Rng, generator, uploaders
from pfedvem.simulation.executors import Executor
from pfedvem.simulation.store import stacked, uninterrupted
from pfedvem.simulation.work import Job, Outcome, Scores, Setup, score_general

AVERAGED = 10  # rounds, about, over which global models are averaged


@dataclass(frozen=True)
class State:
    """Everything that a run is after some rounds; the whole of a checkpoint.

    ``scores`` are those of the last evaluated round, ``history`` has a record for each evaluated round, and ``counts``
    says what the guard had to do with each client's uploads. ``average`` is that of the global models so far.
    """

    round: int
    server: Any
    clients: Any
    scores: Scores
    history: tuple[dict[str, float | None], ...]
    seconds: float
    counts: Counts
    average: Params | None

    @property
    def measured(self) -> dict[str, float | None] | None:
        """The record of this very round, if it was evaluated."""
        return self.history[-1] if self.history and self.history[-1]["round"] == self.round else None


class Progress:
    """Hears how a run goes on. This one keeps silent; a terminal, a notebook or a logger overrides what it wants."""

    def stage(self, title: str, done: int, rounds: int) -> None:
        """A method starts after ``done`` of its rounds."""

    def resumed(self, state: State) -> None:
        """The method goes on from a checkpoint; whether its last round was heard of before is not known."""

    def note(self, text: str) -> None:
        """Something that a user should know."""

    def client(self, done: int, clients: int) -> None:
        """So many of the clients of this round are done."""

    def round(self, state: State) -> None:
        """A round is complete."""


class TextBar(Progress):
    """A bar of plain text, which terminals and notebooks alike can show."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._round = 0

    def stage(self, title: str, done: int, rounds: int) -> None:
        form = "{desc}: {percentage:3.0f}%|{bar}| round {n:.0f}/{total:.0f} [{elapsed}<{remaining}{postfix}]"
        self._bar, self._round = tqdm(total=rounds, initial=done, desc=title, bar_format=form), done

    def note(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def client(self, done: int, clients: int) -> None:
        self._show(self._round + done / clients)

    def round(self, state: State) -> None:
        self._round = state.round
        last = state.history[-1] if state.history else {}
        scores = {key.upper(): f"{last[key]:.1f}%" for key in ("pm", "gm") if last.get(key) is not None}
        assert self._bar is not None
        self._bar.set_postfix(scores, refresh=False)
        self._show(state.round)
        if state.round == self._bar.total:
            self._bar.close()

    def _show(self, rounds: float) -> None:
        assert self._bar is not None
        self._bar.update(rounds - self._bar.n)


class Together(Progress):
    """Several that hear the same."""

    def __init__(self, *members: Progress) -> None:
        self._members = members

    def stage(self, title: str, done: int, rounds: int) -> None:
        for member in self._members:
            member.stage(title, done, rounds)

    def resumed(self, state: State) -> None:
        for member in self._members:
            member.resumed(state)

    def note(self, text: str) -> None:
        for member in self._members:
            member.note(text)

    def client(self, done: int, clients: int) -> None:
        for member in self._members:
            member.client(done, clients)

    def round(self, state: State) -> None:
        for member in self._members:
            member.round(state)


def start(setup: Setup, folder: Path | None = None) -> State:
    """The state before the first round; where clients keep more than fits in memory, files for it are in ``folder``."""
    clients = len(setup.federation)
    server = setup.algorithm.server_init(setup.model, clients, Rng(setup.seed, START, [SERVER]))

    def make(rows: Sequence[int]) -> Any:
        return setup.algorithm.client_init(setup.model, server, Rng(setup.seed, START, rows))

    kept = stacked(make, clients, folder)
    average = averaged(setup.algorithm, None, server, 0)
    return State(0, server, kept, Scores.unknown(clients), (), 0.0, Counts.none(clients), average)


def simulate(
    state: State,
    *,
    rounds: int,
    participation: float,
    eval_every: int,
    executor: Executor,
    progress: Progress,
    after_round: Callable[[State], None],
    train: str = "all",
    eval_clients: int | None = None,
    stop: Callable[[State], bool] = lambda state: False,
) -> State:
    """Runs from ``state`` to ``rounds``, which takes over the arrays of ``state``: only what is returned is valid.

    Every ``eval_every`` rounds and after the last, personalised models are tested straight after local training and
    the global model after merging; 0 tests after the last round only. With ``train="uploaders"`` only clients that
    upload train in a round; with ``eval_clients`` only so many clients are tested, always the same ones. ``stop`` is
    asked after every round whether that was the last.
    """
    tested = sample(executor.setup, eval_clients)
    while state.round < rounds:
        number = state.round + 1
        evaluate = number == rounds or (eval_every > 0 and number % eval_every == 0)
        changes = play(state, participation, tested if evaluate else None, executor, progress, train)
        with uninterrupted():  # a round counts as a whole or not at all
            tree.write(state.clients, changes.visited, changes.rows)
            state = changes.after(state.clients)
            after_round(state)
        progress.round(state)
        if stop(state):
            break
    return state


def one_round(state: State, participation: float, evaluate: bool, executor: Executor, progress: Progress) -> State:
    """One round; ``state`` stays as it is."""
    changes = play(state, participation, sample(executor.setup) if evaluate else None, executor, progress)
    return changes.after(tree.put(state.clients, changes.visited, changes.rows))


@dataclass(frozen=True)
class Changes:
    """What a round changes: the rows of the clients that were visited, and all else as it is afterwards."""

    visited: list[int]
    rows: Any
    rest: State

    def after(self, clients: Any) -> State:
        """The state after the round, with these clients."""
        return replace(self.rest, clients=clients)


def sample(setup: Setup, count: int | None = None) -> Sequence[int]:
    """The clients that are tested: everyone, or so many at random."""
    total = len(setup.federation)
    if count is None or count >= total:
        return range(total)
    return sorted(generator(setup.seed, "evaluation").choice(total, count, replace=False).tolist())


def play(
    state: State,
    participation: float,
    tested: Sequence[int] | None,
    executor: Executor,
    progress: Progress,
    train: str = "all",
) -> Changes:
    """One round of the paper's Algorithm 1, for any method; where ``tested`` is not None it is evaluated."""
    began = time.perf_counter()
    setup = executor.setup
    algorithm, total = setup.algorithm, len(setup.federation)
    down = algorithm.down(state.server)
    uploading = uploaders(setup.seed, state.round, total, participation)
    personal = tested if algorithm.personalised and tested is not None else ()
    jobs = plan(setup, state.round, uploading, () if algorithm.personal_after_merge else personal, train)
    outcomes = scored = perform_all(executor, down, state.clients, jobs, progress)

    visited = [j for outcome in outcomes for j in outcome.job.clients]
    rows = tree.cat([outcome.client for outcome in outcomes])
    for j in sorted(j for outcome in outcomes for j in outcome.lost):
        name = setup.federation.shards[j].id
        progress.note(f"Round {state.round + 1}: client {name} has overflowed in training and keeps what it had.")
    server, counts = merged(setup, state, outcomes, progress)
    if personal and algorithm.personal_after_merge:
        test = Job(state.round, tuple(personal), evaluate=True, train=False)
        clients = tree.put(state.clients, visited, rows)
        scored = perform_all(executor, algorithm.down(server), clients, [test], progress)
    scores, history = Scores.unknown(total) if tested is not None else state.scores, state.history
    for outcome in scored:
        if outcome.scores is not None:
            scores = tree.put(scores, outcome.job.clients, outcome.scores)
    number = state.round + 1
    average = averaged(algorithm, state.average, server, number)
    measured = measure(setup, global_model(setup, server, average), scores) if tested is not None else None
    seconds = state.seconds + time.perf_counter() - began
    if measured is not None:
        history = (*history, {"round": number, **measured, "seconds": round(seconds, 3)})
    return Changes(visited, rows, State(number, server, None, scores, history, seconds, counts, average))


def perform_all(executor: Executor, down: Any, clients: Any, jobs: list[Job], progress: Progress) -> list[Outcome]:
    """The outcomes of the jobs, in an order that does not depend on which was done first."""
    expected, done = sum(len(job.clients) for job in jobs), 0
    outcomes = []
    for outcome in executor.run(down, clients, jobs):
        outcomes.append(outcome)
        done += len(outcome.job.clients)
        progress.client(done, expected)
    return sorted(outcomes, key=lambda outcome: outcome.job.clients)


def plan(setup: Setup, round: int, uploading: Iterable[int], tested: Iterable[int], train: str = "all") -> list[Job]:
    """The jobs of a round: work that nothing reads is not in it."""
    uploads, tests = set(uploading), set(tested)
    everyone = train == "all" and setup.algorithm.trains_everyone
    groups: dict[tuple[bool, bool], list[int]] = {}
    for j in range(len(setup.federation)) if everyone else sorted(uploads | tests):
        groups.setdefault((j in uploads, j in tests), []).append(j)
    return [
        Job(round, tuple(clients), upload=upload, evaluate=evaluate, keep=upload or everyone)
        for (upload, evaluate), clients in groups.items()
    ]


def averaged(algorithm: AnyAlgorithm, average: Params | None, server: Any, round: int) -> Params | None:
    """The average of the global models up to this round: of the first ten, each counts alike, and from then on the
    newest counts a tenth. Nothing is trained from it; None where the method has no global model.

    A merged model goes with the few clients that happened to upload; their mean over rounds is one of many clients.
    """
    newest = algorithm.general(server) if algorithm.global_model else None
    if newest is None or average is None:
        return newest
    return tree.towards(average, newest, max(1 / round, 1 / AVERAGED))


def global_model(setup: Setup, server: Any, average: Params | None) -> Params | None:
    """The global model that is tested and kept, where the method has one: the last merged, or the average."""
    if setup.gm == "average" or not setup.algorithm.global_model:
        return average
    return setup.algorithm.general(server)


def measure(setup: Setup, general: Params | None, scores: Scores) -> dict[str, float | None]:
    """Tests the global model and averages the clients' scores; accuracies and calibration errors in percent."""
    tested = score_general(setup, general)[:4] if general is not None else (math.nan,) * 4
    return record(average(scores), tested)


def record(personal: Sequence[float], general: Sequence[float]) -> dict[str, float | None]:
    """The scores of PM and GM, each accuracy, NLL, calibration error and Brier score, as history has them."""
    (pm, pm_loss, pm_ece, pm_brier), (gm, gm_loss, gm_ece, gm_brier) = personal, general
    values = {"pm": 100 * pm, "gm": 100 * gm, "pm_loss": pm_loss, "gm_loss": gm_loss}
    values |= {"pm_ece": 100 * pm_ece, "gm_ece": 100 * gm_ece, "pm_brier": pm_brier, "gm_brier": gm_brier}
    return {name: number(value) for name, value in values.items()}


def merged(setup: Setup, state: State, outcomes: list[Outcome], progress: Progress) -> tuple[Any, Counts]:
    """The server after the uploads that pass the guard, and the guard's counts; what is new is said."""
    uploads = [outcome for outcome in outcomes if outcome.job.upload]
    clients = [j for outcome in uploads for j in outcome.job.clients]
    algorithm, number = setup.algorithm, state.round + 1
    typical = statistics.median(setup.federation.sizes)
    ups = tree.cat([outcome.up for outcome in uploads])
    found = admit(setup.guard, algorithm, algorithm.down(state.server), ups, typical)
    counts = state.counts.plus(clients, found.counts)
    if not found.rows and counts.diverged:
        raise UserError(f"Training diverged in round {number}: every upload overflowed. Try a smaller learning rate.")
    for row, text in sorted(found.notes.items(), key=lambda item: clients[item[0]]):
        j = clients[row]
        if state.counts.unsuspected(j):  # said once; counted every time
            progress.note(f"Round {number}: the upload of client {setup.federation.shards[j].id} {text}.")
    if not found.rows:
        progress.note(f"Round {number}: there was no upload to merge; what the server keeps stays as it is.")
        return state.server, counts
    return algorithm.merge(state.server, found.ups), counts


def average(scores: Scores) -> list[float]:
    """The mean of each score over the clients that were tested; nan where one of them has none, for it has diverged."""
    tested = ~scores.accuracy.isnan()
    return [float(values[tested].double().mean()) for values in scores.numbers]


def mean(values: Tensor) -> float:
    """The mean over the clients that have a value; nan if none has."""
    return float(values.double().nanmean())


def number(value: float) -> float | None:
    """A value for JSON: nan is null."""
    return None if math.isnan(value) else round(value, 4)
