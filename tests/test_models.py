"""The three networks, and the split of any network into base and head."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from pfedvem import tree
from pfedvem.algorithms import METHODS, FedAvg, PFedMe
from pfedvem.data.federation import Federation
from pfedvem.errors import UserError
from pfedvem.models import Model, Params, apply_head
from pfedvem.networks import NETWORKS, build
from pfedvem.simulation.executors import cohorts
from pfedvem.simulation.fit import fit
from pfedvem.simulation.work import Job, Setup
from tests.conftest import blobs


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


def pruned(layer: nn.Module) -> nn.Module:
    """A layer of which half is cut away."""
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


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


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_the_head_is_found_whatever_the_size_of_the_inputs(scale: float) -> None:
    torch.manual_seed(0)
    hidden = nn.Linear(4, 50, bias=False)
    head = nn.Linear(50, 3)
    nn.init.zeros_(head.bias)
    Model(nn.Sequential(hidden, nn.ReLU(), head)).check(scale * torch.randn(2, 4))
    with pytest.raises(UserError, match="must be the last thing"):
        Model(nn.Sequential(hidden, nn.ReLU(), head, nn.Tanh(), nn.Hardtanh(-1e-9, 1e-9))).check(
            scale * torch.randn(2, 4)
        )


def test_outputs_that_are_no_numbers_are_refused_as_such() -> None:
    with pytest.raises(UserError, match="outputs are not finite"):
        build("mlp", (4,), 3, seed=0).check(torch.full((2, 4), torch.nan))


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
        (nn.Linear, None, "must be an nn.Module that has been made, not <class"),
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)), None, "lazy layers without a size yet"),
        (Named(), "clasifier", "no linear layer named 'clasifier'; it has classifier, body.0"),
        (nn.Linear(4, 3, bias=False), None, "needs a bias"),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), None, "Dropout"),
        (
            nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
            None,
            "running_stats=True in '0'",
        ),
        (
            nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
            None,
            "'0' computes its weights in a",
        ),
        (nn.Sequential(pruned(nn.Linear(4, 4)), nn.Linear(4, 3)), None, "'0' computes its weights in a hook"),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))), None, "'0' must have weights of its own"),
        (
            nn.Sequential(twice := nn.Linear(4, 4), twice, nn.Linear(4, 3)),
            None,
            "'0.weight' and '1.weight' are the same",
        ),
        (
            nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 3)),
            None,
            "'0.weight' has complex numbers",
        ),
    ],
)
def test_networks_that_cannot_work_are_refused_with_the_reason(
    module: nn.Module, head: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Model(module, head)


class Changing(nn.Module):
    """Changes its inputs, returns more than logits, ends in a softmax, or keeps what it computed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "in place":
            x /= 4
        out = self.kept = self.head(x)
        return (out, x) if self.how == "tuple" else out.softmax(1) if self.how == "softmax" else out


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("in place", r"changes its inputs in place, .* x = x \* 2 instead of x \*= 2"),
        ("tuple", r"returns a tuple; let it return its logits \(N, classes\) alone"),
        ("softmax", "leave out a softmax behind it, or name the layer"),
    ],
)
def test_networks_that_do_more_than_they_should_are_refused(how: str, message: str) -> None:
    x = torch.randn(2, 4)
    kept = x.clone()
    with pytest.raises(UserError, match=message):
        Model(Changing(how)).check(x)
    assert torch.equal(x, kept)


def test_a_network_that_keeps_what_it_computed_is_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 4), Changing("nothing"))
    network(torch.randn(2, 4))
    with pytest.raises(UserError, match="cannot be copied; does it keep what it last computed"):
        Model(network)


def test_a_network_that_is_frozen_can_be_used_and_not_trained() -> None:
    model = Model(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)))
    with pytest.raises(UserError, match=r"'0.weight' are frozen .* Federation.through"):
        model.check(torch.randn(2, 4))


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


class Recurrent(nn.Module):
    """Reads a sequence (steps, 8) and classifies by where it ends."""

    def __init__(self, kind: Callable[..., nn.Module] = nn.GRU, **options: float) -> None:
        super().__init__()
        self.body = kind(8, 6, batch_first=True, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x)[0][:, -1])
        return out


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x, x, x)[0].mean(1))
        return out


class Viewing(nn.Module):
    """A convolutional network as it is often written."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(channels, 4, 3), nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).relu().view(-1, 144))
        return out


class Scaled(nn.Sequential):
    """A sequence that does something else first."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[2](self[1](self[0](3 * x)))
        return out


