"""Batch norm with the statistics of the batches of all processes.

torch.nn.SyncBatchNorm computes the same, but not on the CPU and not for the norms of timm. Shapes:
C channels, W processes.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pseudoloss import distributed


def synchronise_norms(network: nn.Module) -> None:
    """Let all batch norms of a network use the images of all processes in training."""
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            vars(module)["forward"] = partial(_forward, module)


def separate_norms(network: nn.Module) -> None:
    """The reverse of `synchronise_norms`."""
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            vars(module).pop("forward", None)


def _forward(norm: Any, x: Tensor) -> Tensor:
    if not norm.training:
        return cast(Tensor, type(norm).forward(norm, x))
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum
    if momentum is None:  # a cumulative average
        momentum = 1 / norm.num_batches_tracked.float()
    out = _SyncNorm.apply(x, norm.weight, norm.bias, norm, momentum)  # type: ignore[no-untyped-call]
    # The norms of timm include what follows.
    return cast(Tensor, norm.act(norm.drop(out)) if hasattr(norm, "act") else out)


class _SyncNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: Any, momentum: Any
    ) -> Tensor:
        dims = [0, *range(2, x.ndim)]
        own_2C = torch.stack(torch.var_mean(x.float(), dims, correction=0))
        var_WC, mean_WC = distributed.gather(own_2C[None]).unbind(1)
        # Every process has equally many images.
        mean_C = mean_WC.mean(0)
        var_C = var_WC.mean(0) + (mean_WC - mean_C).square().mean(0)
        count = distributed.size() * x.numel() // x.shape[1]
        norm.running_mean.lerp_(mean_C, momentum)
        norm.running_var.lerp_(var_C * (count / (count - 1)), momentum)
        ctx.save_for_backward(x, weight, mean_C, var_C)
        ctx.eps, ctx.count = norm.eps, count
        return F.batch_norm(x, mean_C, var_C, weight, bias, False, 0.0, norm.eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean_C, var_C = ctx.saved_tensors
        dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        rstd_C = (var_C + ctx.eps).rsqrt()
        d_out = gradients[0].float()
        normed = (x.float() - mean_C.view(shape)) * rstd_C.view(shape)
        own_2C = torch.stack([(d_out * normed).sum(dims), d_out.sum(dims)])
        sums_2C = own_2C.clone()
        distributed.add_up(sums_2C)
        slope_C, level_C = sums_2C / ctx.count
        d_x = (d_out - level_C.view(shape) - normed * slope_C.view(shape)) * (
            weight.float() * rstd_C
        ).view(shape)
        # Those of the weights are added up over the processes with all other gradients.
        return d_x.to(x.dtype), own_2C[0], own_2C[1], None, None
