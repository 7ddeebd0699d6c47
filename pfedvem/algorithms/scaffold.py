"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
option II.

    y_j  = x;  K_j times:  y_j <- y_j - eta (g(y_j) - c_j + c)
    c_j' = c_j - c + (x - y_j) / (K_j eta)
    x    <- x + mean_S (y_j - x);    c <- c + |S| / J  mean_S (c_j' - c_j)

Only clients that upload replace c_j, so that c stays the mean of all c_j. The formulas are plain steps: no momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, Averaging, train_network
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params
from pfedvem.rng import Rng

Variate = dict[str, Tensor]


@dataclass(frozen=True)
class Server:
    """The model x, the control variate c, and the number of clients J (a tensor of one number)."""

    x: Params
    c: Variate
    clients: Tensor


@dataclass(frozen=True)
class Down:
    """What is broadcast: x and c."""

    x: Params
    c: Variate


@dataclass(frozen=True)
class Up:
    """y_j - x, the change of c_j, and the data size n_j (C,)."""

    dy: Params
    dc: Variate
    n: Tensor


class Scaffold(Averaging, Algorithm[Server, Variate, Down, None, Up]):
    """One global model; control variates correct the drift of local training."""

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    reference: ClassVar[str] = "Karimireddy et al., ICML 2020"
    keeps: ClassVar[str] = "its control variate c_j"
    sends: ClassVar[str] = "the changes of the network and of c_j"
    personalised: ClassVar[bool] = False
    sends_changes: ClassVar[bool] = True

    lr: float = Field(default=1e-2, gt=0, description="local learning rate (eta)")
    lr_global: float = Field(default=1.0, gt=0, description="global learning rate")
    epochs: int = Field(default=5, ge=1, description="local epochs a round (R)")
    batch_size: int = Field(default=10, ge=1, description="batch size (B)")
    weights: Literal["size", "uniform"] = Field(
        default="uniform", description="weigh uploads by data size, or all alike"
    )

    def server_init(self, model: Model, clients: int, rng: Rng) -> Server:
        zero = tree.map(torch.zeros_like, model.weights(model.initial))
        return Server(model.initial, zero, torch.tensor(float(clients)))

    def client_init(self, model: Model, server: Server, rng: Rng) -> Variate:
        return tree.map(lambda leaf: torch.zeros(len(rng), *leaf.shape), server.c)

    def down(self, server: Server) -> Down:
        return Down(server.x, server.c)

    def contribute(
        self, model: Model, down: Down, client: Variate, carry: None, data: ClientData, rng: Rng
    ) -> tuple[Up, Variate, None]:
        # The gradient of the inner product <c - c_j, y> is the correction that every step adds.
        correction = tree.map(lambda c, c_j: c - c_j, down.c, client)

        def drift(params: Params) -> Tensor:
            pairs = zip(tree.leaves(correction), tree.leaves(model.weights(params)), strict=True)
            return torch.stack([(a[: len(b)] * b).flatten(1).sum(1) for a, b in pairs]).sum(0)

        start = tree.expand(down.x, len(rng))
        y = train_network(
            model, start, data, rng, lr=self.lr, epochs=self.epochs, batch_size=self.batch_size, penalty=drift
        )
        steps = self.epochs * (data.n / self.batch_size).ceil()

        def change(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
            return (x - y) / (self.lr * steps).view(-1, *[1] * x.ndim) - c

        dc = tree.map(change, model.weights(down.x), model.weights(y), down.c)
        dy = tree.map(lambda end, start: end - start, y, down.x)
        return Up(dy, dc, data.n), tree.map(torch.add, client, dc), None

    def merge(self, server: Server, ups: Up) -> Server:
        step = tree.weighted_mean(ups.dy, self.weigh(ups.n))
        x = tree.map(lambda leaf, move: (leaf + self.lr_global * move).to(leaf.dtype), server.x, step)
        share = len(ups.n) / server.clients
        mean = tree.weighted_mean(ups.dc, torch.ones_like(ups.n))
        return Server(x, tree.map(lambda c, change: c + share * change, server.c, mean), server.clients)

    def general(self, server: Server) -> Params:
        return server.x
