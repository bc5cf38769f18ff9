"""Metrics that can replace the loss in stage 1 and the pseudo-loss in stage 2: section 4 of the
paper compares them.

Each metric is one number per image, and high means suspicious, so the same mixture and the same AUC
work for all of them.

For noisy labels, the paper's section "Detecting and correcting label noise" names neighbour
agreement and disagreement in the contrastive space, as in MOIT (Ortego et al., CVPR 2021), and the
KL divergence, but gives no formulas: those here are our reading, and `capped` is our own. For
pseudo-labels, its section "Identifying incorrect pseudo-labels" compares the pseudo-loss with their
confidence and entropy.

Neighbours are found chunk by chunk: no tensor has N×N or N×C elements.

Shapes: N images, M others, B of them at a time, P compared with them at a time, D dimensions of
the contrastive space, C classes, K neighbours.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOURS = 200  # row 24 of docs/paper-and-code.md
TEMPERATURE = 0.1  # of a neighbour's weight, exp(similarity / TEMPERATURE)
SMOOTHING = 0.6  # of the label in `label_divergence`; the value of Jo-SRC for CIFAR-100
ROWS, COLUMNS = 2**10, 2**14  # size of a chunk of similarities
CAPTURED = 2**18  # images: beyond it, the many chunks of a search make too large a graph

# -------------------------------------------------------------------------------------- neighbours


class Neighbours(NamedTuple):
    """The nearest images of every image in the contrastive space, and their weights."""

    index_NK: Tensor  # int32, the nearest first
    weight_NK: Tensor  # a row sums to one


def normalise(projection_BD: Tensor) -> Tensor:
    """L2-normalise, so that inner products are cosines."""
    return F.normalize(projection_BD.float())


def neighbours(features_ND: Tensor, K: int = NEIGHBOURS) -> Neighbours:
    """The K nearest other images of every image; all of them if there are fewer."""
    N = len(features_ND)
    K = min(K, N - 1)
    index_NK = torch.empty(N, K, dtype=torch.int32, device=features_ND.device)
    weight_NK = torch.empty(N, K, device=features_ND.device)
    for part, similarity_BK, index_BK in _nearest_others(features_ND, K):
        index_NK[part] = index_BK.int()
        weight_NK[part] = _weights(similarity_BK)
    return Neighbours(index_NK, weight_NK)


def neighbour_votes(
    features_ND: Tensor,
    label_NC: Tensor,
    K: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> Iterator[tuple[slice, Tensor]]:
    """The mean label (B,C) of the K nearest other images of every image, for one chunk of images
    after another. `label_NC` holds a distribution for every image; a neighbour has the weight
    exp(similarity / temperature). Shapes are fixed, and nothing is read back to the host."""
    for part, similarity_BK, index_BK in _nearest_others(features_ND, K):
        weight_BK = _weights(similarity_BK, temperature)
        yield (
            part,
            F.embedding_bag(index_BK, label_NC, per_sample_weights=weight_BK, mode="sum"),
        )


def _nearest_others(features_ND: Tensor, K: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Cosines and indices of the K nearest other images, for one chunk of images after another."""
    K = min(K, len(features_ND) - 1)
    for part in _parts(len(features_ND)):
        own_B = torch.arange(part.start, part.stop, device=features_ND.device)
        yield part, *nearest(features_ND[part], features_ND, K, own_B)