class Functional(nn.Module):
    """Dropout without a layer for it, in training or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.head, self.always = nn.Linear(8, 3), always

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.dropout(x[:, 0], 0.5, self.training or self.always))
        return out


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.RReLU(), nn.Linear(8, 3)),
        Attending(dropout=0.3),
        Recurrent(nn.LSTM, num_layers=2, dropout=0.5),
        Functional(always=False),
        Functional(always=True),
    ],
)
def test_whatever_draws_from_a_global_generator_is_refused(network: nn.Module) -> None:
    before = torch.get_rng_state()
    with pytest.raises(UserError, match="draws from a global generator, so runs could not be repeated"):
        Model(network).check(torch.ones(2, 4, 8))
    assert torch.equal(before, torch.get_rng_state())


ANY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sequences": (lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)), (4, 8)),
    "own forward": (lambda: Scaled(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)), (8,)),
    "GRU": (Recurrent, (4, 8)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (4, 8)),
    "attention": (lambda: Attending(0.0), (4, 8)),
    "x.view": (lambda: Viewing(3), (3, 8, 8)),
    "x.view, one channel": (lambda: Viewing(1), (1, 8, 8)),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(144, 3)
        ),
        (1, 8, 8),
    ),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 5)), nn.Linear(5, 3)), (8,)),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 5)), nn.Linear(5, 3)), (8,)),
}


def clients(shape: tuple[int, ...]) -> Federation:
    """Twenty clients of a few sizes."""
    rng = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % 3
        return torch.randn(n, *shape, generator=rng) + y.view(-1, *[1] * len(shape)), y

    return Federation.from_clients([(*draw(5 + j % 3), *draw(3)) for j in range(20)], classes=["a", "b", "c"])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap's own
@pytest.mark.parametrize("name", list(ANY))
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_any_network_trains_in_cohorts_as_client_by_client(name: str, method: str) -> None:
    make, shape = ANY[name]
    torch.manual_seed(0)
    network, federation = make(), clients(shape)
    algorithm = METHODS[method].model_validate({"epochs": 1, "batch_size": (3,) if method == "local" else 3})
    results = [
        fit(algorithm, network, federation, rounds=1, participation=1.0, executor=place)
        for place in ("sequential", "vectorised")
    ]
    for a, b in zip(
        *(tree.leaves({"server": r.state.server, "clients": r.state.clients}) for r in results), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_networks_of_common_layers_stay_on_the_fast_path() -> None:
    act = nn.ReLU()
    repeated = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), act, nn.Linear(16, 8), act, nn.Linear(8, 4))
    for model in (Model(repeated), *(build(name, (3, 16, 16), 4, 0) for name in NETWORKS)):
        model.check(torch.randn(2, 3, 16, 16))
        assert model._layers is not None
        assert model._channels_last
        assert not any(model._apart.values())
        assert not model.mixes_samples


def test_what_a_cohort_gets_wrong_is_computed_one_by_one() -> None:
    model, x = build("mlp", (4,), 3, 0), torch.randn(2, 4)
    model._layers = [lambda theta, x: x @ theta["1.weight"][0].T]  # everybody gets the first client's weights
    model.check(x)
    assert all(model._apart.values())
    torch.testing.assert_close(model.logits(model.initial, x.unsqueeze(0))[0], model.module(model.initial)(x))


def test_statistics_that_padding_would_change_are_learned_client_by_client() -> None:
    model = Model(ANY["instance norm"][0]())
    federation = clients((1, 8, 8))
    model.check(federation.train.x[:2])
    jobs = cohorts(Setup(FedAvg(), model, federation, 0), [Job(0, tuple(range(20)))])
    assert all(len(job.clients) == 1 for job in jobs)


@pytest.mark.parametrize("sizes", [(1, 1), (11, 21)])
def test_batch_norm_goes_by_its_running_statistics_on_a_batch_of_one(sizes: tuple[int, ...]) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    federation, before = blobs(sizes), Model(network).initial
    result = fit(FedAvg(batch_size=10), network, federation, rounds=1, participation=1.0, workers=1)
    after = result.state.server
    assert not torch.equal(after.theta["0.weight"], before.theta["0.weight"])  # also a client of one sample trains
    learned = not torch.equal(after.theta["1.running_mean"], before.theta["1.running_mean"])
    assert learned == (min(sizes) > 1)


class Constant(nn.Module):
    """With a factor that is no weight."""

    def __init__(self, constant: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("constant", constant, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x) * self.constant)
        return out


def test_buffers_are_refused_by_methods_that_cannot_train_them() -> None:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for network, name in ((norm, "1.num_batches_tracked"), (Constant(torch.ones(4)), "constant")):
        with pytest.raises(UserError, match=rf"pFedMe cannot train buffers such as '{name}'"):
            fit(PFedMe(), network, blobs((5, 6)), rounds=1, workers=1)
    allowed = Constant(torch.ones(4), persistent=False)
    fit(PFedMe(steps=1), allowed, blobs((5, 6)), rounds=1, workers=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.float16, torch.bool])
def test_buffers_of_any_common_type_are_saved_and_read_again(dtype: torch.dtype, tmp_path: Path) -> None:
    network = Constant(torch.ones(4, dtype=dtype))
    for rounds in (1, 2):
        out = fit(FedAvg(), network, blobs((5, 6)), rounds=rounds, out=tmp_path, resume=rounds > 1, workers=1)
    assert out.state.server.theta["constant"].dtype == dtype
    assert out.state.server.theta["constant"].float().tolist() == [1, 1, 1, 1]
