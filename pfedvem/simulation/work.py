"""What one cohort does in one round: train, perhaps contribute, perhaps be evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfedvem import tree
from pfedvem.algorithms.base import AnyAlgorithm
from pfedvem.data.federation import Federation
from pfedvem.guard import TRUST, Guard
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
    guard: Guard = TRUST
    precision: str = "float32"
    gm: str = "last"


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


class Score(NamedTuple):
    """Accuracy, negative log-likelihood, expected calibration error and Brier score of one network, and its bins."""

    accuracy: float
    nll: float
    ece: float
    brier: float
    bins: Tensor


@dataclass(frozen=True)
class Scores:
    """Accuracy (0 to 1), negative log-likelihood, expected calibration error (0 to 1) and Brier score (0 to 2).

    A value a client, nan where there is no test data. ``bins`` (C, bins, 3) has for each bin of the predicted
    probability how many predictions lie in it, the sum of their probabilities, and how many are right.
    """

    accuracy: Tensor
    nll: Tensor
    ece: Tensor
    brier: Tensor
    bins: Tensor

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The scores that have one value a client."""
        return self.accuracy, self.nll, self.ece, self.brier

    @staticmethod
    def unknown(clients: int) -> Scores:
        """Those of clients that are not tested yet."""
        accuracy, nll, ece, brier = torch.full((4, clients), math.nan)
        return Scores(accuracy, nll, ece, brier, torch.zeros(clients, BINS, 3))


@dataclass(frozen=True)
class Outcome:
    """What came of a job: clients as they now are, their uploads, scores and models, where asked for.

    Those that are ``lost`` have overflowed in training and are as they were.
    """

    job: Job
    client: Any
    up: Any
    scores: Scores | None
    models: Posterior | None = None
    lost: tuple[int, ...] = ()


def perform(setup: Setup, down: Any, client: Any, job: Job) -> Outcome:
    """Does a job. A pure function of its arguments: this is what executors run.

    What is computed on an accelerator comes back to main memory.
    """
    algorithm, model, before = setup.algorithm, setup.model.in_precision(setup.precision), client
    down, client = tree.to(down, setup.device), tree.to(client, setup.device)
    data = setup.federation.cohort(job.clients, setup.device)
    rng = Rng(setup.seed, job.round, job.clients, setup.device)
    up, carry, contributed = None, None, client
    if job.train:
        client, carry = algorithm.adapt(model, down, client, data, rng)
        if not (job.upload or job.evaluate or job.take):
            kept, lost = _unless_lost(job, before, tree.to(client, "cpu"))
            return Outcome(job, kept, None, None, lost=lost)
        up, contributed, carry = algorithm.contribute(model, down, client, carry, data, rng)
    scores = None
    if job.evaluate:
        personal = algorithm.personal(model, down, contributed, carry, data, rng)
        scores = score_clients(setup, personal, job.clients) if personal is not None else None
    models = algorithm.posterior(model, down, contributed, carry, data, rng) if job.take else None
    # State that counts only with the upload (a control variate, say) stays as it was where nothing was uploaded.
    kept, sent = (contributed, up) if job.upload else (client, None)
    kept, lost = _unless_lost(job, before, tree.to(kept if job.keep else before, "cpu"))
    return Outcome(job, kept, tree.to(sent, "cpu"), scores, tree.to(models, "cpu"), lost)


def _unless_lost(job: Job, before: Any, after: Any) -> tuple[Any, tuple[int, ...]]:
    """Clients as they are after training, and as before where that has spoilt them for good; and which these are."""
    spoilt = ~tree.finite(after)
    if not bool(spoilt.any()):
        return after, ()
    spoilt &= tree.finite(before)
    lost = tuple(j for j, one in zip(job.clients, spoilt.tolist(), strict=True) if one)
    return tree.where(~spoilt, after, before), lost


def score_clients(setup: Setup, personal: Params, clients: tuple[int, ...]) -> Scores:
    """Tests each personalised model on the test data of all that its client owns."""
    rows = [score(setup, tree.take(personal, [row]), setup.federation.test_indices(j)) for row, j in enumerate(clients)]
    accuracy, nll, ece, brier = torch.tensor([row[:4] for row in rows]).T
    return Scores(accuracy, nll, ece, brier, torch.stack([row.bins for row in rows]))


def score_general(setup: Setup, general: Params) -> Score:
    """Tests the global model on the complete test set."""
    one = tree.expand(tree.to(general, setup.device), 1)
    return score(setup, one, setup.federation.general_indices())


@torch.no_grad()
def score(setup: Setup, params: Params, test: Tensor) -> Score:
    """Accuracy, mean NLL, expected calibration error and Brier score of one network (cohort of one) on these samples.

    The calibration error is the mean distance between how sure predictions are and how often they are right, over bins
    of equal width of the predicted probability; the Brier score the mean squared distance of the probabilities from
    the truth, summed over classes.
    """
    if len(test) == 0:
        return Score(math.nan, math.nan, math.nan, math.nan, torch.zeros(BINS, 3))
    loss, squares, bins = 0.0, 0.0, torch.zeros(BINS, 3, dtype=torch.float64)
    for part in test.split(FORWARD_BATCH):
        x, y = setup.federation.test_samples(part, setup.device)
        log_p = setup.model.log_probabilities(params, x.unsqueeze(0))[0]
        surest, guess = log_p.max(1)
        # What is no number is not right.
        sure, right = surest.exp().double().cpu(), ((guess == y) & ~surest.isnan()).double().cpu()
        place = (sure.nan_to_num(0) * BINS).long().clamp(max=BINS - 1)
        bins.index_add_(0, place, torch.stack([torch.ones_like(sure), sure, right], 1))
        truth = log_p.gather(1, y.unsqueeze(1))
        loss -= float(truth.sum())
        squares += float(log_p.exp().square().sum() - 2 * truth.exp().sum()) + len(y)
    n, (_, sure, right) = len(test), bins.unbind(1)
    return Score(float(right.sum()) / n, loss / n, float((sure - right).abs().sum()) / n, squares / n, bins.float())
