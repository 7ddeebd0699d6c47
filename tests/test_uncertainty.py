"""Predictions by a posterior: what they average, how their uncertainty splits, and how they are judged."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from pfedvem import FedAvg, tree
from pfedvem.data.inputs import Inputs
from pfedvem.errors import UserError
from pfedvem.models import Model, Params, Posterior
from pfedvem.simulation.work import Setup, score
from pfedvem.uncertainty import Prediction, calibration, network, predictor
from tests.conftest import blobs, small_network

NUMBERS = Inputs((4,), images=False)
CLASSES = ("a", "b", "c")


def believed(model: Model, sd: float = 0.5) -> Posterior:
    return Posterior(model.initial, {"w": torch.full_like(model.initial.w, sd)})


def test_a_prediction_is_the_mean_over_networks_drawn_from_the_posterior() -> None:
    model, x = small_network(), torch.randn(7, 4)
    made = predictor(model, believed(model), NUMBERS, seed=0, samples=20000).predict(x, CLASSES)
    torch.manual_seed(0)
    heads = model.initial.w + 0.5 * torch.randn(20000, *model.initial.w.shape)
    h = model.features(model.initial.theta, x.unsqueeze(0))[0]
    each = torch.einsum("nf,skf->snk", torch.cat([h, torch.ones(7, 1)], dim=1), heads).softmax(-1)
    torch.testing.assert_close(made.probabilities, each.mean(0), atol=0.01, rtol=0)
    expected = -(each * each.log()).sum(-1).mean(0)
    assert made.expected_entropy is not None
    torch.testing.assert_close(made.expected_entropy, expected, atol=0.02, rtol=0)


def test_entropy_is_the_sum_of_its_two_parts_and_neither_is_negative() -> None:
    model, x = small_network(), 3 * torch.randn(50, 4)
    made = predictor(model, believed(model), NUMBERS, seed=0).predict(x, CLASSES)
    assert made.mutual_information is not None
    assert made.expected_entropy is not None
    torch.testing.assert_close(made.entropy, made.mutual_information + made.expected_entropy)
    assert bool((made.mutual_information >= 0).all())
    assert bool((made.expected_entropy >= 0).all())
    assert bool((made.entropy <= math.log(3) + 1e-6).all())
    torch.testing.assert_close(made.probabilities.sum(1), torch.ones(50))


def test_a_posterior_that_is_sure_has_no_uncertainty_that_data_could_remove() -> None:
    model, x = small_network(), torch.randn(20, 4)
    sure = predictor(model, believed(model, 1e-6), NUMBERS, seed=0).predict(x, CLASSES)
    wide = predictor(model, believed(model, 2.0), NUMBERS, seed=0).predict(x, CLASSES)
    assert sure.mutual_information is not None
    assert wide.mutual_information is not None
    assert float(sure.mutual_information.max()) < 1e-4
    assert float(wide.mutual_information.mean()) > 0.1


def test_without_a_posterior_the_prediction_is_the_networks_own() -> None:
    model, x = small_network(), torch.randn(20, 4)
    for posterior, samples in ((Posterior(model.initial, {}), 100), (believed(model), 0)):
        made = predictor(model, posterior, NUMBERS, seed=0, samples=samples).predict(x, CLASSES)
        torch.testing.assert_close(made.probabilities, model.module(model.initial)(x).softmax(1))
        assert made.mutual_information is None
        assert made.expected_entropy is None


def test_a_posterior_over_all_weights_draws_whole_networks() -> None:
    model, x = small_network(), torch.randn(20, 4)
    sd = {name: torch.full_like(leaf, 0.3) for name, leaf in tree.named(model.initial).items()}
    made = predictor(model, Posterior(model.initial, sd), NUMBERS, seed=0, samples=10)
    assert len(made.network.samples.networks) == 10  # type: ignore[arg-type, union-attr]
    assert float(made.predict(x, CLASSES).mutual_information.mean()) > 0.01  # type: ignore[union-attr]
    still = {name: 0 * leaf for name, leaf in sd.items()}
    same = predictor(model, Posterior(model.initial, still), NUMBERS, seed=0, samples=3).predict(x, CLASSES)
    torch.testing.assert_close(same.probabilities, model.module(model.initial)(x).softmax(1))


def test_the_same_model_predicts_the_same_twice() -> None:
    model, x = small_network(), torch.randn(5, 4)
    first, again = (predictor(model, believed(model), NUMBERS, seed=3).predict(x, CLASSES) for _ in range(2))
    assert torch.equal(first.probabilities, again.probabilities)


def test_large_batches_are_predicted_in_parts_without_a_difference() -> None:
    model, x = small_network(), torch.randn(1203, 4)
    made = predictor(model, believed(model), NUMBERS, seed=0)
    torch.testing.assert_close(
        made.predict(x, CLASSES).probabilities[1100:], made.predict(x[1100:], CLASSES).probabilities
    )


def test_a_network_takes_what_the_user_has() -> None:
    federation = blobs((9,))
    model, x = small_network(), torch.randn(6, 4)
    assert type(network(model, model.initial, federation.raw)) is nn.Sequential
    scaled = Inputs((4,), False, (1.0, 2.0, 3.0, 4.0), (2.0, 2.0, 2.0, 2.0))
    whole = network(model, model.initial, scaled)
    torch.testing.assert_close(whole(x), model.module(model.initial)((x - torch.tensor([1.0, 2, 3, 4])) / 2))


def test_a_prediction_as_a_table_has_names_and_both_parts() -> None:
    model = small_network()
    frame = predictor(model, believed(model), NUMBERS, seed=0).predict(torch.randn(3, 4), CLASSES).frame()
    parts = ["prediction", "probability", "entropy", "mutual_information", "expected_entropy"]
    assert frame.columns.to_list() == [*parts, "p(a)", "p(b)", "p(c)"]
    assert set(frame["prediction"]) <= set(CLASSES)
    np.testing.assert_allclose(frame[["p(a)", "p(b)", "p(c)"]].max(axis=1), frame["probability"])


# Judged by labels

P = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]])
Y = torch.tensor([0, 1, 1, 0])


def test_scores_are_what_their_definitions_say() -> None:
    found = calibration(P, Y, torch.tensor([0.1, 0.3, 0.2, 0.4]))
    assert found.samples == 4
    assert found.accuracy == 0.75
    assert found.nll == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.8) + math.log(0.5)) / 4)
    assert found.brier == pytest.approx((2 * 0.01 + 2 * 0.36 + 2 * 0.04 + 2 * 0.25) / 4)
    assert found.ece == pytest.approx((0.1 + 0.6 + 0.2 + 0.5) / 4)
    assert found.bins["samples"].sum() == 4


def test_without_test_data_there_is_nothing_to_judge_by() -> None:
    with pytest.raises(UserError, match="There is no test data to judge predictions by"):
        calibration(torch.empty(0, 3), torch.empty(0, dtype=torch.long), torch.empty(0))


def test_a_probability_that_has_underflowed_costs_much_but_not_everything() -> None:
    found = calibration(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), torch.zeros(2))
    assert 40 < found.nll < 50


def test_declining_the_most_uncertain_leaves_the_rest() -> None:
    found = calibration(P, Y, torch.tensor([0.1, 0.9, 0.2, 0.3]))
    by_share = found.declined.set_index("declined")["accuracy"]
    assert by_share[0.0] == 0.75
    assert by_share[0.3] == 1.0, "the wrong one is the most uncertain"


def test_the_bins_of_a_calibrated_model_lie_on_the_diagonal() -> None:
    rng = torch.Generator().manual_seed(0)
    p = 0.5 + torch.rand(20000, generator=rng) / 2
    y = (torch.rand(20000, generator=rng) > p).long()
    found = calibration(torch.stack([p, 1 - p], dim=1), y, -p)
    full = found.bins[found.bins["samples"] > 100]
    assert float((full["confidence"] - full["accuracy"]).abs().max()) < 0.05
    assert found.ece < 0.02


def test_the_scores_of_a_run_are_the_same_as_those_of_its_predictions() -> None:
    federation, model = blobs((30,)), small_network()
    setup = Setup(FedAvg(), model, federation, 0)
    test = federation.test_indices(0)
    accuracy, nll, ece, brier, bins = score(setup, tree.expand(model.initial, 1), test)
    x, y = federation.test_samples(test)
    found = calibration(model.module(model.initial)(x).softmax(1).detach(), y, torch.zeros(len(y)))
    again = (found.accuracy, found.nll, found.ece, found.brier)
    assert again == pytest.approx((accuracy, nll, ece, brier), rel=1e-5)
    assert bins[:, 0].tolist() == found.bins["samples"].tolist()
    full = bins[:, 0] > 0
    assert (bins[:, 2] / bins[:, 0])[full].tolist() == pytest.approx(found.bins["accuracy"][full.numpy()].tolist())
    assert (bins[:, 1] / bins[:, 0])[full].tolist() == pytest.approx(found.bins["confidence"][full.numpy()].tolist())


def test_predictions_are_judged_by_numbers_and_by_names() -> None:
    made = Prediction(P, torch.zeros(4), None, ("no", "yes"))
    assert made.against([0, 1, 1, 0]).accuracy == made.against(["no", "yes", "yes", "no"]).accuracy == 0.75
    assert made.against(pd.Series([0, 1, 1, 0])).accuracy == 0.75
    with pytest.raises(UserError, match="3 labels for 4 predictions"):
        made.against([0, 1, 1])
    with pytest.raises(UserError, match="has the label 2; labels are whole numbers from 0 to 1"):
        made.against([0, 1, 1, 2])
    with pytest.raises(UserError, match=r"labels have the shape \(4, 1\); give one label for each prediction"):
        made.against([[0], [1], [1], [0]])


def test_labels_of_a_federation_are_places_also_where_classes_are_called_by_other_numbers() -> None:
    made = Prediction(P, torch.zeros(4), None, ("1", "2"))
    assert made.against(torch.tensor([0, 1, 1, 0])).accuracy == made.against([1, 2, 2, 1]).accuracy == 0.75
    assert made.against(torch.ones(4, dtype=torch.long)).accuracy == made.against([2, 2, 2, 2]).accuracy


def test_a_head_alone_is_a_network_too() -> None:
    model = Model(nn.Linear(4, 3))
    params = Params({}, torch.randn(3, 5))
    x = torch.randn(2, 4)
    torch.testing.assert_close(model.module(params)(x), x @ params.w[:, :-1].T + params.w[:, -1])
