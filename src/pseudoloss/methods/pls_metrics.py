"""How good pseudo-labels are, where the true labels are known: section 4 of the paper."""

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from pseudoloss.methods import metrics
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pseudo_labels import PLSState
from pseudoloss.scores import auc

HISTOGRAM_BINS = 50
USED = 0.5  # weight from which a pseudo-label counts as used in the loss
SHARES_AT_ONCE = 2**22  # numbers of pseudo-labels in memory at a time


class Bias(TypedDict):
    """Confirmation bias: wrong pseudo-labels that the network learns, so that later on they can no
    longer be told from right ones. Both are shares of the images that are flagged."""

    learned: float | None  # the pseudo-label is wrong, and has a weight of at least 0.5 in the loss
    fitted: float | None  # the pseudo-label is wrong, and the plain view is predicted to be it


def compare_pseudo_labels(
    state: PLSState, true_N: Tensor, weight_N: Tensor
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """AUCs of metrics that tell right from wrong pseudo-labels; confirmation bias and the histogram
    of the pseudo-loss. `weight_N` is the weight of an image in the classification loss."""
    values = {
        "pseudo-loss": state.pseudo_loss_N,
        "confidence": of_pseudo_labels(metrics.confidence, state),
        "entropy": of_pseudo_labels(metrics.entropy, state),
    }
    wrong_N, noisy_N = state.pseudo_class_N != true_N, state.noisy_N
    aucs = {name: auc(value_N[noisy_N], wrong_N[noisy_N]) for name, value_N in values.items()}
    bias = confirmation_bias(state, true_N, weight_N)
    return aucs, {"bias": bias, "pseudo_loss": pseudo_loss_histogram(state, true_N)}


def of_pseudo_labels(metric: Callable[[Tensor], Tensor], state: PLSState) -> Tensor:
    """A metric of the pseudo-labels of all images."""
    size = max(1, SHARES_AT_ONCE // state.classes)
    chunks = [slice(start, start + size) for start in range(0, len(state.trust_N), size)]
    return torch.cat([metric(state.pseudo_labels(rows)) for rows in chunks])


def confirmation_bias(state: PLSState, true_N: Tensor, weight_N: Tensor) -> Bias:
    noisy = int(state.noisy_N.sum())
    if noisy == 0:
        return Bias(learned=None, fitted=None)
    wrong_N = state.noisy_N & (state.pseudo_class_N != true_N)
    return Bias(
        learned=int((wrong_N & (weight_N >= USED)).sum()) / noisy,
        fitted=int((wrong_N & (state.predicted_N == state.pseudo_class_N)).sum()) / noisy,
    )


def pseudo_loss_histogram(state: PLSState, true_N: Tensor) -> dict[str, Any] | None:
    """The pseudo-loss of the flagged images: a histogram of right and of wrong pseudo-labels, and
    the two modes (None where there are none)."""
    asked_N = state.noisy_N & state.pseudo_loss_N.isfinite()
    if not bool(asked_N.any()):
        return None
    value = state.pseudo_loss_N[asked_N].double().cpu().numpy()
    right = (state.pseudo_class_N == true_N)[asked_N].cpu().numpy()
    edges = np.histogram_bin_edges(value, HISTOGRAM_BINS)
    mixture = fit_two_modes(state.pseudo_loss_N, state.noisy_N)
    modes = {name: getattr(mixture, name).tolist() for name in ("means", "variances", "weights")}
    return {
        "histogram": {
            "right": np.histogram(value[right], edges)[0].tolist(),
            "wrong": np.histogram(value[~right], edges)[0].tolist(),
            "edges": edges.tolist(),
        },
        "modes": modes if bool(mixture.fitted) else None,
    }
