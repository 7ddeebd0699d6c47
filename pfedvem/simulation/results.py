"""What a run leaves: numbers for people and programs, and the folder of files."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pfedvem import saved, tree
from pfedvem.data.inputs import Inputs
from pfedvem.errors import UserError
from pfedvem.models import Posterior
from pfedvem.simulation import checkpoints
from pfedvem.simulation.executors import Executor, Vectorised
from pfedvem.simulation.executors import executor as make_executor
from pfedvem.simulation.rounds import State, global_model, mean, number
from pfedvem.simulation.work import Job, Scores, Setup, score_general
from pfedvem.trained import ROUNDS, Personal, Trained
from pfedvem.uncertainty import SAMPLES, Calibration, Prediction, calibration, predictor

if TYPE_CHECKING:
    import pandas as pd

SMALL = 0.1  # the share of clients that counts as small, as in the paper
MODELS_BYTES = 2**30  # personalised models that would take more than this are not written with a run


@dataclass(frozen=True)
class Result:
    """A finished run. ``alone`` are the scores of clients that train without the federation, if asked for."""

    setup: Setup
    state: State
    alone: Scores | None
    out: Path | None

    @property
    def history(self) -> list[dict[str, float | None]]:
        """A record for each evaluated round: round, pm, gm, their losses and calibration errors, seconds."""
        return list(self.state.history)

    @property
    def summary(self) -> dict[str, Any]:
        """The run in one line; accuracies in percent, null where the method has no such model."""
        pm, last = self.state.scores.accuracy, self.state.history[-1]
        tested = int((~pm.isnan()).sum())
        return {
            "method": self.setup.algorithm.name,
            "dataset": self.setup.federation.name,
            "clients": len(self.setup.federation),
            "rounds": self.state.round,
            "seed": self.setup.seed,
            "pm": last["pm"],
            "pm_sem": number(100 * spread(pm) / math.sqrt(tested)) if tested > 1 else None,
            "gm": last["gm"],
            "small_clients_pm": number(100 * mean(pm[self.small_clients])),
            "alone_pm": number(100 * mean(self.alone.accuracy)) if self.alone is not None else None,
            **{
                f"{model}_{name}": last.get(f"{model}_{key}")
                for model in ("pm", "gm")
                for name, key in (("nll", "loss"), ("ece", "ece"), ("brier", "brier"))
            },
            "seconds": round(self.state.seconds, 3),
        }

    @property
    def small_clients(self) -> list[int]:
        """The tenth of the clients with the least data, at least one."""
        sizes = self.setup.federation.sizes
        known = [j for j in range(len(sizes)) if sizes[j] > 0]  # a site that never came has no size
        return sorted(known, key=lambda j: (sizes[j], j))[: max(1, round(SMALL * len(sizes)))]

    @property
    def clients(self) -> pd.DataFrame:
        """A row for each client, by its id: its data, its scores, and what the method has to say of it."""
        import pandas as pd

        return pd.DataFrame(self.rows).set_index("client")

    @cached_property
    def _copies(self) -> list[float]:
        """The share of each client's training samples that are copies of others of its own."""
        federation = self.setup.federation
        return [federation.copies(j) for j in range(len(federation))]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The same as plain records, null where there is no number."""
        seen = {name: values for name, values in self._inspected().items() if values.ndim == 1}
        scores = self.state.scores
        rows = []
        for j, shard in enumerate(self.setup.federation.shards):
            row = {
                "client": shard.id,
                "n_train": shard.n,
                "copies": number(self._copies[j]),
                "labels": "; ".join(shard.owns),
                "pm": number(100 * float(scores.accuracy[j])),
                "pm_nll": number(float(scores.nll[j])),
                "pm_ece": number(100 * float(scores.ece[j])),
                "pm_brier": number(float(scores.brier[j])),
                **{name: int(values[j]) for name, values in vars(self.state.counts).items()},
                **{name: float(values[j]) for name, values in seen.items()},
            }
            if self.alone is not None:
                row["alone"] = number(100 * float(self.alone.accuracy[j]))
            rows.append(row)
        return rows

    @property
    def warnings(self) -> list[str]:
        """What a user should know about the training."""
        said = self.state.counts.warnings()
        discarded = self._inspected().get("discarded")
        if discarded is None or not bool(discarded.any()):
            return said
        count, total = int((discarded > 0).sum()), int(discarded.sum())
        return [
            f"{count} clients overflowed in training ({total} times) and kept what they had; try a smaller lr_head.",
            *said,
        ]

    # Models

    @cached_property
    def trained(self) -> Trained:
        """What was learned, ready for use."""
        setup, federation = self.setup, self.setup.federation
        kept: dict[str, Personal] = {}

        def find(client: str) -> Personal:
            if client not in kept:
                (kept[client],) = self.take_home([federation.place(client)])
            return kept[client]

        ids = tuple(shard.id for shard in federation.shards)
        return Trained(
            setup.algorithm,
            setup.model,
            self.state.server,
            federation.classes,
            federation.raw,
            ids,
            setup.seed,
            find,
            average=self.state.average if setup.gm == "average" else None,
        )

    def personal(self, client: str | int) -> nn.Module:
        """A client's model as an ordinary ``nn.Module``: logits (N, classes) of the inputs that the client has.

        Where training makes the model anew in each round (as pFedVEM trains its base), it is that of one more round
        of local training from what the server has learned, without an upload.
        """
        return self.trained.personal(client)

    def general(self) -> nn.Module:
        """The global model as an ordinary ``nn.Module``: logits (N, classes) of the inputs that clients have."""
        return self.trained.general()

    def predict(self, client: str | int | None, x: Any, *, samples: int = SAMPLES) -> Prediction:
        """Predicts for a client, or by the global model where that is None, with how sure it is.

        Args:
            x: inputs as the client has them: a tensor, an array, or a DataFrame with the columns of training.
            samples: how many samples of the posterior to average over; 0 predicts by its mean.
        """
        return self.trained.predict(client, x, samples=samples)

    def personalize(
        self, data: Any, client: str | int = "new", *, label: str | None = None, rounds: int = ROUNDS
    ) -> Personal:
        """Fits a model for a client that was not there; ``predict`` and ``personal`` know it from then on.

        Args:
            data: the client's samples, in a form that ``Federation.from_datasets`` takes.
            client: the name that it is known by.
            label: the column of the labels, where the data is a table.
            rounds: how many rounds of local training, with what the server has learned as it is.
        """
        return self.trained.personalize(data, client, label=label, rounds=rounds)

    def calibration(self, *, samples: int = SAMPLES) -> Calibration:
        """How right all clients' predictions are on their own test data, taken together.

        Where a method has no personalised models, how right the global model is on the test data of all.
        """
        setup, federation = self.setup, self.setup.federation
        seen = Inputs(federation.shape, images=False)  # as the network sees them

        def predicted(posterior: Posterior, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, y = federation.test_samples(test)
            made = predictor(setup.model, posterior, seen, setup.seed, samples).predict(x, federation.classes)
            return made.probabilities, y, made.entropy

        if setup.algorithm.personalised:
            tested = [j for j in range(len(federation)) if len(federation.test_indices(j))]
            if not tested:
                raise UserError("No client has test data to judge predictions by.")
            homes = ((one, federation.test_indices(federation.place(one.client))) for one in self.take_home(tested))
            parts = [predicted(one.posterior, test) for one, test in homes]
        else:
            general = global_model(setup, self.state.server, self.state.average)
            assert general is not None  # a method has one or the other
            parts = [predicted(Posterior(general, {}), federation.general_indices())]
        return calibration(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def take_home(self, clients: Sequence[int], place: Executor | None = None) -> Iterator[Personal]:
        """The personalised models of these clients, as they come."""
        setup, algorithm, round = self.setup, self.setup.algorithm, self.state.round
        if not algorithm.personalised:
            raise UserError(f"{algorithm.title} has no personalised models; general() is its model.")
        ready = algorithm.personal_after_merge or algorithm.personal_kept
        # What needs no training is as it was tested, in the last round; else this is the round that would follow.
        job = Job(round - 1 if ready else round, tuple(clients), train=not ready, keep=False, take=True)
        seen = {name: values for name, values in self._inspected().items() if values.ndim == 1}
        place = place or Vectorised(setup)
        for outcome in place.run(algorithm.down(self.state.server), self.state.clients, [job]):
            for row, j in enumerate(outcome.job.clients):
                assert outcome.models is not None  # the method is personalised
                posterior = tree.map(lambda leaf: leaf[0], tree.take(outcome.models, [row]))
                shard = setup.federation.shards[j]
                numbers = {"n_train": float(shard.n), **{name: float(values[j]) for name, values in seen.items()}}
                yield Personal(shard.id, posterior, numbers)

    def save(self, folder: Path | str) -> Path:
        """Writes tables, summary and models into a folder, from which ``pfedvem.load`` reads; gives the folder."""
        folder = Path(folder)
        with checkpoints.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "model" / "personal", ignore_errors=True)  # perhaps of another run
        self.write(folder, models=True)
        return folder

    def write(self, out: Path, *, models: bool = False, executor: str = "auto", workers: int | None = None) -> None:
        """Writes metrics.jsonl, clients.csv, calibration.json, summary.json and model/ into a folder.

        With ``models`` the clients' models as well, which the executor of this name trains.
        """
        write_metrics(out, self.state)
        table = io.StringIO()
        rows = self.rows
        writer = csv.DictWriter(table, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        checkpoints.replace(out / "clients.csv", table.getvalue().encode())
        checkpoints.replace(out / "calibration.json", (json.dumps(self._reliability()) + "\n").encode())
        for file in (out / "model" / "personal").glob("*.safetensors"):  # of fewer rounds; who came later stays
            if file.stem.isdecimal() and int(file.stem) < len(rows):
                file.unlink()
        saved.write(self.trained, out / "model", self._inspected())
        if models and self.setup.algorithm.personalised:
            federation = self.setup.federation
            with make_executor(self.setup, executor, workers) as place:
                for personal in self.take_home(range(len(federation)), place):
                    saved.write_personal(out / "model", federation.place(personal.client), personal)
            for number, personal in enumerate(self.trained.later.values(), len(federation)):
                saved.write_personal(out / "model", number, personal)
        # The summary comes last: where it is, everything is.
        checkpoints.replace(out / "summary.json", (json.dumps(self.summary, indent=2) + "\n").encode())

    def _reliability(self) -> dict[str, dict[str, list[float | None]]]:
        """For PM, all clients' predictions taken together, and GM: the bins of a reliability diagram."""
        found = {"pm": self.state.scores.bins.double().sum(0)}
        general = global_model(self.setup, self.state.server, self.state.average)
        if general is not None:
            found["gm"] = score_general(self.setup, general).bins.double()
        out = {}
        for name, bins in found.items():
            count, sure, right = bins.unbind(1)
            means = {"confidence": sure / count, "accuracy": right / count}  # nan where a bin is empty
            out[name] = {"count": count.tolist(), **{key: [number(x) for x in v.tolist()] for key, v in means.items()}}
        return {name: bins for name, bins in out.items() if any(bins["count"])}

    def _inspected(self) -> dict[str, Tensor]:
        algorithm = self.setup.algorithm
        return algorithm.inspect(algorithm.down(self.state.server), self.state.clients)


def write_metrics(out: Path, state: State) -> None:
    """metrics.jsonl: the history so far, a line for each evaluated round."""
    lines = "".join(f"{line}\n" for line in checkpoints.lines(state.history))
    checkpoints.replace(out / "metrics.jsonl", lines.encode())


def spread(values: Tensor) -> float:
    """The standard deviation over the clients that have a value; 0 for a single one."""
    known = values[~values.isnan()].double()
    return float(known.std()) if len(known) > 1 else 0.0
