"""mixup (Zhang et al., ICLR 2018): train on convex combinations of pairs.

Shapes: B images in a batch, C classes.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.batch import Batch, Outputs, ViewBatch
from pseudoloss.methods.memory import Memory
from pseudoloss.nn.views import WEAK_DRAWS, Views


def mix(x: Tensor, partner_B: Tensor, lam: Tensor) -> Tensor:
    """λ·x + (1-λ)·x of the partner."""
    return lam * x + (1 - lam) * x[partner_B]


def cross_entropy(logits_BC: Tensor, target_BC: Tensor) -> Tensor:
    """-Σ target·log softmax(logits), a value an image; in float32, whatever the logits are in."""
    return -(target_BC * F.log_softmax(logits_BC.float(), dim=1)).sum(1)  # row 10


@dataclass(frozen=True)
class Mixup:
    """The baseline, and the warm-up of PLS."""

    draws = WEAK_DRAWS
    guess = None
    guess_in_eval = False

    @property
    def warm_up(self) -> "Mixup":
        return self

    def show(self, views: Views, batch: Batch) -> ViewBatch:
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return ViewBatch([], [mix(view, batch.partner_B, batch.lam)])

    def loss(self, seen: Outputs, batch: Batch, memory: Memory) -> Tensor:
        ((logits_BC, _),) = seen.learnt
        given_BC = F.one_hot(batch.given_B, logits_BC.shape[1]).float()
        return cross_entropy(logits_BC, mix(given_BC, batch.partner_B, batch.lam)).mean()
