"""From a configuration to a result: what ``pfedvem run`` calls."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

from pfedvem.algorithms.local import Local
from pfedvem.data import Federation, load_federation
from pfedvem.experiments.config import Config
from pfedvem.networks import build
from pfedvem.report.logs import Logs
from pfedvem.report.plots import draw_run
from pfedvem.simulation.fit import fit
from pfedvem.simulation.results import Result
from pfedvem.simulation.rounds import Progress, Together


def run(
    config: Config,
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    logs: Logs | None = None,
) -> Result:
    """Loads the data, builds the network, trains with what logs are wanted, and draws a picture of it."""
    with (logs or Logs()).opened(config, out or Path(config.method)) as loggers:
        result = train(config, out=out, resume=resume, progress=Together(progress or Progress(), *loggers))
    if out is not None:
        draw_run(result, out / "run.png")
    return result


def train(
    config: Config,
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    federation: Federation | None = None,
) -> Result:
    """Loads the data, unless it is given, builds the network and trains."""
    if federation is None:
        federation = load_federation(config.data, config.seed)
    progress = progress or Progress()
    for note in federation.notes:
        progress.note(note)
    model = build(config.network, federation.shape, len(federation.classes), config.seed)
    # Beside another method, clients alone have given settings: choosing their own would cost several trainings.
    alone = Local(lr=(config.alone_lr,), batch_size=(10,))
    return fit(
        config.algorithm,
        model,
        federation,
        rounds=config.rounds,
        participation=config.participation,
        seed=config.seed,
        eval_every=config.eval_every,
        alone=alone if config.alone and config.method != Local.name else None,
        out=out,
        resume=resume,
        checkpoint_every=config.checkpoint_every,
        executor=config.executor,
        workers=config.workers,
        cohort=config.cohort,
        device=config.device,
        precision=config.precision,
        train=config.train,
        eval_clients=config.eval_clients,
        keep_models=config.keep_models,
        gm=config.gm,
        guard=config.guard,
        settings=config.dump(),
        progress=progress,
    )


def next_folder(parent: Path, name: str) -> Path:
    """A folder for a run that was given none: PARENT/NAME-1, or the next free number."""
    return next(folder for number in count(1) if not (folder := parent / f"{as_file(name)}-{number}").exists())


def as_file(name: str) -> str:
    """A name that may have a path, a hub id or ``package.module:Class`` in it, as that of a file or folder."""
    return re.sub(r"[/:\\]", "-", name).strip(".-")
