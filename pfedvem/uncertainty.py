"""Predictions that say how sure they are: averages over a posterior, and how well the probabilities keep their word.

For a posterior q over networks, p(y | x) = E_q[ p(y | x, network) ], and its entropy splits in two:

    H[ E_q p ]   =   H[ E_q p ] - E_q H[ p ]   +   E_q H[ p ]
    entropy          mutual information            expected entropy
    in all           more data would remove it     more data would not
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedvem import tree
from pfedvem.data.inputs import Inputs
from pfedvem.data.labels import label_numbers
from pfedvem.errors import UserError
from pfedvem.models import Model, Params, Posterior
from pfedvem.rng import generator
from pfedvem.simulation.work import BINS

if TYPE_CHECKING:
    import pandas as pd

PREDICT_BATCH = 500
SAMPLES = 100  # networks that a prediction averages over


@dataclass(frozen=True)
class Prediction:
    """Predicted probabilities (N, classes) and how uncertain they are, in nats (N,).

    ``mutual_information`` is the part of ``entropy`` that more data of this kind would remove. It is None where there
    is no posterior to tell it from the rest.
    """

    probabilities: Tensor
    entropy: Tensor
    mutual_information: Tensor | None
    classes: tuple[str, ...]

    @property
    def expected_entropy(self) -> Tensor | None:
        """The part of the entropy that more data would not remove (N,)."""
        return None if self.mutual_information is None else self.entropy - self.mutual_information

    @property
    def label(self) -> Tensor:
        """The most probable class of each sample, as its number (N,)."""
        return self.probabilities.argmax(1)

    @property
    def names(self) -> list[str]:
        """The most probable class of each sample, as its name."""
        return [self.classes[number] for number in self.label.tolist()]

    def frame(self) -> pd.DataFrame:
        """A row for each sample: prediction, its probability, the parts of its uncertainty, and all probabilities."""
        import pandas as pd

        columns: dict[str, Any] = {"prediction": self.names, "probability": self.probabilities.max(1).values}
        columns["entropy"] = self.entropy
        if self.mutual_information is not None:
            columns |= {"mutual_information": self.mutual_information, "expected_entropy": self.expected_entropy}
        columns |= {f"p({name})": self.probabilities[:, c] for c, name in enumerate(self.classes)}
        return pd.DataFrame({key: value if key == "prediction" else value.numpy() for key, value in columns.items()})

    def against(self, y: Any) -> Calibration:
        """How right the predictions are, given the labels as the data has them: numbers, or names of classes.

        Those of a federation (``federation.test.y``), or any other tensor, are places among the classes.
        """
        places = tuple(str(place) for place in range(len(self.classes)))
        names = places if isinstance(y, Tensor) else self.classes
        given = np.asarray(y.detach() if isinstance(y, Tensor) else y)
        if given.ndim != 1:
            raise UserError(f"The labels have the shape {given.shape}; give one label for each prediction.")
        labels = torch.from_numpy(label_numbers(given, names, "The data"))
        if len(labels) != len(self.probabilities):
            raise UserError(f"There are {len(labels)} labels for {len(self.probabilities)} predictions.")
        return calibration(self.probabilities, labels, self.entropy)


@dataclass(frozen=True)
class Calibration:
    """How right predictions are, and whether their probabilities keep their word. Shares are from 0 to 1.

    Of each of the ``bins`` of confidence: how many samples are in it, their mean confidence and how many are right.
    Of ``declined``: the accuracy on the rest when the most uncertain share of the samples is declined.
    """

    samples: int
    accuracy: float
    nll: float
    brier: float
    ece: float
    bins: pd.DataFrame
    declined: pd.DataFrame


def calibration(probabilities: Tensor, y: Tensor, uncertainty: Tensor) -> Calibration:
    """Scores of predicted probabilities (N, classes) against the labels y (N,); declines by ``uncertainty`` (N,)."""
    import pandas as pd

    if len(y) == 0:
        raise UserError("There is no test data to judge predictions by.")
    p, n = probabilities.double(), len(y)
    sure, guess = p.max(1)
    right = (guess == y).double()
    place = (sure * BINS).long().clamp(max=BINS - 1)
    count, confident, correct = (
        torch.bincount(place, weights, minlength=BINS) for weights in (torch.ones_like(sure), sure, right)
    )
    edges = torch.arange(BINS + 1, dtype=torch.float64) / BINS
    bins = pd.DataFrame(
        {
            "from": edges[:-1].numpy(),
            "to": edges[1:].numpy(),
            "samples": count.long().numpy(),
            "confidence": (confident / count).numpy(),
            "accuracy": (correct / count).numpy(),
        }
    )
    ordered = right[uncertainty.argsort(stable=True)]
    shares = torch.arange(10, dtype=torch.float64) / 10
    kept = [ordered[: max(1, n - round(share * n))] for share in shares.tolist()]
    declined = pd.DataFrame({"declined": shares.numpy(), "accuracy": [float(part.mean()) for part in kept]})
    truth = p.gather(1, y.unsqueeze(1)).squeeze(1)
    least = torch.finfo(probabilities.dtype).tiny  # what has underflowed to 0 is not quite impossible
    return Calibration(
        samples=n,
        accuracy=float(right.mean()),
        nll=float(-truth.clamp(min=least).log().mean()),
        brier=float((p.square().sum(1) - 2 * truth + 1).mean()),
        ece=float((confident - correct).abs().sum()) / n,
        bins=bins,
        declined=declined,
    )


class Heads(nn.Module):
    """One base with many heads (S, classes, features + 1): logits (N, S, classes)."""

    def __init__(self, base: nn.Module, heads: Tensor) -> None:
        super().__init__()
        self.base = base
        self.samples, self.classes = heads.shape[:2]
        self.linear = nn.Linear(heads.shape[2] - 1, self.samples * self.classes)
        flat = heads.flatten(0, 1)
        self.linear.load_state_dict({"weight": flat[:, :-1], "bias": flat[:, -1]})

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.base(x).flatten(1))
        return logits.view(-1, self.samples, self.classes)


class Networks(nn.Module):
    """Many whole networks: logits (N, S, classes)."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([network(x) for network in self.networks], dim=1)


