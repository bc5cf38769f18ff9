"""The mathematics of the latent-label model (latent.py): one function per equation.

Shapes: N images, C classes.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

STEPS = 40  # of EM
SHARPNESS = 2  # K is the confusion of the predictions to this power
PRIOR_IMAGES = 30  # that the prior of learned transitions counts as, per class
FLOORS = (0.02, 0.01)  # of e and d, for ranking
MAX_CLASSES = 0.45  # largest rate of class confusion
MAX_CONFUSION = 0.95  # largest probability that one image is confused
MIN_ACCURACY = 0.6  # expected, of predictions that can have a plateau
MIN_CLASS = 0.05  # share of the images that must be predicted as each of two classes
RANGE_A = (math.log(0.05), math.log(3.0))


@dataclass(frozen=True)
class Noise:
    """How labels become wrong: the five fitted numbers, and κ."""

    a: float  # log of the temperature
    b: float  # how it depends on the entropy
    random: float = 0.0  # e
    classes: float = 0.0  # d
    images: float = 0.0  # c
    sharpness: float = 1.0  # κ
    log_likelihood: float = -math.inf  # mean per image


NO_NOISE = Noise(0.0, 0.0)


def tempered(log_prob_NC: Tensor, a: float, b: float) -> Tensor:
    """q(t | x): predictions at a temperature that depends on their entropy."""
    C = log_prob_NC.shape[1]
    entropy_N1 = -(log_prob_NC.exp() * log_prob_NC).sum(1, keepdim=True) / math.log(max(C, 2))
    return torch.softmax(log_prob_NC / torch.exp(a + b * (entropy_N1 - 0.5)), 1)


def two_class_temperature(log_prob_N2: Tensor, given_N: Tensor) -> float:
    """The temperature of two classes, from the distribution of the log odds L of the predictions.

    If the classes are Gaussians with the same covariance, calibrated log odds are N(m, 2m) in one
    class and N(-m, 2m) in the other. Second moment and kurtosis of all L give m and the variance v,
    and v / 2m is the temperature. Noisy labels shrink L, and v with its square, so the temperature
    falls. Classes count equally. Predictions that agree with the labels no better than chance, or
    name one class only, get the highest temperature: they say nothing.
    """
    odds_N = (log_prob_N2[:, 0] - log_prob_N2[:, 1]).double()
    first_N = odds_N > 0
    share, highest = float(first_N.double().mean()), math.exp(RANGE_A[1])
    agrees_N = (first_N == (given_N == 0)).double()
    right = [float(agrees_N[given_N == label].mean()) for label in (0, 1)]
    if not MIN_CLASS < share < 1 - MIN_CLASS:
        return highest
    if not sum(right) / 2 > 0.5 + 1.5 / math.sqrt(len(given_N)):
        return highest
    weight_N = torch.where(first_N, 0.5 / share, 0.5 / (1 - share)) / len(odds_N)
    centre = [float(odds_N[one_N].median()) for one_N in (first_N, ~first_N)]
    odds_N = odds_N - sum(centre) / 2
    second = float((weight_N * odds_N**2).sum())
    kurtosis = float((weight_N * odds_N**4).sum()) / max(second**2, 1e-30) - 3
    kurtosis += math.sqrt(24 / len(odds_N))  # its standard error: rather one mode than two
    between = math.sqrt(min(max(-kurtosis / 2, 1e-6), 0.999))  # m² as a share of the moment
    m, v = math.sqrt(between * second), (1 - between) * second
    return min(max(v / (2 * m), math.exp(RANGE_A[0])), highest)


def better_than_chance(log_prob_NC: Tensor, given_N: Tensor) -> bool:
    """Whether predictions agree with the labels more often than by chance (three standard errors).
    If not, the features say nothing, and neither can the model."""
    N, C = log_prob_NC.shape
    predicted_N = log_prob_NC.argmax(1)
    shares = [torch.bincount(v, minlength=C).double() / N for v in (predicted_N, given_N)]
    chance = float((shares[0] * shares[1]).sum())
    agreement = float((predicted_N == given_N).double().mean())
    return agreement > chance + 3 * math.sqrt(chance * (1 - chance) / N)


def plateau(q_NC: Tensor) -> float:
    """How much the log temperature must fall because whole classes are mixed; 0 as a rule.

    If a tenth of the labels of class A say B, the heads learn 9 to 1 for every image of A: labels
    that look ambiguous, and none of them certain. For two Gaussian classes with an accuracy of
    Φ(δ/2), the most confident tenth has log odds of at least δ²/2 + 1.28 δ. Predictions that are
    accurate and yet only half as confident have been flattened by such labels.
    """
    confidence_N = q_NC.max(1).values.double()
    accuracy = float(confidence_N.mean())
    if accuracy < MIN_ACCURACY:
        return 0.0
    delta = 2 * NormalDist().inv_cdf(min(accuracy, 0.999))
    expected = delta**2 / 2 + 1.28 * delta
    found = float(confidence_N.quantile(0.9).clamp(max=1 - 1e-9).logit())
    return math.log(expected / found) if 0 < found < expected / 2 else 0.0


def class_confusion(together_CC: Tensor, sharpness: float = SHARPNESS) -> Tensor:
    """K(y | t), which classes are mistaken for t, from the sums of q(t | x) q(y | x)."""
    shares_CC = together_CC / together_CC.sum(1, keepdim=True).clamp(min=1e-30)
    sharp_CC = shares_CC.fill_diagonal_(0.0) ** sharpness
    return sharp_CC / sharp_CC.sum(1, keepdim=True).clamp(min=1e-30)


@dataclass(frozen=True)
class Likelihoods:
    """Σ_t q(t | x) P(y | t, x) of the given label y, by what happened to it."""

    right_N: Tensor  # nothing: q(y | x)
    random_N: Tensor
    classes_N: Tensor
    images_N: Tensor
    ambiguity_N: Tensor  # √(1 - max q)
    most_random: float  # largest rate of random swaps

    def mixed(self, noise: Noise) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With the rates of `noise`, in the order of the fields."""
        c_N = (noise.images * self.ambiguity_N).clamp(max=MAX_CONFUSION)
        return (
            (1 - c_N) * (1 - noise.random - noise.classes) * self.right_N,
            (1 - c_N) * noise.random * self.random_N,
            (1 - c_N) * noise.classes * self.classes_N,
            c_N * self.images_N,
        )


