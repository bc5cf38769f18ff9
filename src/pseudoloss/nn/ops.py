"""How our networks compute: as plain calls, or on CUDA in fewer and faster kernels.

All give the same network. `Plain` is the definition. `Fused` trains: it passes over memory less
often, and takes several batches through the convolutions at once while each keeps statistics of its
own; those that need no gradient go along with those that do. `Folded` evaluates: the norms are
known then, and those behind a convolution become part of it.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Result = TypeVar("Result")


class Plain:
    """One call of torch for each thing. What flows through a network is a tensor of images."""

    def first(self, conv: nn.Conv2d, x: Tensor) -> Any:
        """The first convolution, of the images themselves."""
        return conv(x)

    def first_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Any:
        return self.norm_relu(norm, self.first(conv, x))

    def conv(self, conv: nn.Conv2d, x: Any) -> Any:
        return conv(x)

    def norm_relu(self, norm: nn.BatchNorm2d, x: Any) -> Any:
        return F.relu(norm(x))

    def sum_norm_relu(self, norm: nn.BatchNorm2d, x: Any, skip: Any, keep: bool) -> tuple[Any, Any]:
        """x + skip, where that is to be kept; and the ReLU of its norm."""
        total = x if skip is None else x + skip
        return total, F.relu(norm(total))

    def conv_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Any) -> Any:
        return self.norm_relu(norm, self.conv(conv, x))

    def downsample(
        self, conv: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: nn.Conv2d, x: Any
    ) -> tuple[Any, Any]:
        """A convolution that halves the image, with norm and ReLU; and the 1×1 shortcut around."""
        return self.conv_norm_relu(conv, norm, x), shortcut(x)

    def pool(self, x: Any, skip: Any = None) -> Tensor:
        """The mean over an image, of x + skip."""
        total = x if skip is None else x + skip
        return cast(Tensor, total.mean((2, 3)))

    def linear(self, layer: nn.Linear, x_BF: Tensor) -> Tensor:
        return cast(Tensor, layer(x_BF))


# ------------------------------------------------------------------------------------ evaluation


class Folded(Plain):
    """Without gradients, by running statistics.

    Made once for weights that do not change meanwhile.
    """

    def __init__(self, convolutions: Iterable[nn.Conv2d], dtype: torch.dtype) -> None:
        self.dtype = dtype
        weights = [conv.weight for conv in convolutions]
        self.weights = dict(zip(weights, _copies(weights, [dtype] * len(weights)), strict=True))
        self.folded: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def first(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        weight = self.weights[conv.weight]
        if not _few_channels(conv):
            return F.conv2d(x.to(self.dtype), weight, None, conv.stride, conv.padding)
        return _images(_patches(x, self.dtype) @ _as_matrix(weight).T, x)

    def first_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        if not _few_channels(conv):
            return self.conv_norm_relu(conv, norm, x.to(self.dtype))
        from pseudoloss.nn import kernels

        patches, weight_CK = _patches(x, self.dtype), _as_matrix(self.weights[conv.weight])
        return _images(kernels.first_norm_relu_running(norm, patches, weight_CK), x)

    def conv(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weights[conv.weight], None, conv.stride, conv.padding)

    def norm_relu(self, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        return self.sum_norm_relu(norm, x, None, False)[1]

    def sum_norm_relu(
        self, norm: nn.BatchNorm2d, x: Tensor, skip: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        return kernels.norm_relu_running(norm, x, skip, keep)

    def conv_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        weight, bias = self._fold(conv, norm)
        if x.is_cuda:
            padding = cast(tuple[int, ...], conv.padding)
            return torch.cudnn_convolution_relu(
                x, weight, bias, conv.stride, padding, conv.dilation, 1
            )
        return F.relu(F.conv2d(x, weight, bias, conv.stride, conv.padding))

    def downsample(
        self, conv: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: nn.Conv2d, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        seen = kernels.every_second(x)
        skip = _images(_rows(seen) @ self.weights[shortcut.weight].flatten(1).T, seen)
        return self.conv_norm_relu(conv, norm, x), skip

    def pool(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        from pseudoloss.nn import kernels

        return kernels.pool(x, skip)

    def _fold(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
        """Weight and bias of a convolution that normalises too."""
        if conv.weight not in self.folded:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            bias = norm.bias - norm.running_mean * scale
            weight = conv.weight * scale[:, None, None, None]
            self.folded[conv.weight] = weight.to(self.dtype), bias.to(self.dtype)
        return self.folded[conv.weight]


# ------------------------------------------------------------------------------------ training


class Flow(NamedTuple):
    """What flows through a fused network: all images, as far as values go; and the same memory of
    those that need a gradient, which stand last, as autograd sees them."""

    images: Tensor
    graded: Tensor


class Fused(Plain):
    """Triton kernels between the convolutions, and matrix products where cuDNN is slow.

    Args:
        weights: the convolutions' weights as they are to be used, by the parameter.
        groups: the batch is so many batches of one size, one behind the other.
        free: so many of them, from the front, need no gradient.
        beside: where the weights may still be on their way, and where their gradients are computed.
    """

    def __init__(
        self, weights: dict[Tensor, Tensor], groups: int, free: int, beside: "Beside"
    ) -> None:
        self.weights, self.beside = weights, beside
        self.groups, self.free = groups, free

    def first(self, conv: nn.Conv2d, x: Tensor) -> Flow:
        weight = self.weights[conv.weight]
        at = len(x) // self.groups * self.free
        if not _few_channels(conv):
            self.beside.join()
            x = x.to(weight.dtype)
            return self.conv(conv, Flow(x, x[at:]))
        weight_CK = self.beside(_as_matrix, weight.detach())
        patches = _patches(x, weight.dtype)
        self.beside.join()
        return Flow(*_First.apply(patches, weight, weight_CK, x, at, self.beside))  # type: ignore[no-untyped-call]

    def first_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Flow:
        if not _few_channels(conv):
            return self.norm_relu(norm, self.first(conv, x))
        from pseudoloss.nn import kernels

        at = len(x) // self.groups * self.free
        weight = self.weights[conv.weight]
        weight_CK = self.beside(_as_matrix, weight.detach())
        patches = _patches(x, weight.dtype)
        square_GKK = kernels.squares(patches, self.groups)
        self.beside.join()
        weights = weight, weight_CK, norm.weight, norm.bias
        return Flow(*_FirstNormRelu.apply(patches, square_GKK, *weights, norm, x, at))  # type: ignore[no-untyped-call]

    def conv(self, conv: nn.Conv2d, x: Flow) -> Flow:
        weight = self.weights[conv.weight]
        found = _Conv.apply(*x, weight, conv.stride, conv.padding, self.beside)  # type: ignore[no-untyped-call]
        return Flow(*found)

    def norm_relu(self, norm: nn.BatchNorm2d, x: Flow) -> Flow:
        return self.sum_norm_relu(norm, x, None, False)[1]

    def sum_norm_relu(
        self, norm: nn.BatchNorm2d, x: Flow, skip: Flow | None, keep: bool
    ) -> tuple[Flow, Flow]:
        skips = (None, None) if skip is None else skip
        found = _NormRelu.apply(*x, *skips, norm.weight, norm.bias, norm, self.groups)  # type: ignore[no-untyped-call]
        return Flow(*found[:2]), Flow(*found[2:])

    def downsample(
        self, conv: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: nn.Conv2d, x: Flow
    ) -> tuple[Flow, Flow]:
        weights = self.weights[conv.weight], self.weights[shortcut.weight]
        found = _Downsample.apply(*x, *weights, self.beside)  # type: ignore[no-untyped-call]
        return self.norm_relu(norm, Flow(*found[:2])), Flow(*found[2:])

    def pool(self, x: Flow, skip: Flow | None = None) -> Tensor:
        free, graded = _Pool.apply(*x, *((None, None) if skip is None else skip))  # type: ignore[no-untyped-call]
        return torch.cat([free, graded])

    def linear(self, layer: nn.Linear, x_BF: Tensor) -> Tensor:
        return F.linear(x_BF, self.weights[layer.weight], self.weights[layer.bias])


class Beside:
    """A second stream for what nothing waits for until `join`: gradients of weights and, before
    the first layer needs them, the weights in another type.

    A batch leaves some of a large GPU idle, above all where images have become small.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _second_stream(device) if device.type == "cuda" else None
        self.held: list[Any] = []

    def __call__(self, function: Callable[..., Result], *inputs: Any) -> Result:
        if self.stream is None:
            return function(*inputs)
        # The first stream must not use their memory again before the join. Without their history,
        # which would hold this object in turn.
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
    """One for a GPU: memory and workspaces belong to a stream, and are not shared with others."""
    return torch.cuda.Stream(device)


