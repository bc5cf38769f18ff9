"""A mixture of two Gaussians in one dimension, fitted on the device without reading back to the
host.

The rule is scikit-learn's `GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4)` on values
scaled to 0..1 (row 13 of docs/paper-and-code.md). Its early stop is part of the method: a mixture
run to convergence flags more clean images. Two things differ from scikit-learn: it starts from the
exact two-means split instead of a random one, so the result is deterministic; and every input has a
defined result. Values are processed in chunks: float64 copies of all of them would need most of the
memory and of the time.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

EM_STEPS = 10
TOLERANCE = 1e-2  # change of the mean log-likelihood at which EM stops
VARIANCE_FLOOR = 5e-4  # added to each variance
PART = 2**21  # values in a chunk
PART_ON_CPU = 2**15  # ... so that they stay in the cache of a core
FIXED_POINT = 2.0**36  # resolution of the exact prefix sums; enough for 2^27 values


class Mixture(NamedTuple):
    """A fitted mixture. The first mode is the low one."""

    low_N: Tensor  # P(low mode) of each value; 1 for values outside `where_N`
    means: Tensor  # (2,), in the units of the values
    variances: Tensor  # (2,)
    weights: Tensor  # (2,)
    fitted: Tensor  # (), bool: False if there was nothing to fit


def fit_two_modes(values_N: Tensor, where_N: Tensor | None = None) -> Mixture:
    """Fit two modes to the values at `where_N`; the probability of the low mode for each.

    Every input has a defined result: NaN and +inf belong to the high mode, -inf to the low one, and
    none of them is used in the fit. With fewer than three finite values, or if all are equal,
    there is only the low mode, and `fitted` is False.
    """
    device = values_N.device
    if device.type == "mps":  # has no float64
        where = None if where_N is None else where_N.cpu()
        return Mixture(*(part.to(device) for part in _single(fit_two_modes(values_N.cpu(), where))))
    values_N = values_N.detach()
    if values_N.dtype != torch.float32:
        values_N = values_N.double()
    if values_N.numel() == 0:
        half = torch.full((2,), 0.5, dtype=torch.float64, device=device)
        none = torch.full((2,), math.nan, dtype=torch.float64, device=device)
        fitted = torch.zeros((), dtype=torch.bool, device=device)
        return Mixture(values_N.float(), none, none, half, fitted)

    asked_N = torch.ones_like(values_N, dtype=torch.bool) if where_N is None else where_N
    used_N = asked_N & values_N.isfinite()
    count = used_N.sum()
    sorted_N = _sort(values_N.masked_fill(~used_N, math.inf))
    lowest = sorted_N[0].double()
    highest = sorted_N.take((count - 1).clamp(min=0)).double()
    half_span = highest / 2 - lowest / 2  # halves: the span itself may overflow
    fitted = (count > 2) & (half_span > 0)

    def scale(values: Tensor, used: Tensor) -> Tensor:
        scaled = (values.double() / 2 - lowest / 2) / half_span
        return scaled.masked_fill(~(used & fitted), 0)

    def parts() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for part in _parts(values_N):
            yield part, scale(values_N[part], used_N[part]), used_N[part].double()

    cut = _two_means(sorted_N, count, scale)
    del sorted_N
    moments = torch.zeros(3, 2, dtype=torch.float64, device=device)
    for part, x, weight in parts():
        moments += _moments(x, values_N[part] <= cut, weight)
    modes = _maximise(moments)
    bound = torch.full_like(half_span, -math.inf)
    done = torch.zeros_like(fitted)
    for _ in range(EM_STEPS):
        moments, new_bound = torch.zeros_like(moments), torch.zeros_like(bound)
        for _, x, weight in parts():
            posterior, likelihood = _expect(x, modes)
            moments += _moments(x, posterior, weight)
            new_bound += (likelihood * weight).sum() / count
        # After convergence nothing changes. Leaving the loop early needs a value on the host, which
        # is free only on the CPU.
        modes = torch.where(done, modes, _maximise(moments))
        done |= (new_bound - bound).abs() < TOLERANCE
        bound = new_bound
        if device.type == "cpu" and done:
            break

    means, variances, shares = modes
    order = means.argsort(stable=True)
    low_N = torch.empty_like(values_N, dtype=torch.float32)
    for part, x, _ in parts():
        posterior, _ = _expect(x, modes)
        low = torch.where(order[0] == 0, posterior, 1 - posterior)
        low = low.masked_fill(~(fitted & used_N[part]), 1)
        outside = asked_N[part] & ~used_N[part] & (values_N[part] != -math.inf)
        low_N[part] = low.masked_fill(outside, 0)
    span = 2 * half_span
    return Mixture(
        low_N,
        lowest + means[order] * span,
        variances[order] * span**2,
        shares[order],
        fitted,
    )


def _parts(values_N: Tensor) -> list[slice]:
    size = PART_ON_CPU if values_N.device.type == "cpu" else PART
    return [slice(start, start + size) for start in range(0, len(values_N), size)]


def _sort(values_N: Tensor) -> Tensor:
    """Sort in ascending order. On the CPU, NumPy is faster and sorts in place."""
    if values_N.device.type != "cpu":
        return values_N.sort().values
    values_N.numpy().sort()
    return values_N


def _two_means(
    sorted_N: Tensor, count: Tensor, scale: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The largest value of the lower part of the two-means split: the one with the least squared
    error.

    In one dimension the best split is a cut of the sorted values, so all cuts are tried; only the
    first `count` values are finite. Prefix sums are integers: exact, and so the same in whatever
    order a GPU adds them.
    """

    def fixed_point(values: Tensor) -> Tensor:
        return (scale(values, values.isfinite()) * FIXED_POINT + 0.5).long()

    total = torch.stack([fixed_point(sorted_N[part]).sum() for part in _parts(sorted_N)]).sum()
    before, most, best_cut = torch.zeros_like(total), total.double().zero_(), sorted_N[0]
    for part in _parts(sorted_N[:-1]):
        lower, upper = sorted_N[:-1][part], sorted_N[1:][part]  # on both sides of each cut
        prefix = before + fixed_point(lower).cumsum(0)
        below = torch.arange(part.start + 1, part.start + 1 + len(lower), device=lower.device)
        above = (count - below).clamp(min=1)
        # The least error within the parts is the most spread between them: Σ (sum of a part)² /
        # size. In float64: torch divides int64 by a Python float in float32, which is off by many
        # ranks.
        lower_sum = prefix.double() / FIXED_POINT
        upper_sum = (total - prefix).double() / FIXED_POINT
        spread = lower_sum**2 / below + upper_sum**2 / above
        is_cut = (below < count) & (lower < upper)
        spread, place = spread.masked_fill(~is_cut, 0).max(0)
        best_cut = torch.where(spread > most, lower.take(place), best_cut)
        most = torch.maximum(spread, most)
        before = prefix[-1]
    return best_cut


