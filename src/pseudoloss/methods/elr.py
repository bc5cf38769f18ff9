"""Early-Learning Regularisation (Liu et al., NeurIPS 2020).

A network fits correct labels before wrong ones. ELR keeps a moving average of its predictions for
every image and rewards agreement with it, so that what was learned early is not unlearned later.

Shapes: N images in the dataset, B in a batch, C classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import (
    NET,
    Batch,
    Detector,
    LabelState,
    Method,
    Outputs,
    Phase,
    Step,
    Verdict,
    ViewBatch,
)
from pseudoloss.nn.views import WEAK_DRAWS, Views

SMALLEST = 1e-4  # predictions are clipped to SMALLEST..1 - SMALLEST


def clipped_prediction(logits_BC: Tensor) -> Tensor:
    """p: softmax of the logits, clipped."""
    return logits_BC.float().softmax(1).clamp(SMALLEST, 1 - SMALLEST)


def update_target(target_BC: Tensor, p_BC: Tensor, beta: float) -> Tensor:
    """Temporal ensembling: t ← β·t + (1 - β)·p, with p normalised to sum to one."""
    return beta * target_BC + (1 - beta) * p_BC / p_BC.sum(1, keepdim=True)


def regularisation(target_BC: Tensor, p_BC: Tensor) -> Tensor:
    """log(1 - ⟨t, p⟩), the mean over the batch: low where prediction and target agree."""
    return (1 - (target_BC * p_BC).sum(1)).log().mean()


def suggestions(target_NC: Tensor) -> tuple[Tensor, Tensor]:
    """The class of the moving average, and its share of the average as the trust in it."""
    largest_N, suggested_N = target_NC.max(1)
    return suggested_N, largest_N / target_NC.sum(1).clamp(min=1e-12)  # the average starts at 0


@dataclass(frozen=True)
class ELRState(LabelState):
    target_NC: Tensor  # t: moving average of the predictions; 0 before the first one


class ELR(Method):
    def __init__(
        self, detector: Detector, epochs: int, warmup: int, strength: float, beta: float
    ) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs
        self.strength = strength  # λ
        self.beta = beta

    def phases(self) -> tuple[Phase, ...]:
        """ELR itself has no warm-up: both phases have the same step, and the learning rate falls in
        the second."""
        step = Step(self.show, self.loss, WEAK_DRAWS)
        return (
            Phase("warm-up", self.warmup, (step,)),
            Phase("elr", self.epochs - self.warmup, (step,)),
        )

    def start(self, given_N: Tensor, classes: int) -> ELRState:
        target_NC = torch.zeros(len(given_N), classes, device=given_N.device)
        return ELRState(**LabelState.start(given_N, classes), target_NC=target_NC)

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return {NET: ViewBatch([], [view])}

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: ELRState) -> Tensor:
        ((logits_BC, _),) = outputs[NET].with_grad
        p_BC = clipped_prediction(logits_BC)
        target_BC = update_target(state.target_NC[batch.index_B], p_BC.detach(), self.beta)
        state.target_NC[batch.index_B] = target_BC
        fit = F.cross_entropy(logits_BC.float(), batch.given_B)
        return fit + self.strength * regularisation(target_BC, p_BC)

    def verdict(self, state: ELRState, epoch: int) -> Verdict:
        """The class of the moving average is suggested; its share of the average is the trust."""
        suggested_N, trust_N = suggestions(state.target_NC)
        known = super().verdict(state, epoch)
        return known._replace(suggested_N=suggested_N, trust_N=trust_N)
