"""A model of one number v whose loss is a quadratic, f = a/2 (v - b)^2: every method has closed forms on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params, Theta
from pfedvem.solvers import Batch


class Quadratic(Model):
    """v is the head's bias; a sample's input is its (a, b), and features are zero."""

    def __init__(self, v: float) -> None:
        super().__init__(nn.Linear(1, 1))
        self.initial = self.at(v)

    def features(self, theta: Theta, x: Tensor, *, train: bool = False) -> Tensor:
        return torch.zeros(*x.shape[:2], 1)

    def nll(self, outputs: Tensor, batch: Batch) -> Tensor:
        each = 0.5 * batch.x[..., 0] * (outputs[..., 0] - batch.x[..., 1]).square()
        return (each if batch.mask is None else each * batch.mask).sum(-1)

    @staticmethod
    def at(v: float) -> Params:
        return Params({}, torch.tensor([[0.0, v]]))


def clients(a: list[float], b: list[float], sizes: list[int] | None = None) -> ClientData:
    """Clients with the same (a, b) in each of their samples."""
    sizes = sizes or [1] * len(a)
    x = torch.tensor([[[a_j, b_j]] * max(sizes) for a_j, b_j in zip(a, b, strict=True)])
    return ClientData(x, torch.zeros(x.shape[:2], dtype=torch.long), tuple(sizes))


def value(params: Params) -> list[float]:
    """v of each client, or of the one model."""
    numbers: list[float] = params.w[..., -1].flatten().tolist()
    return numbers
