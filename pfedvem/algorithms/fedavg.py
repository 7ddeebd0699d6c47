"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

w_j = SGD on f_j from w;    w = sum_j n_j w_j / sum_j n_j        (base, head and buffers alike)
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import LocalTraining, NetworkUp, OneNetwork
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng


class FedAvg(LocalTraining, OneNetwork):
    """One global model, the average of locally trained ones."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    reference: ClassVar[str] = "McMahan et al., AISTATS 2017"
    personalised: ClassVar[bool] = False

    def contribute(
        self, model: Model, down: Params, client: Tensor, carry: Params | None, data: ClientData, rng: Rng
    ) -> tuple[NetworkUp, Tensor, None]:
        params = self.train(model, tree.expand(down, len(rng)), data, rng)
        return NetworkUp(params, data.n), client, None
