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
maximise the likelihood of the given labels. The posterior over t gives everything else.

Random swaps and class confusion must explain the labels better than no noise does (by log N, the
price of two numbers). Image confusion and weak features look alike, so models without it, with
κ = 1 and with κ = 2 are fitted. Beforehand, κ = 1 is as likely as a prediction is right.

Classes may differ in how their labels become wrong. A fourth model without image confusion learns
the transitions T(y | t) from the images, with those of e and d as prior. The likelihood of a label
counts only what the other labels teach. Mistakes of the predictions look like such transitions, but
sit on ambiguous images. So the first model gets the likelihood of transitions that are learned for
ambiguous images only, if that is higher: there, the predictions are wrong and not the labels.

The models are averaged by their likelihoods. They are only roughly right: for this average, the
likelihood counts as if there were at most `EVIDENCE` images.

With two classes, random swaps and flat predictions have the same likelihood, so the temperature
comes from the distribution of the predictions instead (`two_class_temperature`).

Shapes: N images, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.latent_noise import (
    RANGE_A,
    Likelihoods,
    Noise,
    better_than_chance,
    class_confusion,
    estimate_rates,
    joint,
    learn_from_others,
    learned_transitions,
    likelihoods,
    plateau,
    tempered,
    transitions,
    two_class_temperature,
    with_floors,
)

EVIDENCE = 1000  # images that the choice between the models may count
FIT_IMAGES = 5000  # a and b are fitted to a random sample of at most so many images
CONFUSIONS = (1.0, 2.0)  # κ of the models with image confusion
NEGLIGIBLE = 1e-3  # a smaller weight of a model is 0
RELEVANT = 0.05  # weight from which a model counts for the range of the rate
LEARNING = 12  # rounds in which transitions are learned
RANGE_B = (-1.5, 1.0)
PRIOR_B = 0.002  # weight of b², per image
CHUNK = 2**22  # values of an N×C array that are computed at once
NO_NOISE = Noise(0.0, 0.0)


@dataclass(frozen=True)
class Swaps:
    """How the classes of a model are swapped, whatever the image looks like."""

    T_CC: Tensor  # T(y | t), the probability that an image of class t is labelled y
    floored_CC: Tensor  # the same for sorting: every label can be wrong


@dataclass(frozen=True)
class LatentFit:
    """The fitted model and what it says about every label."""

    posterior_NC: Tensor  # P(true class | image, given label), float32
    log_odds_N: Tensor  # that the label is wrong; for sorting, also where fitted rates are 0
    rate: float  # expected share of wrong labels
    rates: tuple[float, float]  # the lowest and the highest of the models that count
    confused: float  # part of it that is confusion of single images
    between: float  # part of it that is confusion of classes, in proportion to e and d
    accuracy: float  # expected accuracy of the predictions, with respect to the true classes
    models: tuple[Noise, ...]  # the first is without image confusion
    weights: tuple[float, ...]  # of the models; they sum to 1
    swaps: tuple[Swaps, ...]  # of the models

    @property
    def noise(self) -> Noise:
        """The model with the largest weight."""
        return self.models[max(range(len(self.models)), key=lambda k: self.weights[k])]

    @property
    def confusion_weight(self) -> float:
        """The weight of the models with image confusion."""
        pairs = zip(self.models, self.weights, strict=True)
        return sum(weight for noise, weight in pairs if noise.images > 0)

    @property
    def learned_weight(self) -> float:
        """The weight of the model with learned transitions."""
        return sum(self.weights[1 + len(CONFUSIONS) :])


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
    found = [noise.log_likelihood for noise in (plain, *confusing)]
    counted = max(2, min(len(given_N), EVIDENCE))
    # The better the predictions, the more likely people see what they see (κ = 1).
    alike = min(max(sample.accuracy(plain), 0.5), 0.99)
    prices = [0.0, *(0.5 * math.log(counted) - math.log(p) for p in (alike, 1 - alike))]
    if plain.random > 0 or plain.classes > 0:
        plain = _with_rates(labels, plain)
    models = [plain, *(_with_rates(labels, noise) for noise in confusing)]
    swaps = [labels.swaps(noise) for noise in models]
    if plain.random > 0 or plain.classes > 0:
        learn = partial(_learn, labels, sample, plain, swaps[0].T_CC, moves=shift == 0)
        found[0] = max(found[0], learn(ambiguous=True)[0].log_likelihood)
        learned, T_CC = learn(ambiguous=False)
        found.append(learned.log_likelihood)
        prices.append(math.log(counted))
        models.append(learned)
        swaps.append(Swaps(T_CC, with_floors(T_CC, labels.confusion(plain))))
    return _judge(labels, models, _weights(found, prices, len(given_N)), swaps)