class Predictor(nn.Module):
    """From what a user has to probabilities (N, classes), their entropy (N,) and its mutual information (N,).

    This is what predicts, and what is exported. Without a posterior there is one network and no mutual information.
    """

    def __init__(self, inputs: Inputs, networks: nn.Module, posterior: bool) -> None:
        super().__init__()
        self.network = nn.Sequential(OrderedDict([*inputs.steps(), ("samples", networks)]))
        self.posterior = posterior

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        log_p = self.network(x).log_softmax(-1)
        p = log_p.exp().mean(1)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        if not self.posterior:
            return p, entropy
        expected = -(log_p.exp() * log_p).sum(-1).mean(1)
        return p, entropy, (entropy - expected).clamp(min=0)

    @torch.no_grad()
    def predict(self, x: Tensor, classes: tuple[str, ...]) -> Prediction:
        """The prediction for all samples, in parts that fit into memory."""
        parts = [self(part) for part in x.split(PREDICT_BATCH)]
        p, entropy, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
        return Prediction(p, entropy, rest[0] if rest else None, classes)


def predictor(model: Model, posterior: Posterior, inputs: Inputs, seed: int, samples: int = SAMPLES) -> Predictor:
    """What predicts by so many samples of a posterior (no client dimension), or by its mean if it has no deviations.

    ``samples=0`` predicts by the mean in any case.
    """
    mean, sd = posterior.mean, posterior.sd if samples > 0 else {}
    if set(sd) <= {"w"}:
        heads = mean.w.unsqueeze(0)
        if sd:
            heads = heads + sd["w"] * _noise(seed, "w", samples, mean.w)
        return Predictor(inputs, Heads(model.base(mean.theta), heads), bool(sd))
    named = {
        name: leaf + sd[name] * _noise(seed, name, samples, leaf) if name in sd else leaf.expand(samples, *leaf.shape)
        for name, leaf in tree.named(mean).items()
    }
    networks = [model.module(tree.rebuild(mean, [leaf[s] for leaf in named.values()])) for s in range(samples)]
    return Predictor(inputs, Networks(networks), True)


def _noise(seed: int, name: str, samples: int, like: Tensor) -> Tensor:
    """The same draws whenever the same model predicts."""
    draws = generator(seed, f"predict {name}").standard_normal((samples, *like.shape), dtype=np.float32)
    return torch.from_numpy(draws)


def network(model: Model, params: Params, inputs: Inputs) -> nn.Module:
    """An ordinary ``nn.Module`` from what a user has to logits (N, classes)."""
    steps = inputs.steps()
    module = model.module(params)
    return nn.Sequential(OrderedDict([*copy.deepcopy(steps), ("network", module)])).eval() if steps else module
