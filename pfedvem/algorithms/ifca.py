"""IFCA: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, model averaging.

    k_j = argmin_k f_j(theta, w_k) on the client's training data
    (theta_j, w_j) = SGD on f_j from (theta, w_{k_j})
    w_k   = sum_{j in cluster k} n_j w_j / sum n_j        (an empty cluster keeps its head)
    theta = sum_j n_j theta_j / sum_j n_j

This is the paper's configuration for ambiguous clusters (weight sharing): the base is averaged over everyone and only
the heads are clustered. The personalised model is the merged model of the client's cluster, without local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import Algorithm, Averaging, LocalTraining, nothing
from pfedvem.data.federation import ClientData
from pfedvem.models import Model, Params, Theta, apply_head
from pfedvem.rng import Rng
from pfedvem.solvers import as_batch


@dataclass(frozen=True)
class Server:
    """The shared base and the heads (k, classes, features + 1); also what is sent down."""

    theta: Theta
    heads: Tensor


@dataclass(frozen=True)
class Up:
    """The trained network, which cluster it is for, one-hot (C, k), and the data size n_j (C,)."""

    params: Params
    cluster: Tensor
    n: Tensor


class IFCA(LocalTraining, Averaging, Algorithm[Server, Tensor, Server, None, Up]):
    """Clients sort themselves into clusters by which head fits their data best."""

    name: ClassVar[str] = "ifca"
    title: ClassVar[str] = "IFCA"
    reference: ClassVar[str] = "Ghosh et al., NeurIPS 2020"
    keeps: ClassVar[str] = "nothing; it chooses a cluster in every round"
    sends: ClassVar[str] = "the whole network and its cluster"
    global_model: ClassVar[bool] = False
    personal_after_merge: ClassVar[bool] = True
    merges_alike: ClassVar[bool] = False

    clusters: int = Field(default=2, ge=1, description="number of clusters (k)")

    def server_init(self, model: Model, clients: int, rng: Rng) -> Server:
        # Heads of their own, drawn as PyTorch draws a linear layer's; the first is everyone's initial head.
        bound = model.features_dim**-0.5
        others = rng.stream("heads").uniform(self.clusters - 1, *model.initial.w.shape)[0]
        heads = torch.cat([model.initial.w.unsqueeze(0), bound * (2 * others - 1)])
        return Server(model.initial.theta, heads)

    def client_init(self, model: Model, server: Server, rng: Rng) -> Tensor:
        return nothing(rng)

    def down(self, server: Server) -> Server:
        return server

    def pick(self, model: Model, down: Server, data: ClientData) -> Tensor:
        """The cluster (C,) whose head has the least loss on each client's training data; the first of equals."""
        with torch.no_grad():
            features = model.features_of(down.theta, data)
            losses = torch.stack([model.nll(apply_head(head, features), as_batch(data)) for head in down.heads], dim=1)
        return losses.sort(dim=1, stable=True).indices[:, 0]

    def contribute(
        self, model: Model, down: Server, client: Tensor, carry: None, data: ClientData, rng: Rng
    ) -> tuple[Up, Tensor, None]:
        cluster = self.pick(model, down, data)
        start = Params(tree.expand(down.theta, len(rng)), down.heads[cluster])
        params = self.train(model, start, data, rng)
        return Up(params, F.one_hot(cluster, self.clusters).float(), data.n), client, None

    def before(self, down: Server, ups: Up) -> dict[str, Tensor]:
        sent = Params(down.theta, down.heads[ups.cluster.argmax(1)])
        return tree.named({"params": sent})

    def merge(self, server: Server, ups: Up) -> Server:
        weights = self.weigh(ups.n)
        members = F.one_hot(ups.cluster.argmax(1), len(server.heads))  # whatever is sent: one vote, for one cluster
        heads = [
            tree.weighted_mean(ups.params.w, weights * member) if bool(member.any()) else head
            for head, member in zip(server.heads, members.T, strict=True)
        ]
        return Server(tree.weighted_mean(ups.params.theta, weights), torch.stack(heads))

    def personal(self, model: Model, down: Server, client: Tensor, carry: None, data: ClientData, rng: Rng) -> Params:
        return Params(tree.expand(down.theta, len(rng)), down.heads[self.pick(model, down, data)])
