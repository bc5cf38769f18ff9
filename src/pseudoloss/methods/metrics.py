"""Other ways to find wrong labels and wrong guesses, for comparison: section 4 of the paper.

Each metric is a number an image, and high means suspicious, as with the loss and the pseudo-loss.
So the same mixture and the same AUC serve them all.

The paper compares the small loss with three metrics that others use to find noise. Its section
"Detecting and correcting label noise" names neighbour agreement and disagreement in the contrastive
space, as MOIT has them (Ortego et al., CVPR 2021), and the KL divergence, but gives no formula; the
formulas here are our reading; `capped` is our own. For guesses, its section "Identifying incorrect
pseudo-labels" compares the pseudo-loss with the confidence and the entropy of the guess.

Neighbours are found a part at a time: no tensor has N×N numbers, or N×C. Nothing here is part of
the default tracking pass.

Shapes: N images, M others, B of them at a time, P compared with them at a time, D dimensions of
the contrastive space, C classes, K neighbours.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOURS = 200  # row 24 of docs/paper-and-code.md, for all that asks neighbours
TEMPERATURE = 0.1  # of a neighbour's weight, exp(similarity / TEMPERATURE)
SMOOTHING = 0.6  # of a label that a prediction is compared with; Jo-SRC's for CIFAR-100
ROWS, COLUMNS = 2**10, 2**14  # of similarities at a time

# -------------------------------------------------------------------------------------- neighbours


class Neighbours(NamedTuple):
    """Of every image, the nearest ones in the contrastive space, and how much each one's word
    counts."""

    index_NK: Tensor  # int32, the nearest first
    weight_NK: Tensor  # a row sums to one


def normalise(projection_BD: Tensor) -> Tensor:
    """Into the contrastive space: of length one, so that products are cosines."""
    return F.normalize(projection_BD.float())


def neighbours(features_ND: Tensor, K: int = NEIGHBOURS) -> Neighbours:
    """The K nearest of every image among all others, or all of them where there are fewer."""
    N = len(features_ND)
    K = min(K, N - 1)
    index_NK = torch.empty(N, K, dtype=torch.int32, device=features_ND.device)
    weight_NK = torch.empty(N, K, device=features_ND.device)
    for part in _parts(N):
        own_B = torch.arange(part.start, part.stop, device=features_ND.device)
        similarity_BK, index_BK = nearest(features_ND[part], features_ND, K, own_B)
        index_NK[part] = index_BK.int()
        weight_NK[part] = _weights(similarity_BK)
    return Neighbours(index_NK, weight_NK)


def nearest(
    asked_BD: Tensor, features_ND: Tensor, K: int, own_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and places of the K nearest, the nearest first; `own_B`: a place to leave out, that
    of the image itself."""
    best_BK = asked_BD.new_empty(len(asked_BD), 0)
    index_BK = torch.empty(len(asked_BD), 0, dtype=torch.long, device=asked_BD.device)
    for start in range(0, len(features_ND), COLUMNS):
        features_PD = features_ND[start : start + COLUMNS]
        similarity_BP = asked_BD @ features_PD.T
        place_P = torch.arange(start, start + len(features_PD), device=asked_BD.device)
        if own_B is not None:
            similarity_BP.masked_fill_(own_B[:, None] == place_P, -torch.inf)
        here_BK, at_BK = similarity_BP.topk(min(K, len(place_P)))
        # The best so far and the best from here, and of those the best again.
        best, index = torch.cat([best_BK, here_BK], 1), torch.cat([index_BK, place_P[at_BK]], 1)
        best_BK, at_BK = best.topk(min(K, best.shape[1]))
        index_BK = index.gather(1, at_BK)
    return best_BK, index_BK


def votes(weight_BK: Tensor, label_BK: Tensor, classes: int) -> Tensor:
    """The label distribution of neighbours: what each class has of their weight, (B, C)."""
    return weight_BK.new_zeros(len(weight_BK), classes).scatter_add_(1, label_BK, weight_BK)


# ------------------------------------------------------------------------------ is a label wrong?


def capped(loss_N: Tensor, classes: int) -> Tensor:
    """The loss up to that of a prediction that spreads evenly over the classes; 0 to log C.

    Where the network does worse than to know nothing, it says that the label is wrong; how much
    worse tells rather how certain it is. Among many wrong labels those certainties can make modes
    of their own, and a mixture of the loss then parts wrong labels from wrong labels
    (docs/results.md, 80%).
    """
    return loss_N.clamp(max=math.log(classes))


