"""PerFedAvg: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Hessian-free (HF) variant.

    v_j = w;  R times, with independent batches D, D', D'':
        v~  = v - alpha grad f(v; D)
        u   = grad f(v~; D')
        h   = [grad f(v + delta u; D'') - grad f(v - delta u; D'')] / (2 delta)
        v  <- v - beta (u - alpha h)                            (first order: v <- v - beta u)
    w   = mean_S v_j

The personalised model is one epoch of SGD with rate alpha on the client's training data, from the merged w.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import NetworkUp, OneNetwork, network_loss, train_network
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng
from pfedvem.solvers import gradient, random_batches


class PerFedAvg(OneNetwork):
    """A meta-model from which one epoch of training reaches a good personal model."""

    name: ClassVar[str] = "perfedavg"
    title: ClassVar[str] = "PerFedAvg"
    reference: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    keeps: ClassVar[str] = "nothing; it adapts the meta-model before use"
    global_model: ClassVar[bool] = False
    personal_after_merge: ClassVar[bool] = True

    alpha: float = Field(default=1e-2, ge=0, description="step size of the adaptation")
    beta: float = Field(default=1e-2, gt=0, description="learning rate of the meta-model")
    steps: int = Field(default=25, ge=1, description="local meta-steps a round (R)")
    batch_size: int = Field(default=10, ge=1, description="batch size (B)")
    delta: float = Field(default=1e-3, ge=1e-6, description="step of the difference that stands for the Hessian")
    first_order: bool = Field(default=False, description="leave the Hessian term out (the FO variant)")
    weights: Literal["size", "uniform"] = Field(
        default="uniform", description="weigh uploads by data size, or all alike"
    )

    def server_init(self, model: Model, clients: int, rng: Rng) -> Params:
        model.refuse_buffers(self.title)
        return super().server_init(model, clients, rng)

    def contribute(
        self, model: Model, down: Params, client: Tensor, carry: Params | None, data: ClientData, rng: Rng
    ) -> tuple[NetworkUp, Tensor, None]:
        loss = network_loss(model)
        exact = network_loss(model.in_precision("float32"))  # in bfloat16 so small a difference would be lost
        draws = [
            random_batches(data, rng.stream(name), batch_size=self.batch_size, steps=self.steps)
            for name in ("adapt", "meta", "hessian")
        ]
        v = tree.expand(down, len(rng))
        for d, d1, d2 in zip(*draws, strict=True):
            adapted = tree.add(v, gradient(loss, v, d), -self.alpha)
            u = gradient(loss, adapted, d1)
            step = u
            if not self.first_order:
                ahead = gradient(exact, tree.add(v, u, self.delta), d2)
                behind = gradient(exact, tree.add(v, u, -self.delta), d2)
                step = tree.add(u, tree.add(ahead, behind, -1.0), -self.alpha / (2 * self.delta))
            v = tree.add(v, step, -self.beta)
        return NetworkUp(v, data.n), client, None

    def personal(
        self, model: Model, down: Params, client: Tensor, carry: Params | None, data: ClientData, rng: Rng
    ) -> Params:
        start = tree.expand(down, len(rng))
        return train_network(model, start, data, rng, lr=self.alpha, epochs=1, batch_size=self.batch_size)
