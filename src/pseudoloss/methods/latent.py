"""The latent-label model: the true class of every image is unknown, its given label a noisy copy.

`p` is a prediction that did not use the image's own label (out-of-fold, or of held-out images). The
true class t of an image has the probability

    q(t | x) = softmax(log p(t | x) / τ(x)),   τ(x) = exp(a + b (H(x) - 1/2)),

with the entropy H of p, from 0 to 1: a temperature that may depend on how sure the prediction is.
The given label y of an image of class t is wrong in one of three ways:

    random swaps       any other class,                              at a rate e
    class confusion    a class y that is often mistaken for t,       at a rate d:  y ~ K(y | t)
    image confusion    another class that this image looks like,     at a rate c √(1 - max q(x)):
                                                                     y ~ h(y | x) / (1 - h(t | x))

with h = q^κ, normalised: κ = 1 if images look to people as they do to the predictions, κ = 2 if
people consider fewer classes. So a label on which a weak prediction merely disagrees is explained
by q, and a label that confident predictions contradict by noise. The five numbers a, b, e, d, c
maximise the likelihood of the given labels; no rate per class or per pair of classes is fitted,
since that explained mistakes of the prediction as wrong labels. The posterior over t gives
everything else.

Random swaps and class confusion must explain the labels better than no noise does (by log N, the
price of two numbers). Image confusion and weak features look alike, so three models are fitted,
without it, with κ = 1 and with κ = 2, and averaged by their likelihoods. The models are only
roughly right: for this average, the likelihood counts as if there were at most `EVIDENCE` images.

With two classes, random swaps and flat predictions have the same likelihood, so the temperature
comes from the distribution of the predictions instead (`two_class_temperature`).

Shapes: N images, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

EVIDENCE = 1000  # images that the choice between the models may count
FIT_IMAGES = 5000  # a and b are fitted to a random sample of at most so many images
STEPS = 40  # of EM
SHARPNESS = 2  # K is the confusion of the predictions to this power
CONFUSIONS = (1.0, 2.0)  # κ of the models with image confusion
FLOORS = (0.02, 0.01)  # of e and d, for ranking
NEGLIGIBLE = 1e-3  # a smaller weight of a model is 0
MAX_CLASSES = 0.45  # largest rate of class confusion
MAX_CONFUSION = 0.95  # largest probability that one image is confused
MIN_ACCURACY = 0.6  # expected, of predictions that can have a plateau
MIN_CLASS = 0.05  # share of the images that must be predicted as each of two classes
RANGE_A = (math.log(0.05), math.log(3.0))
RANGE_B = (-1.5, 1.0)
PRIOR_B = 0.002  # weight of b², per image
CHUNK = 2**22  # values of an N×C array that are computed at once


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


@dataclass(frozen=True)
class LatentFit:
    """The fitted model and what it says about every label."""

    posterior_NC: Tensor  # P(true class | image, given label), float32
    log_odds_N: Tensor  # that the label is wrong; for sorting, also where fitted rates are 0
    rate: float  # expected share of wrong labels
    confused: float  # part of it that is confusion of single images
    accuracy: float  # expected accuracy of the predictions, with respect to the true classes
    models: tuple[Noise, ...]  # the first is without image confusion
    weights: tuple[float, ...]  # of the models; they sum to 1
    confusions: tuple[Tensor, ...]  # K of the models (C,C)

    @property
    def noise(self) -> Noise:
        """The model with the largest weight."""
        return self.models[max(range(len(self.models)), key=lambda k: self.weights[k])]

    @property
    def confusion_weight(self) -> float:
        """The weight of the models with image confusion."""
        return sum(self.weights[1:])


def fit_latent_labels(log_prob_NC: Tensor, given_N: Tensor, seed: int = 1) -> LatentFit:
    """Fit the model to predictions and given labels.

    Args:
        log_prob_NC: logarithms of predictions that did not use the image's own label.
        given_N: given labels, int64.
        seed: of the sample of images that the temperature is fitted to.
    """
    labels, sample = _Labels(log_prob_NC, given_N), _sample(log_prob_NC, given_N, seed)
    if log_prob_NC.shape[1] == 2:
        place = Noise(math.log(two_class_temperature(log_prob_NC, given_N)), 0.0)
        return _judge(labels, [_with_rates(labels, place)], [1.0])
    if not better_than_chance(log_prob_NC, given_N):
        return _judge(labels, [Noise(RANGE_A[1], 0.0)], [1.0])
    plain = _search(partial(_with_rates, sample))
    right = _search(partial(_with_likelihood, sample))
    if (plain.log_likelihood - right.log_likelihood) * len(given_N) < math.log(len(given_N)):
        plain = right  # noise explains nothing
    shift = plateau(tempered(sample.log_prob_NC, plain.a, plain.b))
    if shift > 0:
        plain = _with_rates(sample, replace(plain, a=plain.a - shift))
    confusing = [
        _search(partial(_with_confusion, sample, sharpness), start=plain)
        for sharpness in CONFUSIONS
    ]
    weights = _weights([noise.log_likelihood for noise in (plain, *confusing)], len(given_N))
    if plain.random > 0 or plain.classes > 0:
        plain = _with_rates(labels, plain)
    return _judge(labels, [plain, *(_with_rates(labels, noise) for noise in confusing)], weights)


def with_new_predictions(
    fit: LatentFit, log_prob_NC: Tensor, given_N: Tensor, seed: int = 1
) -> LatentFit:
    """Judge the same labels by better predictions. The labels are as noisy as before, in the same
    way, so rates and K stay, and only the temperature is fitted again."""
    labels, sample = _Labels(log_prob_NC, given_N), _sample(log_prob_NC, given_N, seed)
    if log_prob_NC.shape[1] == 2:
        a = math.log(two_class_temperature(log_prob_NC, given_N))
        return _judge(labels, [replace(fit.models[0], a=a)], [1.0], fit.confusions)
    models: list[Noise] = []
    for noise, K_CC in zip(fit.models, fit.confusions, strict=True):
        start = models[0] if models else None
        models.append(_search(partial(_with_likelihood, sample, K_CC=K_CC), noise, start))
    return _judge(labels, models, fit.weights, fit.confusions)


def pseudo_labels(fit: LatentFit, log_prob_NC: Tensor, given_N: Tensor) -> Tensor:
    """What heads are trained on in the next round: the posterior, but a label that only image
    confusion contradicts stays (N,C)."""
    labels, pseudo_NC = _Labels(log_prob_NC, given_N), torch.zeros_like(fit.posterior_NC)
    for noise, weight, K_CC in zip(fit.models, fit.weights, fit.confusions, strict=True):
        if weight > 0:
            _add_posterior(labels, noise, K_CC, weight, pseudo_NC, keep_confused=True)
    return pseudo_NC / pseudo_NC.sum(1, keepdim=True)


def _weights(log_likelihoods: Sequence[float], images: int) -> list[float]:
    """Weights of the models, of which the first is without image confusion. Each of the others
    costs half the logarithm of the counted images; before, they are together as likely as it."""
    counted = min(images, EVIDENCE)
    price = 0.5 * math.log(max(counted, 2)) + math.log(max(len(log_likelihoods) - 1, 1))
    evidence = [
        (found - log_likelihoods[0]) * counted - (price if k else 0.0)
        for k, found in enumerate(log_likelihoods)
    ]
    return torch.tensor(evidence, dtype=torch.float64).softmax(0).tolist()


def _judge(
    labels: "_Labels",
    models: Sequence[Noise],
    weights: Sequence[float],
    confusions: Sequence[Tensor] | None = None,
) -> LatentFit:
    confusions = confusions or [labels.confusion(noise) for noise in models]
    log_prob_NC, given_N = labels.log_prob_NC, labels.given_N
    posterior_NC = torch.zeros_like(log_prob_NC, dtype=torch.float32)
    odds_2N = torch.zeros(2, len(given_N), dtype=torch.float64, device=given_N.device)
    parts = torch.zeros(3, dtype=torch.float64)
    weights = [weight if weight > NEGLIGIBLE else 0.0 for weight in weights]
    weights = [weight / sum(weights) for weight in weights]
    for noise, weight, K_CC in zip(models, weights, confusions, strict=True):
        if weight > 0:
            parts += weight * _add_posterior(labels, noise, K_CC, weight, posterior_NC)
            _add_doubt(labels, noise, K_CC, weight, odds_2N)
    posterior_NC /= posterior_NC.sum(1, keepdim=True)
    rate, confused, accuracy = parts.tolist()
    wrong_N, right_N = odds_2N.clamp(min=1e-30).log()
    fitted = tuple(models), tuple(weights), tuple(confusions)
    return LatentFit(posterior_NC, wrong_N - right_N, rate, confused, accuracy, *fitted)


# ----------------------------------------------------------------------------- the mathematics


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


# ------------------------------------------------------------------------------------ all images


@dataclass(frozen=True)
class _Labels:
    """Predictions and given labels, computed chunk by chunk."""

    log_prob_NC: Tensor
    given_N: Tensor

    def chunks(self) -> list[slice]:
        N, C = self.log_prob_NC.shape
        size = max(1, CHUNK // C)
        return [slice(start, start + size) for start in range(0, N, size)]

    def confusion(self, noise: Noise) -> Tensor:
        C = self.log_prob_NC.shape[1]
        together_CC = torch.zeros(C, C, device=self.log_prob_NC.device)
        for rows in self.chunks():
            q_NC = tempered(self.log_prob_NC[rows], noise.a, noise.b)
            together_CC += q_NC.T @ q_NC
        return class_confusion(together_CC)

    def likelihoods(self, noise: Noise, K_CC: Tensor | None = None) -> Likelihoods:
        K_CC = self.confusion(noise) if K_CC is None else K_CC
        found = [
            likelihoods(
                tempered(self.log_prob_NC[rows], noise.a, noise.b),
                self.given_N[rows],
                K_CC,
                noise.sharpness,
            )
            for rows in self.chunks()
        ]
        # On the CPU: on a GPU the many small steps of EM would wait for whatever else runs there.
        names = [name for name in Likelihoods.__dataclass_fields__ if name.endswith("_N")]
        tensors = {name: torch.cat([getattr(part, name) for part in found]).cpu() for name in names}
        return Likelihoods(**tensors, most_random=found[0].most_random)


def _sample(log_prob_NC: Tensor, given_N: Tensor, seed: int) -> _Labels:
    N = len(given_N)
    if N <= FIT_IMAGES:
        return _Labels(log_prob_NC, given_N)
    rows = np.sort(np.random.default_rng(seed).permutation(N)[:FIT_IMAGES])
    rows_n = torch.from_numpy(rows).to(given_N.device)
    return _Labels(log_prob_NC[rows_n], given_N[rows_n])


def _with_rates(labels: _Labels, noise: Noise) -> Noise:
    # With two classes, random swaps and class confusion are the same.
    classes = 0.02 if labels.log_prob_NC.shape[1] > 2 else 0.0
    start = replace(noise, random=0.05, classes=classes, images=0.2 if noise.images > 0 else 0.0)
    return estimate_rates(labels.likelihoods(noise), start)


def _with_confusion(labels: _Labels, sharpness: float, noise: Noise) -> Noise:
    return _with_rates(labels, replace(noise, images=0.2, sharpness=sharpness))


def _with_likelihood(labels: _Labels, noise: Noise, K_CC: Tensor | None = None) -> Noise:
    return estimate_rates(labels.likelihoods(noise, K_CC), noise, steps=0)


def _search(
    fitted: Callable[[Noise], Noise], noise: Noise = NO_NOISE, start: Noise | None = None
) -> Noise:
    """The a and b with the largest likelihood: a grid, then steps that are halved.

    Args:
        fitted: the noise with its log-likelihood, and with other rates.
        noise: what `fitted` is called with, at other a and b.
        start: a model whose a and b are nearly right.
    """
    tried: dict[tuple[float, float], Noise] = {}

    def at(a: float, b: float) -> Noise:
        a, b = min(max(a, RANGE_A[0]), RANGE_A[1]), min(max(b, RANGE_B[0]), RANGE_B[1])
        if (a, b) not in tried:
            tried[a, b] = fitted(replace(noise, a=a, b=b))
        return tried[a, b]

    def score(noise: Noise) -> float:
        return noise.log_likelihood - PRIOR_B * noise.b**2

    if start is None:
        points = [at(math.log(t), b) for t, b in product((0.15, 0.3, 0.5, 0.8, 1.2), (-0.75, 0.0))]
    else:
        points = [at(start.a + step, start.b) for step in (-0.3, -0.15, 0.0)]
    best = max(points, key=score)
    step_a, step_b = 0.2, 0.3
    while step_a > 0.02:
        directions = ((-step_a, 0.0), (step_a, 0.0), (0.0, -step_b), (0.0, step_b))
        better = max((at(best.a + da, best.b + db) for da, db in directions), key=score)
        if score(better) > score(best):
            best = better
        else:
            step_a, step_b = step_a / 2, step_b / 2
    return best


def _posterior(q_NC: Tensor, given_N: Tensor, K_CC: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """P(t, y | x) for all t, without and with the part that is image confusion (N,C)."""
    C = q_NC.shape[1]
    highest_N1 = q_NC.max(1, keepdim=True).values
    c_N1 = (noise.images * (1 - highest_N1).clamp(min=0).sqrt()).clamp(max=MAX_CONFUSION)
    swapped_NC = noise.random / max(C - 1, 1) + noise.classes * K_CC.T[given_N]
    swapped_NC.scatter_(1, given_N[:, None], 1 - noise.random - noise.classes)
    h_NC = look(q_NC, noise.sharpness)
    chosen_N1 = h_NC.gather(1, given_N[:, None])
    confused_NC = (chosen_N1 / (1 - h_NC).clamp(min=1e-6)).clamp_(max=1.0)
    confused_NC.scatter_(1, given_N[:, None], 0.0)
    return q_NC * (1 - c_N1) * swapped_NC, q_NC * c_N1 * confused_NC


def _add_posterior(
    labels: _Labels,
    noise: Noise,
    K_CC: Tensor,
    share: float,
    posterior_NC: Tensor,
    keep_confused: bool = False,
) -> Tensor:
    """Add a share of the posterior; return the expected shares of wrong labels, of those by image
    confusion, and of right predictions. `keep_confused`: image confusion counts as right."""
    sums = torch.zeros(3, dtype=torch.float64)
    for rows in labels.chunks():
        y_N = labels.given_N[rows]
        q_NC = tempered(labels.log_prob_NC[rows], noise.a, noise.b)
        plain_NC, confused_NC = _posterior(q_NC, y_N, K_CC, noise)
        if keep_confused:
            own_N1 = confused_NC.sum(1, keepdim=True)
            confused_NC = torch.zeros_like(confused_NC).scatter_(1, y_N[:, None], own_N1)
        total_N1 = (plain_NC + confused_NC).sum(1, keepdim=True).clamp(min=1e-30)
        found_NC = (plain_NC + confused_NC) / total_N1
        posterior_NC[rows] += share * found_NC
        sums[0] += float((1 - found_NC.gather(1, y_N[:, None])).sum(dtype=torch.float64))
        sums[1] += float((confused_NC / total_N1).sum(dtype=torch.float64))
        sums[2] += float(q_NC.max(1).values.sum(dtype=torch.float64))
    return sums / len(labels.given_N)


def _add_doubt(labels: _Labels, noise: Noise, K_CC: Tensor, share: float, doubt_2N: Tensor) -> None:
    """Add a share of the probabilities that a label is wrong and right, with rates that are never
    0, so that labels can be sorted even where the fitted rates are 0."""
    random, classes = (
        max(rate, floor) for rate, floor in zip((noise.random, noise.classes), FLOORS, strict=True)
    )
    noise = replace(noise, random=random, classes=classes)
    for rows in labels.chunks():
        y_N = labels.given_N[rows]
        q_NC = tempered(labels.log_prob_NC[rows], noise.a, noise.b)
        plain_NC, confused_NC = _posterior(q_NC, y_N, K_CC, noise)
        joint_NC = plain_NC + confused_NC
        right_N = joint_NC.gather(1, y_N[:, None])[:, 0]
        wrong_N = joint_NC.scatter(1, y_N[:, None], 0.0).sum(1)
        total_N = (right_N + wrong_N).clamp(min=1e-30)
        doubt_2N[0, rows] += share * wrong_N / total_N
        doubt_2N[1, rows] += share * right_N / total_N
