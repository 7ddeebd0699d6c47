"""A federation: one copy of the data, and which samples of it belong to which client."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pfedvem.data.inputs import Inputs, normalised
from pfedvem.errors import UserError
from pfedvem.rng import generator

if TYPE_CHECKING:
    import pandas as pd

Indices = NDArray[np.int64]
PREPARED_BYTES = 2**30
FORWARD_BATCH = 250


@dataclass(frozen=True)
class Split:
    """Inputs ``x`` (N, ...), uint8 images or float32 values, and labels ``y`` (N,) of int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Shard:
    """What one client owns: indices into the federation's train and test split.

    ``test`` is a tuple of index arrays, one for each label or subclass that the client owns; clients that own
    the same label share the array, so that ten thousand clients cost no more memory than their training data.
    """

    id: str
    train: Indices
    test: tuple[Indices, ...]
    owns: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.train)


@dataclass(frozen=True)
class ClientData:
    """The training data of a cohort of C clients, padded to the largest: ``x`` (C, N, ...), ``y`` (C, N).

    Client c has ``sizes[c]`` samples; what lies behind them is padding that no result may depend on.
    """

    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]

    @property
    def n(self) -> Tensor:
        """The sizes n_j as float32 (C,), for weighing."""
        return torch.tensor(self.sizes, dtype=torch.float32, device=self.x.device)

    def take(self, rows: Sequence[int]) -> ClientData:
        """The data of some of the clients, padded to the largest of them."""
        sizes = tuple(self.sizes[row] for row in rows)
        return ClientData(self.x[list(rows), : max(sizes)], self.y[list(rows), : max(sizes)], sizes)

    def select(self, samples: Sequence[Indices]) -> ClientData:
        """Only these samples of each client, padded to the most."""
        sizes = np.array([len(chosen) for chosen in samples])
        index = np.zeros((len(samples), sizes.max()), dtype=np.int64)
        for row, chosen in zip(index, samples, strict=True):
            row[: len(chosen)] = chosen
        return self.pick(index, sizes)

    def pick(self, index: Indices, sizes: Indices) -> ClientData:
        """The samples ``index`` (C, B) of each client, of which the first ``sizes`` (C,) are wanted."""
        width = self.y.shape[1]
        flat = torch.from_numpy((index + width * np.arange(len(index))[:, None]).ravel()).to(self.x.device)
        x, y = take_rows(self.x.flatten(0, 1), flat), self.y.flatten(0, 1)[flat]
        return ClientData(x.unflatten(0, index.shape), y.view(index.shape), tuple(sizes.tolist()))

    @property
    def mask(self) -> Tensor | None:
        """True (C, N) where a sample is real; None where nothing is padded."""
        width = self.y.shape[1]
        if all(n == width for n in self.sizes):
            return None
        return torch.arange(width, device=self.x.device) < torch.tensor(self.sizes, device=self.x.device).unsqueeze(1)


