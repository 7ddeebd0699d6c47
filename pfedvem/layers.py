"""Common layers that run a whole cohort at once.

A network that is an ``nn.Sequential`` of these needs no ``vmap``: a layer with weights knows the client dimension, and
one without acts on each sample alone and sees all clients' samples as one batch. Any other network runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import vmap

Layer = Callable[[dict[str, Tensor], Tensor], Tensor]
"""From weights with a leading client dimension C and inputs (C * B, ...) to outputs (C * B, ...)."""

How = tuple[Any, Any, Any, int]  # stride, padding, dilation and groups of a convolution

# These treat every sample for itself, so clients may share a batch.
PER_SAMPLE = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.ELU,
    nn.GELU,
    nn.Identity,
    nn.LeakyReLU,
    nn.MaxPool2d,
    nn.ReLU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Tanh,
)
PATCHES = torch.backends.cpu.get_cpu_capability() == "AVX2"  # with AVX-512 the library's weight gradient is faster
PATCH_CHANNELS = 48  # from so many on, a product of patches beats it


def cohort_layers(base: nn.Module) -> list[Layer] | None:
    """The layers of a network, in order, for cohorts; None if it has one that is not known here."""
    if type(base) is not nn.Sequential:  # a subclass may compute something else
        return None
    # Not named_children(), which leaves out a layer that comes a second time.
    layers = [None if module is None else _layer(name, module) for name, module in base._modules.items()]
    return None if None in layers else [layer for layer in layers if layer is not None]


def _layer(name: str, module: nn.Module) -> Layer | None:
    if type(module) is nn.Linear:
        return _linear(name, module.bias is not None)
    if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return _convolution(name, module)
    if type(module) in PER_SAMPLE or (type(module) is nn.Flatten and module.start_dim == 1):
        return lambda theta, x: module(x)
    return None


def _in_precision(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast would have them, which does not reach into the gradients that are written out below."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, w, b
    kind = torch.get_autocast_dtype(x.device.type)
    return x.to(kind), w.to(kind), None if b is None else b.to(kind)


def _linear(name: str, bias: bool) -> Layer:
    def apply(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        x, w, b = _in_precision(x, theta[f"{name}.weight"], theta[f"{name}.bias"] if bias else None)
        if len(w) == 1:
            return F.linear(x, w.squeeze(0), None if b is None else b.squeeze(0))
        # Samples may have further dimensions, as sequences do: to a client's weights they are all rows.
        out: Tensor = _Linear.apply(x.reshape(len(w), -1, x.shape[-1]), w, b)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    return apply


class _Linear(torch.autograd.Function):
    """x w' + b for each client. PyTorch would give the gradient of w transposed, and turning it costs time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.mT if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        x, w = ctx.saved_tensors
        want_x, _, want_b = ctx.needs_input_grad
        return g @ w if want_x else None, g.mT @ x, g.sum(1) if want_b else None


def _convolution(name: str, layer: nn.Conv2d) -> Layer:
    how: How = (layer.stride, layer.padding, layer.dilation, layer.groups)
    patched = PATCHES and layer.in_channels >= PATCH_CHANNELS and layer.groups == 1 and layer.dilation == (1, 1)

    def apply(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        x, w, b = _in_precision(x, theta[f"{name}.weight"], theta.get(f"{name}.bias"))
        if x.device.type != "cpu":  # accelerators run a cohort well as one grouped convolution
            own = vmap(lambda x, w, b: F.conv2d(x, w, b, *how))
            return own(x.unflatten(0, (w.shape[0], -1)), w, b).flatten(0, 1)
        one = _Patched.apply if patched and torch.is_grad_enabled() else _plain
        if len(w) == 1:
            return one(x, w.squeeze(0), None if b is None else b.squeeze(0), how)
        biases = [None] * len(w) if b is None else b.unbind()
        return torch.cat([one(*part, how) for part in zip(x.chunk(len(w)), w.unbind(), biases, strict=True)])

    return apply


def _plain(x: Tensor, w: Tensor, b: Tensor | None, how: How) -> Tensor:
    return F.conv2d(x, w, b, *how)


class _Patched(torch.autograd.Function):
    """A convolution whose weight gradient is one matrix product of patches and output gradients.

    oneDNN runs forward passes and input gradients near the speed of a matrix product, but weight gradients well below
    it. With channels-last inputs of many channels, patches are copied in long runs and the product is faster.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, how: How) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        return F.conv2d(x, w, b, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        x, w = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.convolution_backward(
                g, x, w, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
            )[0]
        db = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, weight_gradient(x, g, w.shape[2:], stride, padding), db, None


def weight_gradient(x: Tensor, g: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Any) -> Tensor:
    """The gradient (O, I, kh, kw) of a convolution's weights from its inputs and the gradient of its outputs."""
    (kh, kw), (outputs, rows, columns) = kernel, g.shape[1:]
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
    n, _, _, channels = x.shape
    image, row, column, _ = x.stride()
    patches = x.as_strided(
        (n, rows, columns, kh, kw * channels), (image, row * stride[0], column * stride[1], row, 1)
    ).reshape(-1, kh * kw * channels)
    product = g.permute(0, 2, 3, 1).reshape(-1, outputs).T @ patches
    return product.view(outputs, kh, kw, channels).permute(0, 3, 1, 2).contiguous()
