"""Autograd functions of `FusedOps`, and what they share.

Each function takes and returns activations as two tensors (`ops.Activations`): all images, marked
as not differentiable, and the slice of the images at the end that need a gradient.

Shapes: B images, C channels, K values of a patch.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Result = TypeVar("Result")

# ------------------------------------------------------------------------------- a second stream


class SideStream:
    """A second CUDA stream, for work whose result is not needed until `join`: the gradients of the
    weights and, before the first layer, casting the weights.

    One batch does not keep a large GPU busy, above all where the images have become small.
    On the CPU everything runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _second_stream(device) if device.type == "cuda" else None
        self.held: list[Any] = []

    def __call__(self, function: Callable[..., Result], *inputs: Any) -> Result:
        if self.stream is None:
            return function(*inputs)
        # Hold the inputs, so that the main stream does not reuse their memory before the join.
        # They are detached, because their history would hold this object in turn.
        self.held.append(torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, inputs))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return function(*inputs)

    def join(self) -> None:
        if self.stream is not None and self.held:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per GPU: memory and workspaces belong to a stream and are not shared."""
    return torch.cuda.Stream(device)


# ------------------------------------------------------------------------------ casting weights


def cast_weights(
    dtype: torch.dtype, weights: Iterable[Tensor], side_stream: SideStream
) -> dict[Tensor, Tensor]:
    """All weights in another dtype, by parameter. One kernel casts all of them, and one kernel
    casts all gradients back."""
    weights = list(weights)
    return dict(zip(weights, _Cast.apply(dtype, side_stream, *weights), strict=True))  # type: ignore[no-untyped-call]


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, side_stream: SideStream, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.side_stream, ctx.dtypes = side_stream, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        return copies(weights, [dtype] * len(weights), side_stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.side_stream.join()
        # Every weight is used once. If one was used twice, autograd would add up its gradients
        # before the join. The weights of an unused head have no gradient.
        present = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        cast_back = copies(present.values(), [ctx.dtypes[i] for i in present])
        found = dict(zip(present, cast_back, strict=True))
        return None, None, *(found.get(i) for i in range(len(gradients)))


def copies(
    tensors: Iterable[Tensor], dtypes: list[torch.dtype], side_stream: SideStream | None = None
) -> tuple[Tensor, ...]:
    """Copies of tensors in the given dtypes, made by one kernel."""
    tensors = list(tensors)
    copied = [torch.empty_like(t, dtype=d) for t, d in zip(tensors, dtypes, strict=True)]
    copy = torch._foreach_copy_
    if side_stream is None:
        copy(copied, tensors)
    else:
        side_stream(copy, copied, tensors)
    return tuple(copied)


# ------------------------------------------------------------------------------------ functions


class FirstConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        patches: Tensor,
        weight: Tensor,
        weight_CK: Tensor,
        x: Tensor,
        start: int,
        side_stream: SideStream,
    ) -> tuple[Tensor, Tensor]:
        out = as_images(patches @ weight_CK.T, x)
        ctx.save_for_backward(patches[start * x[0, 0].numel() :], weight)
        ctx.side_stream = side_stream
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out)
        return out, out[start:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        patches, weight = ctx.saved_tensors

        def weight_gradient(d_out: Tensor, patches: Tensor) -> Tensor:
            return _as_weight(as_rows(d_out).T @ patches, weight)

        d_weight = ctx.side_stream(weight_gradient, gradients[1], patches)
        return None, d_weight, None, None, None, None


class FirstConvNormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        patches: Tensor,
        square_GKK: Tensor,
        weight: Tensor,
        weight_CK: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        norm: nn.BatchNorm2d,
        x: Tensor,
        start: int,
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        ones = weight[0].numel()
        rows = kernels.first_norm_relu(norm, patches, square_GKK, weight_CK, ones)
        out = as_images(rows, x)
        no_grad = len(square_GKK) * start // len(x)
        ctx.save_for_backward(
            out[start:], patches[start * x[0, 0].numel() :], weight, weight_CK, square_GKK[no_grad:]
        )
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out)
        return out, out[start:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from pseudoloss.nn import kernels

        out, patches, weight, weight_CK, square_GKK = ctx.saved_tensors
        d_out = gradients[1].contiguous(memory_format=torch.channels_last)
        rows, ones = (as_rows(d_out), as_rows(out)), weight[0].numel()
        d_weight, d_norm_weight, d_norm_bias = kernels.first_norm_relu_gradient(
            ctx.norm, *rows, patches, weight_CK, ones, square_GKK
        )
        d_weight = _as_weight(d_weight, weight)
        return None, None, d_weight, None, d_norm_weight, d_norm_bias, None, None, None


class Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        with_grad: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        side_stream: SideStream,
    ) -> tuple[Tensor, Tensor]:
        out = F.conv2d(images, weight, None, stride, padding)
        ctx.save_for_backward(with_grad, weight)
        ctx.stride, ctx.padding, ctx.side_stream = stride, padding, side_stream
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out)
        return out, out[len(images) - len(with_grad) :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with_grad, weight = ctx.saved_tensors
        inputs = gradients[1], with_grad, weight, ctx.stride, ctx.padding
        d_weight = ctx.side_stream(_conv_weight_gradient, *inputs)
        d_x = _conv_input_gradient(*inputs) if ctx.needs_input_grad[1] else None
        return None, d_x, d_weight, None, None, None


class NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        with_grad: Tensor,
        skip: Tensor | None,
        skip_with_grad: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        norm: nn.BatchNorm2d,
        groups: int,
    ) -> tuple[Tensor, ...]:
        from pseudoloss.nn import kernels

        total, out, mean_GC, rstd_GC = kernels.norm_relu(norm, images, skip, groups)
        start = len(images) - len(with_grad)
        no_grad = groups * start // len(images)
        ctx.save_for_backward(total[start:], mean_GC[no_grad:], rstd_GC[no_grad:])
        ctx.norm, ctx.has_skip = norm, skip is not None
        ctx.set_materialize_grads(False)
        if not ctx.has_skip:
            total = images.view_as(images)
        ctx.mark_non_differentiable(total, out)
        return total, total[start:], out, out[start:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from pseudoloss.nn import kernels

        _, d_total, _, d_out = (
            None if d is None else d.contiguous(memory_format=torch.channels_last)
            for d in gradients
        )
        assert d_out is not None
        d_x, d_weight, d_bias = kernels.norm_relu_gradient(
            ctx.norm, d_out, d_total, *ctx.saved_tensors
        )
        return None, d_x, None, (d_x if ctx.has_skip else None), d_weight, d_bias, None, None


class Downsample(torch.autograd.Function):
    """The 1×1 shortcut of stride 2 uses every second pixel of every second row: it is a matrix
    product on those pixels, and its gradient is added to them in place."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        with_grad: Tensor,
        weight: Tensor,
        shortcut: Tensor,
        side_stream: SideStream,
    ) -> tuple[Tensor, ...]:
        from pseudoloss.nn import kernels

        out = F.conv2d(images, weight, None, 2, 1)
        small = kernels.every_second(images)
        skip = as_images(as_rows(small) @ shortcut.flatten(1).T, small)
        start = len(images) - len(with_grad)
        ctx.save_for_backward(with_grad, weight, shortcut, small[start:])
        ctx.side_stream = side_stream
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out, skip)
        return out, out[start:], skip, skip[start:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from pseudoloss.nn import kernels

        with_grad, weight, shortcut, small = ctx.saved_tensors
        _, d_out, _, d_skip = gradients

        def shortcut_gradient(d_skip: Tensor, small: Tensor) -> Tensor:
            return (as_rows(d_skip).T @ as_rows(small)).view_as(shortcut)

        inputs = d_out, with_grad, weight, (2, 2), (1, 1)
        d_weight = ctx.side_stream(_conv_weight_gradient, *inputs)
        d_shortcut = ctx.side_stream(shortcut_gradient, d_skip, small)
        d_x = _conv_input_gradient(*inputs).contiguous(memory_format=torch.channels_last)
        kernels.add_to_every_second(d_x, as_images(as_rows(d_skip) @ shortcut.flatten(1), small))
        return None, d_x, d_weight, d_shortcut, None


class Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        with_grad: Tensor,
        skip: Tensor | None,
        skip_with_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        out = kernels.pool(images, skip)
        ctx.shape, ctx.has_skip = with_grad.shape, skip is not None
        ctx.set_materialize_grads(False)
        start = len(images) - len(with_grad)
        no_grad = out[:start]
        ctx.mark_non_differentiable(no_grad)
        return no_grad, out[start:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, height, width = ctx.shape
        d_mean = (gradients[1] / (height * width))[:, :, None, None]
        # Written out once, channels-last, for both inputs and all layers before them.
        d_x = d_mean.expand(ctx.shape).contiguous(memory_format=torch.channels_last)
        return None, d_x, None, (d_x if ctx.has_skip else None)


# -------------------------------------------------------------- convolutions as matrix products


def has_few_channels(conv: nn.Conv2d) -> bool:
    """Whether the convolution can be computed as the product of `patches_of` and `as_matrix`."""
    return conv.kernel_size == (3, 3) and conv.stride == (1, 1) and conv.in_channels <= 3


def patches_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The 3×3 patches of images with few channels, one row per pixel. After its values a patch has
    a one."""
    from pseudoloss.nn import kernels

    return kernels.patches(x.contiguous(memory_format=torch.channels_last), dtype)


def as_matrix(weight: Tensor) -> Tensor:
    """The weights (C,K) to multiply patches with. The weight of the one is zero."""
    from pseudoloss.nn import kernels

    weight_CK = weight.new_zeros(len(weight), kernels.patch_width(weight.shape[1]))
    weight_CK[:, : weight[0].numel()] = weight.permute(0, 2, 3, 1).flatten(1)
    return weight_CK


def _as_weight(d_weight_CK: Tensor, weight: Tensor) -> Tensor:
    """The gradient of that matrix, in the shape of the convolution's weight."""
    d_weight = d_weight_CK[:, : weight[0].numel()].view(len(weight), 3, 3, -1).permute(0, 3, 1, 2)
    # Dense, or one kernel could not cast all gradients.
    return d_weight.to(weight.dtype).contiguous(memory_format=torch.channels_last)


def as_rows(x: Tensor) -> Tensor:
    """Channels-last images as a matrix with one row per pixel."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def as_images(rows: Tensor, like: Tensor) -> Tensor:
    """The matrix as images again, of the size of `like`."""
    B, _, height, width = like.shape
    return rows.view(B, height, width, -1).permute(0, 3, 1, 2)


def _conv_input_gradient(
    d_out: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any
) -> Tensor:
    return cast(Tensor, _conv_backward(d_out, x, weight, stride, padding, [True, False, False])[0])


def _conv_weight_gradient(
    d_out: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any
) -> Tensor:
    return cast(Tensor, _conv_backward(d_out, x, weight, stride, padding, [False, True, False])[1])


def _conv_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, wanted: list[bool]
) -> Any:
    """The gradients of the input, the weight and the bias of a convolution; only those `wanted`."""
    options = None, stride, padding, [1, 1], False, [0, 0], 1
    return torch.ops.aten.convolution_backward(d_out, x, weight, *options, wanted)
