"""Figures of merit: accuracy and, where the truth is known, how well noise was found and mended.

Accuracies are percentages, as the field prints them; precision, recall and AUC lie in 0..1.
A figure that is not defined (no noisy image, no truth) is None.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data import OUT
from pseudoloss.labels import TRUSTED
from pseudoloss.memory import Memory
from pseudoloss.mixture import fit_two_modes

BINS = 50  # of a histogram


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

    trusted: float | None  # the guess is wrong, and stage 2 trusts it (at least 0.5)
    fitted: float | None  # the guess is wrong, and the network says the same of the plain view


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


def bias(memory: Memory, true_N: Tensor) -> Bias:
    noisy = int(memory.noisy_N.sum())
    if noisy == 0:
        return Bias(trusted=None, fitted=None)
    wrong_N = memory.noisy_N & (memory.guess_N != true_N)
    return Bias(
        trusted=int((wrong_N & (memory.trust_N >= TRUSTED)).sum()) / noisy,
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