def weights_in(
    dtype: torch.dtype, weights: Iterable[Tensor], beside: Beside
) -> dict[Tensor, Tensor]:
    """All weights in another type, at once, `beside`; and back at once when it has their
    gradients."""
    weights = list(weights)
    return dict(zip(weights, _Cast.apply(dtype, beside, *weights), strict=True))  # type: ignore[no-untyped-call]


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, beside: Beside, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.beside, ctx.dtypes = beside, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        return _copies(weights, [dtype] * len(weights), beside)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.beside.join()
        # A weight is used once: autograd would add up what comes from several uses before the join.
        # A head that is not used has no gradient.
        there = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        copies = _copies(there.values(), [ctx.dtypes[i] for i in there])
        found = dict(zip(there, copies, strict=True))
        return None, None, *(found.get(i) for i in range(len(gradients)))


def _copies(
    tensors: Iterable[Tensor], dtypes: list[torch.dtype], beside: Beside | None = None
) -> tuple[Tensor, ...]:
    tensors = list(tensors)
    copies = [torch.empty_like(t, dtype=d) for t, d in zip(tensors, dtypes, strict=True)]
    copy = torch._foreach_copy_  # one kernel for all
    if beside is None:
        copy(copies, tensors)
    else:
        beside(copy, copies, tensors)
    return tuple(copies)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        patches: Tensor,
        weight: Tensor,
        weight_CK: Tensor,
        x: Tensor,
        at: int,
        beside: Beside,
    ) -> tuple[Tensor, Tensor]:
        out = _images(patches @ weight_CK.T, x)
        ctx.save_for_backward(patches[at * x[0, 0].numel() :], weight)
        ctx.beside = beside
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out)
        return out, out[at:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        patches, weight = ctx.saved_tensors

        def of_weight(d_out: Tensor, patches: Tensor) -> Tensor:
            return _as_weight(_rows(d_out).T @ patches, weight)

        d_weight = ctx.beside(of_weight, gradients[1], patches)
        return None, d_weight, None, None, None, None


class _FirstNormRelu(torch.autograd.Function):
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
        at: int,
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        ones = weight[0].numel()
        rows = kernels.first_norm_relu(norm, patches, square_GKK, weight_CK, ones)
        out = _images(rows, x)
        free = len(square_GKK) * at // len(x)
        ctx.save_for_backward(
            out[at:], patches[at * x[0, 0].numel() :], weight, weight_CK, square_GKK[free:]
        )
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out)
        return out, out[at:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from pseudoloss.nn import kernels

        out, patches, weight, weight_CK, square_GKK = ctx.saved_tensors
        d_out = gradients[1].contiguous(memory_format=torch.channels_last)
        d_weight, d_norm_weight, d_norm_bias = kernels.first_norm_relu_gradient(
            *(ctx.norm, _rows(d_out), _rows(out), patches, weight_CK, weight[0].numel(), square_GKK)
        )
        d_weight = _as_weight(d_weight, weight)
        return None, None, d_weight, None, d_norm_weight, d_norm_bias, None, None, None


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        graded: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        beside: Beside,
    ) -> tuple[Tensor, Tensor]:
        out = F.conv2d(images, weight, None, stride, padding)
        ctx.save_for_backward(graded, weight)
        ctx.form, ctx.beside = (stride, padding), beside
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out)
        return out, out[len(images) - len(graded) :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graded, weight = ctx.saved_tensors
        d_out = gradients[1]
        d_weight = ctx.beside(_conv_gradient_of_weight, d_out, graded, weight, *ctx.form)
        d_x = None
        if ctx.needs_input_grad[1]:
            d_x = _conv_gradient(d_out, graded, weight, *ctx.form)
        return None, d_x, d_weight, None, None, None


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        graded: Tensor,
        skip: Tensor | None,
        skip_graded: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        norm: nn.BatchNorm2d,
        groups: int,
    ) -> tuple[Tensor, ...]:
        from pseudoloss.nn import kernels

        total, out, mean_GC, rstd_GC = kernels.norm_relu(norm, images, skip, groups)
        at = len(images) - len(graded)
        free = groups * at // len(images)
        ctx.save_for_backward(total[at:], mean_GC[free:], rstd_GC[free:])
        ctx.norm, ctx.has_skip = norm, skip is not None
        ctx.set_materialize_grads(False)
        if not ctx.has_skip:
            total = images.view_as(images)
        ctx.mark_non_differentiable(total, out)
        return total, total[at:], out, out[at:]

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