def look(q_NC: Tensor, sharpness: float) -> Tensor:
    """h(y | x): which classes an image looks like to the people who labelled it."""
    if sharpness == 1:
        return q_NC
    h_NC = q_NC**sharpness
    return h_NC / h_NC.sum(1, keepdim=True)


def likelihoods(q_NC: Tensor, given_N: Tensor, K_CC: Tensor, sharpness: float = 1.0) -> Likelihoods:
    C = q_NC.shape[1]
    right_N = q_NC.gather(1, given_N[:, None])[:, 0]
    h_NC = look(q_NC, sharpness)
    odds_NC = q_NC / (1 - h_NC).clamp(min=1e-6)
    others_N = odds_NC.sum(1) - odds_NC.gather(1, given_N[:, None])[:, 0]
    chosen_N = h_NC.gather(1, given_N[:, None])[:, 0]
    return Likelihoods(
        right_N=right_N.double(),
        random_N=((1 - right_N).clamp(min=0) / max(C - 1, 1)).double(),
        classes_N=(q_NC * K_CC.T[given_N]).sum(1).double(),
        images_N=(chosen_N * others_N).clamp(max=1.0).double(),
        ambiguity_N=(1 - q_NC.max(1).values).clamp(min=0).sqrt().double(),
        most_random=0.9 * (C - 1) / C,
    )


