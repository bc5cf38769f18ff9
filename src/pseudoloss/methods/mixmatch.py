"""MixMatch (Berthelot et al., NeurIPS 2019), as methods use it that keep the labels of some images
and train on the others without theirs: DivideMix and EvidentialMix.

Every image has two weak views. The mean prediction for them corrects the label of an image that has
one, and stands in for it where there is none. Then all views are mixed with each other.

Shapes: B images of a kind in a batch (labelled or not), C classes, X = 4·B mixed views.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import Batch, Mix, Outputs
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.pls import class_balance
from pseudoloss.nn.views import WEAK_DRAWS, Views

DRAWS = 2 * WEAK_DRAWS + 2  # random numbers per image: two views, and partners for both


def ramp_up(epochs: float, length: float) -> float:
    """Rises from 0 to 1 over the first `length` epochs."""
    return min(max(epochs / length, 0.0), 1.0)


def mean_prediction(views: Sequence[Tensor]) -> Tensor:
    """The mean of the softmax of the logits of several views or networks."""
    return torch.stack([logits_BC.float().softmax(1) for logits_BC in views]).mean(0)


def sharpen(p_BC: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised. In logarithms, so that no power of a small probability underflows."""
    return (p_BC.clamp(min=torch.finfo(p_BC.dtype).tiny).log() / temperature).softmax(1)


def refine(given_BC: Tensor, p_BC: Tensor, w_B: Tensor, temperature: float) -> Tensor:
    """Sharpened w·y + (1 - w)·p: a label is kept as far as it is probably correct, w."""
    w_B1 = w_B[:, None]
    return sharpen(w_B1 * given_BC + (1 - w_B1) * p_BC, temperature)


def squared_error(logits_XC: Tensor, target_XC: Tensor) -> Tensor:
    """Mean (p - target)², over images and classes (the Brier score, divided by C)."""
    return (logits_XC.float().softmax(1) - target_XC).square().mean()


def of_both_kinds(labelled_BC: Tensor, unlabelled_BC: Tensor) -> Tensor:
    """One row for each view: the first view of the labelled and of the unlabelled images, then the
    second view of both."""
    return torch.cat([labelled_BC, unlabelled_BC, labelled_BC, unlabelled_BC])


def separate(rows_XC: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of labelled and of unlabelled images, from the order of `of_both_kinds`."""
    labelled, unlabelled = rows_XC.unflatten(0, (2, 2, -1)).unbind(1)
    return labelled.flatten(0, 1), unlabelled.flatten(0, 1)


def mixed_loss(logits_XC: Tensor, target_XC: Tensor, strength: Tensor | float) -> Tensor:
    """Cross-entropy of the views that count as labelled, and `strength` times the squared error of
    the others. A mixed view counts as its first, dominant part."""
    labelled, unlabelled = separate(logits_XC)
    labels, guesses = separate(target_XC)
    fit = cross_entropy(labelled, labels).mean()
    return fit + strength * squared_error(unlabelled, guesses)


# --------------------------------------------------------- a step with a stream of either kind


def two_views(views: Views, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two weak views of every image."""
    first, second, _ = batch.draws_BK[:, :DRAWS].split([WEAK_DRAWS, WEAK_DRAWS, 2], dim=1)
    return views.weak(batch.images_BCHW, first), views.weak(batch.images_BCHW, second)


def mixing(batch: Batch) -> Mix:
    """How all 4·B views are mixed: with partners of either kind, and one λ."""
    keys_X = batch.draws_BK[:, DRAWS - 2 : DRAWS].flatten()
    return Mix(keys_X.argsort(stable=True), batch.mixes[0].lam)


def kinds(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of labelled and of unlabelled images in a batch: one half each."""
    labelled, unlabelled = rows.tensor_split(2)
    return labelled, unlabelled


def mixmatch_views(views: Views, batch: Batch) -> tuple[list[Tensor], Tensor]:
    """What a network sees: both views of the unlabelled images, both views of the labelled ones;
    and all of them, mixed."""
    found = two_views(views, batch)
    labelled, unlabelled = zip(*(kinds(view) for view in found), strict=True)
    return [*unlabelled, *labelled], mixing(batch).of(torch.cat(found))


@dataclass(frozen=True)
class MixMatchOptions:
    """Numbers of MixMatch."""

    alpha: float  # λ ~ Beta(α, α), folded
    temperature: float  # of sharpening
    lambda_u: float  # weight of the squared error, in the end
    ramp_epochs: int  # over which it grows
    prior_C: Tensor  # class shares that the mean prediction aims at

    def share(self, epochs: int) -> float:
        """The share of λ_u in the middle of an epoch, so many epochs after the first one."""
        return ramp_up(epochs + 0.5, self.ramp_epochs)


def mixmatch_loss(
    net: Outputs,
    helping: Sequence[Tensor],
    batch: Batch,
    w_N: Tensor,
    share: Tensor,
    options: MixMatchOptions,
) -> Tensor:
    """The loss of a network that has seen `mixmatch_views`, with a term that keeps all classes.

    Args:
        net: what it makes of the views.
        helping: logits (B,C) of another network for the unlabelled images.
        batch: labelled images, then as many unlabelled ones.
        w_N: how probably each label is correct.
        share: of λ_u, in this epoch.
        options: numbers.
    """
    (mixed_XC, _), free = net.with_grad[0], [logits_BC for logits_BC, _ in net.no_grad]
    index_B, _ = kinds(batch.index_B)
    given_B, _ = kinds(batch.given_B)
    given_BC = F.one_hot(given_B, len(options.prior_C)).float()
    T = options.temperature
    label_BC = refine(given_BC, mean_prediction(free[2:]), w_N[index_B], T)
    guess_BC = sharpen(mean_prediction([*free[:2], *helping]), T)
    target_XC = mixing(batch).of(of_both_kinds(label_BC, guess_BC))
    loss = mixed_loss(mixed_XC, target_XC, options.lambda_u * share)
    return loss + class_balance(mixed_XC, options.prior_C)
