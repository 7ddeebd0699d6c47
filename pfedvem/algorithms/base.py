"""The interface of an algorithm: what a client keeps, what goes over the wire, and how both change.

An algorithm is a frozen value; its fields are its hyper-parameters. All other values (``Server``, ``Client``,
``Down``, ``Up``) are frozen dataclasses of tensors that are passed in and returned, never changed in place, so nothing
is aliased. Everything about a client is written over a *cohort*: each tensor has a leading client dimension C.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pfedvem import tree
from pfedvem.data.federation import ClientData
from pfedvem.errors import UserError
from pfedvem.models import Model, Params, Posterior
from pfedvem.rng import Rng
from pfedvem.solvers import Batch, count, minibatches, sgd

Server = TypeVar("Server")
Client = TypeVar("Client")
Down = TypeVar("Down")
Carry = TypeVar("Carry")
Up = TypeVar("Up")


class Algorithm(BaseModel, ABC, Generic[Server, Client, Down, Carry, Up]):
    """A federated method. A round is::

        down = algorithm.down(server)
        client, carry = algorithm.adapt(model, down, client, data, rng)             # every client
        up, client, carry = algorithm.contribute(model, down, client, carry, data, rng)   # to upload or be evaluated
        personal = algorithm.personal(model, down, client, carry, data, rng)        # if it is evaluated
        server = algorithm.merge(server, ups)                                       # the ups of those that upload

    A carry is what local training found on the way; it never leaves the client and does not outlive the round. The
    engine calls ``contribute`` only where something reads its result, and keeps the client that it returns only if
    the upload counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    keeps: ClassVar[str]
    """What a client keeps, in words."""
    sends: ClassVar[str]
    """What a client uploads, in words."""
    personalised: ClassVar[bool] = True
    """Whether there is a personalised model (PM) to evaluate."""
    global_model: ClassVar[bool] = True
    """Whether there is a global model (GM) to evaluate."""
    personal_after_merge: ClassVar[bool] = False
    """Whether the PM is made from the merged server, without this round's local training."""
    personal_kept: ClassVar[bool] = False
    """Whether the PM is all in what the client keeps, so that it is there without further training."""
    sends_changes: ClassVar[bool] = False
    """Whether an upload is a change of what was sent down, rather than that itself, trained."""
    merges_alike: ClassVar[bool] = True
    """Whether each array of the uploads is merged over all of them alike, rather than in groups."""
    claims: ClassVar[frozenset[str]] = frozenset({"n"})
    """The numbers that uploads are weighed by, as clients say them of themselves."""
    default_rounds: ClassVar[int | None] = None
    """The number of rounds that the method needs by its nature, where it has one."""

    @abstractmethod
    def server_init(self, model: Model, clients: int, rng: Rng) -> Server:
        """What the server of so many clients keeps before the first round; ``rng`` is the server's."""

    @abstractmethod
    def client_init(self, model: Model, server: Server, rng: Rng) -> Client:
        """What each client of the cohort keeps before its first round. It never leaves the client.

        At a real site ``server`` is what was sent, ``down(server)``, so use nothing else of it.
        """

    @abstractmethod
    def down(self, server: Server) -> Down:
        """Exactly what is sent to a client; without a client dimension."""

    def adapt(
        self, model: Model, down: Down, client: Client, data: ClientData, rng: Rng
    ) -> tuple[Client, Carry | None]:
        """Local training that changes what the client keeps. Methods without client state leave this as it is."""
        return client, None

    @abstractmethod
    def contribute(
        self, model: Model, down: Down, client: Client, carry: Carry | None, data: ClientData, rng: Rng
    ) -> tuple[Up, Client, Carry | None]:
        """Local training that only an upload or an evaluation needs."""

    @abstractmethod
    def merge(self, server: Server, ups: Up) -> Server:
        """Aggregation of the uploads, stacked along the client dimension in any order."""

    def bounds(self, down: Down, ups: Up) -> dict[str, Tensor]:
        """The most (C,) that each claim can credibly be, by what else is known of the uploads; not for n."""
        return {}

    def before(self, down: Down, ups: Up) -> dict[str, Tensor]:
        """What the arrays of uploads were before local training, by name; with or without a client dimension."""
        arrays = {name: leaf for name, leaf in tree.named(ups).items() if name not in self.claims}
        if self.sends_changes:
            return {name: leaf.new_zeros(()) for name, leaf in arrays.items()}
        sent = tree.leaves(down)
        if sent and [leaf.shape for leaf in sent] != [leaf.shape[1:] for leaf in arrays.values()]:
            raise UserError(f"{self.title} does not say what its uploads were before training: it needs `before`.")
        return dict(zip(arrays, sent, strict=False))

    def personal(
        self, model: Model, down: Down, client: Client, carry: Carry | None, data: ClientData, rng: Rng
    ) -> Params | None:
        """The personalised models after local training and before merging.

        Where ``personal_after_merge`` is set, after merging instead: ``down`` is then the new one, ``client`` is what
        the client keeps and there is no carry.
        """
        return None

    def posterior(
        self, model: Model, down: Down, client: Client, carry: Carry | None, data: ClientData, rng: Rng
    ) -> Posterior | None:
        """The same models as ``personal``, with what is uncertain in them; plain networks unless a method says more."""
        found = self.personal(model, down, client, carry, data, rng)
        return None if found is None else Posterior(found, {})

    def general(self, server: Server) -> Params | None:
        """The global model, without a client dimension."""
        return None

    def inspect(self, down: Down, client: Client) -> dict[str, Tensor]:
        """What there is to see of the clients: saved with the model; one number a client is a column of the report."""
        return tree.named(client)

    @property
    def trains_everyone(self) -> bool:
        """Whether clients that do not upload have anything to do."""
        return type(self).adapt is not Algorithm.adapt


