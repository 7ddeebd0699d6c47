"""The three networks, and the split of any network into base and head."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.models import NETWORKS, Model, Params, apply_head, build


@pytest.mark.parametrize(
    ("name", "shape", "classes", "features", "parameters"),
    [
        ("mlp", (1, 28, 28), 10, 100, 784 * 100 + 100 + 1010),
        ("lenet", (3, 32, 32), 10, 84, 1216 + 12832 + 96120 + 10164 + 850),
        ("cnn6", (3, 32, 32), 20, 100, 896 + 18496 + 73856 + 295168 + 230500 + 2020),
        ("cnn6", (3, 64, 64), 3, 100, 896 + 18496 + 73856 + 295168 + 230500 + 303),
    ],
)
def test_the_papers_networks_have_their_sizes(
    name: str, shape: tuple[int, ...], classes: int, features: int, parameters: int
) -> None:
    model = build(name, shape, classes, seed=0)
    assert model.features_dim == features
    assert model.dimension == (features + 1) * classes
    assert sum(leaf.numel() for leaf in tree.leaves(model.initial)) == parameters
    model.check(torch.randn(2, *shape))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = build("mlp", (4,), 3, seed=7).initial.w
    torch.manual_seed(1)
    assert torch.equal(first, build("mlp", (4,), 3, seed=7).initial.w)
    assert not torch.equal(first, build("mlp", (4,), 3, seed=8).initial.w)


class Named(nn.Module):
    """A network whose head is not its last linear layer in order of definition."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.body(x))
        return out


def test_a_head_can_be_named() -> None:
    model, x = Model(Named(), head="classifier"), torch.randn(5, 4)
    model.check(x)
    assert model.dimension == 21
    torch.testing.assert_close(model.module(model.initial)(x), model.logits(model.initial, x.unsqueeze(0))[0])


def test_a_head_that_is_not_the_last_step_is_refused() -> None:
    with pytest.raises(UserError, match="must be the last thing"):
        Model(Named()).check(torch.randn(5, 4))
    softmax = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    with pytest.raises(UserError, match="must be the last thing"):
        Model(softmax).check(torch.randn(5, 4))


def test_a_lone_linear_layer_has_the_identity_as_its_base() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    model = Model(layer)
    model.check(x)
    assert model.initial.theta == {}
    torch.testing.assert_close(model.logits(model.initial, x.unsqueeze(0))[0], layer(x))


@pytest.mark.parametrize(
    ("module", "head", "message"),
    [
        (nn.Conv2d(1, 1, 1), None, "no nn.Linear"),
        (Named(), "clasifier", "no linear layer named 'clasifier'; it has classifier, body.0"),
        (nn.Linear(4, 3, bias=False), None, "needs a bias"),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), None, "Dropout"),
    ],
)
def test_networks_that_cannot_work_are_refused_with_the_reason(
    module: nn.Module, head: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Model(module, head)


def test_inputs_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(UserError, match=r"does not take inputs of shape \(5,\)"):
        build("mlp", (4,), 3, seed=0).check(torch.randn(2, 5))
    with pytest.raises(UserError, match="at least 16x16"):
        build("lenet", (1, 8, 8), 10, seed=0)
    with pytest.raises(UserError, match="no network 'resnet'"):
        build("resnet", (1, 8, 8), 10, seed=0)
    with pytest.raises(UserError, match="needs images"):
        build("cnn6", (64,), 10, seed=0)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_cohort_of_networks_computes_what_each_computes_alone(name: str) -> None:
    models = [build(name, (3, 16, 16), 4, seed) for seed in range(3)]
    stacked = tree.cat([tree.expand(model.initial, 1) for model in models])
    x = torch.randn(3, 2, 3, 16, 16)
    together = models[0].logits(stacked, x)
    for j, model in enumerate(models):
        torch.testing.assert_close(together[j], model.logits(model.initial, x[j : j + 1])[0], atol=1e-5, rtol=1e-4)


def test_one_base_for_all_is_the_same_as_a_copy_each() -> None:
    model, x = build("lenet", (3, 16, 16), 4, 0), torch.randn(3, 2, 3, 16, 16)
    copies = tree.expand(model.initial.theta, 3)
    shared = model.features(model.initial.theta, x)
    torch.testing.assert_close(shared, model.features(copies, x), atol=1e-5, rtol=1e-4)


def test_a_stack_of_heads_predicts_by_the_mean_of_their_probabilities() -> None:
    model, x = build("mlp", (4,), 3, 0), torch.randn(1, 6, 4)
    heads = torch.randn(1, 7, 3, 101)
    mean = model.log_probabilities(Params(model.initial.theta, heads), x).exp()
    h = model.features(model.initial.theta, x)
    expected = torch.stack([apply_head(heads[:, s], h).softmax(-1) for s in range(7)]).mean(0)
    torch.testing.assert_close(mean, expected)


def test_batch_norm_learns_its_statistics_in_training_and_only_there() -> None:
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    theta = {key: value.clone().unsqueeze(0) for key, value in model.initial.theta.items()}
    x = torch.randn(1, 8, 4)
    model.features(theta, x)
    assert torch.equal(theta["1.running_mean"][0], model.initial.theta["1.running_mean"])
    model.features(theta, x, train=True)
    assert not torch.equal(theta["1.running_mean"][0], model.initial.theta["1.running_mean"])
    assert theta["1.num_batches_tracked"].item() == 1


def test_a_model_goes_to_another_process_and_computes_the_same() -> None:
    model = build("mlp", (1, 4, 4), 3, 0)
    x = torch.randn(2, 5, 1, 4, 4)
    assert torch.equal(pickle.loads(pickle.dumps(model)).logits(model.initial, x), model.logits(model.initial, x))
