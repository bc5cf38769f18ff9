"""Scores of all labels, from features: predictions by cross-validated heads, then the latent-label
model of their agreement with the given labels (methods/latent.py).

In a second round the heads are trained on the pseudo-labels of the first, sharpened. The scores are
those of the last round.

N images, D features, C classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.auditing.estimate import NoiseEstimate as NoiseEstimate
from pseudoloss.auditing.estimate import estimate_noise
from pseudoloss.auditing.heads import assign_folds, normalise, out_of_fold
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.errors import InputError
from pseudoloss.methods.latent import fit_latent_labels, pseudo_labels, with_new_predictions
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.nn.devices import cpu_threads

Method = Literal["latent", "two-mixtures"]

L2 = (3e-5, 1e-4)  # the best one is chosen by the likelihood of held-out labels
L2_FALLS = 10_000  # images; with more it falls in proportion, as the loss is a mean
SMALL = 5_000  # images: up to this, repeats cost little
L2_IMAGES = 5_000  # that the weight decay is chosen by, at most
GAMMA = 2.0  # sharpens pseudo-labels, as in the paper
FLOOR = 1e-9


@dataclass(frozen=True)
class LabelScores:
    """Scores of N labels of C classes."""

    pred_probs_NC: np.ndarray  # float32, out-of-fold predictions of heads trained on given labels
    p_noisy_N: np.ndarray  # probability that the given label is wrong
    label_score_N: np.ndarray  # ranks labels: the lowest are the most doubtful
    trust_N: np.ndarray  # probability that the candidate is the right label
    predicted_N: np.ndarray  # most likely class without regard to the given label
    candidate_N: np.ndarray  # most likely class other than the given label
    noise: NoiseEstimate
    details: dict[str, Any]  # fitted values, for summary.json


def score_labels(
    features_ND: np.ndarray,
    given_N: np.ndarray,
    classes: int,
    *,
    method: Method = "latent",
    folds: int = 5,
    repeats: int | None = None,
    rounds: int = 2,
    seed: int = 1,
    device: torch.device | str = "cpu",
    groups_N: np.ndarray | None = None,
    progress: Progress = no_progress,
) -> LabelScores:
    """Score the given labels of images with features.

    Args:
        features_ND: one row per image.
        given_N: labels, 0 to `classes` - 1.
        classes: number of classes.
        method: the latent-label model, or the two mixtures of pseudo-loss selection.
        folds: of the cross-validation.
        repeats: cross-validations per round, each with other folds; None: 3, or 1 for more than
            5,000 images.
        rounds: after the first, heads are trained on pseudo-labels.
        seed: of the folds.
        device: of the computation.
        groups_N: images with the same value (duplicates) are in the same fold.
        progress: is told of the iterations of the heads.

    Raises:
        InputError: features or labels cannot be used.
    """
    given_N = _check(features_ND, given_N, classes, groups_N)
    if repeats is None:
        repeats = 3 if len(given_N) <= SMALL else 1
    x_ND = normalise(features_ND, device)
    y_N = torch.from_numpy(given_N).to(device)
    fold_RN = torch.from_numpy(assign_folds(given_N, folds, repeats, seed, groups_N)).to(device)
    l2 = _choose_l2(x_ND, y_N, fold_RN[0], classes, seed, progress)
    l2 *= min(1.0, L2_FALLS / len(given_N))
    details: dict[str, Any] = {"method": method, "folds": folds, "repeats": repeats, "l2": l2}
    details["rounds"] = rounds

    def predict(round_number: int, targets: Tensor, weights_N: Tensor | None) -> Tensor:
        what = f"round {round_number}"
        return out_of_fold(
            x_ND, targets, fold_RN, classes, l2,
            weights_N=weights_N, what=what, progress=progress,
        )  # fmt: skip

    first_NC = predict(1, y_N, None)
    judge = _latent if method == "latent" else _two_mixtures
    judged = judge(first_NC, y_N, rounds, predict, details)
    keep_N = judged.posterior_NC.gather(1, y_N[:, None])[:, 0]
    likely_N, candidate_N = judged.posterior_NC.scatter(1, y_N[:, None], -1.0).max(1)
    p_noisy_N = (1 - keep_N.double()).clamp(0, 1).cpu().numpy()
    return LabelScores(
        pred_probs_NC=(first_NC / first_NC.sum(1, keepdim=True)).cpu().numpy(),
        p_noisy_N=p_noisy_N,
        label_score_N=judged.label_score_N.double().cpu().numpy(),
        trust_N=(likely_N * judged.trust_N).clamp(0, 1).double().cpu().numpy(),
        predicted_N=judged.prob_NC.argmax(1).cpu().numpy(),
        candidate_N=candidate_N.cpu().numpy(),
        noise=estimate_noise(
            p_noisy_N,
            given_N,
            classes,
            judged.rate,
            judged.confused,
            judged.accuracy,
            between=judged.between,
            rates=judged.rates,
        ),
        details=details,
    )


class Judged(NamedTuple):
    """What a method makes of the predictions."""

    prob_NC: Tensor  # predictions of the last round
    posterior_NC: Tensor  # probability of each class to be the true one
    label_score_N: Tensor
    trust_N: Tensor | float  # factor of the probability of the suggestion
    rate: float  # expected share of wrong labels
    confused: float  # of it, confusion of ambiguous images
    accuracy: float  # expected accuracy of the predictions, with respect to the true classes
    between: float = 0.0  # of the rate, confusion of classes
    rates: tuple[float, float] | None = None  # the lowest and highest rate of the models


Predict = Callable[[int, Tensor, Tensor | None], Tensor]  # round, targets, weights


def _latent(
    prob_NC: Tensor, given_N: Tensor, rounds: int, predict: Predict, details: dict[str, Any]
) -> Judged:
    with cpu_threads(1):  # the fit has many operations on a sample
        fit = fit_latent_labels((prob_NC + FLOOR).log(), given_N)
    noise = fit.noise
    details |= {
        "temperature": math.exp(noise.a),
        "temperature_slope": noise.b,
        "random_swaps": noise.random,
        "class_confusion": noise.classes,
        "image_confusion": noise.images,
        "image_confusion_sharpness": noise.sharpness,
        "image_confusion_weight": fit.confusion_weight,
        "learned_transitions_weight": fit.learned_weight,
        "predicted_accuracy": fit.accuracy,
    }
    for round_number in range(2, rounds + 1):
        pseudo_NC = pseudo_labels(fit, (prob_NC + FLOOR).log(), given_N) ** GAMMA
        prob_NC = predict(round_number, pseudo_NC / pseudo_NC.sum(1, keepdim=True), None)
        with cpu_threads(1):
            fit = with_new_predictions(fit, (prob_NC + FLOOR).log(), given_N)
    score_N = torch.sigmoid(-fit.log_odds_N.double())
    return Judged(
        prob_NC=prob_NC,
        posterior_NC=fit.posterior_NC,
        label_score_N=score_N,
        trust_N=1.0,
        rate=fit.rate,
        confused=fit.confused,
        accuracy=fit.accuracy,
        between=fit.between,
        rates=fit.rates,
    )


def _choose_l2(
    x_ND: Tensor, y_N: Tensor, fold_N: Tensor, classes: int, seed: int, progress: Progress
) -> float:
    """The weight decay whose out-of-fold predictions predict the given labels best."""
    if len(y_N) > L2_IMAGES:
        rows = np.random.default_rng([seed, 2]).choice(len(y_N), L2_IMAGES, replace=False)
        rows_M = torch.from_numpy(np.sort(rows)).to(x_ND.device)
        x_ND, y_N, fold_N = x_ND[rows_M], y_N[rows_M], fold_N[rows_M]
    losses = []
    for number, l2 in enumerate(L2, 1):
        what = f"weight decay {number} of {len(L2)}"
        prob_NC = out_of_fold(x_ND, y_N, fold_N[None], classes, l2, what=what, progress=progress)
        losses.append(float(F.nll_loss((prob_NC + FLOOR).log(), y_N)))
    return L2[int(np.argmin(losses))]


def _two_mixtures(
    prob_NC: Tensor, given_N: Tensor, rounds: int, predict: Predict, details: dict[str, Any]
) -> Judged:
    """The two stages of pseudo-loss selection.

    Stage 1 flags the labels in the high mode of the loss. Flagged labels are replaced by the
    sharpened prediction, whose loss, the pseudo-loss, gives the trust of stage 2.
    """
    posterior_NC, noisy_N, trust_N = prob_NC, prob_NC[:, 0], prob_NC[:, 0]
    for round_number in range(1, rounds + 1):
        if round_number > 1:
            prob_NC = predict(round_number, posterior_NC, trust_N)
        log_NC = (prob_NC + FLOOR).log()
        loss_N = -log_NC.gather(1, given_N[:, None])[:, 0]
        highest = float(np.log(prob_NC.shape[1])) * 1.5
        noisy_N = 1 - fit_two_modes(loss_N.clamp(max=highest)).low_N
        pseudo_NC = prob_NC**GAMMA
        pseudo_NC /= pseudo_NC.sum(1, keepdim=True)
        pseudo_loss_N = -(pseudo_NC * log_NC).sum(1)
        trust_N = fit_two_modes(pseudo_loss_N, noisy_N > 0.5).low_N
        other_NC = pseudo_NC.scatter(1, given_N[:, None], 0.0)
        other_NC /= other_NC.sum(1, keepdim=True).clamp(min=1e-30)
        posterior_NC = other_NC * noisy_N[:, None]
        posterior_NC = posterior_NC.scatter(1, given_N[:, None], (1 - noisy_N)[:, None])
    accuracy = float(prob_NC.max(1).values.mean())
    rate = float(noisy_N.mean())
    return Judged(prob_NC, posterior_NC, 1 - noisy_N, trust_N, rate, 0.0, accuracy)


def _check(
    features_ND: np.ndarray, given_N: np.ndarray, classes: int, groups_N: np.ndarray | None
) -> np.ndarray:
    given_N = np.asarray(given_N)
    if given_N.ndim != 1 or not np.issubdtype(given_N.dtype, np.integer):
        raise InputError("labels: expected one integer per image")
    if len(given_N) != len(features_ND):
        raise InputError(f"{len(features_ND)} rows of features, but {len(given_N)} labels")
    if groups_N is not None and len(groups_N) != len(given_N):
        raise InputError(f"{len(groups_N)} groups, but {len(given_N)} labels")
    if len(given_N) < 2:
        raise InputError("an audit needs at least two images")
    if classes < 2:
        raise InputError("an audit needs at least two classes")
    if given_N.min() < 0 or given_N.max() >= classes:
        raise InputError(f"labels: expected 0 to {classes - 1}")
    return given_N.astype(np.int64)
