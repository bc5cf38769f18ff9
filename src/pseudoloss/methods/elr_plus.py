"""ELR+ (Liu et al., NeurIPS 2020): early-learning regularisation with two networks.

The networks are trained in turn, on mixed images. What one is held to comes from the other: from
the predictions of a moving average of its weights for the images before mixing.

Shapes: N images in the dataset, B in a batch, C classes; 2 networks.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import (
    Batch,
    Detector,
    Ema,
    LabelState,
    Method,
    Outputs,
    Phase,
    Step,
    Verdict,
    ViewBatch,
)
from pseudoloss.methods.elr import clipped_prediction, regularisation, suggestions, update_target
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.mixup import folded_beta
from pseudoloss.nn.views import WEAK_DRAWS, Views

FIRST, SECOND = "first", "second"
FOLLOWS_FIRST, FOLLOWS_SECOND = "follows-first", "follows-second"  # averages of their weights
NETWORKS, FOLLOWERS = (FIRST, SECOND), (FOLLOWS_FIRST, FOLLOWS_SECOND)
RAMP_SHARE = 40_000 / (250 * 50_000 / 128)  # of the authors' run
SMALLEST_SHARE = 1e-12  # of a class in a target that refines labels
LOW = 0.5  # the regularisation should reach this share of its weight


def sigmoid_ramp(step: Tensor, steps: int) -> Tensor:
    """r(s) = exp(-5·(1 - s / S)²): rises from almost 0 to 1 over S steps."""
    return (-5 * (1 - (step / steps).clamp(0, 1)).square()).exp()


def refined(label_BC: Tensor, target_BC: Tensor) -> Tensor:
    """ỹ ∘ q, normalised: of the mixed classes, those that the target agrees with."""
    product_BC = label_BC * target_BC.clamp(min=SMALLEST_SHARE)
    return product_BC / product_BC.sum(1, keepdim=True)


@dataclass(frozen=True)
class ELRPlusState(LabelState):
    target_2NC: Tensor  # t of each network: the moving average of what the other one predicts
    seen_2: Tensor  # int64: images that each network was trained on, repetitions included


class ELRPlus(Method):
    networks = NETWORKS
    predicts = NETWORKS

    def __init__(
        self,
        detector: Detector,
        epochs: int,
        warmup: int,
        strength: float,
        beta: float,
        alpha: float,
        decay: float,
        batch_size: int,
        steps: int,
        ramp_steps: int | None,
    ) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs
        self.strength = strength  # λ of the regularisation
        self.beta = beta
        self.lambda_rule = folded_beta(alpha)  # λ of mixup
        self.batch_size = batch_size
        self.steps = steps  # of each network, in the whole run
        self.ramp_steps = ramp_steps or max(round(RAMP_SHARE * steps), 1)
        self.ema = {
            role: Ema(NETWORKS[own], partial(self.decay_of, own, decay), copy_buffers=False)
            for own, role in enumerate(FOLLOWERS)
        }

    def phases(self) -> tuple[Phase, ...]:
        """ELR+ itself has no warm-up: both phases have the same steps, and the learning rate falls
        in the second."""
        turns = tuple(
            Step(
                partial(self.show, own),
                partial(self.loss, own),
                WEAK_DRAWS,
                lambdas=(self.lambda_rule,),
                trains=(NETWORKS[own],),
                moves_norms=(FOLLOWERS[1 - own],),
                cost=4,
            )
            for own in range(2)
        )
        return (
            Phase("warm-up", self.warmup, turns),
            Phase("elr-plus", self.epochs - self.warmup, turns),
        )

    def start(self, given_N: Tensor, classes: int) -> ELRPlusState:
        device = given_N.device
        return ELRPlusState(
            **LabelState.start(given_N, classes),
            target_2NC=torch.zeros(2, len(given_N), classes, device=device),
            seen_2=torch.zeros(2, dtype=torch.int64, device=device),
        )

    def steps_of(self, own: int, state: ELRPlusState) -> Tensor:
        """How many steps a network has been trained."""
        return state.seen_2[own] / self.batch_size

    def decay_of(self, own: int, decay: float, state: ELRPlusState) -> Tensor:
        """Of the moving average of its weights, after a step."""
        return decay * sigmoid_ramp(self.steps_of(own, state) + 1, self.ramp_steps)

    def show(self, own: int, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """Mixed images for the network, the same before mixing for the average of the other one."""
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return {
            NETWORKS[own]: ViewBatch([], [batch.mixes[0].of(view)]),
            FOLLOWERS[1 - own]: ViewBatch([view], []),
        }

    def loss(
        self, own: int, outputs: dict[str, Outputs], batch: Batch, state: ELRPlusState
    ) -> Tensor:
        """Cross-entropy with the refined label, and ELR's term with the mixed target."""
        ((logits_BC, _),) = outputs[NETWORKS[own]].with_grad
        ((other_BC, _),) = outputs[FOLLOWERS[1 - own]].no_grad
        mix, index_B = batch.mixes[0], batch.index_B
        target_BC = state.target_2NC[own, index_B]
        target_BC = update_target(target_BC, other_BC.float().softmax(1), self.beta)
        state.target_2NC[own, index_B] = target_BC
        state.seen_2[own] += len(index_B)

        q_BC = mix.of(target_BC)
        label_BC = mix.of(F.one_hot(batch.given_B, logits_BC.shape[1]).float())
        fit = cross_entropy(logits_BC, refined(label_BC, q_BC)).mean()
        strength = self.strength * sigmoid_ramp(self.steps_of(own, state), self.ramp_steps)
        return fit + strength * regularisation(q_BC, clipped_prediction(logits_BC))

    def verdict(self, state: ELRPlusState, epoch: int) -> Verdict:
        """As ELR does, with the mean of both targets."""
        suggested_N, trust_N = suggestions(state.target_2NC.mean(0))
        return super().verdict(state, epoch)._replace(suggested_N=suggested_N, trust_N=trust_N)

    def notices_at_start(self) -> dict[str, str | None]:
        reached = math.exp(-5 * (1 - min(self.steps / self.ramp_steps, 1)) ** 2)
        if reached >= LOW:
            return {"ramp": None}
        return {
            "ramp": f"the regularisation reaches only {reached:.0%} of its weight in this run of "
            f"{self.steps} steps. Use fewer --ramp-steps, or leave it out."
        }
