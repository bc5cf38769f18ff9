"""A mixture of several Gaussians in one dimension, fitted on the device without reading back to the
host.

The rule is scikit-learn's `GaussianMixture(K, max_iter=10, tol=1e-2, reg_covar=5e-4)` on values
scaled to 0..1. It starts from a k-means clustering whose centres are spread evenly, not at random,
so the result is deterministic; and every input has a defined result. For two modes, mixture.py has
an exact start.

Shapes: N values, B of them at a time, K components.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pseudoloss.methods.mixture import EM_STEPS, TOLERANCE, VARIANCE_FLOOR

LLOYD_STEPS = 20  # of k-means
PART = 2**18  # values in a chunk
PART_ON_CPU = 2**12  # ... so that their posteriors stay in the cache of a core
EMPTY = 1e-6  # a component with fewer values than this stays where it is


class Components(NamedTuple):
    """A fitted mixture of scaled values, in the order of the means."""

    means_K: Tensor
    variances_K: Tensor
    weights_K: Tensor
    lowest: Tensor  # (), the value that is scaled to 0
    highest: Tensor  # (), ... to 1
    fitted: Tensor  # (), bool: False if there was nothing to fit


def fit_gaussians(values_N: Tensor, count: int) -> Components:
    """Fit so many components to the values that are finite. With fewer than three of them, or if
    all are equal, `fitted` is False."""
    device = values_N.device
    if device.type == "mps":  # has no float64
        found = fit_gaussians(values_N.cpu(), count)
        return Components(*((t if t.dtype == torch.bool else t.float()).to(device) for t in found))
    values_N = values_N.detach()
    finite_N = values_N.isfinite()
    used = finite_N.sum()
    lowest = values_N.masked_fill(~finite_N, math.inf).min().double()
    highest = values_N.masked_fill(~finite_N, -math.inf).max().double()
    fitted = (used > 2) & (highest > lowest)
    x_N = scaled(values_N, lowest, highest).masked_fill(~(finite_N & fitted), 0)
    parts = list(zip(_split(x_N), _split(finite_N.double()), strict=True))

    modes = start(parts, count)
    bound = torch.full_like(lowest, -math.inf)
    done = torch.zeros_like(fitted)
    for _ in range(EM_STEPS):
        moments, new_bound = torch.zeros_like(modes), torch.zeros_like(bound)
        for x_B, weight_B in parts:
            log_BK = joint(x_B, modes)
            likelihood_B = log_BK.logsumexp(1)
            posterior_BK = (log_BK - likelihood_B[:, None]).exp()
            moments += sums(posterior_BK * weight_B[:, None], x_B)
            new_bound += (likelihood_B * weight_B).sum() / used
        # After convergence nothing changes; leaving the loop would need a value on the host.
        modes = torch.where(done, modes, maximise(moments, modes[0]))
        done |= (new_bound - bound).abs() < TOLERANCE
        bound = new_bound
    means_K, variances_K, weights_K = modes[:, modes[0].argsort(stable=True)]
    return Components(means_K, variances_K, weights_K, lowest, highest, fitted)


def posterior(values_B: Tensor, found: Components) -> Tensor:
    """The probability of each component (B,K). NaN and +inf belong to the highest one, -inf to the
    lowest; all do if nothing could be fitted."""
    x_B = scaled(values_B, found.lowest, found.highest)
    modes = torch.stack([found.means_K, found.variances_K, found.weights_K])
    p_BK = joint(x_B.nan_to_num(0.0, 0.0, 0.0), modes).softmax(1).float()
    one_hot_KK = torch.eye(p_BK.shape[1], device=p_BK.device)
    low_B1 = ((values_B == -math.inf) | ~found.fitted)[:, None]
    p_BK = torch.where(values_B.isfinite()[:, None], p_BK, one_hot_KK[-1])
    return torch.where(low_B1, one_hot_KK[0], p_BK)


def posterior_of_groups(values_N: Tensor, found: Components, group_KG: Tensor) -> Tensor:
    """The probability of groups of components (N,G), which `group_KG` says; in chunks. At most 1,
    whatever a sum is rounded to."""
    chunks = [posterior(part, found) @ group_KG for part in _split(values_N)]
    return torch.cat(chunks).clamp(max=1)


def scaled(values_N: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """In halves, since the span itself may overflow."""
    return (values_N.to(lowest.dtype) / 2 - lowest / 2) / (highest / 2 - lowest / 2)


def start(parts: Sequence[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """Means, variances and weights (3,K) of the clusters of k-means."""
    centres_K = (torch.arange(count, dtype=torch.float64, device=parts[0][0].device) + 0.5) / count

    def clusters() -> Tensor:
        found = torch.zeros(3, count, dtype=torch.float64, device=centres_K.device)
        for x_B, weight_B in parts:
            nearest_B1 = (x_B[:, None] - centres_K).abs().argmin(1, keepdim=True)
            one_hot_BK = torch.arange(count, device=x_B.device) == nearest_B1
            found += sums(one_hot_BK * weight_B[:, None], x_B)
        return found

    for _ in range(LLOYD_STEPS):
        size_K, sum_K, _ = clusters()
        centres_K = torch.where(size_K > 0, sum_K / size_K.clamp(min=1), centres_K)
    return maximise(clusters(), centres_K)


def joint(x_B: Tensor, modes: Tensor) -> Tensor:
    """The logarithm of weight times density (B,K)."""
    means_K, variances_K, weights_K = modes
    distance_BK: Tensor = (x_B[:, None] - means_K) ** 2 / variances_K
    constant_K: Tensor = weights_K.log() - 0.5 * (2 * math.pi * variances_K).log()
    return constant_K - 0.5 * distance_BK


def sums(share_BK: Tensor, x_B: Tensor) -> Tensor:
    """(3,K): Σ p, Σ p·x and Σ p·x² of each component."""
    x_B1 = x_B[:, None]
    return torch.stack([(share_BK * power).sum(0) for power in (1.0, x_B1, x_B1 * x_B1)])


def maximise(moments: Tensor, before_K: Tensor) -> Tensor:
    """M-step: (3,K), means, variances and weights. `before_K`: the means of components that have
    become empty."""
    size_K, sum_K, square_K = moments
    divisor_K = size_K + 10 * torch.finfo(torch.float64).eps
    means_K = torch.where(size_K > EMPTY, sum_K / divisor_K, before_K)
    spread_K = square_K - 2 * means_K * sum_K + means_K**2 * size_K
    variances_K = spread_K.clamp(min=0) / divisor_K + VARIANCE_FLOOR
    return torch.stack([means_K, variances_K, divisor_K / divisor_K.sum()])


def _split(values_N: Tensor) -> tuple[Tensor, ...]:
    size = PART_ON_CPU if values_N.device.type == "cpu" else PART
    parts: tuple[Tensor, ...] = values_N.split(size)
    return parts
