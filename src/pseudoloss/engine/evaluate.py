"""Figures of merit: how right a classifier is and, where the truth is known, how well noise was
found and mended.

Accuracies are percentages, as the field prints them; precision, recall and AUC lie in 0..1.
A figure that is not defined (no noisy image, no truth) is None.
Shapes: N images, C classes, K bins.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from pseudoloss.audit.labels import TRUSTED
from pseudoloss.data import OUT
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import fit_two_modes

BINS = 50  # of a histogram
RELIABILITY_BINS = 15  # of a reliability table


class Detection(TypedDict):
    """Of stage 1: does `noisy` find the wrong labels?"""

    precision: float | None
    recall: float | None
    recall_in: float | None  # of wrong labels whose image belongs to another class
    recall_out: float | None  # of images that belong to no class
    auc: float | None  # of the loss, over all images


class Guesses(TypedDict):
    """Of stage 2, over the images found noisy: is the guess right, and does trust know it?"""

    accuracy: float | None
    auc: float | None  # of trust


class Bias(TypedDict):
    """Confirmation bias: wrong guesses that the run believes all the same.

    The paper uses the word for wrong guesses that enter the loss and are learnt, so that later on
    they can no longer be told from right ones. Both figures are shares of the images found noisy.
    """

    learnt: float | None  # the guess is wrong, and counts in the loss (weight of at least 0.5)
    fitted: float | None  # the guess is wrong, and the network says the same of the plain view


class ClassFigures(TypedDict):
    """Of one class."""

    accuracy: float | None  # of its images; the recall, as a percentage
    precision: float | None  # of the images that are taken for it
    recall: float | None
    support: int  # images with this label
    predicted: int  # images that are taken for it


class Bin(TypedDict):
    """Images whose most likely class has a probability above `low`, and up to `high`."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean of those probabilities
    accuracy: float | None


class Calibration(TypedDict):
    """Does a classifier know how often it is right?"""

    error: float  # expected calibration error, 0 to 1
    bins: list[Bin]


def confusion(label_N: Tensor, predicted_N: Tensor, classes: int) -> Tensor:
    """How many images of each class (rows) are taken for each class (columns)."""
    pairs_N = label_N * classes + predicted_N
    return torch.bincount(pairs_N, minlength=classes * classes).view(classes, classes)


def by_class(confusion_CC: Tensor) -> list[ClassFigures]:
    right_C, label_C, predicted_C = (
        part.tolist() for part in (confusion_CC.diag(), confusion_CC.sum(1), confusion_CC.sum(0))
    )
    return [
        ClassFigures(
            accuracy=100 * right / support if support else None,
            precision=right / predicted if predicted else None,
            recall=right / support if support else None,
            support=support,
            predicted=predicted,
        )
        for right, support, predicted in zip(right_C, label_C, predicted_C, strict=True)
    ]


def calibration(confidence_N: Tensor, right_N: Tensor, bins: int = RELIABILITY_BINS) -> Calibration:
    """A reliability table in bins of equal width, and the expected calibration error: how far
    confidence and accuracy of a bin are apart, on average over the images."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    bin_N = torch.bucketize(confidence_N.double(), edges[1:-1])
    counts_K, confidence_K, right_K = (
        torch.bincount(bin_N, weights, minlength=bins).double()
        for weights in (None, confidence_N.double(), right_N.double())
    )
    error = ((confidence_K - right_K).abs().sum() / len(right_N)).item()
    table = [
        Bin(
            low=k / bins,
            high=(k + 1) / bins,
            images=int(count),
            confidence=confidence / count if count else None,
            accuracy=100 * right / count if count else None,
        )
        for k, (count, confidence, right) in enumerate(
            zip(counts_K.tolist(), confidence_K.tolist(), right_K.tolist(), strict=True)
        )
    ]
    return Calibration(error=error, bins=table)


def negative_log_likelihood(probability_N: Tensor) -> float:
    """From the probability that each image's own label was given; lower is better."""
    tiny = torch.finfo(torch.float64).tiny
    return -probability_N.double().clamp(min=tiny).log().mean().item()