def channels_last(x: Tensor) -> Tensor:
    """Images (B, channels, height, width) as convolutions like them best in memory; anything else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Samples by their index; images that lie channels-last in memory stay so."""
    if x.ndim != 4:
        return x.index_select(0, index)
    return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Federation:
    """All clients' data. ``notes`` are sentences that a user should see (what is missing, what was held out).

    The general model is tested on the test samples ``general``, on all of them if that is None. ``columns`` are the
    names of a table's features. ``source`` says what a user's inputs are where a backbone has made these from them.
    """

    name: str
    train: Split
    test: Split
    shards: tuple[Shard, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    notes: tuple[str, ...] = ()
    general: Indices | None = None
    columns: tuple[str, ...] = ()
    source: Inputs | None = None

    def __post_init__(self) -> None:
        for shard in self.shards:
            if shard.n == 0:
                raise UserError(f"Client {shard.id} has no training data; every client needs at least one sample.")

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(shard.n for shard in self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, without the batch."""
        return tuple(self.train.x.shape[1:])

    def inputs(self, x: Tensor) -> Tensor:
        """Turns stored samples (B, ...) into what the network sees: normalised by channel or feature."""
        return normalised(x, self.mean, self.std)

    @property
    def raw(self) -> Inputs:
        """What a user's inputs are, and how they become what the network sees."""
        images = self.train.x.dtype == torch.uint8
        return self.source or Inputs(self.shape, images, self.mean, self.std, self.columns)

    def place(self, client: str | int) -> int:
        """Where the client of this id stands."""
        if str(client) not in self._places:
            some = ", ".join([*self._places][:8]) + (", ..." if len(self) > 8 else "")
            raise UserError(f"There is no client {str(client)!r}; there are {some}.")
        return self._places[str(client)]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {shard.id: j for j, shard in enumerate(self.shards)}

    def through(self, backbone: nn.Module) -> Federation:
        """The federation of what a frozen network makes of the inputs: features (N, F), computed here, once.

        What is trained on it takes seconds. The models that come of it take the inputs of this federation again.
        """
        if self.source is not None:
            raise UserError("These inputs have come through a backbone already; put both into one nn.Sequential.")
        if not isinstance(backbone, nn.Module):
            raise UserError(f"The backbone must be an nn.Module, not {backbone!r}.")
        backbone = backbone.eval().requires_grad_(False)

        @torch.no_grad()
        def features(split: Split) -> Split:
            try:
                parts = [backbone(self.inputs(part).clone()).flatten(1) for part in split.x.split(FORWARD_BATCH)]
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
                raise UserError(
                    f"The backbone makes no tensor of features (N, ...) of inputs of shape {self.shape}: {error}"
                ) from error
            return Split(torch.cat(parts), split.y)

        source = replace(self.raw, backbone=backbone)
        train = features(self.train)
        test = features(self.test) if len(self.test) else Split(train.x[:0], self.test.y)
        return replace(self, train=train, test=test, mean=(0.0,), std=(1.0,), columns=(), source=source)

    def cohort(self, clients: Sequence[int], device: str = "cpu") -> ClientData:
        """The training data of these clients, normalised and padded to the largest of them."""
        sizes = tuple(self.shards[j].n for j in clients)
        index = np.zeros((len(clients), max(sizes)), dtype=np.int64)
        for row, j in enumerate(clients):
            index[row, : sizes[row]] = self.shards[j].train
        flat = torch.from_numpy(index.ravel())
        x = self._samples(self.train, self.prepared[0], flat, device).unflatten(0, index.shape)
        return ClientData(x, self.train.y[flat].view(*index.shape).to(device), sizes)

    def test_samples(self, index: Tensor, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """These test samples, normalised, and their labels."""
        return self._samples(self.test, self.prepared[1], index, device), self.test.y[index].to(device)

    @cached_property
    def prepared(self) -> tuple[Tensor | None, Tensor | None]:
        """The inputs of both splits, normalised once for all rounds; None for a split that would take too much memory.

        Processes that are forked afterwards share it.
        """

        def prepare(split: Split) -> Tensor | None:
            return channels_last(self.inputs(split.x)) if 4 * split.x.numel() <= PREPARED_BYTES else None

        train = prepare(self.train)
        return train, train if self.test is self.train else prepare(self.test)

    def _samples(self, split: Split, prepared: Tensor | None, index: Tensor, device: str) -> Tensor:
        if prepared is None:
            return channels_last(self.inputs(split.x[index].to(device)))
        return take_rows(prepared, index).to(device)

    def only(self, client: int) -> Federation:
        """The federation of this client alone: its own data, without that of the others."""
        if not 0 <= client < len(self):
            raise UserError(f"There is no client {client}; there are {len(self)}, from 0.")
        shard, test = self.shards[client], np.concatenate(self.shards[client].test)
        own = replace(shard, train=np.arange(shard.n, dtype=np.int64), test=(np.arange(len(test), dtype=np.int64),))
        train, held = torch.from_numpy(shard.train), torch.from_numpy(test)
        return replace(
            self,
            train=Split(self.train.x[train], self.train.y[train]),
            test=Split(self.test.x[held], self.test.y[held]),
            shards=(own,),
            general=None,
        )

    def validation(self, share: float = 0.2, seed: int = 0) -> Federation:
        """The same clients, with this share of each one's training data held out as its test data.

        For choosing settings: the test data itself is no part of what is returned. Every client keeps a sample to
        train on; one that is too small to hold any out is not tested. The general model is tested on all that is held
        out.
        """
        if not 0 < share < 1:
            raise UserError(f"The share that is held out must be above 0 and below 1, not {share:g}.")
        shards = []
        for j, shard in enumerate(self.shards):
            count = min(round(share * shard.n), shard.n - 1)
            held = np.sort(generator(seed, "validation split", client=j).permutation(shard.n)[:count])
            shards.append(replace(shard, train=np.delete(shard.train, held), test=(shard.train[held],)))
        general = np.concatenate([shard.test[0] for shard in shards])
        if len(general) == 0:
            raise UserError(f"No client has enough training data to hold out a share of {share:g} of it.")
        small = sum(len(shard.test[0]) == 0 for shard in shards)
        notes = (f"{small} of {len(self)} clients are too small to hold out validation data.",) if small else ()
        return replace(self, test=self.train, shards=tuple(shards), notes=notes, general=general)

    def test_indices(self, client: int) -> Tensor:
        """The test samples of all that this client owns, as indices into ``test``."""
        return torch.from_numpy(np.concatenate(self.shards[client].test))

    def copies(self, client: int) -> float:
        """The share of a client's training samples whose inputs are the same as those of another of its samples."""
        rows = self.train.x[torch.from_numpy(self.shards[client].train)].flatten(1).numpy()
        return 1 - len({row.tobytes() for row in rows}) / len(rows)

    def general_indices(self) -> Tensor:
        """The test samples of the general model, as indices into ``test``."""
        return torch.arange(len(self.test)) if self.general is None else torch.from_numpy(self.general)

    def fingerprint(self) -> str:
        """A short digest of the data and of who owns what: equal federations, equal fingerprints."""
        owners = [(shard.id, shard.n, [len(part) for part in shard.test]) for shard in self.shards]
        about = (self.classes, self.mean, self.std, self.shape, len(self.train), len(self.test), owners)
        digest = hashlib.sha256(repr(about).encode())
        for split in (self.train, self.test):
            for values in (split.x, split.y):
                digest.update(np.ascontiguousarray(values.numpy()).data)
        for shard in self.shards:
            for part in (shard.train, *shard.test):
                digest.update(part.tobytes())
        digest.update(self.general_indices().numpy().tobytes())
        return digest.hexdigest()[:16]

    @staticmethod
    def from_datasets(
        clients: Sequence[Any] | Mapping[Any, Any],
        tests: Sequence[Any] | Mapping[Any, Any] | None = None,
        *,
        holdout: float = 0.2,
        classes: Sequence[str] | None = None,
        label: str | None = None,
        standardise: bool = False,
        name: str = "own",
        seed: int = 0,
    ) -> Federation:
        """A federation of what clients have: a list, or a dict by the clients' names.

        Args:
            clients: for each client a pair (x, y) of tensors or arrays, a torch ``Dataset`` of such pairs, a Hugging
                Face dataset or a pandas DataFrame. Images are uint8 (N, channels, height, width) or (N, height,
                width) and are normalised by channel; numbers (N, ...) are left as they are. Labels are whole numbers
                from 0, or words.
            tests: test data in the same form. A client that has none there holds out some of its own.
            holdout: the share that such a client holds out.
            classes: the names of the classes; by default those that occur. Where these are numbers other than 0, 1,
                2, ..., so are the labels.
            label: the column of the labels, in a Hugging Face dataset or DataFrame.
            standardise: bring each feature or channel of numbers, the dimension after the batch, to mean 0 and
                standard deviation 1.
            seed: which samples are held out.
        """
        from pfedvem.data.own import from_datasets

        return from_datasets(
            clients,
            tests,
            holdout=holdout,
            classes=classes,
            label=label,
            standardise=standardise,
            name=name,
            seed=seed,
        )

    @staticmethod
    def from_frame(
        frame: pd.DataFrame,
        *,
        client: str,
        label: str,
        features: Sequence[str] | None = None,
        test: pd.DataFrame | None = None,
        holdout: float = 0.2,
        classes: Sequence[str] | None = None,
        standardise: bool = True,
        name: str = "table",
        seed: int = 0,
    ) -> Federation:
        """A federation of the rows of a table, by the client that each belongs to.

        Args:
            frame: a pandas DataFrame; features are numbers.
            client: the column that says whose row it is.
            label: the column of the labels, numbers or words.
            features: the columns of the features; by default all others.
            test: rows to test on. A client that has none there holds out some of its own.
            holdout: the share that such a client holds out.
            classes: the names of the classes, as text; by default those that occur.
            standardise: bring each feature to mean 0 and standard deviation 1 over all clients' training data.
            seed: which rows are held out.
        """
        from pfedvem.data.own import from_frame

        return from_frame(
            frame,
            client=client,
            label=label,
            features=features,
            test=test,
            holdout=holdout,
            classes=classes,
            standardise=standardise,
            name=name,
            seed=seed,
        )

    @staticmethod
    def from_clients(
        clients: Sequence[tuple[Any, Any, Any, Any]],
        classes: Sequence[str] | None = None,
        name: str = "arrays",
    ) -> Federation:
        """A federation of data handed in: for each client (x_train, y_train, x_test, y_test), as tensors or arrays.

        Images are uint8 and are brought to [0, 1]; numbers are left as they are. A client may have no test data. The
        general model is tested on the test data of all clients together.
        """
        from pfedvem.data.own import from_clients

        return from_clients(clients, classes, name)
