"""Scores of classifiers and detectors, as functions of tensors.

Accuracies are percentages; precision, recall and AUC are between 0 and 1. A score that is undefined
is None.
Shapes: N images, C classes, K bins.
"""

from typing import TypedDict

import torch
from torch import Tensor

RELIABILITY_BINS = 15


class ClassScores(TypedDict):
    """Scores of one class."""

    accuracy: float | None  # the recall as a percentage
    precision: float | None
    recall: float | None
    support: int  # images with this label
    predicted: int  # images that are predicted as this class


class Bin(TypedDict):
    """Images whose most likely class has a probability above `low` and up to `high`."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean of these probabilities
    accuracy: float | None


class Calibration(TypedDict):
    """How well the probabilities of a classifier match its accuracy."""

    error: float  # expected calibration error, 0 to 1
    bins: list[Bin]


def confusion(label_N: Tensor, predicted_N: Tensor, classes: int) -> Tensor:
    """Confusion matrix: one row per label, one column per prediction."""
    pairs_N = label_N * classes + predicted_N
    return torch.bincount(pairs_N, minlength=classes * classes).view(classes, classes)


def by_class(confusion_CC: Tensor) -> list[ClassScores]:
    """Scores of every class, from a confusion matrix."""
    right_C, label_C, predicted_C = (
        part.tolist() for part in (confusion_CC.diag(), confusion_CC.sum(1), confusion_CC.sum(0))
    )
    return [
        ClassScores(
            accuracy=100 * right / support if support else None,
            precision=right / predicted if predicted else None,
            recall=right / support if support else None,
            support=support,
            predicted=predicted,
        )
        for right, support, predicted in zip(right_C, label_C, predicted_C, strict=True)
    ]


def calibration(confidence_N: Tensor, right_N: Tensor, bins: int = RELIABILITY_BINS) -> Calibration:
    """A reliability table with bins of equal width, and the expected calibration error: the mean
    over all images of the distance between confidence and accuracy of their bin."""
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
    """Mean negative log-likelihood, from the predicted probability of each image's label."""
    tiny = torch.finfo(torch.float64).tiny
    return -probability_N.double().clamp(min=tiny).log().mean().item()


def share(of_N: Tensor, hit_N: Tensor) -> float | None:
    """Fraction of the images in `of_N` that are also in `hit_N`."""
    count = int(of_N.sum())
    return int((of_N & hit_N).sum()) / count if count else None


def auc(score_N: Tensor, positive_N: Tensor) -> float | None:
    """Area under the ROC curve. Ties count one half."""
    positives = int(positive_N.sum())
    negatives = len(positive_N) - positives
    if positives == 0 or negatives == 0 or bool(score_N.isnan().any()):
        return None
    ordered_N = score_N.sort().values
    below = torch.searchsorted(ordered_N, score_N)
    up_to = torch.searchsorted(ordered_N, score_N, right=True)
    twice_ranks = int((below + up_to + 1)[positive_N].sum())  # integers, so the result is exact
    return (twice_ranks - positives * (positives + 1)) / (2 * positives * negatives)
