"""Plain cross-entropy on the given labels: the baseline that believes every one of them."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.batch import Batch, Outputs, ViewBatch
from pseudoloss.methods.memory import Memory
from pseudoloss.nn.views import WEAK_DRAWS, Views


@dataclass(frozen=True)
class CrossEntropy:
    draws = WEAK_DRAWS
    guess = None
    guess_in_eval = False

    @property
    def warm_up(self) -> "CrossEntropy":
        return self

    def show(self, views: Views, batch: Batch) -> ViewBatch:
        return ViewBatch([], [views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])])

    def loss(self, seen: Outputs, batch: Batch, memory: Memory) -> Tensor:
        ((logits_BC, _),) = seen.learnt
        return F.cross_entropy(logits_BC, batch.given_B)