def _expect(x: Tensor, modes: Tensor) -> tuple[Tensor, Tensor]:
    """E-step: the posterior of the first mode and the log-likelihood of each value."""
    means, variances, shares = modes
    # The logarithm of share times density is a parabola in x.
    square, slope = -0.5 / variances, means / variances
    constant = shares.log() - 0.5 * ((2 * math.pi * variances).log() + means**2 / variances)
    first, second = ((square[k] * x + slope[k]) * x + constant[k] for k in (0, 1))
    return torch.sigmoid(first - second), torch.logaddexp(first, second)


def _moments(x: Tensor, posterior: Tensor, weight: Tensor) -> Tensor:
    """(3, 2): Σ p, Σ p·x and Σ p·x², p being the posterior of each mode."""
    first = posterior * weight
    sums = [[p.sum(), (p * x).sum(), (p * x * x).sum()] for p in (first, weight - first)]
    return torch.stack([torch.stack(mode) for mode in sums], dim=1)


def _maximise(moments: Tensor) -> Tensor:
    """M-step: (3, 2), means, variances and shares of both modes."""
    size, sum_x, sum_xx = moments
    divisor = size + 10 * torch.finfo(torch.float64).eps
    means = sum_x / divisor
    variances = (sum_xx - 2 * means * sum_x + means**2 * size) / divisor + VARIANCE_FLOOR
    return torch.stack([means, variances, divisor / divisor.sum()])


def _single(mixture: Mixture) -> Mixture:
    return Mixture(*(part.float() if part.is_floating_point() else part for part in mixture))
