"""Runs in the tools that follow training: TensorBoard and MLflow. Both hear what the progress bar hears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedvem.algorithms import AnyAlgorithm
from pfedvem.errors import UserError
from pfedvem.simulation.fit import flat
from pfedvem.simulation.rounds import Progress, State

if TYPE_CHECKING:
    from pfedvem.experiments.config import Config

TAGS = {"pm": "accuracy/pm", "gm": "accuracy/gm", "pm_loss": "loss/pm", "gm_loss": "loss/gm"}
TAGS |= {"pm_ece": "ece/pm", "gm_ece": "ece/gm", "seconds": "time/seconds"}
EXPERIMENT = "pfedvem"
NEEDED = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}


@dataclass(frozen=True)
class Logs:
    """Where runs are logged: TensorBoard's folder and MLflow's address, None for not at all.

    An empty folder stands for one among the run's own files, an empty address for the one that MLflow is set up with.
    """

    tensorboard: str | None = None
    mlflow: str | None = None

    def __post_init__(self) -> None:
        for name, title in NEEDED.items():
            if getattr(self, name) is not None and find_spec(name) is None:
                raise UserError(f"Logging to {title} needs another package: pip install 'pfedvem[{name}]'.")

    @contextmanager
    def opened(self, config: Config, out: Path) -> Iterator[list[Progress]]:
        """The loggers of a run whose files are in ``out``, which gives it its name."""
        if self.tensorboard is None and self.mlflow is None:
            yield []
            return
        loggers: list[_Logger] = []
        if self.tensorboard is not None:
            folder = Path(self.tensorboard) / out.name if self.tensorboard else out / "tensorboard"
            loggers.append(TensorBoard(config.algorithm, folder))
        if self.mlflow is not None:
            loggers.append(MLflow(config, self.mlflow, out.name))
        complete = False
        try:
            yield list(loggers)
            complete = True
        finally:
            for logger in loggers:
                logger.close(complete)


class _Logger(Progress):
    """Hears the evaluated rounds of the method itself, not those of the clients alone."""

    def __init__(self) -> None:
        self._stages = 0

    def stage(self, title: str, done: int, rounds: int) -> None:
        self._stages += 1
        if self._stages == 1:
            self.begin(done)

    def round(self, state: State) -> None:
        if self._stages == 1 and state.measured is not None:
            self.log(state)

    def begin(self, done: int) -> None:
        """The run starts after so many rounds."""

    def log(self, state: State) -> None:
        """A round was evaluated."""

    def close(self, complete: bool) -> None:
        """The run has ended."""


class TensorBoard(_Logger):
    """Scalars of every evaluated round, and histograms over clients of what the method has to say of each."""

    def __init__(self, algorithm: AnyAlgorithm, folder: Path) -> None:
        super().__init__()
        self._algorithm, self._folder = algorithm, folder
        self._logged = 0

    def begin(self, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run had logged after its checkpoint is run again; without older logs, its history is new.
        self._logged = done if any(self._folder.glob("events.*")) else 0
        self._writer = SummaryWriter(str(self._folder), purge_step=done + 1 if self._logged else None)

    def log(self, state: State) -> None:
        for record in state.history:
            step = int(record["round"] or 0)
            for key, tag in TAGS.items():
                value = record[key]
                if step > self._logged and value is not None:
                    self._writer.add_scalar(tag, value, step)
        self._logged = state.round
        seen = self._algorithm.inspect(self._algorithm.down(state.server), state.clients)
        for name, values in {**seen, "pm": 100 * state.scores.accuracy}.items():
            known = values[values.isfinite()] if values.ndim == 1 else values[:0]
            if known.numel():
                self._writer.add_histogram(f"clients/{name}", known, state.round)
        self._writer.flush()

    def close(self, complete: bool) -> None:
        if self._stages:
            self._writer.close()


class MLflow(_Logger):
    """The settings as parameters and the scalars of every evaluated round as metrics.

    A run that is resumed is a new one there, with the whole history.
    """

    def __init__(self, config: Config, address: str, name: str) -> None:
        super().__init__()
        self._config, self._address, self._name = config, address, name
        self._logged, self._run = 0, ""

    def begin(self, done: int) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            self._client = MlflowClient(self._address or None)
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
            number = experiment.experiment_id if experiment is not None else self._client.create_experiment(EXPERIMENT)
            self._run = self._client.create_run(number, run_name=self._name).info.run_id
        except MlflowException as error:
            raise UserError(f"MLflow cannot be used: {error}") from error
        for key, value in flat(self._config.dump()).items():
            self._client.log_param(self._run, key, value)

    def log(self, state: State) -> None:
        for record in state.history:
            step = int(record["round"] or 0)
            values: dict[str, Any] = {key: value for key, value in record.items() if value is not None}
            if step > self._logged:
                for key in values.keys() - {"round"}:
                    self._client.log_metric(self._run, key, values[key], step=step)
        self._logged = state.round

    def close(self, complete: bool) -> None:
        if self._run:  # it was there to be begun
            self._client.set_terminated(self._run, "FINISHED" if complete else "FAILED")