def nearest(
    asked_BD: Tensor, features_ND: Tensor, K: int, own_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and indices of the K nearest, the nearest first. `own_B` is the index of the image
    itself, which is left out."""
    best_BK = asked_BD.new_empty(len(asked_BD), 0)
    index_BK = torch.empty(len(asked_BD), 0, dtype=torch.long, device=asked_BD.device)
    for start in range(0, len(features_ND), COLUMNS):
        features_PD = features_ND[start : start + COLUMNS]
        similarity_BP = asked_BD @ features_PD.T
        place_P = torch.arange(start, start + len(features_PD), device=asked_BD.device)
        if own_B is not None:
            similarity_BP.masked_fill_(own_B[:, None] == place_P, -torch.inf)
        here_BK, at_BK = similarity_BP.topk(min(K, len(place_P)))
        # Merge with the best of the chunks before.
        best, index = torch.cat([best_BK, here_BK], 1), torch.cat([index_BK, place_P[at_BK]], 1)
        best_BK, at_BK = best.topk(min(K, best.shape[1]))
        index_BK = index.gather(1, at_BK)
    return best_BK, index_BK


def votes(weight_BK: Tensor, label_BK: Tensor, classes: int) -> Tensor:
    """The label distribution of the neighbours: the weight of each class, (B, C)."""
    return weight_BK.new_zeros(len(weight_BK), classes).scatter_add_(1, label_BK, weight_BK)


# ----------------------------------------------------------------------------- for given labels


def capped(loss_N: Tensor, classes: int) -> Tensor:
    """min(loss, log C): at most the loss of a uniform prediction; 0 to log C.

    Above log C, a loss says how confident the network is rather than whether the label is wrong. If
    most labels are wrong, confident and unconfident predictions can form two modes of their own,
    and the mixture then separates wrong labels from wrong labels (docs/results.md, 80%).
    """
    return loss_N.clamp(max=math.log(classes))


def agreement(near: Neighbours, given_N: Tensor) -> Tensor:
    """The weight of neighbours with another given label than the image; 0 to 1.

    The paper expects clean images to have many neighbours of their own class. They are counted by
    weight, since a class may have fewer images than an image has neighbours.
    """
    return 1 - torch.cat([_share(near, part, given_N, given_N) for part in _parts(len(given_N))])


def disagreement(near: Neighbours, given_N: Tensor, classes: int) -> Tensor:
    """Cross-entropy of the given label and the label distribution of the neighbours, after their
    own labels were corrected; 0 to log(C·(K+1)).

    As in MOIT, which the paper cites: the corrected label of an image is the class with the most
    weight among its neighbours. One more vote is spread over all classes, to keep the logarithm
    finite.
    """
    parts = _parts(len(given_N))
    corrected_N = torch.cat(
        [votes(*_weights_and_labels(near, part, given_N), classes).argmax(1) for part in parts]
    )
    share_N = torch.cat([_share(near, part, corrected_N, given_N) for part in parts])
    K = near.index_NK.shape[1]
    return -((K * share_N + 1 / classes) / (K + 1)).log()


def view_divergence(plain_BC: Tensor, weak_BC: Tensor) -> Tensor:
    """KL(plain ‖ weak) of the predictions for two views, from their logits; 0 or more.

    A label that was memorised for one view is not predicted for another.
    """
    log_plain_BC, log_weak_BC = plain_BC.log_softmax(1), weak_BC.log_softmax(1)
    # Rounding can make it slightly negative.
    return (log_plain_BC.exp() * (log_plain_BC - log_weak_BC)).sum(1).clamp(min=0)


def label_divergence(logits_BC: Tensor, given_B: Tensor) -> Tensor:
    """Jensen-Shannon divergence of the prediction and the smoothed given label; 0 to log 2.

    As in Jo-SRC, which the paper cites. Without smoothing it would rank images as the loss does.
    """
    share_BC = logits_BC.float().softmax(1)
    C = share_BC.shape[1]
    label_BC = SMOOTHING / C + (1 - SMOOTHING) * F.one_hot(given_B, C)
    mean_BC = (share_BC + label_BC) / 2
    ours, theirs = (
        (torch.xlogy(part_BC, part_BC) - part_BC * mean_BC.log()).sum(1)
        for part_BC in (share_BC, label_BC)
    )
    return ((ours + theirs) / 2).clamp(min=0)


# ---------------------------------------------------------------------------- for pseudo-labels


def confidence(pseudo_BC: Tensor) -> Tensor:
    """One minus the share of the most likely class; 0 to 1 - 1/C."""
    return 1 - pseudo_BC.amax(1) / pseudo_BC.sum(1)


def entropy(pseudo_BC: Tensor) -> Tensor:
    """Entropy of a pseudo-label in nats; 0 to log C."""
    share_BC = pseudo_BC / pseudo_BC.sum(1, keepdim=True)
    return -torch.xlogy(share_BC, share_BC).sum(1).clamp(max=0)


# -------------------------------------------------------------------------- the contrastive space


def knn_predict(
    asked_MD: Tensor, features_ND: Tensor, given_N: Tensor, classes: int, K: int = NEIGHBOURS
) -> Tensor:
    """The class with the most weight among the given labels of the K nearest (row 24)."""
    K = min(K, len(features_ND))
    predicted = []
    for part in _parts(len(asked_MD)):
        similarity_BK, index_BK = nearest(asked_MD[part], features_ND, K)
        votes_BC = votes(_weights(similarity_BK), given_N[index_BK], classes)
        predicted.append(votes_BC.argmax(1))
    return torch.cat(predicted)


def _weights(similarity_BK: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    return (similarity_BK / temperature).softmax(1)


def _weights_and_labels(near: Neighbours, part: slice, label_N: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and labels of the neighbours of some images."""
    return near.weight_NK[part], label_N[near.index_NK[part].long()]


def _share(near: Neighbours, part: slice, label_N: Tensor, given_N: Tensor) -> Tensor:
    """The weight of the neighbours whose label equals the given label of the image."""
    weight_BK, label_BK = _weights_and_labels(near, part, label_N)
    share_B = (weight_BK * (label_BK == given_N[part, None])).sum(1)
    return share_B.clamp(max=1)  # rounding can exceed 1


def _parts(images: int) -> list[slice]:
    return [slice(start, min(start + ROWS, images)) for start in range(0, images, ROWS)]
