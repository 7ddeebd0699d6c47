"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

w_j = SGD on f_j from w;    w = sum_j n_j w_j / sum_j n_j        (base, head and buffers alike)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, Averaging, LocalTraining, nothing
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng


@dataclass(frozen=True)
class Up:
    """The trained network and the data size n_j (C,)."""

    params: Params
    n: Tensor


class FedAvg(LocalTraining, Averaging, Algorithm[Params, Tensor, Params, None, Up]):
    """One global model, the average of locally trained ones."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    reference: ClassVar[str] = "McMahan et al., AISTATS 2017"
    keeps: ClassVar[str] = "nothing"
    sends: ClassVar[str] = "the whole network"
    personalised: ClassVar[bool] = False

    def server_init(self, model: Model, clients: int, rng: Rng) -> Params:
        return model.initial

    def client_init(self, model: Model, server: Params, rng: Rng) -> Tensor:
        return nothing(rng)

    def down(self, server: Params) -> Params:
        return server

    def contribute(
        self, model: Model, down: Params, client: Tensor, carry: None, data: ClientData, rng: Rng
    ) -> tuple[Up, Tensor, None]:
        params = self.train(model, tree.expand(down, len(rng)), data, rng)
        return Up(params, data.n), client, None

    def merge(self, server: Params, ups: Up) -> Params:
        return tree.weighted_mean(ups.params, self.weigh(ups.n))

    def general(self, server: Params) -> Params:
        return server