def with_new_predictions(
    fit: LatentFit, log_prob_NC: Tensor, given_N: Tensor, seed: int = 1
) -> LatentFit:
    """Judge the same labels by better predictions. The labels are as noisy as before, in the same
    way, so rates and transitions stay, and only the temperature is fitted again."""
    labels, sample = _Labels(log_prob_NC, given_N), _sample(log_prob_NC, given_N, seed)
    if log_prob_NC.shape[1] == 2:
        a = math.log(two_class_temperature(log_prob_NC, given_N))
        return _judge(labels, [replace(fit.models[0], a=a)], [1.0], fit.swaps)
    models: list[Noise] = []
    for noise, swaps in zip(fit.models, fit.swaps, strict=True):
        start = models[0] if models else None
        models.append(_search(partial(_with_likelihood, sample, T_CC=swaps.T_CC), noise, start))
    return _judge(labels, models, fit.weights, fit.swaps)


def pseudo_labels(fit: LatentFit, log_prob_NC: Tensor, given_N: Tensor) -> Tensor:
    """What heads are trained on in the next round: the posterior, but a label that only image
    confusion contradicts stays (N,C)."""
    labels, pseudo_NC = _Labels(log_prob_NC, given_N), torch.zeros_like(fit.posterior_NC)
    for noise, weight, swaps in zip(fit.models, fit.weights, fit.swaps, strict=True):
        if weight > 0:
            _add_posterior(labels, noise, swaps, weight, pseudo_NC, keep_confused=True)
    return pseudo_NC / pseudo_NC.sum(1, keepdim=True)


def _weights(log_likelihoods: Sequence[float], prices: Sequence[float], images: int) -> list[float]:
    """Weights of the models, from the mean log-likelihood of an image and the price of each model,
    in nats."""
    counted = min(images, EVIDENCE)
    pairs = zip(log_likelihoods, prices, strict=True)
    evidence = [(found - log_likelihoods[0]) * counted - price for found, price in pairs]
    return torch.tensor(evidence, dtype=torch.float64).softmax(0).tolist()


def _judge(
    labels: "_Labels",
    models: Sequence[Noise],
    weights: Sequence[float],
    swaps: Sequence[Swaps] | None = None,
) -> LatentFit:
    swaps = swaps or [labels.swaps(noise) for noise in models]
    log_prob_NC, given_N = labels.log_prob_NC, labels.given_N
    posterior_NC = torch.zeros_like(log_prob_NC, dtype=torch.float32)
    odds_2N = torch.zeros(2, len(given_N), dtype=torch.float64, device=given_N.device)
    parts, rates, between = torch.zeros(3, dtype=torch.float64), [], 0.0
    weights = [weight if weight > NEGLIGIBLE else 0.0 for weight in weights]
    weights = [weight / sum(weights) for weight in weights]
    for noise, weight, swapped in zip(models, weights, swaps, strict=True):
        if weight > 0:
            found = _add_posterior(labels, noise, swapped, weight, posterior_NC)
            parts += weight * found
            rates += [float(found[0])] if weight >= RELEVANT else []
            classes = noise.classes / max(noise.random + noise.classes, 1e-12)
            between += weight * classes * float(found[0] - found[1])
            _add_doubt(labels, noise, swapped, weight, odds_2N)
    posterior_NC /= posterior_NC.sum(1, keepdim=True)
    rate, confused, accuracy = parts.tolist()
    wrong_N, right_N = odds_2N.clamp(min=1e-30).log()
    return LatentFit(
        posterior_NC=posterior_NC,
        log_odds_N=wrong_N - right_N,
        rate=rate,
        rates=(min(rate, *rates), max(rate, *rates)),
        confused=confused,
        between=between,
        accuracy=accuracy,
        models=tuple(models),
        weights=tuple(weights),
        swaps=tuple(swaps),
    )


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

    def accuracy(self, noise: Noise) -> float:
        """Expected accuracy of the predictions."""
        parts = (tempered(self.log_prob_NC[rows], noise.a, noise.b) for rows in self.chunks())
        return sum(float(q_NC.max(1).values.sum()) for q_NC in parts) / len(self.given_N)

    def swaps(self, noise: Noise) -> Swaps:
        K_CC = self.confusion(noise)
        T_CC = transitions(noise, K_CC)
        return Swaps(T_CC, with_floors(T_CC, K_CC))

    def learn(
        self, noise: Noise, counts_CC: Tensor, prior_CC: Tensor, ambiguous: bool
    ) -> tuple[Tensor, float]:
        """Expected number of labels y of images of class t, and the mean log-likelihood."""
        new_CC, total = torch.zeros_like(counts_CC), 0.0
        for rows in self.chunks():
            q_NC, y_N = tempered(self.log_prob_NC[rows], noise.a, noise.b), self.given_N[rows]
            all_NC, learned_NC = learn_from_others(q_NC, y_N, counts_CC, prior_CC, ambiguous)
            sum_N1 = all_NC.sum(1, keepdim=True).clamp(min=1e-30)
            new_CC += (learned_NC / sum_N1).T @ F.one_hot(y_N, len(prior_CC)).to(q_NC.dtype)
            total += float(sum_N1.double().log().sum())
        return new_CC, total / len(self.given_N)

    def likelihoods(self, noise: Noise) -> Likelihoods:
        K_CC = self.confusion(noise)
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


