"""Figures of merit: accuracy and, where the truth is known, how well noise was found and mended.

Accuracies are percentages, as the field prints them; precision, recall and AUC lie in 0..1.
A figure that is not defined (no noisy image, no truth) is None.
"""

from typing import TypedDict

import torch
from torch import Tensor

from pseudoloss.data import OUT
from pseudoloss.memory import Memory


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