def estimate_rates(parts: Likelihoods, noise: Noise, steps: int = STEPS) -> Noise:
    """EM for the rates e, d and c; a rate that starts at 0 stays there.

    Most labels of a class must be right, or the classes could trade names.
    """
    exposed = max(float(parts.ambiguity_N.sum()), 1e-12)
    for _ in range(steps):
        right_N, random_N, classes_N, images_N = parts.mixed(noise)
        total_N = (right_N + random_N + classes_N + images_N).clamp(min=1e-30)
        kept = max(float(((right_N + random_N + classes_N) / total_N).sum()), 1e-12)
        noise = replace(
            noise,
            random=min(float((random_N / total_N).sum()) / kept, parts.most_random),
            classes=min(float((classes_N / total_N).sum()) / kept, MAX_CLASSES),
            images=float((images_N / total_N).sum()) / exposed,
        )
    right_N, random_N, classes_N, images_N = parts.mixed(noise)
    total_N = (right_N + random_N + classes_N + images_N).clamp(min=1e-30)
    return replace(noise, log_likelihood=float(total_N.log().mean()))


def transitions(noise: Noise, K_CC: Tensor) -> Tensor:
    """T(y | t): labels of class t after random swaps and class confusion."""
    T_CC = noise.random / max(len(K_CC) - 1, 1) + noise.classes * K_CC
    return T_CC.fill_diagonal_(1 - noise.random - noise.classes)


def with_floors(T_CC: Tensor, K_CC: Tensor) -> Tensor:
    """Transitions for sorting, in which every label can be wrong."""
    random, classes = FLOORS
    least_CC = transitions(Noise(0.0, 0.0, random, classes), K_CC)
    more_CC = torch.maximum(T_CC, least_CC).fill_diagonal_(0.0)
    return more_CC + torch.diag((1 - more_CC.sum(1)).clamp(min=1e-3))


def joint(q_NC: Tensor, given_N: Tensor, T_CC: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """P(t, y | x) for all t, without and with the part that is image confusion (N,C)."""
    highest_N1 = q_NC.max(1, keepdim=True).values
    c_N1 = (noise.images * (1 - highest_N1).clamp(min=0).sqrt()).clamp(max=MAX_CONFUSION)
    h_NC = look(q_NC, noise.sharpness)
    chosen_N1 = h_NC.gather(1, given_N[:, None])
    confused_NC = (chosen_N1 / (1 - h_NC).clamp(min=1e-6)).clamp_(max=1.0)
    confused_NC.scatter_(1, given_N[:, None], 0.0)
    return q_NC * (1 - c_N1) * T_CC.T[given_N], q_NC * c_N1 * confused_NC


def learned_transitions(counts_CC: Tensor, prior_CC: Tensor) -> Tensor:
    """T(y | t) from the expected number of labels y of images of class t."""
    counted_C1 = counts_CC.sum(1, keepdim=True)
    return (counts_CC + PRIOR_IMAGES * prior_CC) / (counted_C1 + PRIOR_IMAGES)


def learn_from_others(
    q_NC: Tensor, given_N: Tensor, counts_CC: Tensor, prior_CC: Tensor, ambiguous: bool
) -> tuple[Tensor, Tensor]:
    """P(t, y | x) for all t, with transitions learned from all other images; and the part of it
    that is due to the learned transitions (N,C).

    Args:
        q_NC: P(t | x).
        given_N: given labels.
        counts_CC: expected number of labels y of images of class t, with those of these images.
        prior_CC: transitions before any were learned.
        ambiguous: learned transitions are those of the share √(1 - max q) of each image, and the
            prior ones those of the rest; otherwise they are those of all images.
    """
    prior_NC = prior_CC.T[given_N]
    share_N1 = torch.ones_like(q_NC[:, :1])
    if ambiguous:
        share_N1 = (1 - q_NC.max(1, keepdim=True).values).clamp(min=0).sqrt()
    rest_NC, exposed_NC = q_NC * (1 - share_N1) * prior_NC, q_NC * share_N1
    own_NC = exposed_NC * learned_transitions(counts_CC, prior_CC).T[given_N]
    own_NC = own_NC / (rest_NC + own_NC).sum(1, keepdim=True).clamp(min=1e-30)
    label_NC = (counts_CC.T[given_N] - own_NC).clamp(min=0)
    class_NC = (counts_CC.sum(1) - own_NC).clamp(min=0)
    others_NC = (label_NC + PRIOR_IMAGES * prior_NC) / (class_NC + PRIOR_IMAGES)
    learned_NC = exposed_NC * others_NC
    return rest_NC + learned_NC, learned_NC
