"""Jo-SRC: joint sample selection and regularisation based on consistency (Yao et al., CVPR 2021).

Two weak views of every image. A label is clean if the prediction for the first is close to it. Of
the others, images whose views are predicted alike are in-distribution, and a network with averaged
weights corrects their labels; the rest is out-of-distribution and gets an almost uniform target.
The predictions of the two views are pulled together, those of out-of-distribution images apart.

All divergences are in bits.

Shapes: N images in the dataset, B in a batch, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.base import (
    NET,
    Batch,
    Detector,
    Ema,
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
from pseudoloss.methods.losses import cross_entropy, mean_over
from pseudoloss.methods.mixmatch import mean_prediction
from pseudoloss.nn.views import WEAK_DRAWS, Views

EMA = "ema"  # role of the network with averaged weights
SOFTENING = 10.0  # temperature of the targets of out-of-distribution images
ALMOST_ALL = 0.98
OFTEN = 0.5  # share of out-of-distribution images that are as far apart as allowed


def smoothed(given_B: Tensor, classes: int, epsilon: float) -> Tensor:
    """ȳ: 1 - ε for the given class, ε / (C - 1) for each of the others."""
    rest = epsilon / max(classes - 1, 1)
    return rest + (1 - epsilon - rest) * F.one_hot(given_B, classes)


def js_divergence(p_BC: Tensor, q_BC: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions: 0 to 1."""
    mean_BC = (p_BC + q_BC) / 2
    sums = [
        (torch.xlogy(part_BC, part_BC) - torch.xlogy(part_BC, mean_BC)).sum(1)
        for part_BC in (p_BC, q_BC)
    ]
    return ((sums[0] + sums[1]) / (2 * math.log(2))).clamp(0, 1)


def symmetric_kl(first_BC: Tensor, second_BC: Tensor) -> Tensor:
    """KL(p ‖ q) + KL(q ‖ p) = Σ (p - q)(log p - log q), from the logits of two views."""
    log_p_BC = F.log_softmax(first_BC.float(), dim=1)
    log_q_BC = F.log_softmax(second_BC.float(), dim=1)
    return ((log_p_BC.exp() - log_q_BC.exp()) * (log_p_BC - log_q_BC)).sum(1) / math.log(2)


def clean_threshold(epoch: int, epochs: int, warmup: int, first: float, last: float) -> float:
    """τ: rises from 0 to `first` in the warm-up, and from there to `last`."""
    if epoch < warmup:
        return first * epoch / warmup
    return first + (last - first) * (epoch - warmup) / (epochs - warmup)


class Kinds(NamedTuple):
    """What kind of image each is; exactly one of the three."""

    clean_B: Tensor
    id_B: Tensor  # in-distribution, with a wrong label
    ood_B: Tensor  # out-of-distribution


def sort_images(p_clean_B: Tensor, tau: Tensor, agree_B: Tensor) -> Kinds:
    clean_B = p_clean_B >= tau
    return Kinds(clean_B, ~clean_B & agree_B, ~clean_B & ~agree_B)


def targets(kinds: Kinds, label_BC: Tensor, soft_BC: Tensor) -> Tensor:
    """The smoothed label; the averaged network's prediction; or softmax(prediction / 10)."""
    wrong_BC = torch.where(kinds.id_B[:, None], soft_BC, (soft_BC / SOFTENING).softmax(1))
    return torch.where(kinds.clean_B[:, None], label_BC, wrong_BC)


def consistency(divergence_B: Tensor, ood_B: Tensor, largest: float) -> Tensor:
    """The divergence of two views. That of an out-of-distribution image has sign -1, which has no
    lower bound: it is limited to `largest`, and has no gradient beyond."""
    return torch.where(ood_B, -divergence_B.clamp(max=largest), divergence_B)


@dataclass(frozen=True)
class JoSRCState(LabelState):
    tau: Tensor  # threshold of the epoch, scalar
    p_clean_N: Tensor  # 1 - divergence of prediction and label, when the image was seen last
    agree_N: Tensor  # bool: its two views were predicted alike
    class_N: Tensor  # int32: predicted by the averaged network; in the warm-up by the network
    confidence_N: Tensor  # in that class
    suggested_N: Tensor  # int32: that class for noisy labels, the given one for others
    empty: Tensor  # int32, scalar: steps of the warm-up in which no label was clean
    ood: Tensor  # int32, scalar: out-of-distribution images of the epoch
    bounded: Tensor  # int32, scalar: ... whose views were as far apart as allowed


