"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

    w_j     = K epochs of SGD on f_j(theta, w) from own w_j, theta fixed
    theta_j = R epochs of SGD on f_j(theta, w_j) from theta, w_j fixed;    theta = sum_j n_j theta_j / sum_j n_j

The head stays with the client; there is no extra tuning round at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.fedper import FedPer, Up
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Theta, apply_head
from pfedvem.rng import Rng
from pfedvem.solvers import Batch, count, minibatches, sgd


class FedRep(FedPer):
    """A shared base and personal heads, trained in turn: first the head, then the base."""

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    reference: ClassVar[str] = "Collins et al., ICML 2021"

    head_epochs: int = Field(default=10, ge=1, description="epochs on the head a round (K)")
    epochs: int = Field(default=5, ge=1, description="epochs on the base a round (R)")

    def adapt(self, model: Model, down: Theta, client: Tensor, data: ClientData, rng: Rng) -> tuple[Tensor, Theta]:
        def loss(w: Tensor, batch: Batch) -> Tensor:
            return model.nll(apply_head(w, batch.x), batch) / count(batch)

        with torch.no_grad():  # the base is fixed, so its features are computed once
            features = replace(data, x=model.features_of(down, data))
        steps = minibatches(features, rng.stream("head"), batch_size=self.batch_size, epochs=self.head_epochs)
        return sgd(loss, client, steps, lr=self.lr, momentum=self.momentum), {}

    def contribute(
        self, model: Model, down: Theta, client: Tensor, carry: Theta | None, data: ClientData, rng: Rng
    ) -> tuple[Up, Tensor, Theta]:
        def loss(theta: Theta, batch: Batch) -> Tensor:
            heads = client[: batch.clients]
            return model.nll(apply_head(heads, model.features(theta, batch.x, train=True)), batch) / count(batch)

        steps = minibatches(data, rng.stream("batches"), batch_size=self.batch_size, epochs=self.epochs)
        theta = sgd(loss, tree.expand(down, len(rng)), steps, lr=self.lr, momentum=self.momentum)
        return Up(theta, data.n), client, theta
