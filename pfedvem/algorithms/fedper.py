"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818.

    (theta_j, w_j) = SGD on f_j from (theta, own w_j), jointly;    theta = sum_j n_j theta_j / sum_j n_j

The head w_j stays with the client. All heads start from the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, Averaging, LocalTraining
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params, Theta
from pfedvem.rng import Rng


@dataclass(frozen=True)
class Up:
    """The trained base theta_j and the data size n_j (C,)."""

    theta: Theta
    n: Tensor


class FedPer(LocalTraining, Averaging, Algorithm[Theta, Tensor, Theta, Theta, Up]):
    """A shared base and personal heads, trained jointly."""

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer"
    reference: ClassVar[str] = "Arivazhagan et al., 2019"
    keeps: ClassVar[str] = "its head"
    sends: ClassVar[str] = "the base"
    global_model: ClassVar[bool] = False

    def server_init(self, model: Model, clients: int, rng: Rng) -> Theta:
        return model.initial.theta

    def client_init(self, model: Model, server: Theta, rng: Rng) -> Tensor:
        return tree.expand(model.initial.w, len(rng)).clone()

    def down(self, server: Theta) -> Theta:
        return server

    def adapt(self, model: Model, down: Theta, client: Tensor, data: ClientData, rng: Rng) -> tuple[Tensor, Theta]:
        params = self.train(model, Params(tree.expand(down, len(rng)), client), data, rng)
        return params.w, params.theta

    def contribute(
        self, model: Model, down: Theta, client: Tensor, carry: Theta | None, data: ClientData, rng: Rng
    ) -> tuple[Up, Tensor, Theta]:
        assert carry is not None
        return Up(carry, data.n), client, carry

    def merge(self, server: Theta, ups: Up) -> Theta:
        return tree.weighted_mean(ups.theta, self.weigh(ups.n))

    def personal(
        self, model: Model, down: Theta, client: Tensor, carry: Theta | None, data: ClientData, rng: Rng
    ) -> Params:
        assert carry is not None
        return Params(carry, client)
