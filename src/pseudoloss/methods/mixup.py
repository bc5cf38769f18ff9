"""mixup (Zhang et al., ICLR 2018): train on convex combinations of pairs of images.

Shapes: B images in a batch, C classes.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import (
    NET,
    Batch,
    Detector,
    Method,
    Outputs,
    Phase,
    Step,
    ViewBatch,
    beta,
    fold,
)
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.nn.views import WEAK_DRAWS, Views


def show(views: Views, batch: Batch) -> dict[str, ViewBatch]:
    """A mixed weak view."""
    view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
    return {NET: ViewBatch([], [batch.mixes[0].of(view)])}


def loss(outputs: dict[str, Outputs], batch: Batch, state: object) -> Tensor:
    """Cross-entropy with the mixed labels."""
    ((logits_BC, _),) = outputs[NET].with_grad
    given_BC = F.one_hot(batch.given_B, logits_BC.shape[1]).float()
    return cross_entropy(logits_BC, batch.mixes[0].of(given_BC)).mean()


def mixup_step(lambda_rule: Callable[[Tensor], Tensor] = fold) -> Step:
    """The step of the baseline, and of the warm-up of PLS."""
    return Step(show, loss, WEAK_DRAWS, lambdas=(lambda_rule,))


def folded_beta(alpha: float) -> Callable[[Tensor], Tensor]:
    """λ ~ Beta(α, α), folded. Folding changes nothing about a batch as a whole: each image is also
    somebody's partner."""
    return fold if alpha == 1 else beta(alpha, folded=True)


class Mixup(Method):
    def __init__(self, detector: Detector, epochs: int, warmup: int, alpha: float) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs
        self.lambda_rule = folded_beta(alpha)

    def phases(self) -> tuple[Phase, ...]:
        """Two phases of the same step: the learning rate falls in the second."""
        step = mixup_step(self.lambda_rule)
        return (
            Phase("warm-up", self.warmup, (step,)),
            Phase("mixup", self.epochs - self.warmup, (step,)),
        )
