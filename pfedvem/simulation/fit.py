"""``fit``: trains a federation from start to finish, with files, checkpoints and resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import tomli_w
from torch import nn

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, AnyAlgorithm
from pfedvem.algorithms.local import Local
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.guard import TRUST, Guard
from pfedvem.models import Model
from pfedvem.simulation import checkpoints
from pfedvem.simulation.executors import executor as make_executor
from pfedvem.simulation.executors import require
from pfedvem.simulation.results import MODELS_BYTES, Result, write_metrics
from pfedvem.simulation.rounds import Progress, State, TextBar, one_round, sample, simulate, start
from pfedvem.simulation.work import Scores, Setup

# Settings that may change when a run goes on: they say where and how long it runs, not what it computes.
FREE = {"rounds", "executor", "workers", "cohort", "device", "checkpoint_every", "alone", "alone_lr", "data.root"}
FREE |= {"keep_models"}

EARLIER = {"precision": "float32", "gm": "last"}  # what was so before it was a setting


Callback = Callable[[Mapping[str, float | None]], bool | None]
"""Hears the record of each evaluated round, as ``Result.history`` has it; True ends the training there."""


class Interrupted(Exception):
    """A run was stopped by Ctrl-C after ``rounds`` complete rounds, which are saved in ``out`` if there is one."""

    def __init__(self, rounds: int, out: Path | None) -> None:
        super().__init__(f"Stopped after round {rounds}.")
        self.rounds, self.out = rounds, out


def fit(
    algorithm: AnyAlgorithm,
    model: Model | nn.Module,
    federation: Federation,
    *,
    head: str | None = None,
    rounds: int | None = None,
    participation: float = 0.1,
    seed: int = 0,
    eval_every: int = 5,
    alone: Local | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    executor: str = "auto",
    workers: int | None = None,
    cohort: int | None = None,
    device: str = "cpu",
    precision: str = "float32",
    train: str = "all",
    eval_clients: int | None = None,
    keep_models: bool = False,
    gm: str = "last",
    guard: Guard = TRUST,
    callbacks: Sequence[Callback] = (),
    settings: Mapping[str, Any] | None = None,
    progress: Progress | bool = False,
) -> Result:
    """Trains ``algorithm`` on a federation.

    Args:
        algorithm: a method with its hyper-parameters, such as ``PFedVEM(lr_head=0.01)``.
        model: any network that ends in a linear layer, or an already split ``Model``.
        federation: the clients' data.
        head: the name of the linear layer that is the head; by default the last one.
        rounds: communication rounds; by default 100, or what the method says of itself (``Local`` trains once).
        participation: the probability that a client uploads in a round.
        seed: drives initial weights and all sampling, from 0 to 2**63 - 1.
        eval_every: rounds between evaluations; the last round is always evaluated.
        alone: also train every client without the federation, by this method, and report it beside.
        out: a folder for the run's files and checkpoints; without one, nothing is written.
        resume: go on from the newest checkpoint in ``out``, if there is one.
        executor: where clients are trained: ``sequential``, ``vectorised``, ``processes`` or ``auto``.
        workers: the number of processes; by default one for each processor.
        cohort: how many clients are trained together at most; by default as many as pays.
        device: ``cpu``, ``cuda`` or ``mps``.
        precision: ``bfloat16`` trains the base in mixed precision, which newer processors compute faster; weights,
            heads, losses and tests stay in ``float32``.
        eval_clients: how many clients are tested, always the same ones; by default all.
        train: who trains in a round: ``all`` clients, as in the paper, or only the ``uploaders``.
        keep_models: also write every client's personalised model into ``out``, for ``load`` and ``pfedvem predict``.
        gm: the global model that is tested and kept: the ``last`` merged, as in the paper, or its ``average`` over
            about ten rounds, which depends less on who happened to upload. Training is the same.
        guard: how far uploads are trusted, such as ``Guard(merge="median")``; by default their weights are bounded.
        callbacks: hear the record of each evaluated round; one that returns True ends the training there.
        settings: what the run was configured with, to be saved as config.toml; by default these arguments.
        progress: True shows a bar, in a terminal or a notebook; or what else is to hear how the run goes on.
    """
    for given, kind, example in (
        (algorithm, Algorithm, "an algorithm such as PFedVEM()"),
        (federation, Federation, "a federation, as Federation.from_datasets makes one"),
        (Local() if alone is None else alone, Local, "alone=Local()"),
        (guard, Guard, 'a guard such as Guard(merge="median")'),
        (callbacks, Sequence, "a list of callbacks"),
    ):
        if not isinstance(given, kind):
            raise UserError(f"fit takes {example}, not {given!r}.")
    if resume and out is None:
        raise UserError("resume goes on from the files of a run: say where they are by out=.")
    model = model if isinstance(model, Model) else Model(model, head)
    model.check(federation.inputs(federation.train.x[:2]))
    if model.classes != len(federation.classes):
        raise UserError(
            f"The network has {model.classes} outputs for {len(federation.classes)} classes; end it in one for each."
        )
    rounds = rounds if rounds is not None else algorithm.default_rounds or 100
    for name, value, lowest in (
        ("rounds", rounds, 1),
        ("seed", seed, 0),
        ("eval_every", eval_every, 0),
        ("checkpoint_every", checkpoint_every, 1),
        ("eval_clients", eval_clients, 1),
        ("workers", workers, 1),
        ("cohort", cohort, 1),
    ):
        if value is None and name in ("eval_clients", "workers", "cohort"):
            continue
        if not isinstance(value, Integral):
            raise UserError(f"{name} must be a whole number, not {value!r}.")
        if value < lowest:
            raise UserError(f"{name} must be at least {lowest}, not {value}.")
    rounds, seed, eval_every = int(rounds), int(seed), int(eval_every)  # NumPy's cannot be written to files
    participation = float(participation)
    if seed >= 2**63:
        raise UserError(f"seed must be below 2**63, not {seed}.")
    if not 0 < participation <= 1:
        raise UserError(f"participation must be above 0 and at most 1, not {participation}.")
    if train not in ("all", "uploaders"):
        raise UserError(f"train must be all or uploaders, not {train!r}.")
    if executor not in ("auto", "sequential", "vectorised", "processes"):
        raise UserError(f"executor must be auto, sequential, vectorised or processes, not {executor!r}.")
    if precision not in ("float32", "bfloat16"):
        raise UserError(f"precision must be float32 or bfloat16, not {precision!r}.")
    if gm not in ("last", "average"):
        raise UserError(f"gm must be last or average, not {gm!r}.")
    require(device)
    if isinstance(progress, bool):
        progress = TextBar() if progress else Progress()
    guard.check(algorithm)
    setup = Setup(algorithm, model, federation, seed, device, guard, precision, gm)
    folder = Path(out) if out is not None else None
    # Where clients keep more than fits in memory, it lies beside the run's files.
    beside = next((place for place in (folder, *folder.parents) if place.is_dir()), None) if folder else None
    state = start(setup, beside)

    saved = settings or {
        "method": algorithm.name,
        "rounds": rounds,
        "participation": participation,
        "seed": seed,
        "eval_every": eval_every,
        "train": train,
        "precision": precision,
        "gm": gm,
        "guard": guard.model_dump(exclude_none=True),
        "algorithm": algorithm.model_dump(mode="json", exclude_none=True),
    }
    identity = _identity(saved, setup)
    if folder is not None:
        state = _open(folder, state, identity, resume, rounds, progress)
        checkpoints.replace(folder / "config.toml", tomli_w.dumps(saved).encode())
        write_metrics(folder, state)

    def after_round(latest: State) -> None:
        nonlocal state
        state = latest
        if folder is None:
            return
        if latest.round % checkpoint_every == 0 or latest.round == rounds:
            checkpoints.save(folder / "checkpoint", latest, identity)
        if latest.measured is not None:
            write_metrics(folder, latest)

    def stop(latest: State) -> bool:
        if latest.measured is None:
            return False
        answers = [callback(latest.measured) for callback in callbacks]  # all of them hear it
        return any(answers)

    try:
        progress.stage(algorithm.title, state.round, rounds)
        if state.round > 0:
            progress.resumed(state)
        with make_executor(setup, executor, workers, cohort) as place:
            simulate(
                state,
                rounds=rounds,
                participation=participation,
                eval_every=eval_every,
                executor=place,
                progress=progress,
                after_round=after_round,
                train=train,
                eval_clients=eval_clients,
                stop=stop,
            )
        if folder is not None and state.round < rounds:  # a callback has ended it
            checkpoints.save(folder / "checkpoint", state, identity)
        scores = None
        if alone is not None:
            progress.stage("alone", 0, 1)
            with make_executor(replace(setup, algorithm=alone), executor, workers, cohort) as place:
                done = one_round(start(place.setup), 1.0, True, place, progress)
            progress.round(done)
            tested = sample(setup, eval_clients)  # the same as in the federation, so that the two can be compared
            scores = tree.put(Scores.unknown(len(federation)), tested, tree.take(done.scores, tested))
        result = Result(setup, state, scores, folder)
        if folder is not None:
            wanted = keep_models and algorithm.personalised
            size = tree.size(model.initial) * len(federation)
            if wanted and size > MODELS_BYTES:
                progress.note(f"The clients' models would take {size / 1e9:.1f} GB and are not written.")
            result.write(folder, models=wanted and size <= MODELS_BYTES, executor=executor, workers=workers)
    except KeyboardInterrupt:
        if folder is not None and state.round > 0:
            checkpoints.save(folder / "checkpoint", state, identity)
            write_metrics(folder, state)
        raise Interrupted(state.round, folder) from None
    return result


def _open(
    folder: Path, state: State, identity: Mapping[str, Any], resume: bool, rounds: int, progress: Progress
) -> State:
    """Looks into the folder of a run; gives the state to go on from."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not the folder of a run.")
    if not resume:
        if (folder / "checkpoint").exists() or (folder / "summary.json").exists():
            raise UserError(f"{folder} holds a run already; go on with --resume, or choose another --out.")
        return state
    found, warnings = checkpoints.load(folder / "checkpoint", state, identity)
    for warning in warnings:
        progress.note(f"Passed over: {warning}.")
    if found is None:
        progress.note(f"There is no checkpoint in {folder}: starting from the first round.")
        return state
    ended = bool(found.history) and found.history[-1]["round"] == rounds
    if found.round > rounds or (found.round == rounds and not ended):
        raise UserError(f"{folder} has {found.round} rounds already; ask for more than that, not for {rounds}.")
    if found.round < rounds:  # where a summary is, everything is
        (folder / "summary.json").unlink(missing_ok=True)
    progress.note(f"Going on after round {found.round}.")
    return found


def _identity(settings: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """What a checkpoint must share with the run that goes on from it, as dotted keys."""
    same = lasting(settings, FREE)
    shapes = {name: list(leaf.shape) for name, leaf in setup.model.initial.theta.items()}
    return {**same, "data": setup.federation.fingerprint(), "network shapes": shapes}


def lasting(settings: Mapping[str, Any], free: set[str]) -> dict[str, Any]:
    """The settings, as dotted keys, that a run cannot change; ``free`` are those that it can.

    What was so in every run of earlier versions is left out, since their checkpoints do not say it.
    """
    return {key: value for key, value in flat(settings).items() if key not in free and EARLIER.get(key) != value}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out
