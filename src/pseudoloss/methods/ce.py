"""Plain cross-entropy on the given labels: the baseline that believes every one of them."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pseudoloss.memory import Memory
from pseudoloss.methods.batch import Batch
from pseudoloss.networks import Network
from pseudoloss.views import WEAK_DRAWS, Views


@dataclass(frozen=True)
class CrossEntropy:
    draws = WEAK_DRAWS
    guesses = False

    def loss(self, network: Network, views: Views, batch: Batch, memory: Memory) -> Tensor:
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        logits_BC, _ = network(view)
        return F.cross_entropy(logits_BC, batch.given_B)

    warm_up_loss = loss
