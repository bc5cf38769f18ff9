"""Cross-entropy on the given labels: the baseline that takes every label as correct."""

import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import NET, Batch, Detector, Method, Outputs, Phase, Step, ViewBatch
from pseudoloss.nn.views import WEAK_DRAWS, Views


class CrossEntropy(Method):
    def __init__(self, detector: Detector, epochs: int, warmup: int) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs

    def phases(self) -> tuple[Phase, ...]:
        """Two phases of the same step: the learning rate falls in the second."""
        step = Step(self.show, self.loss, WEAK_DRAWS)
        return (
            Phase("warm-up", self.warmup, (step,)),
            Phase("ce", self.epochs - self.warmup, (step,)),
        )

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return {NET: ViewBatch([], [view])}

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: object) -> Tensor:
        ((logits_BC, _),) = outputs[NET].with_grad
        return F.cross_entropy(logits_BC, batch.given_B)
