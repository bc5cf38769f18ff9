"""Co-teaching (Han et al., NeurIPS 2018).

Two networks see the same batch. Each picks the images with the smallest losses, which are the most
likely to be labelled correctly, and the other one learns from them.

Shapes: N images in the dataset, B in a batch, C classes.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import (
    Batch,
    Detector,
    LabelState,
    Method,
    Outputs,
    Phase,
    Scorer,
    Scoring,
    Step,
    Verdict,
    ViewBatch,
)
from pseudoloss.methods.losses import mean_over
from pseudoloss.nn.views import WEAK_DRAWS, Views

FIRST, SECOND = "first", "second"


def kept_share(epoch: int, forget_rate: float, forget_epochs: int) -> float:
    """R(e) = 1 - τ·min(e / E_k, 1): the share of a batch that is learned from, in epoch e."""
    return 1 - forget_rate * min(epoch / forget_epochs, 1)


def smallest(loss_B: Tensor, share: Tensor) -> Tensor:
    """Which images are among the `share` of the batch with the smallest losses; at least one is."""
    rank_B = loss_B.argsort().argsort()
    return rank_B < (share * len(loss_B)).floor().clamp(min=1)


@dataclass(frozen=True)
class CoTeachingState(LabelState):
    kept: Tensor  # R(e), scalar
    confidence_N: Tensor  # mean probability of the predicted class over both networks


class CoTeaching(Method):
    networks = (FIRST, SECOND)

    def __init__(
        self,
        detector: Detector,
        epochs: int,
        warmup: int,
        forget_rate: float,
        forget_epochs: int,
        ensemble: bool,
    ) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs
        self.forget_rate = forget_rate
        self.forget_epochs = forget_epochs
        self.predicts = (FIRST, SECOND) if ensemble else (FIRST,)

    def phases(self) -> tuple[Phase, ...]:
        """Both phases have the same step; the learning rate falls in the second."""
        step = Step(self.show, self.loss, WEAK_DRAWS, trains=(FIRST, SECOND), cost=6)
        return (
            Phase("warm-up", self.warmup, (step,)),
            Phase("co-teaching", self.epochs - self.warmup, (step,)),
        )

    def start(self, given_N: Tensor, classes: int) -> CoTeachingState:
        return CoTeachingState(
            **LabelState.start(given_N, classes),
            kept=torch.ones((), device=given_N.device),
            confidence_N=torch.zeros(len(given_N), device=given_N.device),
        )

    def begin_epoch(self, state: CoTeachingState, epoch: int) -> None:
        state.kept.fill_(kept_share(epoch, self.forget_rate, self.forget_epochs))

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return {role: ViewBatch([], [view]) for role in self.networks}

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: CoTeachingState) -> Tensor:
        """The sum of both networks' losses, each over the images that the other one picked."""
        first_B, second_B = (
            F.cross_entropy(outputs[role].with_grad[0][0].float(), batch.given_B, reduction="none")
            for role in self.networks
        )
        for_second_B = smallest(first_B.detach(), state.kept)
        for_first_B = smallest(second_B.detach(), state.kept)
        return mean_over(first_B, for_first_B) + mean_over(second_B, for_second_B)

    def scoring(self, epoch: int) -> Scoring:
        return replace(super().scoring(epoch), passes=1 + len(self.networks))

    def score(self, scorer: Scorer, state: CoTeachingState) -> None:
        """Also the mean probability of the predicted class over both networks."""
        super().score(scorer, state)
        state.confidence_N.zero_()
        for role in self.networks:
            for rows, (logits_BC,) in scorer.logits(role=role):
                class_B1 = state.predicted_N[rows, None].long()
                p_B = logits_BC.float().softmax(1).gather(1, class_B1)[:, 0]
                state.confidence_N[rows] += p_B / len(self.networks)

    def verdict(self, state: CoTeachingState, epoch: int) -> Verdict:
        """The predicted class is suggested, and trusted as far as both networks are sure of it."""
        known = super().verdict(state, epoch)
        return known._replace(suggested_N=state.predicted_N, trust_N=state.confidence_N)
