"""How our own networks compute their layers.

`EagerOps` defines the network with plain torch calls. The other two compute the same network faster
on CUDA. `FusedOps` is for training: it reads and writes memory less often, and passes several
batches through the convolutions together while each keeps its own batch statistics; batches that
need no gradient are part of the same pass. `FoldedOps` is for evaluation: the statistics are fixed
then, and a norm after a convolution becomes part of the convolution.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pseudoloss.nn import autograd
from pseudoloss.nn.autograd import (
    SideStream,
    as_images,
    as_matrix,
    as_rows,
    copies,
    has_few_channels,
    patches_of,
)


class EagerOps:
    """One torch call per operation. The activations are a tensor of images."""

    def first(self, conv: nn.Conv2d, x: Tensor) -> Any:
        """The first convolution; x are the input images."""
        return conv(x)

    def first_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Any:
        return self.norm_relu(norm, self.first(conv, x))

    def conv(self, conv: nn.Conv2d, x: Any) -> Any:
        return conv(x)

    def norm_relu(self, norm: nn.BatchNorm2d, x: Any) -> Any:
        return F.relu(norm(x))

    def sum_norm_relu(
        self, norm: nn.BatchNorm2d, x: Any, skip: Any, keep_sum: bool
    ) -> tuple[Any, Any]:
        """x + skip, and ReLU(norm(x + skip)). The sum is only valid with `keep_sum`."""
        total = x if skip is None else x + skip
        return total, F.relu(norm(total))

    def conv_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Any) -> Any:
        return self.norm_relu(norm, self.conv(conv, x))

    def downsample(
        self, conv: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: nn.Conv2d, x: Any
    ) -> tuple[Any, Any]:
        """A convolution of stride 2 with norm and ReLU, and the 1×1 shortcut."""
        return self.conv_norm_relu(conv, norm, x), shortcut(x)

    def pool(self, x: Any, skip: Any = None) -> Tensor:
        """The mean of x + skip over the pixels of each image."""
        total = x if skip is None else x + skip
        return cast(Tensor, total.mean((2, 3)))

    def linear(self, layer: nn.Linear, x_BF: Tensor) -> Tensor:
        return cast(Tensor, layer(x_BF))


class FoldedOps(EagerOps):
    """Evaluation without gradients, with the running statistics.

    Created once for weights that do not change while it is used.
    """

    def __init__(self, convolutions: Iterable[nn.Conv2d], dtype: torch.dtype) -> None:
        self.dtype = dtype
        weights = [conv.weight for conv in convolutions]
        self.weights = dict(zip(weights, copies(weights, [dtype] * len(weights)), strict=True))
        self.folded: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def first(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        weight = self.weights[conv.weight]
        if not has_few_channels(conv):
            return F.conv2d(x.to(self.dtype), weight, None, conv.stride, conv.padding)
        return as_images(patches_of(x, self.dtype) @ as_matrix(weight).T, x)

    def first_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        if not has_few_channels(conv):
            return self.conv_norm_relu(conv, norm, x.to(self.dtype))
        from pseudoloss.nn import kernels

        patches, weight_CK = patches_of(x, self.dtype), as_matrix(self.weights[conv.weight])
        return as_images(kernels.first_norm_relu_running(norm, patches, weight_CK), x)

    def conv(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weights[conv.weight], None, conv.stride, conv.padding)

    def norm_relu(self, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
        return self.sum_norm_relu(norm, x, None, keep_sum=False)[1]

    def sum_norm_relu(
        self, norm: nn.BatchNorm2d, x: Tensor, skip: Tensor | None, keep_sum: bool
    ) -> tuple[Tensor, Tensor]:
        from pseudoloss.nn import kernels

        return kernels.norm_relu_running(norm, x, skip, keep_sum)

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

        small = kernels.every_second(x)
        skip = as_images(as_rows(small) @ self.weights[shortcut.weight].flatten(1).T, small)
        return self.conv_norm_relu(conv, norm, x), skip

    def pool(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        from pseudoloss.nn import kernels

        return kernels.pool(x, skip)

    def _fold(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
        """Weight and bias of one convolution that does the work of the convolution and the norm."""
        if conv.weight not in self.folded:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            bias = norm.bias - norm.running_mean * scale
            weight = conv.weight * scale[:, None, None, None]
            self.folded[conv.weight] = weight.to(self.dtype), bias.to(self.dtype)
        return self.folded[conv.weight]


class Activations(NamedTuple):
    """The activations of a fused network.

    `images` holds the values of all images, without gradients. `with_grad` is the part of the same
    memory that autograd sees: the images at the end, which need a gradient.
    """

    images: Tensor
    with_grad: Tensor


class FusedOps(EagerOps):
    """Triton kernels between the convolutions, and matrix products where cuDNN is slow.

    Args:
        weights: the weights to compute with (cast, for example), by parameter.
        groups: number of batches of one size in the input, one after another.
        no_grad: the number of them, from the start, that need no gradient.
        side_stream: computes the gradients of the weights, and may still be casting the weights.
    """

    def __init__(
        self, weights: dict[Tensor, Tensor], groups: int, no_grad: int, side_stream: SideStream
    ) -> None:
        self.weights, self.side_stream = weights, side_stream
        self.groups, self.no_grad = groups, no_grad

    def first(self, conv: nn.Conv2d, x: Tensor) -> Activations:
        weight = self.weights[conv.weight]
        start = self._first_with_grad(x)
        if not has_few_channels(conv):
            self.side_stream.join()
            x = x.to(weight.dtype)
            return self.conv(conv, Activations(x, x[start:]))
        weight_CK = self.side_stream(as_matrix, weight.detach())
        patches = patches_of(x, weight.dtype)
        self.side_stream.join()
        inputs = patches, weight, weight_CK, x, start, self.side_stream
        return Activations(*autograd.FirstConv.apply(*inputs))  # type: ignore[no-untyped-call]

    def first_norm_relu(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Activations:
        if not has_few_channels(conv):
            return self.norm_relu(norm, self.first(conv, x))
        from pseudoloss.nn import kernels

        weight = self.weights[conv.weight]
        weight_CK = self.side_stream(as_matrix, weight.detach())
        patches = patches_of(x, weight.dtype)
        square_GKK = kernels.squares(patches, self.groups)
        self.side_stream.join()
        weights = weight, weight_CK, norm.weight, norm.bias
        inputs = patches, square_GKK, *weights, norm, x, self._first_with_grad(x)
        return Activations(*autograd.FirstConvNormRelu.apply(*inputs))  # type: ignore[no-untyped-call]

    def conv(self, conv: nn.Conv2d, x: Activations) -> Activations:
        inputs = *x, self.weights[conv.weight], conv.stride, conv.padding, self.side_stream
        return Activations(*autograd.Conv.apply(*inputs))  # type: ignore[no-untyped-call]

    def norm_relu(self, norm: nn.BatchNorm2d, x: Activations) -> Activations:
        return self.sum_norm_relu(norm, x, None, keep_sum=False)[1]

    def sum_norm_relu(
        self, norm: nn.BatchNorm2d, x: Activations, skip: Activations | None, keep_sum: bool
    ) -> tuple[Activations, Activations]:
        skips = (None, None) if skip is None else skip
        inputs = *x, *skips, norm.weight, norm.bias, norm, self.groups
        found = autograd.NormRelu.apply(*inputs)  # type: ignore[no-untyped-call]
        return Activations(*found[:2]), Activations(*found[2:])

    def downsample(
        self, conv: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: nn.Conv2d, x: Activations
    ) -> tuple[Activations, Activations]:
        weights = self.weights[conv.weight], self.weights[shortcut.weight]
        found = autograd.Downsample.apply(*x, *weights, self.side_stream)  # type: ignore[no-untyped-call]
        return self.norm_relu(norm, Activations(*found[:2])), Activations(*found[2:])

    def pool(self, x: Activations, skip: Activations | None = None) -> Tensor:
        skips = (None, None) if skip is None else skip
        return torch.cat(autograd.Pool.apply(*x, *skips))  # type: ignore[no-untyped-call]

    def linear(self, layer: nn.Linear, x_BF: Tensor) -> Tensor:
        return F.linear(x_BF, self.weights[layer.weight], self.weights[layer.bias])

    def _first_with_grad(self, x: Tensor) -> int:
        """The index of the first image that needs a gradient."""
        return len(x) // self.groups * self.no_grad
