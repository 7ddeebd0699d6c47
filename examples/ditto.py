"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

w_j = SGD on f_j from w;    w = sum_j n_j w_j / sum_j n_j                 as FedAvg
v_j = SGD on f_j(v) + lam/2 |v - w|^2 from own v_j                        the personalised model
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, Averaging, LocalTraining, NetworkUp
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng


class Ditto(LocalTraining, Averaging, Algorithm[Params, Params, Params, None, NetworkUp]):
    """A global model, and a personal one for each client that stays near it."""

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    reference: ClassVar[str] = "Li et al., ICML 2021"
    keeps: ClassVar[str] = "its personal network v_j"
    sends: ClassVar[str] = "the whole network w_j"
    personal_kept: ClassVar[bool] = True

    lam: float = Field(default=0.1, ge=0, description="how near the personal model stays to the global one")

    def server_init(self, model: Model, clients: int, rng: Rng) -> Params:
        return model.initial

    def client_init(self, model: Model, server: Params, rng: Rng) -> Params:
        return tree.map(lambda leaf: leaf.clone(), tree.expand(server, len(rng)))

    def down(self, server: Params) -> Params:
        return server

    def adapt(self, model: Model, down: Params, client: Params, data: ClientData, rng: Rng) -> tuple[Params, None]:
        def near(params: Params) -> Tensor:
            return self.lam / 2 * tree.squared_distance(model.weights(params), model.weights(down))

        return self.train(model, client, data, rng, penalty=near), None

    def contribute(
        self, model: Model, down: Params, client: Params, carry: None, data: ClientData, rng: Rng
    ) -> tuple[NetworkUp, Params, None]:
        return NetworkUp(self.train(model, tree.expand(down, len(rng)), data, rng), data.n), client, None

    def merge(self, server: Params, ups: NetworkUp) -> Params:
        return tree.weighted_mean(ups.params, self.weigh(ups.n))

    def personal(self, model: Model, down: Params, client: Params, carry: None, data: ClientData, rng: Rng) -> Params:
        return client

    def general(self, server: Params) -> Params:
        return server