class JoSRC(Method):
    corrects = "Jo-SRC"

    def __init__(
        self,
        detector: Detector,
        classes: int,
        epochs: int,
        warmup: int,
        epsilon: float,
        thresholds: tuple[float, float],
        alpha: float,
        decay: float,
        largest: float,
    ) -> None:
        super().__init__(detector, warmup)
        self.classes = classes
        self.epochs = epochs
        self.epsilon = epsilon
        self.thresholds = thresholds  # τ after the warm-up and at the end
        self.alpha = alpha  # weight of the consistency
        self.largest = largest
        self.ema = {EMA: Ema(NET, decay)}

    def phases(self) -> tuple[Phase, ...]:
        draws = 2 * WEAK_DRAWS
        warm_up = Step(self.show, self.warm_up_loss, draws, lambdas=(), cost=6)
        main = Step(self.show_both, self.loss, draws, lambdas=(), cost=8)
        return (
            Phase("warm-up", self.warmup, (warm_up,)),
            Phase("jo-src", self.epochs - self.warmup, (main,)),
        )

    def start(self, given_N: Tensor, classes: int) -> JoSRCState:
        one_N = torch.ones(len(given_N), device=given_N.device)
        none = torch.zeros((), dtype=torch.int32, device=given_N.device)
        return JoSRCState(
            **LabelState.start(given_N, classes),
            tau=torch.full((), self.thresholds[0], device=given_N.device),
            p_clean_N=one_N,
            agree_N=one_N.bool(),
            class_N=given_N.int(),
            confidence_N=torch.zeros_like(one_N),
            suggested_N=given_N.int(),
            empty=none,
            ood=none.clone(),
            bounded=none.clone(),
        )

    def begin_epoch(self, state: JoSRCState, epoch: int) -> None:
        first, last = self.thresholds
        state.tau.fill_(clean_threshold(epoch, self.epochs, self.warmup, first, last))
        state.ood.zero_()
        state.bounded.zero_()

    # ------------------------------------------------------------------------------ the steps

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """Two weak views."""
        weak = [
            views.weak(batch.images_BCHW, draws_BK)
            for draws_BK in batch.draws_BK[:, : 2 * WEAK_DRAWS].split(WEAK_DRAWS, dim=1)
        ]
        return {NET: ViewBatch([], weak)}

    def show_both(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """... of both networks; the averaged one uses batch statistics too."""
        shown = self.show(views, batch)
        return shown | {EMA: ViewBatch(shown[NET].with_grad, [])}

    def warm_up_loss(self, outputs: dict[str, Outputs], batch: Batch, state: JoSRCState) -> Tensor:
        """Cross-entropy of both views with the smoothed labels that are clean."""
        (first_BC, _), (second_BC, _) = outputs[NET].with_grad
        label_BC = smoothed(batch.given_B, first_BC.shape[1], self.epsilon)
        own_BC = mean_prediction([first_BC.detach(), second_BC.detach()])
        clean_B = self._remember(first_BC, second_BC, label_BC, own_BC, batch, state).clean_B
        state.empty.add_(~clean_B.any())
        loss_B = cross_entropy(first_BC, label_BC) + cross_entropy(second_BC, label_BC)
        return mean_over(loss_B, clean_B)

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: JoSRCState) -> Tensor:
        """(1 - α)·classification + α·consistency."""
        (first_BC, _), (second_BC, _) = outputs[NET].with_grad
        label_BC = smoothed(batch.given_B, first_BC.shape[1], self.epsilon)
        soft_BC = mean_prediction([logits_BC for logits_BC, _ in outputs[EMA].no_grad])
        kinds = self._remember(first_BC, second_BC, label_BC, soft_BC, batch, state)
        target_BC = targets(kinds, label_BC, soft_BC)
        classification_B = cross_entropy(first_BC, target_BC) + cross_entropy(second_BC, target_BC)
        divergence_B = symmetric_kl(first_BC, second_BC)
        consistency_B = consistency(divergence_B, kinds.ood_B, self.largest)
        state.ood.add_(kinds.ood_B.sum())
        state.bounded.add_((kinds.ood_B & (divergence_B > self.largest)).sum())
        return (1 - self.alpha) * classification_B.mean() + self.alpha * consistency_B.mean()

    def _remember(
        self,
        first_BC: Tensor,
        second_BC: Tensor,
        label_BC: Tensor,
        soft_BC: Tensor,
        batch: Batch,
        state: JoSRCState,
    ) -> Kinds:
        """What the images of a batch are, also for the label table."""
        first_BC, second_BC = first_BC.detach(), second_BC.detach()
        p_clean_B = 1 - js_divergence(first_BC.float().softmax(1), label_BC)
        agree_B = first_BC.argmax(1) == second_BC.argmax(1)
        confidence_B, class_B = soft_BC.max(1)
        state.p_clean_N[batch.index_B] = p_clean_B
        state.agree_N[batch.index_B] = agree_B
        state.class_N[batch.index_B] = class_B.int()
        state.confidence_N[batch.index_B] = confidence_B
        return sort_images(p_clean_B, state.tau, agree_B)

    # ------------------------------------------------------------------------ after an epoch

    def scoring(self, epoch: int) -> Scoring:
        return Scoring(self.score_and_flag)

    def score_and_flag(self, scorer: Scorer, state: JoSRCState) -> None:
        """Losses and predictions; labels are flagged as the steps of the epoch have found."""
        self.score(scorer, state)
        state.noisy_N.copy_(state.p_clean_N < state.tau)
        state.p_noisy_N.copy_(1 - state.p_clean_N)
        suggested_N = torch.where(state.noisy_N, state.class_N, scorer.given_N.int())
        state.suggested_N.copy_(suggested_N)

    def verdict(self, state: JoSRCState, epoch: int) -> Verdict:
        """The class that the averaged network predicts is suggested for noisy labels; trusted as
        far as it is sure, and not at all if the image is out-of-distribution."""
        trust_N = torch.where(state.noisy_N, state.confidence_N * state.agree_N, 1)
        known = super().verdict(state, epoch)
        return known._replace(suggested_N=state.suggested_N, trust_N=trust_N)

    def notices_at_start(self) -> dict[str, str | None]:
        """With few classes, smoothed labels of two classes are close to each other."""
        found = super().notices_at_start()
        one_BC, other_BC = smoothed(torch.tensor([[0], [1]]), self.classes, self.epsilon)
        p_clean = 1 - float(js_divergence(one_BC, other_BC))
        if p_clean < self.thresholds[0]:
            return found | {"smoothing": None}
        return found | {
            "smoothing": f"with {self.classes} classes and --label-smoothing {self.epsilon:g}, "
            f"wrong labels count as clean: they score up to {p_clean:.2f}, and --clean-threshold "
            f"is {self.thresholds[0]:g}. Use a lower --label-smoothing, such as 0.1."
        }

    def notices(
        self, state: JoSRCState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        empty, ood, bounded = int(state.empty), int(state.ood), int(state.bounded)
        if empty and epoch + 1 == self.warmup:
            found["empty"] = (
                f"{empty} steps of the warm-up found no clean label and trained nothing. Try a "
                "lower --clean-threshold or a lower --lr."
            )
        if self.in_warm_up(epoch):
            return found
        if noisy[-1] > ALMOST_ALL:
            found["noisy"] = (
                f"Jo-SRC flags {noisy[-1]:.0%} of the labels as noisy: predictions are further "
                "from the smoothed labels than --clean-threshold allows. Try a lower one, or "
                "another --label-smoothing."
            )
        if noisy[-1] == 0:
            found["noisy"] = (
                "Jo-SRC finds no noisy label, so nothing is corrected. If you know of wrong "
                "labels, try a higher --clean-threshold or a lower --label-smoothing."
            )
        if epoch + 1 == self.epochs and bounded > OFTEN * ood:
            found["bound"] = (
                f"in the last epoch the views of {bounded:,} of {ood:,} out-of-distribution images "
                f"were {self.largest:g} bits apart or more, as far as --largest-divergence lets "
                "them be pushed."
            )
        return found
