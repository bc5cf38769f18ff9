"""How doubtful each label is, from predictions of a network that was trained on these labels.

The latent-label model: the true class t of an image is unknown, q(t | x) is the prediction at a
temperature τ, and a label is wrong with the probability ε; then it is y with the probability
F[t, y]. So the label y has the likelihood (1-ε) q(y) + ε Σ_t q(t) F[t, y], and the posterior over
t gives the probability that it is wrong. A weak prediction contradicts no label, a confident one
does.

A network has seen the labels that it was trained on, and its predictions lean towards them. So ε
and τ are estimated on images that were held out. The log-odds of a training label are then lowered
by one constant, with which the training labels have the noise rate ε.

Shapes: N images, M held out, B of them at a time, C classes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURES = torch.logspace(-1.3, 0.5, 40, dtype=torch.float64)  # 0.05 to 3
RATES = torch.cat([torch.arange(0, 0.1, 0.0025), torch.arange(0.1, 0.96, 0.01)]).double()
# What the flips are counted with, before ε and τ are known.
FIRST_RATE, FIRST_TEMPERATURE = 0.3, 0.3
FLIP_SHRINKAGE = 5.0  # flips of each class that are assumed to be spread evenly
FLIP_PRIOR = 0.01  # probability that flips are uneven, before the held-out labels are seen
MOST_CLASSES = 2048  # with more, F is even
MOST_HELD_OUT = 2**22  # predictions (M·C) that ε and τ are estimated from
LARGEST_SHIFT = 1e4  # of log-odds


class Noise(NamedTuple):
    """The noise rate ε with a 90% interval, τ and F."""

    rate: float
    low: float
    high: float
    temperature: float
    flips_CC: Tensor  # float64


class Evidence(NamedTuple):
    """What the predictions say about the labels of B images."""

    log_odds_B: Tensor  # of the given label being right, float64
    candidate_B: Tensor  # the most likely other class
    share_B: Tensor  # probability of the candidate if the given label is wrong


def even_flips(classes: int) -> Tensor:
    """F if every wrong class is equally likely."""
    flips_CC = torch.full((classes, classes), 1 / max(classes - 1, 1), dtype=torch.float64)
    return flips_CC.fill_diagonal_(0)


def count_flips(log_prob_NC: Tensor, given_N: Tensor) -> Tensor:
    """F from training images: which class the doubtful labels of each class are."""
    C, device = log_prob_NC.shape[1], log_prob_NC.device
    even_CC = even_flips(C).to(device)
    if C > MOST_CLASSES or C < 3:
        return even_CC
    first = Noise(FIRST_RATE, 0.0, 1.0, FIRST_TEMPERATURE, even_CC)
    log_odds_N = weigh(log_prob_NC, given_N, first).log_odds_B
    wrong_N = probability_wrong(log_odds_N, matching_shift(log_odds_N, FIRST_RATE))
    q_NC = (log_prob_NC.double() / FIRST_TEMPERATURE).log_softmax(1)
    others_NC = q_NC.scatter(1, given_N[:, None], -math.inf).softmax(1)
    counts_CC = torch.zeros_like(even_CC)
    counts_CC.T.index_add_(0, given_N, others_NC * wrong_N[:, None])
    counts_CC += FLIP_SHRINKAGE * even_CC
    return counts_CC / counts_CC.sum(1, keepdim=True)


def estimate_noise(log_prob_MC: Tensor, given_M: Tensor, flips_CC: Tensor) -> Noise:
    """ε and τ of images that were not trained on.

    Both have a posterior distribution on a grid (ε uniform, τ log-uniform before), once with even
    flips and once with `flips_CC`; the two are averaged by their probability.
    """
    M, C = log_prob_MC.shape
    keep = max(1, MOST_HELD_OUT // C)
    if keep < M:
        rows_M = torch.linspace(0, M - 1, keep, device=given_M.device).long()
        log_prob_MC, given_M = log_prob_MC[rows_M], given_M[rows_M]
    even_CC = even_flips(C).to(log_prob_MC.device)
    kinds = ((even_CC, 1 - FLIP_PRIOR), (flips_CC, FLIP_PRIOR))
    log_KTR = torch.stack(
        [_log_likelihoods(log_prob_MC, given_M, kind) + math.log(prior) for kind, prior in kinds]
    )
    width_R = torch.gradient(torch.arange(len(RATES)).double(), spacing=(RATES,))[0].reciprocal()
    p_KTR = (log_KTR - log_KTR.max()).exp() * width_R
    p_KTR /= p_KTR.sum()
    p_R = p_KTR.sum((0, 1))
    below_R = p_R.cumsum(0)
    low, high = (RATES[int((below_R < quantile).sum().clamp(max=len(RATES) - 1))].item()
                 for quantile in (0.05, 0.95))  # fmt: skip
    rate = float(p_R @ RATES)
    temperature = math.exp(float(p_KTR.sum((0, 2)) @ TEMPERATURES.log()))
    uneven = float(p_KTR[1].sum())
    mixed_CC = (1 - uneven) * even_CC + uneven * flips_CC
    return Noise(rate, min(low, rate), max(high, rate), temperature, mixed_CC)


def _log_likelihoods(log_prob_MC: Tensor, given_M: Tensor, flips_CC: Tensor) -> Tensor:
    """Of all labels together, by τ and ε: (T,R)."""
    rates_R, flips_MC = RATES.to(given_M.device), flips_CC.T[given_M]
    found = []
    for temperature in TEMPERATURES.tolist():
        q_MC = (log_prob_MC.double() / temperature).softmax(1)
        q_M1 = q_MC.gather(1, given_M[:, None])
        flipped_M1 = (q_MC * flips_MC).sum(1, keepdim=True)
        likelihood_MR = (1 - rates_R) * q_M1 + rates_R * flipped_M1
        found.append(likelihood_MR.clamp(min=1e-12).log().sum(0))
    return torch.stack(found).cpu()


def weigh(log_prob_BC: Tensor, given_B: Tensor, noise: Noise) -> Evidence:
    """Posterior odds of the given labels, and the most likely other classes."""
    rate = min(max(noise.rate, 1e-4), 1 - 1e-4)
    q_BC = (log_prob_BC.double() / noise.temperature).log_softmax(1)
    given_B1 = given_B[:, None]
    others_BC = q_BC + noise.flips_CC.T[given_B].log() + math.log(rate)
    others_BC = others_BC.scatter(1, given_B1, -math.inf)
    others_B = others_BC.logsumexp(1)
    right_B = q_BC.gather(1, given_B1)[:, 0] + math.log(1 - rate)
    log_odds_B = (right_B - others_B).nan_to_num(0.0).clamp(-LARGEST_SHIFT, LARGEST_SHIFT)
    best_B, candidate_B = others_BC.max(1)
    return Evidence(log_odds_B, candidate_B, (best_B - others_B).exp().nan_to_num(1.0))


def matching_shift(log_odds_N: Tensor, rate: float) -> float:
    """What to lower all log-odds by so that `rate` is the mean probability of a wrong label."""
    low, high = -2 * LARGEST_SHIFT, 2 * LARGEST_SHIFT
    for _ in range(60):
        middle = (low + high) / 2
        if float(probability_wrong(log_odds_N, middle).mean()) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def probability_wrong(log_odds_N: Tensor, shift: float = 0.0) -> Tensor:
    return torch.sigmoid(shift - log_odds_N)
