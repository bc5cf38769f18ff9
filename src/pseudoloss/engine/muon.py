"""Muon (Jordan et al., 2024): momentum that is orthogonalised, for the weights of convolutions.

A step moves all directions of a weight matrix equally far: the singular values of the update become
about 1. All other parameters take a step of SGD. As with the other optimisers, memory and learning
rate are tensors that exist from the start, nothing is read back to the host, and a step that is not
finite changes nothing, so it can be captured.

Shapes: M matrices of R rows and S columns.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

# The polynomial a·x + b·x³ + c·x⁵ moves singular values from 0..1 towards 1, quickly rather than
# exactly: after five steps they are between 0.68 and 1.21, if they were 0.004 or more at first.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5


def orthogonalise(x_MRS: Tensor, steps: int = STEPS) -> Tensor:
    """U Vᵀ of each matrix U Σ Vᵀ, roughly, by Newton-Schulz steps; in bf16 on a GPU."""
    kind = torch.bfloat16 if x_MRS.is_cuda else torch.float32
    tall = x_MRS.shape[1] > x_MRS.shape[2]
    x = x_MRS.mT if tall else x_MRS
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax((1, 2), keepdim=True).clamp(min=tiny)  # so that no square underflows
    # The norm is at least the largest singular value.
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=tiny)).to(kind)
    for _ in range(steps):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    found: Tensor = x.mT if tall else x
    return found.to(x_MRS.dtype)


def as_matrix(weight: Tensor) -> Tensor:
    """A row for each output of a convolution; nothing is copied where channels come last."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def as_weight(matrix_RS: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    outputs, channels, height, width = like.shape
    return matrix_RS.view(outputs, height, width, channels).permute(0, 3, 1, 2)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum for parameters of four dimensions, SGD for the others.

    Args:
        params: the parameters.
        lr: learning rate, of both.
        momentum: of both.
        weight_decay: of convolutions, decoupled: they shrink by lr·weight_decay in a step; of
            other parameters, added to their gradients.
        fused: whether SGD uses its fused kernel.
    """

    found_inf: Tensor | None = None  # 1: the next step changes nothing

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: Tensor,
        momentum: float,
        weight_decay: float,
        fused: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.fused = fused
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        self._step_of_sgd([p for p in trained if p.dim() != 4])
        self._step_of_muon([p for p in trained if p.dim() == 4])

    def _step_of_muon(self, parameters: list[Tensor]) -> None:
        """In a few kernels for all weights together, where that is possible."""
        if not parameters:
            return
        group = self.param_groups[0]
        lr, momentum = group["lr"], group["momentum"]
        grads = [p.grad for p in parameters if p.grad is not None]
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        moved = torch._foreach_add(grads, buffers, alpha=momentum)
        ahead = torch._foreach_add(grads, moved, alpha=momentum)
        changes = torch._foreach_mul(self._orthogonal(ahead), lr)
        new = torch._foreach_mul(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(new, changes)
        self._replace([*parameters, *buffers], [*new, *moved])

    def _orthogonal(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Each weight, orthogonalised; those of one shape as one batch of matrices."""
        places: dict[tuple[int, int], list[int]] = {}
        for i, weight in enumerate(weights):
            places.setdefault((len(weight), weight[0].numel()), []).append(i)
        found = list(weights)
        for (rows, columns), same in places.items():
            update = orthogonalise(torch.stack([as_matrix(weights[i]) for i in same]))
            update = update * max(1, rows / columns) ** 0.5
            for i, change_RS in zip(same, update, strict=True):
                found[i] = as_weight(change_RS, weights[i])
        return found

    def _replace(self, tensors: list[Tensor], new: list[Tensor]) -> None:
        """... unless the step is not finite."""
        if self.found_inf is not None:
            is_bad = self.found_inf > 0
            new = [torch.where(is_bad, *pair) for pair in zip(tensors, new, strict=True)]
        torch._foreach_copy_(tensors, new)

    def _step_of_sgd(self, parameters: list[Tensor]) -> None:
        group = self.param_groups[0]
        sgd(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]
            [self.state[p]["momentum_buffer"] for p in parameters],
            foreach=False,
            fused=self.fused,
            found_inf=self.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0,
            nesterov=False,
            maximize=False,
        )