class _Downsample(torch.autograd.Function):
    """The shortcut sees every second pixel of every second row: a matrix product on those, whose
    gradient is added there in place."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        graded: Tensor,
        weight: Tensor,
        shortcut: Tensor,
        beside: Beside,
    ) -> tuple[Tensor, ...]:
        from pseudoloss.nn import kernels

        out = F.conv2d(images, weight, None, 2, 1)
        seen = kernels.every_second(images)
        skip = _images(_rows(seen) @ shortcut.flatten(1).T, seen)
        at = len(images) - len(graded)
        ctx.save_for_backward(graded, weight, shortcut, seen[at:])
        ctx.beside = beside
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out, skip)
        return out, out[at:], skip, skip[at:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from pseudoloss.nn import kernels

        graded, weight, shortcut, seen = ctx.saved_tensors
        _, d_out, _, d_skip = gradients

        def of_shortcut(d_skip: Tensor, seen: Tensor) -> Tensor:
            return (_rows(d_skip).T @ _rows(seen)).view_as(shortcut)

        d_weight = ctx.beside(_conv_gradient_of_weight, d_out, graded, weight, (2, 2), (1, 1))
        d_shortcut = ctx.beside(of_shortcut, d_skip, seen)
        d_x = _conv_gradient(d_out, graded, weight, (2, 2), (1, 1))
        d_x = d_x.contiguous(memory_format=torch.channels_last)
        kernels.add_to_every_second(d_x, _images(_rows(d_skip) @ shortcut.flatten(1), seen))
        return None, d_x, d_weight, d_shortcut, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, graded: Tensor, skip: Tensor | None, skip_graded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        out = kernels.pool(images, skip)
        ctx.shape, ctx.has_skip = graded.shape, skip is not None
        ctx.set_materialize_grads(False)
        at = len(images) - len(graded)
        free = out[:at]
        ctx.mark_non_differentiable(free)
        return free, out[at:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, height, width = ctx.shape
        d_mean = (gradients[1] / (height * width))[:, :, None, None]
        # Written once, channels last, for both and for all that is behind them.
        d_x = d_mean.expand(ctx.shape).contiguous(memory_format=torch.channels_last)
        return None, d_x, None, (d_x if ctx.has_skip else None)


def _few_channels(conv: nn.Conv2d) -> bool:
    """Whether it can be computed as a product of `_patches` and `_as_matrix`."""
    return conv.kernel_size == (3, 3) and conv.stride == (1, 1) and conv.in_channels <= 3


def _patches(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a 3×3 convolution of few channels sees of the images, a row a pixel; behind its values
    a patch has a one."""
    from pseudoloss.nn import kernels

    return kernels.patches(x.contiguous(memory_format=torch.channels_last), dtype)