def detection(memory: Memory, given_N: Tensor, true_N: Tensor) -> Detection:
    wrong_N, out_N = given_N != true_N, true_N == OUT
    return Detection(
        precision=_share(memory.noisy_N, wrong_N),
        recall=_share(wrong_N, memory.noisy_N),
        recall_in=_share(wrong_N & ~out_N, memory.noisy_N),
        recall_out=_share(out_N, memory.noisy_N),
        auc=auc(memory.loss_N, wrong_N),
    )


def guesses(memory: Memory, true_N: Tensor) -> Guesses:
    """No guess is right for an image that belongs to no class: its truth equals none."""
    noisy_N = memory.noisy_N
    if not bool(noisy_N.any()):
        return Guesses(accuracy=None, auc=None)
    right_N = memory.guess_N[noisy_N] == true_N[noisy_N]
    return Guesses(
        accuracy=100 * int(right_N.sum()) / len(right_N),
        auc=auc(memory.trust_N[noisy_N], right_N),
    )


def noise_aucs(
    metrics: Mapping[str, Tensor], given_N: Tensor, true_N: Tensor
) -> dict[str, float | None]:
    """How well each metric (high: suspicious) finds wrong labels, over all images."""
    return {name: auc(value_N, given_N != true_N) for name, value_N in metrics.items()}


def guess_aucs(
    metrics: Mapping[str, Tensor], memory: Memory, true_N: Tensor
) -> dict[str, float | None]:
    """How well each metric (high: suspicious) tells right guesses from wrong ones, over the images
    found noisy."""
    wrong_N = memory.guess_N != true_N
    noisy_N = memory.noisy_N
    return {name: auc(value_N[noisy_N], wrong_N[noisy_N]) for name, value_N in metrics.items()}


def bias(memory: Memory, true_N: Tensor, weight_N: Tensor) -> Bias:
    """`weight_N`: what an image weighs in the classification loss."""
    noisy = int(memory.noisy_N.sum())
    if noisy == 0:
        return Bias(learnt=None, fitted=None)
    wrong_N = memory.noisy_N & (memory.guess_N != true_N)
    return Bias(
        learnt=int((wrong_N & (weight_N >= TRUSTED)).sum()) / noisy,
        fitted=int((wrong_N & (memory.predicted_N == memory.guess_N)).sum()) / noisy,
    )


def pseudo_losses(memory: Memory, true_N: Tensor) -> dict[str, Any] | None:
    """The pseudo-loss over the images found noisy: a histogram of right and of wrong guesses, and
    the two modes (None where there are none)."""
    asked_N = memory.noisy_N & memory.pseudo_loss_N.isfinite()
    if not bool(asked_N.any()):
        return None
    value = memory.pseudo_loss_N[asked_N].double().cpu().numpy()
    right = (memory.guess_N == true_N)[asked_N].cpu().numpy()
    edges = np.histogram_bin_edges(value, BINS)
    mixture = fit_two_modes(memory.pseudo_loss_N, memory.noisy_N)
    modes = {name: getattr(mixture, name).tolist() for name in ("means", "variances", "weights")}
    return {
        "histogram": {
            "right": np.histogram(value[right], edges)[0].tolist(),
            "wrong": np.histogram(value[~right], edges)[0].tolist(),
            "edges": edges.tolist(),
        },
        "modes": modes if bool(mixture.fitted) else None,
    }


def _share(of_N: Tensor, hit_N: Tensor) -> float | None:
    """How many of some images are hit; None where there are none."""
    count = int(of_N.sum())
    return int((of_N & hit_N).sum()) / count if count else None


def auc(score_N: Tensor, positive_N: Tensor) -> float | None:
    """Area under the ROC curve: how often a positive scores above a negative (half for a tie)."""
    positives = int(positive_N.sum())
    negatives = len(positive_N) - positives
    if positives == 0 or negatives == 0 or bool(score_N.isnan().any()):
        return None
    ordered_N = score_N.sort().values
    below = torch.searchsorted(ordered_N, score_N)
    up_to = torch.searchsorted(ordered_N, score_N, right=True)
    twice_ranks = int((below + up_to + 1)[positive_N].sum())  # whole numbers: exact
    return (twice_ranks - positives * (positives + 1)) / (2 * positives * negatives)
