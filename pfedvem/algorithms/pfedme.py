"""pFedMe: Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

    w_j = w;  R times, on a new batch:
        theta_j ~ argmin_theta  f(theta; batch) + lambda/2 |theta - w_j|^2      (K gradient steps, warm start)
        w_j    <- w_j - eta lambda (w_j - theta_j)
    w = (1 - beta) w + beta mean_S w_j

The personalised model is theta_j, a value of its own; the global model is w.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import NetworkUp, OneNetwork, network_loss
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng, Stream
from pfedvem.solvers import Batch, Descent, Momentum, minibatches, random_batches


class PFedMe(OneNetwork):
    """Personal models near a global one, by a proximal term."""

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    reference: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    keeps: ClassVar[str] = "nothing; theta_j is found anew in every round"
    sends: ClassVar[str] = "the whole network w_j"

    lr: float = Field(default=1e-2, gt=0, description="learning rate of w_j (eta)")
    lr_personal: float = Field(default=1e-2, gt=0, description="learning rate of theta_j")
    lam: float = Field(default=15.0, gt=0, description="weight of the proximal term (lambda)")
    steps: int = Field(default=20, ge=1, description="local rounds, each on a new batch (R)")
    epochs: int = Field(default=0, ge=0, description="if not 0, so many passes over the data in place of R batches")
    inner_steps: int = Field(default=5, ge=1, description="gradient steps on theta_j a batch (K)")
    batch_size: int = Field(default=10, ge=1, description="batch size (B)")
    beta: float = Field(default=1.0, gt=0, description="how far the server moves to the mean")
    weights: Literal["size", "uniform"] = Field(
        default="uniform", description="weigh uploads by data size, or all alike"
    )

    def server_init(self, model: Model, clients: int, rng: Rng) -> Params:
        model.refuse_buffers(self.title)
        return super().server_init(model, clients, rng)

    def contribute(
        self, model: Model, down: Params, client: Tensor, carry: Params | None, data: ClientData, rng: Rng
    ) -> tuple[NetworkUp, Tensor, Params]:
        start = tree.expand(down, len(rng))
        inner, outer = Descent(start, Momentum(self.lr_personal)), Descent(start, Momentum(self.lr))
        theta, w = inner.value, outer.value

        def proximal(params: Params) -> Tensor:
            return self.lam / 2 * tree.squared_distance(params, tree.first(w, len(params.w)))  # the w of the moment

        def to_theta(params: Params, batch: Batch) -> Tensor:
            return self.lam / 2 * tree.squared_distance(params, tree.first(theta, batch.clients))

        loss = network_loss(model, proximal)
        for batch in self._batches(data, rng.stream("batches")):
            for _ in range(self.inner_steps):
                inner.step(loss, batch)
            outer.step(to_theta, batch)
        return NetworkUp(w, data.n), client, theta

    def _batches(self, data: ClientData, order: Stream) -> Iterator[Batch]:
        if self.epochs:
            return minibatches(data, order, batch_size=self.batch_size, epochs=self.epochs)
        return random_batches(data, order, batch_size=self.batch_size, steps=self.steps)

    def merge(self, server: Params, ups: NetworkUp) -> Params:
        return tree.towards(server, super().merge(server, ups), self.beta)

    def personal(
        self, model: Model, down: Params, client: Tensor, carry: Params | None, data: ClientData, rng: Rng
    ) -> Params:
        assert carry is not None
        return carry