def _with_likelihood(labels: _Labels, noise: Noise, T_CC: Tensor | None = None) -> Noise:
    """With the log-likelihood of rates that stay; without transitions, there is no noise."""
    total = 0.0
    for rows in labels.chunks():
        q_NC, y_N = tempered(labels.log_prob_NC[rows], noise.a, noise.b), labels.given_N[rows]
        if T_CC is None:
            sum_N = q_NC.gather(1, y_N[:, None])[:, 0]
        else:
            sum_N = torch.add(*joint(q_NC, y_N, T_CC, noise)).sum(1)
        total += float(sum_N.double().clamp(min=1e-30).log().sum())
    return replace(noise, log_likelihood=total / len(labels.given_N))


def _learn(
    labels: _Labels, sample: _Labels, noise: Noise, prior_CC: Tensor, ambiguous: bool, moves: bool
) -> tuple[Noise, Tensor]:
    """Learned transitions, with the temperature and likelihood of the sample. `moves`: the
    temperature changes; the rates of the noise stay."""
    steps, counts_CC = (-0.05, 0.0, 0.05) if moves else (0.0,), torch.zeros_like(prior_CC)
    for _ in range(LEARNING):
        counts_CC = labels.learn(noise, counts_CC, prior_CC, ambiguous)[0]
        tried = [
            replace(at, log_likelihood=sample.learn(at, counts_CC, prior_CC, ambiguous)[1])
            for at in (replace(noise, a=noise.a + step) for step in steps)
        ]
        noise = max(tried, key=lambda at: at.log_likelihood)
    return noise, learned_transitions(counts_CC, prior_CC)


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


def _add_posterior(
    labels: _Labels,
    noise: Noise,
    swaps: Swaps,
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
        plain_NC, confused_NC = joint(q_NC, y_N, swaps.T_CC, noise)
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


def _add_doubt(labels: _Labels, noise: Noise, swaps: Swaps, share: float, doubt_2N: Tensor) -> None:
    """Add a share of the probabilities that a label is wrong and right, with rates that are never
    0, so that labels can be sorted even where the fitted rates are 0."""
    for rows in labels.chunks():
        y_N = labels.given_N[rows]
        q_NC = tempered(labels.log_prob_NC[rows], noise.a, noise.b)
        joint_NC = torch.add(*joint(q_NC, y_N, swaps.floored_CC, noise))
        right_N = joint_NC.gather(1, y_N[:, None])[:, 0]
        wrong_N = joint_NC.scatter(1, y_N[:, None], 0.0).sum(1)
        total_N = (right_N + wrong_N).clamp(min=1e-30)
        doubt_2N[0, rows] += share * wrong_N / total_N
        doubt_2N[1, rows] += share * right_N / total_N