def agreement(near: Neighbours, given_N: Tensor) -> Tensor:
    """How much of the neighbours' weight has another given label than the image; 0 to 1.

    The paper speaks of images that are expected to have many neighbours of their own class. Those
    are counted by weight, since a class may have fewer images than an image has neighbours.
    """
    return 1 - torch.cat([_share(near, part, given_N, given_N) for part in _parts(len(given_N))])


def disagreement(near: Neighbours, given_N: Tensor, classes: int) -> Tensor:
    """Cross-entropy of the given label and the label distribution of neighbours whose own labels
    were corrected first; 0 to log(C·(K+1)).

    As in MOIT, to which the paper refers: an image's corrected label is the class that most of its
    neighbours' weight has, so that wrong labels of neighbours do not count. One vote more is spread
    over all classes, which keeps the logarithm finite.
    """
    parts = _parts(len(given_N))
    corrected_N = torch.cat(
        [votes(*_word_of(near, part, given_N), classes).argmax(1) for part in parts]
    )
    share_N = torch.cat([_share(near, part, corrected_N, given_N) for part in parts])
    K = near.index_NK.shape[1]
    return -((K * share_N + 1 / classes) / (K + 1)).log()


def view_divergence(plain_BC: Tensor, weak_BC: Tensor) -> Tensor:
    """KL(plain ‖ weak) of the predictions of two views, from their logits; 0 or more.

    What was learnt by heart for one view does not hold for another.
    """
    log_plain_BC, log_weak_BC = plain_BC.log_softmax(1), weak_BC.log_softmax(1)
    # Rounding can leave a little less than nothing.
    return (log_plain_BC.exp() * (log_plain_BC - log_weak_BC)).sum(1).clamp(min=0)


def label_divergence(logits_BC: Tensor, given_B: Tensor) -> Tensor:
    """Jensen-Shannon divergence of the prediction and the smoothed given label; 0 to log 2.

    As in Jo-SRC, to which the paper refers. Without the smoothing it would order images as the loss
    does.
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


# ------------------------------------------------------------------------------ is a guess wrong?


def confidence(guess_BC: Tensor) -> Tensor:
    """What the most likely class of a guess lacks to all of it; 0 to 1 - 1/C."""
    return 1 - guess_BC.amax(1) / guess_BC.sum(1)


def entropy(guess_BC: Tensor) -> Tensor:
    """Of a guess, in nats; 0 to log C."""
    share_BC = guess_BC / guess_BC.sum(1, keepdim=True)
    return -torch.xlogy(share_BC, share_BC).sum(1).clamp(max=0)


# ------------------------------------------------------------------------- how good is the space?


def knn_predict(
    asked_MD: Tensor, features_ND: Tensor, given_N: Tensor, classes: int, K: int = NEIGHBOURS
) -> Tensor:
    """The class that most of the weight of the K nearest has, by their given labels (row 24)."""
    K = min(K, len(features_ND))
    predicted = []
    for part in _parts(len(asked_MD)):
        similarity_BK, index_BK = nearest(asked_MD[part], features_ND, K)
        votes_BC = votes(_weights(similarity_BK), given_N[index_BK], classes)
        predicted.append(votes_BC.argmax(1))
    return torch.cat(predicted)


def _weights(similarity_BK: Tensor) -> Tensor:
    return (similarity_BK / TEMPERATURE).softmax(1)


def _word_of(near: Neighbours, part: slice, label_N: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and labels of the neighbours of some images."""
    return near.weight_NK[part], label_N[near.index_NK[part].long()]


def _share(near: Neighbours, part: slice, label_N: Tensor, given_N: Tensor) -> Tensor:
    """What neighbours with the label that an image was given have of the weight."""
    weight_BK, label_BK = _word_of(near, part, label_N)
    share_B = (weight_BK * (label_BK == given_N[part, None])).sum(1)
    return share_B.clamp(max=1)  # rounding can leave a little more


def _parts(images: int) -> list[slice]:
    return [slice(start, min(start + ROWS, images)) for start in range(0, images, ROWS)]
