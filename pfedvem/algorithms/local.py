"""Local: every client trains alone, from the same initial weights; nothing is sent.

    w_j = SGD or Adam on f_j from w_j

As the paper lets it, each client chooses its own learning rate and batch size: it trains once with each on a part of
its training data, keeps what predicts the rest best, and trains with that on all of it. Test data plays no part.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, network_loss, nothing
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng
from pfedvem.solvers import Adam, Momentum, as_batch, descend, minibatches

several = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,))
Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], several]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], several]


@dataclass(frozen=True)
class Client:
    """A client's own network, and which of the candidates it chose (C,), -1 before it has."""

    params: Params
    choice: Tensor


class Local(Algorithm[None, Client, None, None, Tensor]):
    """No federation at all: what a client reaches alone."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    reference: ClassVar[str] = "the paper's trivial baseline"
    keeps: ClassVar[str] = "its whole network"
    sends: ClassVar[str] = "nothing"
    global_model: ClassVar[bool] = False
    personal_kept: ClassVar[bool] = True
    default_rounds: ClassVar[int | None] = 1

    lr: Rates = Field(
        default=(1e-3, 1e-4), min_length=1, description="learning rates to choose from, each above 0 (eta)"
    )
    batch_size: Sizes = Field(
        default=(10, 50, 100), min_length=1, description="batch sizes to choose from, each at least 1 (B)"
    )
    epochs: int = Field(default=20, ge=1, description="epochs a round")
    optimiser: Literal["sgd", "adam"] = Field(default="sgd", description="SGD as in the other methods, or Adam")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of SGD; it does not outlive a round")
    validation: float = Field(
        default=0.2, gt=0, lt=1, description="share of a client's training data that the choice is made on"
    )

    @property
    def candidates(self) -> list[tuple[float, int]]:
        return list(itertools.product(self.lr, self.batch_size))

    def server_init(self, model: Model, clients: int, rng: Rng) -> None:
        return None

    def client_init(self, model: Model, server: None, rng: Rng) -> Client:
        params = tree.map(lambda leaf: leaf.clone(), tree.expand(model.initial, len(rng)))
        return Client(params, torch.full((len(rng),), -1))

    def down(self, server: None) -> None:
        return None

    def adapt(self, model: Model, down: None, client: Client, data: ClientData, rng: Rng) -> tuple[Client, None]:
        choice, chosen = client.choice, client.choice >= 0
        if not bool(chosen.all()):
            choice = choice.where(chosen, self._choose(model, client.params, data, rng))
        params = client.params
        for candidate in sorted(set(choice.tolist())):
            rows = torch.nonzero(choice == candidate)[:, 0].tolist()
            trained = self._train(model, tree.take(params, rows), data.take(rows), rng.take(rows), candidate)
            params = tree.put(params, rows, trained)
        return Client(params, choice), None

    def _train(self, model: Model, start: Params, data: ClientData, rng: Rng, candidate: int) -> Params:
        lr, batch_size = self.candidates[candidate]
        rule = Adam(lr) if self.optimiser == "adam" else Momentum(lr, self.momentum)
        steps = minibatches(data, rng.stream("batches"), batch_size=batch_size, epochs=self.epochs)
        return descend(network_loss(model), start, steps, rule)

    def _choose(self, model: Model, start: Params, data: ClientData, rng: Rng) -> Tensor:
        """The candidate (C,) with the best accuracy on held-out training data, the lowest loss where they tie."""
        if len(self.candidates) == 1:
            return torch.zeros(len(rng), dtype=torch.long, device=data.x.device)
        orders = rng.stream("validation").permutations(data.sizes)
        held = [min(max(1, round(self.validation * n)), n - 1) for n in data.sizes]
        train = data.select([order[n:] for order, n in zip(orders, held, strict=True)])
        # A client with one sample has nothing to hold out and judges by the sample that it has.
        rest = as_batch(data.select([order[: max(n, 1)] for order, n in zip(orders, held, strict=True)]))
        scores: list[list[tuple[float, float]]] = [[] for _ in data.sizes]
        for candidate in range(len(self.candidates)):
            params = self._train(model, start, train, rng, candidate)
            with torch.no_grad():
                logits = model.logits(params, rest.x)
            right = (logits.argmax(-1) == rest.y) & logits.isfinite().all(-1)
            right = right if rest.mask is None else right & rest.mask
            loss = model.nll(logits, rest).nan_to_num(torch.inf)
            for row, hits, value in zip(scores, right.sum(1).tolist(), loss.tolist(), strict=True):
                row.append((hits, -value))
        return torch.tensor([row.index(max(row)) for row in scores], device=data.x.device)

    def contribute(
        self, model: Model, down: None, client: Client, carry: None, data: ClientData, rng: Rng
    ) -> tuple[Tensor, Client, None]:
        return nothing(rng), client, None

    def merge(self, server: None, ups: Tensor) -> None:
        return None

    def personal(self, model: Model, down: None, client: Client, carry: None, data: ClientData, rng: Rng) -> Params:
        return client.params

    def inspect(self, down: None, client: Client) -> dict[str, Tensor]:
        chosen = torch.tensor([(float("nan"), float("nan")), *self.candidates])[client.choice + 1]
        return {"lr": chosen[:, 0], "batch_size": chosen[:, 1], **tree.named(client.params)}
