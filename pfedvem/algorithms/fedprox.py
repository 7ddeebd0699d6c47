"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    w_j = SGD on f_j(v) + mu/2 |v - w|^2 from w;    w = sum_j n_j w_j / sum_j n_j

The anchor w is the broadcast, fixed for the round. Straggling here means not uploading, so there is no partial work.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import NetworkUp
from pfedvem.algorithms.fedavg import FedAvg
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng


class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps local models near the global one."""

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    reference: ClassVar[str] = "Li et al., MLSys 2020"

    mu: float = Field(default=0.1, ge=0, description="weight of the proximal term")

    def contribute(
        self, model: Model, down: Params, client: Tensor, carry: Params | None, data: ClientData, rng: Rng
    ) -> tuple[NetworkUp, Tensor, None]:
        def proximal(params: Params) -> Tensor:
            return self.mu / 2 * tree.squared_distance(model.weights(params), model.weights(down))

        params = self.train(model, tree.expand(down, len(rng)), data, rng, penalty=proximal)
        return NetworkUp(params, data.n), client, None
