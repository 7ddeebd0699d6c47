"""How any ``nn.Module`` splits into a base theta and a linear head w, and is applied to clients' values of them."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrize import is_parametrized

from pfedvem import tree
from pfedvem.data.federation import ClientData, channels_last, take_rows
from pfedvem.errors import UserError
from pfedvem.layers import cohort_layers
from pfedvem.solvers import Batch, nll

Theta = dict[str, Tensor]

BATCH_NORM = nn.modules.batchnorm._BatchNorm

FORWARD_BATCH = 250
ROUNDING = 1e-4  # by how much of the largest number two ways to compute the same may differ
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)  # of a network on inputs not made for it


@dataclass(frozen=True)
class Params:
    """A whole network: the base's parameters and buffers by name, and the head w (classes, features + 1).

    The head's last column is its bias. In a cohort every leaf has a leading client dimension. A head may also be a
    stack of samples (C, S, classes, features + 1), whose predicted probabilities are averaged.
    """

    theta: Theta
    w: Tensor


@dataclass(frozen=True)
class Posterior:
    """What is believed of a network: its mean, and the standard deviations of those weights that are uncertain.

    These are by name, ``w`` or ``theta.conv1.weight``; a method that trains plain networks has none.
    """

    mean: Params
    sd: dict[str, Tensor]


class Model:
    """A network split into base and head, applied to values: it holds shapes and initial weights, never state.

    Args:
        module: any network that ends in a linear layer.
        head: the name of that layer; by default the last ``nn.Linear``.
    """

    name: str | None = None
    """Of one of the paper's networks, which can be built again by it."""

    def __init__(self, module: nn.Module, head: str | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise UserError(f"The network must be an nn.Module that has been made, not {module!r}.")
        if any(map(nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
            raise UserError("The network has lazy layers without a size yet; give it one batch, network(x), before.")
        linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        if not linear:
            raise UserError("The network has no nn.Linear layer that could be its head; end it in one.")
        name = head if head is not None else list(linear)[-1]
        if name not in linear:
            raise UserError(f"The network has no linear layer named {name!r}; it has {', '.join(linear)}.")
        _refuse(module)
        layer = linear[name]
        if is_parametrized(layer):
            raise UserError(
                f"The head {name!r} must have weights of its own: leave it without weight norm and the like."
            )
        if layer.bias is None:
            raise UserError(f"The head {name!r} needs a bias, since mu and sigma cover weights and bias together.")
        self.classes, self.features_dim = layer.out_features, layer.in_features
        self._base = _without(module, name)
        self._layers = cohort_layers(self._base)
        self._buffers = {key for key, _ in self._base.named_buffers()}
        kinds = [type(layer) for layer in module.modules()]
        self.convolutional = any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds)
        self.mixes_samples = any(issubclass(kind, BATCH_NORM) for kind in kinds)
        """Whether an output or a buffer depends on all samples of a batch: then no batch may be padded."""
        self._apart = {True: False, False: False}  # whether clients go one by one, in training and out of it
        self._channels_last = True
        self._mixed = False
        theta = {key: value.detach().clone() for key, value in self._base.state_dict().items()}
        w = torch.cat([layer.weight, layer.bias.unsqueeze(1)], dim=1).detach().clone()
        self.initial = Params(theta, w)
        self._module, self.head = module, name

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_layers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layers = cohort_layers(self._base)

    def in_precision(self, name: str) -> Model:
        """The same network, whose base is computed in ``float32`` or in ``bfloat16`` (mixed precision)."""
        mixed = name == "bfloat16"
        if mixed == self._mixed:
            return self
        other = copy.copy(self)
        other._mixed = mixed
        return other

    @property
    def dimension(self) -> int:
        """d = (features + 1) x classes."""
        return self.classes * (self.features_dim + 1)

    def weights(self, params: Params) -> dict[str, Tensor]:
        """What is learned by gradient: everything but the base's buffers (running statistics), by name."""
        return {"w": params.w, **{key: value for key, value in params.theta.items() if key not in self._buffers}}

    def refuse_buffers(self, method: str) -> None:
        """For methods that have no meaning for running statistics or other buffers."""
        kept = sorted(self._buffers & self.initial.theta.keys())
        if kept:
            raise UserError(
                f"{method} cannot train buffers such as {kept[0]!r}: instead of batch norm use group or layer norm, "
                "and register constants with persistent=False."
            )

    def features(self, theta: Theta, x: Tensor, *, train: bool = False) -> Tensor:
        """The base's output (C, B, features) for inputs (C, B, ...).

        ``theta`` is either one base for all (then this is a single large forward pass) or has a leading client
        dimension. In training, running statistics in ``theta`` are updated in place.
        """
        cohort, batch = x.shape[:2]
        shared = all(value.ndim == self.initial.theta[key].ndim for key, value in theta.items())
        if shared and cohort > 1:  # one base for all is one client with everybody's samples
            return self.features(theta, x.flatten(0, 1).unsqueeze(0), train=train).view(cohort, batch, -1)
        theta = tree.expand(theta, 1) if shared else theta
        x = self._ordered(x.flatten(0, 1))
        # Without gradients nothing needs the whole batch at once; parts of it fit the processor's cache.
        whole = torch.is_grad_enabled() or cohort > 1
        # Of the base alone: heads and losses are computed in full, and so are gradients, but for its own.
        with torch.autocast(x.device.type, torch.bfloat16) if self._mixed else nullcontext():
            parts = [self._forward(theta, part, train) for part in ([x] if whole else x.split(FORWARD_BATCH))]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found.view(cohort, batch, -1).to(self.initial.w.dtype)

    def features_of(self, theta: Theta, data: ClientData) -> Tensor:
        """One base's output (C, N, features) for all of the clients' data; padding is not computed."""
        if data.mask is None:
            return self.features(theta, data.x)
        real = torch.nonzero(data.mask.flatten())[:, 0]
        found = self.features(theta, take_rows(data.x.flatten(0, 1), real).unsqueeze(0))[0]
        out: Tensor = found.new_zeros(data.y.numel(), found.shape[1])
        out[real] = found
        return out.view(*data.y.shape, -1)

    def _forward(self, theta: Theta, x: Tensor, train: bool) -> Tensor:
        """The base's output (C * B, features) for inputs (C * B, ...) and a base for each of C clients."""
        if self._layers is not None and not self._apart[train]:
            for layer in self._layers:
                x = layer(theta, x)
            return x.flatten(1)
        cohort = len(next(iter(theta.values()))) if theta else 1
        # vmap makes grouped convolutions, which are slow on CPUs.
        if cohort == 1 or self._apart[train] or (x.device.type == "cpu" and self.convolutional):
            return self._one_by_one(theta, x, train)
        theta = self._prepared(theta, train, len(x) // cohort)
        each = vmap(lambda own, part: functional_call(self._base, own, (part,)))
        out: Tensor = each(theta, x.unflatten(0, (cohort, -1)))
        return out.flatten(0, 1).flatten(1)

    def _one_by_one(self, theta: Theta, x: Tensor, train: bool) -> Tensor:
        """The same, whatever the network: a forward pass for each client."""
        cohort = len(next(iter(theta.values()))) if theta else 1
        theta = self._prepared(theta, train, len(x) // cohort)
        rows = [{key: value[c] for key, value in theta.items()} for c in range(cohort)]
        parts = zip(rows, x.chunk(cohort), strict=True)
        return torch.cat([functional_call(self._base, own, (part,)).flatten(1) for own, part in parts])

    def _prepared(self, theta: Theta, train: bool, batch: int) -> Theta:
        """Puts the base into training or out of it; gives what can be written into it."""
        self._base.train(train)
        if train and batch == 1 and self.mixes_samples:
            # One sample has no variance, and a client may have no more: it goes by the running statistics.
            for layer in self._base.modules():
                if isinstance(layer, BATCH_NORM):
                    layer.eval()
        # A view without gradient: batch norm writes into its buffers, and a leaf that wants gradients forbids that.
        return {key: value.detach() if key in self._buffers else value for key, value in theta.items()}

    def _ordered(self, x: Tensor) -> Tensor:
        """Inputs (B, ...) in an order in memory that the network can take."""
        return channels_last(x) if self._channels_last else x.flatten().view(x.shape)

    def logits(self, params: Params, x: Tensor, *, train: bool = False) -> Tensor:
        """The whole network's output (C, B, classes)."""
        return apply_head(params.w, self.features(params.theta, x, train=train))

    def nll(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The negative log-likelihood of a batch, summed over its samples: outputs (C, ..., B, classes), (C, ...)."""
        return nll(outputs, batch)

    def log_probabilities(self, params: Params, x: Tensor) -> Tensor:
        """The log of the predicted probabilities (C, B, classes), averaged over a head's samples if it has them."""
        h = self.features(params.theta, x)
        if params.w.ndim == 3:
            return apply_head(params.w, h).log_softmax(-1)
        each = apply_head(params.w, h).log_softmax(-1)
        return each.logsumexp(1) - torch.tensor(float(params.w.shape[1])).log()

    def module(self, params: Params) -> nn.Module:
        """An ordinary ``nn.Module`` with these weights (no client dimension)."""
        full = copy.deepcopy(self._module)
        head = full.get_submodule(self.head)
        state = dict(params.theta)
        prefix = f"{self.head}." if self.head else ""  # the network may be its head alone
        state[f"{prefix}weight"], state[f"{prefix}bias"] = params.w[:, :-1], params.w[:, -1]
        assert isinstance(head, nn.Linear)
        full.load_state_dict(state)
        return full.eval()

    def base(self, theta: Theta) -> nn.Module:
        """The network up to its head as an ordinary ``nn.Module``, with these weights (no client dimension)."""
        base = copy.deepcopy(self._base)
        base.load_state_dict(theta)
        return base.eval()

    def check(self, x: Tensor) -> None:
        """Refuses a network that cannot be trained on inputs like these few (B, ...).

        Its output must be its head applied to the base's output, and it must not be random. Also finds out how it can
        be run: where a cohort would not get what its clients get alone, they go one by one from now on.
        """
        for name, weight in self._module.named_parameters():
            if not weight.requires_grad:
                raise UserError(
                    f"The weights {name!r} are frozen (requires_grad=False), but a network is trained as a whole: "
                    "leave frozen layers out of it and give them to Federation.through, or unfreeze them."
                )
        shape = tuple(x.shape[1:])
        picked = take_rows(x, torch.arange(len(x)))  # in memory as batches are
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                given = x.clone()
                version = given._version
                expected = self._module.eval()(given)
            except FAILURES as error:
                raise UserError(f"The network does not take inputs of shape {shape}: {error}") from error
            if given._version != version:
                raise UserError(
                    "The network changes its inputs in place, which would change the data: write x = x * 2 instead of "
                    "x *= 2, and let its first layer have no inplace=True."
                )
            if not isinstance(expected, Tensor):
                raise UserError(
                    f"The network returns a {type(expected).__name__}; let it return its logits (N, classes) alone."
                )
            if not bool(expected.isfinite().all()):
                raise UserError(
                    "The network's outputs are not finite: look for NaN in the inputs and in its weights, and "
                    "normalise inputs that are very large."
                )
            last = self._ends_in_head(picked, expected)
            if not last:
                self._channels_last = False  # x.view(...) wants images in the plain order
                last = self._ends_in_head(picked, expected)
            if last:
                try:
                    self._compare(picked)
                except FAILURES as error:
                    raise UserError(f"The network cannot be trained on inputs of shape {shape}: {error}") from error
            if not torch.equal(before, torch.get_rng_state()):
                raise UserError(
                    "The network draws from a global generator, so runs could not be repeated: set dropout to 0 "
                    "wherever it is, and take no RReLU or noise."
                )
        if not last:
            raise UserError(
                f"The head {self.head!r} must be the last thing that the network computes: leave out a softmax "
                "behind it, or name the layer that is the last as head=."
            )

    def _ends_in_head(self, x: Tensor, expected: Tensor) -> bool:
        try:
            h = self._one_by_one(tree.expand(self.initial.theta, 1), self._ordered(x), False)
            return _close(apply_head(self.initial.w, h), expected)
        except FAILURES:
            return False

    def _compare(self, x: Tensor) -> None:
        """Runs a cohort of two, the second with other weights, one by one and together."""
        theta = {
            key: torch.stack([value, value if key in self._buffers else value.flatten().roll(1).view_as(value)])
            for key, value in self.initial.theta.items()
        }
        both = self._ordered(take_rows(x, torch.arange(len(x)).repeat(2)))
        for train in (True, False):
            own = tree.map(torch.clone, theta)
            alone = self._one_by_one(own, both, train)
            # What training writes into a buffer must not come of padding, or of a step that a client does not take.
            self.mixes_samples |= any(not torch.equal(own[key], theta[key]) for key in self._buffers & theta.keys())
            self._apart[train] = False
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "There is a performance drop")  # if so, training will say it
                    together = self._forward(tree.map(torch.clone, theta), both, train)
                self._apart[train] = not all(map(_close, together.chunk(2), alone.chunk(2)))
            except FAILURES:
                self._apart[train] = True


def apply_head(w: Tensor, h: Tensor) -> Tensor:
    """Logits (..., B, classes) of the head w (..., classes, features + 1) on features h (..., B, features).

    Of a stack of S samples of each head (C, S, classes, features + 1), logits (C, S, B, classes).
    """
    if w.ndim == h.ndim + 1:
        logits: Tensor = apply_head(w.flatten(1, 2), h).unflatten(-1, w.shape[1:3]).movedim(-2, 1)
        return logits
    return h @ w[..., :-1].mT + w[..., -1].unsqueeze(-2)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether these are equal but for rounding, which goes with the size of the numbers."""
    return a.shape == b.shape and bool(((a - b).abs() <= ROUNDING * b.abs().max()).all())


def _refuse(module: nn.Module) -> None:
    """Says of a network that cannot be trained here why not."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise UserError("Dropout draws from a global generator, so runs could not be repeated: set p=0.")
        if isinstance(layer, BATCH_NORM) and not layer.track_running_stats:
            raise UserError(f"Batch norm is used by its running statistics: set track_running_stats=True in {name!r}.")
        # Hooks write a plain tensor in the place of the weights that they compute.
        made = [key for key, value in vars(layer).items() if isinstance(value, Tensor)]
        if any({f"{key}_orig", f"{key}_g"} & layer._parameters.keys() for key in made):
            raise UserError(
                f"The layer {name!r} computes its weights in a hook (spectral_norm, weight_norm or prune of "
                "torch.nn.utils), which cannot be trained here: use torch.nn.utils.parametrizations, or remove it."
            )
    seen: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if seen.setdefault(id(value), name) != name:
            raise UserError(f"{seen[id(value)]!r} and {name!r} are the same tensor; give each layer one of its own.")
        if value.is_complex():
            raise UserError(
                f"{name!r} has complex numbers; give the network its real and imaginary parts (view_as_real)."
            )


def _without(module: nn.Module, name: str) -> nn.Module:
    """The network with its head replaced by the identity: what it then returns are the features."""
    if name == "":
        return nn.Identity()
    try:
        base = copy.deepcopy(module)
    except RuntimeError as error:  # of tensors that know how they were computed
        raise UserError(f"The network cannot be copied; does it keep what it last computed? ({error})") from error
    parent, _, child = name.rpartition(".")
    setattr(base.get_submodule(parent), child, nn.Identity())
    return base