def _as_matrix(weight: Tensor) -> Tensor:
    """The weights (C,K) to multiply patches with. That of the one is zero."""
    from pseudoloss.nn import kernels

    weight_CK = weight.new_zeros(len(weight), kernels.patch_width(weight.shape[1]))
    weight_CK[:, : weight[0].numel()] = weight.permute(0, 2, 3, 1).flatten(1)
    return weight_CK


def _as_weight(d_weight_CK: Tensor, weight: Tensor) -> Tensor:
    """The gradient of that matrix, as that of the convolution's weight."""
    d_weight = d_weight_CK[:, : weight[0].numel()].view(len(weight), 3, 3, -1).permute(0, 3, 1, 2)
    # Dense, or casting all gradients would not be one kernel.
    return d_weight.to(weight.dtype).contiguous(memory_format=torch.channels_last)


def _conv_gradient(d_out: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    return cast(
        Tensor,
        torch.ops.aten.convolution_backward(
            *(d_out, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1),
            [True, False, False],
        )[0],
    )


def _conv_gradient_of_weight(
    d_out: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any
) -> Tensor:
    return cast(
        Tensor,
        torch.ops.aten.convolution_backward(
            *(d_out, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1),
            [False, True, False],
        )[1],
    )


def _rows(x: Tensor) -> Tensor:
    """Channels-last images as a table: a row a pixel."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _images(rows: Tensor, like: Tensor) -> Tensor:
    """The table as images again."""
    B, _, height, width = like.shape
    return rows.view(B, height, width, -1).permute(0, 3, 1, 2)
