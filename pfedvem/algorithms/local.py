"""Local: every client trains alone, from the same initial weights; nothing is sent.

w_j = SGD on f_j from w_j
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, LocalTraining, nothing
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng


class Local(LocalTraining, Algorithm[None, Params, None, None, Tensor]):
    """No federation at all: what a client reaches alone."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    reference: ClassVar[str] = "the paper's trivial baseline"
    global_model: ClassVar[bool] = False
    default_rounds: ClassVar[int | None] = 1

    epochs: int = Field(20, ge=1, description="epochs a round")

    def server_init(self, model: Model, rng: Rng) -> None:
        return None

    def client_init(self, model: Model, server: None, rng: Rng) -> Params:
        return tree.map(lambda leaf: leaf.clone(), tree.expand(model.initial, len(rng)))

    def down(self, server: None) -> None:
        return None

    def adapt(self, model: Model, down: None, client: Params, data: ClientData, rng: Rng) -> tuple[Params, None]:
        return self.train(model, client, data, rng), None

    def contribute(
        self, model: Model, down: None, client: Params, carry: None, data: ClientData, rng: Rng
    ) -> tuple[Tensor, Params, None]:
        return nothing(rng), client, None

    def merge(self, server: None, ups: Tensor) -> None:
        return None

    def personal(self, model: Model, down: None, client: Params, carry: None, data: ClientData, rng: Rng) -> Params:
        return client
