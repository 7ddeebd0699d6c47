"""The round loop: broadcast, local training, merging, evaluation; the same for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.rng import SERVER, START, Rng, uploaders
from pfedvem.simulation.executors import Executor
from pfedvem.simulation.work import Job, Outcome, Scores, Setup, score_general


@dataclass(frozen=True)
class State:
    """Everything that a run is after some rounds; the whole of a checkpoint.

    ``scores`` are those of the last evaluated round and ``history`` has a record for each evaluated round.
    """

    round: int
    server: Any
    clients: Any
    scores: Scores
    history: tuple[dict[str, float | None], ...]
    seconds: float


class Progress:
    """Hears how a run goes on. This one keeps silent; a terminal, a notebook or a logger overrides what it wants."""

    def stage(self, title: str, done: int, rounds: int) -> None:
        """A method starts after ``done`` of its rounds."""

    def note(self, text: str) -> None:
        """Something that a user should know."""

    def client(self, done: int, clients: int) -> None:
        """So many of the clients of this round are done."""

    def round(self, state: State) -> None:
        """A round is complete."""


def start(setup: Setup) -> State:
    """The state before the first round."""
    clients = len(setup.federation)
    server = setup.algorithm.server_init(setup.model, clients, Rng(setup.seed, START, [SERVER]))
    kept = setup.algorithm.client_init(setup.model, server, Rng(setup.seed, START, range(clients)))
    unknown = torch.full((clients,), math.nan)  # not tested yet
    return State(0, server, kept, Scores(unknown, unknown.clone()), (), 0.0)


def simulate(
    state: State,
    *,
    rounds: int,
    participation: float,
    eval_every: int,
    executor: Executor,
    progress: Progress,
    after_round: Callable[[State], None],
) -> State:
    """Runs from ``state`` to ``rounds``. ``state`` is only replaced when a round is complete.

    Every ``eval_every`` rounds and after the last, personalised models are tested straight after local training and
    the global model after merging; 0 tests after the last round only.
    """
    while state.round < rounds:
        number = state.round + 1
        evaluate = number == rounds or (eval_every > 0 and number % eval_every == 0)
        state = one_round(state, participation, evaluate, executor, progress)
        after_round(state)
        progress.round(state)
    return state


def one_round(state: State, participation: float, evaluate: bool, executor: Executor, progress: Progress) -> State:
    """One round of the paper's Algorithm 1, for any method."""
    began = time.perf_counter()
    setup = executor.setup
    algorithm, total = setup.algorithm, len(setup.federation)
    down = algorithm.down(state.server)
    uploading = uploaders(setup.seed, state.round, total, participation)
    testing = evaluate and algorithm.personalised
    jobs = plan(setup, state.round, uploading, testing and not algorithm.personal_after_merge)
    outcomes = tested = perform_all(executor, down, state.clients, jobs, progress)

    visited = [j for outcome in outcomes for j in outcome.job.clients]
    clients = tree.put(state.clients, visited, tree.cat([outcome.client for outcome in outcomes]))
    server = algorithm.merge(state.server, tree.cat(finite_uploads(setup, outcomes, state.round + 1, progress)))
    if testing and algorithm.personal_after_merge:
        everyone = Job(state.round, tuple(range(total)), evaluate=True, train=False)
        tested = perform_all(executor, algorithm.down(server), clients, [everyone], progress)
    scores, history = state.scores, state.history
    for outcome in tested:
        if outcome.scores is not None:
            scores = tree.put(scores, outcome.job.clients, outcome.scores)
    measured = measure(setup, server, scores) if evaluate else None
    seconds = state.seconds + time.perf_counter() - began
    if measured is not None:
        history = (*history, {"round": state.round + 1, **measured, "seconds": round(seconds, 3)})
    return State(state.round + 1, server, clients, scores, history, seconds)


def perform_all(executor: Executor, down: Any, clients: Any, jobs: list[Job], progress: Progress) -> list[Outcome]:
    """The outcomes of the jobs, in the order of the clients."""
    expected, done = sum(len(job.clients) for job in jobs), 0
    outcomes = []
    for outcome in executor.run(down, clients, jobs):
        outcomes.append(outcome)
        done += len(outcome.job.clients)
        progress.client(done, expected)
    return sorted(outcomes, key=lambda outcome: outcome.job.clients)


def plan(setup: Setup, round: int, uploading: list[int], evaluate: bool) -> list[Job]:
    """The jobs of a round: work that nothing reads is not in it."""
    uploads = set(uploading)
    others = [j for j in range(len(setup.federation)) if j not in uploads]
    jobs = [Job(round, tuple(uploading), upload=True, evaluate=evaluate)]
    if others and (evaluate or setup.algorithm.trains_everyone):
        jobs.append(Job(round, tuple(others), upload=False, evaluate=evaluate))
    return jobs


def measure(setup: Setup, server: Any, scores: Scores) -> dict[str, float | None]:
    """Tests the global model and averages the clients' scores; accuracies in percent."""
    general = setup.algorithm.general(server) if setup.algorithm.global_model else None
    gm, gm_loss = score_general(setup, general) if general is not None else (math.nan, math.nan)
    values = {"pm": 100 * mean(scores.accuracy), "gm": 100 * gm, "pm_loss": mean(scores.nll), "gm_loss": gm_loss}
    return {name: number(value) for name, value in values.items()}


def finite_uploads(setup: Setup, outcomes: list[Outcome], round: int, progress: Progress) -> list[Any]:
    """The uploads that can be merged: one that has overflowed would spoil the server for good, and is left out."""
    ups = []
    for outcome in outcomes:
        if not outcome.job.upload:
            continue
        if all(bool(leaf.isfinite().all()) for leaf in tree.leaves(outcome.up)):
            ups.append(outcome.up)
        else:
            names = ", ".join(setup.federation.shards[j].id for j in outcome.job.clients)
            progress.note(f"Round {round}: the upload of client {names} has overflowed and was left out.")
    if not ups:
        raise UserError(f"Training diverged in round {round}: every upload overflowed. Try a smaller learning rate.")
    return ups


def mean(values: Tensor) -> float:
    """The mean over the clients that have a value; nan if none has."""
    return float(values.double().nanmean())


def number(value: float) -> float | None:
    """A value for JSON: nan is null."""
    return None if math.isnan(value) else round(value, 4)
