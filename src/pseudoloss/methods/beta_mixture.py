"""A mixture of two beta distributions of the losses, fitted on the device without reading back to
the host (Arazo et al., ICML 2019, section 3.1).

Losses between the 5th and the 95th percentile are scaled to 0..1. Ten rounds of
expectation-maximisation follow, in which the parameters come from the moments of each mode. (A
method can ask for other percentiles and rounds.) The posterior of the high mode is kept as a table
of 100 bins, from its maximum on constant: a density may rise towards the ends, and the highest
losses must not count as low.

Shapes: N losses, B of them in a batch, T bins.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EM_STEPS = 10
PERCENTILES = (0.05, 0.95)  # losses outside are not used in the fit
EDGE = 1e-3  # scaled losses are clipped to EDGE..1 - EDGE
START = ((1.0, 2.0), (2.0, 1.0))  # α and β of the low and of the high mode
BINS = 100
VARIANCE_FLOOR = EDGE**2  # a mode narrower than the clipping would have no finite parameters
LEAST_SHARE = 1e-3  # with fewer of the losses in one of the modes, there are no two modes


class BetaMixture(NamedTuple):
    """A fitted mixture. The first mode is the low one."""

    lowest: Tensor  # (), the loss that is scaled to 0
    highest: Tensor  # (), ... to 1
    alphas: Tensor  # (2,)
    betas: Tensor  # (2,)
    weights: Tensor  # (2,)
    high_T: Tensor  # P(high mode) in each bin; 0 if nothing could be fitted
    fitted: Tensor  # (), bool: there are two modes


def fit_two_betas(
    loss_N: Tensor,
    where_N: Tensor | None = None,
    rounds: int = EM_STEPS,
    percentiles: tuple[float, float] = PERCENTILES,
) -> BetaMixture:
    """Fit two modes to the losses that are finite, or to those of them at `where_N`.

    Every input has a defined result. `fitted` is False with fewer than three finite losses, if all
    between the percentiles are equal, or if one of the modes ends empty.
    """
    device = loss_N.device
    if device.type == "mps":  # has no float64
        where = None if where_N is None else where_N.cpu()
        found = fit_two_betas(loss_N.cpu(), where, rounds, percentiles)
        return BetaMixture(*(part.to(device) for part in _single(found)))
    loss_N = loss_N.detach().double()
    if loss_N.numel() == 0:
        loss_N, where_N = loss_N.new_zeros(1), None
    finite_N = loss_N.isfinite() if where_N is None else loss_N.isfinite() & where_N
    count = finite_N.sum()
    sorted_N = loss_N.masked_fill(~finite_N, torch.inf).sort().values.nan_to_num(posinf=0.0)
    lowest, highest = (_quantile(sorted_N, count, share) for share in percentiles)
    used_N = (finite_N & (loss_N >= lowest) & (loss_N <= highest)).double()
    x_N = scaled(loss_N, lowest, highest)
    logs_2N = torch.stack([x_N.log(), (1 - x_N).log()])

    # Filled on the device: while a graph is captured, nothing can be copied from the host.
    alphas, betas = (
        torch.stack([torch.full_like(lowest, value) for value in values])
        for values in zip(*START, strict=True)
    )
    weights = torch.full_like(alphas, 0.5)
    for _ in range(rounds):
        high_N = _posterior(logs_2N, alphas, betas, weights) * used_N
        share_2N = torch.stack([used_N - high_N, high_N])
        size_2 = share_2N.sum(1)
        divisor_2 = size_2.clamp(min=1e-12)
        mean_2 = (share_2N @ x_N) / divisor_2
        square_2N = (x_N - mean_2[:, None]) ** 2
        variance_2 = ((share_2N * square_2N).sum(1) / divisor_2).clamp(min=VARIANCE_FLOOR)
        precision_2 = mean_2 * (1 - mean_2) / variance_2 - 1
        # An empty mode keeps its parameters.
        usable_2 = (size_2 > 1e-6) & (precision_2 > 0)
        alphas = torch.where(usable_2, mean_2 * precision_2, alphas)
        betas = torch.where(usable_2, (1 - mean_2) * precision_2, betas)
        size = size_2.sum()
        weights = torch.where(size > 0, size_2 / size.clamp(min=1e-12), weights)

    means = alphas / (alphas + betas)
    order = means.argsort(stable=True)
    alphas, betas, weights = alphas[order], betas[order], weights[order]
    finite = torch.stack([alphas, betas, weights]).isfinite().all()
    fitted = (count > 2) & (highest > lowest) & (weights > LEAST_SHARE).all() & finite
    bins_T = torch.arange(BINS, dtype=torch.float64, device=device)
    middle_T = (bins_T + 0.5) / BINS
    logs_2T = torch.stack([middle_T.log(), (1 - middle_T).log()])
    high_T = _posterior(logs_2T, alphas, betas, weights).nan_to_num(0.0)
    high_T = torch.where(bins_T >= high_T.argmax(), high_T.max(), high_T)
    return BetaMixture(
        lowest, highest, alphas, betas, weights, torch.where(fitted, high_T, 0.0), fitted
    )


def peaks(mixture: BetaMixture) -> Tensor:
    """Where each mode is highest, (α - 1) / (α + β - 2), after scaling: (2,). Outside of 0..1 for
    a density that rises towards an end."""
    return (mixture.alphas - 1) / (mixture.alphas + mixture.betas - 2)


def scaled(loss_B: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Losses scaled to 0..1 and clipped; NaN counts as high. If all were equal, all are low."""
    span = torch.where(highest > lowest, highest - lowest, torch.inf)
    return ((loss_B - lowest) / span).nan_to_num(1.0).clamp(EDGE, 1 - EDGE)


def high_mode(loss_B: Tensor, lowest: Tensor, highest: Tensor, high_T: Tensor) -> Tensor:
    """P(high mode) of losses, from the table of a mixture."""
    x_B = scaled(loss_B, lowest, highest)
    return high_T[(x_B * len(high_T)).long()]


def _quantile(sorted_N: Tensor, count: Tensor, share: float) -> Tensor:
    """Of the first `count` values, interpolated linearly as NumPy does."""
    place = share * (count - 1).clamp(min=0).double()
    below = place.floor().long()
    above = (below + 1).minimum((count - 1).clamp(min=0))
    return sorted_N.take(below).lerp(sorted_N.take(above), place - below)


def _posterior(logs_2X: Tensor, alphas: Tensor, betas: Tensor, weights: Tensor) -> Tensor:
    """P(second mode) of values, given the logarithms of x and of 1 - x."""
    normaliser_2 = torch.lgamma(alphas) + torch.lgamma(betas) - torch.lgamma(alphas + betas)
    constant_2 = weights.log() - normaliser_2
    slopes_22 = torch.stack([alphas, betas], dim=1) - 1
    low_X, high_X = slopes_22 @ logs_2X + constant_2[:, None]
    return torch.sigmoid(high_X - low_X)


def _single(mixture: BetaMixture) -> BetaMixture:
    return BetaMixture(*(part.float() if part.is_floating_point() else part for part in mixture))