Penalty = Callable[[Params], Tensor]


def train_network(
    model: Model,
    start: Params,
    data: ClientData,
    rng: Rng,
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    momentum: float = 0.0,
    penalty: Penalty | None = None,
) -> Params:
    """SGD on the mean loss f_j of each client from ``start``, base and head jointly.

    ``penalty`` gives a further loss of each client (C,) in every step, such as a proximal term.
    """
    steps = minibatches(data, rng.stream("batches"), batch_size=batch_size, epochs=epochs)
    return sgd(network_loss(model, penalty), start, steps, lr=lr, momentum=momentum)


def network_loss(model: Model, penalty: Penalty | None = None) -> Callable[[Params, Batch], Tensor]:
    """The mean NLL of each client's batch (C,) for the whole network, in training."""

    def loss(params: Params, batch: Batch) -> Tensor:
        value = model.nll(model.logits(params, batch.x, train=True), batch) / count(batch)
        return value if penalty is None else value + penalty(params)

    return loss


class LocalTraining(BaseModel):
    """The hyper-parameters of plain local training, for the methods that train the whole network jointly."""

    lr: float = Field(default=1e-3, gt=0, description="learning rate (eta)")
    epochs: int = Field(default=5, ge=1, description="local epochs a round (R)")
    batch_size: int = Field(default=10, ge=1, description="batch size (B)")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum; it does not outlive a round")

    def train(self, model: Model, start: Params, data: ClientData, rng: Rng, penalty: Penalty | None = None) -> Params:
        """SGD by these settings."""
        return train_network(
            model,
            start,
            data,
            rng,
            lr=self.lr,
            epochs=self.epochs,
            batch_size=self.batch_size,
            momentum=self.momentum,
            penalty=penalty,
        )


class Averaging(BaseModel):
    """How uploads weigh in an average."""

    weights: Literal["size", "uniform"] = Field(default="size", description="weigh uploads by data size, or all alike")

    def weigh(self, n: Tensor) -> Tensor:
        """The weights of uploads with data sizes n (C,)."""
        return n if self.weights == "size" else torch.ones_like(n)


@dataclass(frozen=True)
class NetworkUp:
    """An upload of a whole network, and the data size n_j (C,)."""

    params: Params
    n: Tensor


class OneNetwork(Averaging, Algorithm[Params, Tensor, Params, Params, NetworkUp]):
    """Methods whose server keeps one network, sends it and averages what comes back; clients keep nothing."""

    keeps: ClassVar[str] = "nothing"
    sends: ClassVar[str] = "the whole network"

    def server_init(self, model: Model, clients: int, rng: Rng) -> Params:
        return model.initial

    def client_init(self, model: Model, server: Params, rng: Rng) -> Tensor:
        return nothing(rng)

    def down(self, server: Params) -> Params:
        return server

    def merge(self, server: Params, ups: NetworkUp) -> Params:
        return tree.weighted_mean(ups.params, self.weigh(ups.n))

    def general(self, server: Params) -> Params:
        return server


AnyAlgorithm = Algorithm[Any, Any, Any, Any, Any]


def nothing(rng: Rng) -> Tensor:
    """The state of a client that keeps nothing: (C, 0)."""
    return torch.empty(len(rng), 0)
