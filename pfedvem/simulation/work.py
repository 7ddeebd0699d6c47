"""What one cohort does in one round: train, perhaps contribute, perhaps be evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import AnyAlgorithm
from pfedvem.data.federation import Federation
from pfedvem.models import FORWARD_BATCH, Model, Params, Posterior
from pfedvem.rng import Rng

BINS = 15  # of the expected calibration error


@dataclass(frozen=True)
class Setup:
    """What stays the same for a whole run."""

    algorithm: AnyAlgorithm
    model: Model
    federation: Federation
    seed: int
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """A cohort of clients in a round, and what is wanted of it; without ``keep`` clients stay as they were.

    With ``take`` they hand over their personalised models.
    """

    round: int
    clients: tuple[int, ...]
    upload: bool = False
    evaluate: bool = False
    train: bool = True
    keep: bool = True
    take: bool = False


@dataclass(frozen=True)
class Scores:
    """Accuracy (0 to 1), negative log-likelihood, expected calibration error (0 to 1) and Brier score (0 to 2).

    A value a client, nan where there is no test data.
    """

    accuracy: Tensor
    nll: Tensor
    ece: Tensor
    brier: Tensor

    @staticmethod
    def unknown(clients: int) -> Scores:
        """Those of clients that are not tested yet."""
        return Scores(*(torch.full((clients,), math.nan) for _ in range(4)))


@dataclass(frozen=True)
class Outcome:
    """What came of a job: clients as they now are, their uploads, scores and models, where asked for."""

    job: Job
    client: Any
    up: Any
    scores: Scores | None
    models: Posterior | None = None


def perform(setup: Setup, down: Any, client: Any, job: Job) -> Outcome:
    """Does a job. A pure function of its arguments: this is what executors run.

    What is computed on an accelerator comes back to main memory.
    """
    algorithm, model, before = setup.algorithm, setup.model, client
    down, client = tree.to(down, setup.device), tree.to(client, setup.device)
    data = setup.federation.cohort(job.clients, setup.device)
    rng = Rng(setup.seed, job.round, job.clients, setup.device)
    up, carry, contributed = None, None, client
    if job.train:
        client, carry = algorithm.adapt(model, down, client, data, rng)
        if not (job.upload or job.evaluate or job.take):
            return Outcome(job, tree.to(client, "cpu"), None, None)
        up, contributed, carry = algorithm.contribute(model, down, client, carry, data, rng)
    scores = None
    if job.evaluate:
        personal = algorithm.personal(model, down, contributed, carry, data, rng)
        scores = score_clients(setup, personal, job.clients) if personal is not None else None
    models = algorithm.posterior(model, down, contributed, carry, data, rng) if job.take else None
    # State that counts only with the upload (a control variate, say) stays as it was where nothing was uploaded.
    kept, sent = (contributed, up) if job.upload else (client, None)
    kept = tree.to(kept if job.keep else before, "cpu")
    return Outcome(job, kept, tree.to(sent, "cpu"), scores, tree.to(models, "cpu"))


def score_clients(setup: Setup, personal: Params, clients: tuple[int, ...]) -> Scores:
    """Tests each personalised model on the test data of all that its client owns."""
    rows = [score(setup, tree.take(personal, [row]), setup.federation.test_indices(j)) for row, j in enumerate(clients)]
    return Scores(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def score_general(setup: Setup, general: Params) -> tuple[float, float, float, float]:
    """Tests the global model on the complete test set."""
    one = tree.expand(tree.to(general, setup.device), 1)
    return score(setup, one, setup.federation.general_indices())


@torch.no_grad()
def score(setup: Setup, params: Params, test: Tensor) -> tuple[float, float, float, float]:
    """Accuracy, mean NLL, expected calibration error and Brier score of one network (cohort of one) on these samples.

    The calibration error is the mean distance between how sure predictions are and how often they are right, over bins
    of equal width of the predicted probability; the Brier score the mean squared distance of the probabilities from
    the truth, summed over classes.
    """
    if len(test) == 0:
        return math.nan, math.nan, math.nan, math.nan
    correct, loss, squares, excess = 0.0, 0.0, 0.0, torch.zeros(BINS, dtype=torch.float64)
    for part in test.split(FORWARD_BATCH):
        x, y = setup.federation.test_samples(part, setup.device)
        log_p = setup.model.log_probabilities(params, x.unsqueeze(0))[0]
        surest, guess = log_p.max(1)
        sure, right = surest.exp().double().cpu(), (guess == y).double().cpu()
        place = (sure.nan_to_num(0) * BINS).long().clamp(max=BINS - 1)
        excess += torch.bincount(place, sure - right, minlength=BINS)
        correct += float(right.sum())
        truth = log_p.gather(1, y.unsqueeze(1))
        loss -= float(truth.sum())
        squares += float(log_p.exp().square().sum() - 2 * truth.exp().sum()) + len(y)
    n = len(test)
    return correct / n, loss / n, float(excess.abs().sum()) / n, squares / n
