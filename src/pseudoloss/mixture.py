"""Two Gaussian modes in one dimension, fitted where the values are and without a host read-back.

The rule is scikit-learn's `GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4)` on values
scaled to 0..1 (row 13 of docs/paper-and-code.md). Its early stop is part of the method: a mixture
run to convergence flags more clean images. Two things differ from scikit-learn: the start is the
exact two-means split instead of a random one, so the result is deterministic; and every input
has a defined result.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

EM_STEPS = 10
TOLERANCE = 1e-2  # change of the mean log-likelihood at which EM stops
VARIANCE_FLOOR = 5e-4  # added to each variance
FIXED_POINT = 2.0**36  # resolution of the exact prefix sums; holds for 2^27 values


class Mixture(NamedTuple):
    """A fitted mixture. The first mode is the low one."""

    low_N: Tensor  # P(low mode) of each value; 1 where a value was left out of the fit
    means: Tensor  # (2,) of the values as they came
    variances: Tensor  # (2,)
    weights: Tensor  # (2,)
    fitted: Tensor  # (), bool: False where there was nothing to fit


def fit_two_modes(values_N: Tensor, where_N: Tensor | None = None) -> Mixture:
    """Fit two modes to the values at `where_N`, and tell how likely each belongs to the low one.

    Defined for every input: NaN and +inf belong to the high mode, -inf to the low one, and none
    of them takes part in the fit. Where fewer than three finite values are left, or all of them
    are equal, there is one mode only: it is the low one, and `fitted` is False.
    """
    device = values_N.device
    if device.type == "mps":  # has no float64
        where = None if where_N is None else where_N.cpu()
        return Mixture(*(part.to(device) for part in _single(fit_two_modes(values_N.cpu(), where))))
    values_N = values_N.detach().double()
    asked_N = torch.ones_like(values_N, dtype=torch.bool) if where_N is None else where_N
    if values_N.numel() == 0:
        half = torch.full((2,), 0.5, dtype=torch.float64, device=device)
        none = torch.full((2,), math.nan, dtype=torch.float64, device=device)
        fitted = torch.zeros((), dtype=torch.bool, device=device)
        return Mixture(values_N.float(), none, none, half, fitted)

    used_N = asked_N & values_N.isfinite()
    count = used_N.sum()
    lowest = torch.where(used_N, values_N, math.inf).min()
    highest = torch.where(used_N, values_N, -math.inf).max()
    half_span = highest / 2 - lowest / 2  # halves: the span itself may overflow
    fitted = (count > 2) & (half_span > 0)
    x_N = torch.where(used_N & fitted, (values_N / 2 - lowest / 2) / half_span, 0.0)

    weight_N = used_N.double()
    low_N = _two_means(x_N, used_N, count).double() * weight_N
    means, variances, shares = _maximise(x_N, low_N, weight_N)
    bound = torch.full_like(count, -math.inf, dtype=torch.float64)
    done = torch.zeros_like(fitted)
    for _ in range(EM_STEPS):
        posterior_N, likelihood_N = _expect(x_N, means, variances, shares)
        new = _maximise(x_N, posterior_N * weight_N, weight_N)
        new_bound = (likelihood_N * weight_N).sum() / count
        # After the stop nothing moves any more; a loop that broke off would have to ask the host.
        means, variances, shares = (
            torch.where(done, old, fresh)
            for old, fresh in zip((means, variances, shares), new, strict=True)
        )
        done |= (new_bound - bound).abs() < TOLERANCE
        bound = new_bound
    posterior_N, _ = _expect(x_N, means, variances, shares)

    order = means.argsort(stable=True)
    low_N = torch.where(order[0] == 0, posterior_N, 1 - posterior_N)
    low_N = torch.where(fitted & used_N, low_N, 1.0)
    outside_N = asked_N & ~used_N & (values_N != -math.inf)
    low_N = torch.where(outside_N, 0.0, low_N)
    span = 2 * half_span
    return Mixture(
        low_N.float(),
        lowest + means[order] * span,
        variances[order] * span**2,
        shares[order],
        fitted,
    )


def _two_means(x_N: Tensor, used_N: Tensor, count: Tensor) -> Tensor:
    """True in the lower part of the split into two that leaves the least squared error.

    In one dimension the best split is a cut of the sorted values, so all cuts are tried at once.
    Prefix sums are kept in integers: exact, and so the same in whatever order a GPU adds them.
    """
    sorted_N = torch.where(used_N, x_N, math.inf).sort().values
    usable_N = sorted_N.isfinite()
    prefix_N = (torch.where(usable_N, sorted_N, 0.0) * FIXED_POINT).round().long().cumsum(0)
    below = torch.arange(1, len(x_N) + 1, device=x_N.device)
    above = (count - below).clamp(min=1)
    sum_below = prefix_N / FIXED_POINT
    sum_above = (prefix_N[-1] - prefix_N) / FIXED_POINT
    # Least error within the parts is most spread between them: Σ (sum of a part)² / its size.
    spread_N = sum_below**2 / below + sum_above**2 / above
    following_N = torch.cat([sorted_N[1:], sorted_N[-1:]])
    is_cut_N = (below < count) & (sorted_N < following_N)
    cut = sorted_N[torch.where(is_cut_N, spread_N, -1.0).argmax()]
    return x_N <= cut


def _expect(x_N: Tensor, means: Tensor, variances: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """E-step: the posterior of the first mode, and the log-likelihood of each value."""
    joint = [
        shares[k].log()
        - 0.5 * (math.log(2 * math.pi) + variances[k].log() + (x_N - means[k]) ** 2 / variances[k])
        for k in (0, 1)
    ]
    likelihood_N = torch.logaddexp(joint[0], joint[1])
    return (joint[0] - likelihood_N).exp(), likelihood_N


def _maximise(x_N: Tensor, first_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M-step: means, variances and shares of both modes."""
    means, variances, sizes = [], [], []
    for part_N in (first_N, weight_N - first_N):
        size = part_N.sum() + 10 * torch.finfo(torch.float64).eps
        mean = (part_N * x_N).sum() / size
        variances.append((part_N * (x_N - mean) ** 2).sum() / size + VARIANCE_FLOOR)
        means.append(mean)
        sizes.append(size)
    size = torch.stack(sizes)
    return torch.stack(means), torch.stack(variances), size / size.sum()


def _single(mixture: Mixture) -> Mixture:
    return Mixture(*(part.float() if part.is_floating_point() else part for part in mixture))
