"""What a federation has learned, ready for use: models, predictions, and clients that come later."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedvem import tree, uncertainty
from pfedvem.algorithms import AnyAlgorithm
from pfedvem.data.federation import ClientData
from pfedvem.data.given import read
from pfedvem.data.inputs import Inputs
from pfedvem.data.labels import label_numbers
from pfedvem.errors import UserError
from pfedvem.models import Model, Params, Posterior
from pfedvem.rng import START, Rng
from pfedvem.simulation.executors import one_thread
from pfedvem.uncertainty import SAMPLES, Prediction, Predictor

ROUNDS = 30  # of local training for a client that comes later


@dataclass(frozen=True)
class Personal:
    """One client's model: what is believed of it, and numbers such as its confidence tau and its data size."""

    client: str
    posterior: Posterior
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """A trained federation. ``find`` gives a client's personalised model; ``later`` has those that joined since.

    ``average`` is the global model where that is not the server's last.
    """

    algorithm: AnyAlgorithm
    model: Model
    server: Any
    classes: tuple[str, ...]
    inputs: Inputs
    clients: tuple[str, ...]
    seed: int
    find: Callable[[str], Personal]
    later: dict[str, Personal] = field(default_factory=dict)
    average: Params | None = None

    def client(self, client: str | int) -> Personal:
        """A client's model, with what is uncertain in it."""
        return self.later.get(str(client)) or self.find(str(client))

    def personal(self, client: str | int) -> nn.Module:
        """A client's model as an ordinary ``nn.Module``: logits (N, classes) of the inputs that the client has."""
        return uncertainty.network(self.model, self.client(client).posterior.mean, self.inputs)

    def general(self) -> nn.Module:
        """The global model as an ordinary ``nn.Module``."""
        return uncertainty.network(self.model, self._general(), self.inputs)

    def predictor(self, client: str | int | None, samples: int = SAMPLES) -> Predictor:
        """What predicts for a client, or by the global model where that is None; it can be exported."""
        posterior = Posterior(self._general(), {}) if client is None else self.client(client).posterior
        return (
            uncertainty.predictor(self.model, posterior, self.inputs, self.seed, samples).eval().requires_grad_(False)
        )

    def predict(self, client: str | int | None, x: Any, *, samples: int = SAMPLES) -> Prediction:
        """Predicts for a client, or by the global model where that is None, with how sure it is.

        Args:
            x: inputs as the client has them: a tensor, an array, or a DataFrame with the columns of training.
            samples: how many samples of the posterior to average over; 0 predicts by its mean.
        """
        return self.predictor(client, samples).predict(self.inputs.read(x), self.classes)

    def personalize(
        self, data: Any, client: str | int = "new", *, label: str | None = None, rounds: int = ROUNDS
    ) -> Personal:
        """Fits a personalised model for a client that was not there, from what the server has learned.

        The server's part stays as it is; the client trains as one that joins would, for so many rounds.

        Args:
            data: the client's samples, in a form that ``Federation.from_datasets`` takes.
            client: the name that it is known by from now on.
            label: the column of the labels, where the data is a table.
        """
        name, algorithm = str(client), self.algorithm
        if rounds < 1:
            raise UserError(f"rounds must be at least 1, not {rounds}.")
        if not algorithm.personalised or not tree.leaves(algorithm.down(self.server)):
            raise UserError(f"{algorithm.title} has nothing that a client which comes later could start from.")
        if name in self.clients:
            raise UserError(f"Client {name!r} took part in training; give the new one another name.")
        x, y, _ = read(data, f"Client {name}", label, self.inputs.columns or None)
        if y is None:
            raise UserError(f"Client {name} has no labels to learn from; name their column as label=.")
        samples = self._client_data(self.inputs.read(x), label_numbers(y, self.classes, f"Client {name}"))
        with one_thread():
            self.later[name] = self._fitted(name, samples, rounds)
        return self.later[name]

    def _fitted(self, name: str, data: ClientData, rounds: int) -> Personal:
        algorithm, model = self.algorithm, self.model
        down = algorithm.down(self.server)
        place = [len(self.clients) + zlib.crc32(name.encode())]  # by its name: who else came does not matter
        client = algorithm.client_init(model, down, Rng(self.seed, START, place))
        carry = None
        if algorithm.personal_after_merge:
            rng = Rng(self.seed, 0, place)
        else:
            for number in range(rounds):
                rng = Rng(self.seed, number, place)
                client, carry = algorithm.adapt(model, down, client, data, rng)
            _, client, carry = algorithm.contribute(model, down, client, carry, data, rng)
        posterior = algorithm.posterior(model, down, client, carry, data, rng)
        assert posterior is not None  # the method is personalised
        seen = {key: float(value) for key, value in algorithm.inspect(down, client).items() if value.shape == (1,)}
        return Personal(name, tree.map(lambda leaf: leaf[0], posterior), {"n_train": float(data.sizes[0]), **seen})

    def _client_data(self, raw: Tensor, y: np.ndarray[Any, Any]) -> ClientData:
        """One client's samples as the network sees them, as a cohort of one."""
        with torch.no_grad():
            x = nn.Sequential(*(step for _, step in self.inputs.steps())).eval()(raw)
        self.model.check(x[:2])
        return ClientData(x.unsqueeze(0), torch.from_numpy(y).unsqueeze(0), (len(y),))

    def _general(self) -> Params:
        if self.average is not None:
            return self.average
        found = self.algorithm.general(self.server) if self.algorithm.global_model else None
        if found is None:
            raise UserError(f"{self.algorithm.title} has no global model; ask for a client's.")
        return found
