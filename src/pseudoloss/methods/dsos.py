"""Dynamic Softening of Out-of-distribution Samples, DSOS (Albert et al., WACV 2022).

After a warm-up, the collision entropy of prediction and label sorts the images after every epoch:
it is low for correct labels, log 2 where the network is sure of another class, and higher where it
is sure of none. So of two modes above log 2, the low one has wrong labels that can be corrected,
and the high one out-of-distribution images. These stay in training, with soft targets.

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
    LabelState,
    Method,
    Outputs,
    Phase,
    Scorer,
    Scoring,
    Step,
    Verdict,
    ViewBatch,
    fold,
    no_mixing,
)
from pseudoloss.methods.beta_mixture import fit_two_betas, high_mode, peaks, scaled
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.mixup import show
from pseudoloss.nn.views import WEAK_DRAWS, Views

NOISY_FROM = math.log(2)  # collision entropy of a sure prediction that contradicts the label
ROUNDING = 1e-6
HIGHEST = math.log(4)  # no collision entropy of a label is higher
ROUNDS = 100  # of expectation-maximisation
WHOLE = (0.0, 1.0)  # no values are left out of the fit
PEAK_MIN, PEAK_MAX = -0.1, 1.1  # a mode that peaks outside is not one
ALMOST_ALL = 0.98


def collision_entropy(logits_BC: Tensor, given_BC: Tensor) -> Tensor:
    """v = -log Σ ((p + y) / 2)²: 0 to log 4."""
    mean_BC = (logits_BC.float().softmax(1) + given_BC) / 2
    return -mean_BC.square().sum(1).log()


def entropy(logits_BC: Tensor) -> Tensor:
    """-Σ p log p of each prediction."""
    log_BC = F.log_softmax(logits_BC.float(), dim=1)
    return -(log_BC.exp() * log_BC).sum(1)


def soften(label_BC: Tensor, u_B: Tensor, temperature: float) -> Tensor:
    """ỹ = softmax(y·u / T): the label where u is 1, uniform where it is 0."""
    return (label_BC * u_B[:, None] / temperature).softmax(1)


class Sorted(NamedTuple):
    """What the collision entropies say about all images."""

    noisy_N: Tensor  # bool
    u_N: Tensor  # how far the image is in-distribution; 1 if the label is not noisy
    correct_N: Tensor  # bool: noisy and in-distribution, so that the prediction replaces the label
    fitted: Tensor  # bool, scalar: the noisy ones have two modes


def sort_images(v_N: Tensor, correct_above: float) -> Sorted:
    """Noisy from log 2 on. Among these a mixture of two beta distributions is fitted to v, scaled
    to 0..1: u = 1 - P(high mode), and labels with P(low mode) above a threshold are corrected.
    Where a mode has no peak, or the mixture no two modes, v itself decides: u = 1 - v, and labels
    with v below a half are corrected."""
    noisy_N = v_N >= NOISY_FROM - ROUNDING
    mixture = fit_two_betas(v_N, noisy_N, ROUNDS, WHOLE)
    peak_2 = peaks(mixture)
    low_fits, high_fits = mixture.fitted & (peak_2 > PEAK_MIN) & (peak_2 < PEAK_MAX)
    high_N = high_mode(v_N, mixture.lowest, mixture.highest, mixture.high_T)
    value_N = scaled(v_N, mixture.lowest, mixture.highest)
    u_N = 1 - torch.where(high_fits, high_N, value_N)
    low_N = torch.where(low_fits, 1 - high_N > correct_above, value_N < 0.5)
    u_N = torch.where(noisy_N, u_N, 1).float()
    return Sorted(noisy_N, u_N, noisy_N & low_N, low_fits & high_fits)


@dataclass(frozen=True)
class DSOSState(LabelState):
    entropy_N: Tensor  # v: collision entropy after the last epoch; 0 before the first
    latest_N: Tensor  # int32: predicted class in the same pass
    u_N: Tensor  # how far the image is in-distribution
    label_N: Tensor  # int32: the class that is trained on: given, or corrected
    unfitted: Tensor  # int32, scalar: epochs in which the mixture had no two modes


class DSOS(Method):
    corrects = "DSOS"

    def __init__(
        self,
        detector: Detector,
        epochs: int,
        warmup: int,
        entropy_weight: float,
        dynamic: bool,
        temperature: float,
        correct_above: float,
        warmup_mixup: bool,
        main_batch_size: int,
    ) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs
        self.entropy_weight = entropy_weight
        self.dynamic = dynamic  # the entropy weight depends on the image
        self.temperature = temperature
        self.correct_above = correct_above
        self.warmup_mixup = warmup_mixup
        self.main_batch_size = main_batch_size

    def phases(self) -> tuple[Phase, ...]:
        """The step is the same in both phases: during the warm-up no label is noisy. The second
        phase ends each epoch with a pass over all images that trains nothing."""
        warm_up = Step(
            show, self.loss, WEAK_DRAWS, lambdas=(fold if self.warmup_mixup else no_mixing,)
        )
        main = Step(show, self.loss, WEAK_DRAWS, lambdas=(fold,))
        look = Step(
            self.show_plain,
            self.remember,
            draws=0,
            lambdas=(),
            trains=(),
            moves_norms=(NET,),
            cost=1,
        )
        return (
            Phase("warm-up", self.warmup, (warm_up,)),
            Phase("dsos", self.epochs - self.warmup, (main, look), self.main_batch_size),
        )

    def start(self, given_N: Tensor, classes: int) -> DSOSState:
        zero_N = torch.zeros(len(given_N), device=given_N.device)
        return DSOSState(
            **LabelState.start(given_N, classes),
            entropy_N=zero_N,
            latest_N=given_N.int(),
            u_N=torch.ones_like(zero_N),
            label_N=given_N.int(),
            unfitted=torch.zeros((), dtype=torch.int32, device=given_N.device),
        )

    # ------------------------------------------------------------------------------ the steps

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: DSOSState) -> Tensor:
        """Cross-entropy with the softened targets, mixed, and the entropy of the predictions."""
        ((logits_BC, _),) = outputs[NET].with_grad
        mix = batch.mixes[0]
        u_B, label_B = state.u_N[batch.index_B], state.label_N[batch.index_B].long()
        label_BC = F.one_hot(label_B, logits_BC.shape[1]).float()
        target_BC = soften(label_BC, u_B, self.temperature)
        fit = cross_entropy(logits_BC, mix.of(target_BC)).mean()
        weight_B = mix.of(u_B) if self.dynamic else torch.ones_like(u_B)
        return fit + self.entropy_weight * (weight_B * entropy(logits_BC)).mean()

    def show_plain(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """In training mode: the running statistics become those of plain images."""
        return {NET: ViewBatch([views.plain(batch.images_BCHW)], [])}

    def remember(self, outputs: dict[str, Outputs], batch: Batch, state: DSOSState) -> Tensor:
        """What the network makes of the plain images; the mean collision entropy."""
        ((logits_BC, _),) = outputs[NET].no_grad
        given_BC = F.one_hot(batch.given_B, logits_BC.shape[1]).float()
        v_B = collision_entropy(logits_BC, given_BC)
        state.entropy_N[batch.index_B] = v_B
        state.latest_N[batch.index_B] = logits_BC.argmax(1).int()
        return v_B.mean()

    # ------------------------------------------------------------------------ after an epoch

    def scoring(self, epoch: int) -> Scoring:
        return super().scoring(epoch) if self.in_warm_up(epoch) else Scoring(self.score_and_sort)

    def score_and_sort(self, scorer: Scorer, state: DSOSState) -> None:
        """Which labels are noisy, which of these are corrected and how soft the targets are."""
        self.score(scorer, state)
        noisy_N, u_N, correct_N, fitted = sort_images(state.entropy_N, self.correct_above)
        state.noisy_N.copy_(noisy_N)
        state.p_noisy_N.copy_(state.entropy_N / HIGHEST)
        state.u_N.copy_(u_N)
        state.label_N.copy_(torch.where(correct_N, state.latest_N, scorer.given_N.int()))
        state.fitted.copy_(fitted)
        state.unfitted.add_(~fitted)

    def verdict(self, state: DSOSState, epoch: int) -> Verdict:
        """The last prediction is suggested for noisy labels, and trusted as far as the image is
        in-distribution. During the warm-up the loss alone flags labels."""
        known = super().verdict(state, epoch)
        if self.in_warm_up(epoch):
            return known
        suggested_N = torch.where(state.noisy_N, state.latest_N, state.label_N)
        return known._replace(suggested_N=suggested_N, trust_N=state.u_N)

    def notices(
        self, state: DSOSState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        if self.in_warm_up(epoch):
            return {}
        found: dict[str, str | None] = {}
        share, unfitted = noisy[-1], int(state.unfitted)
        if share == 0:
            text = "DSOS finds no noisy label, so it trains like mixup."
            if len(classes) == 2:  # no label has a collision entropy above log 2
                text += " With two classes it flags a label only if the network is certain of the "
                text += "other class. Use another --method."
            found["noisy"] = text
        if share > ALMOST_ALL:
            found["noisy"] = (
                f"DSOS flags {share:.0%} of the labels as noisy: the network is sure of almost "
                "none. Try a longer --warmup or a higher --entropy-weight."
            )
        if epoch + 1 == self.epochs and unfitted:
            found["mixture"] = (
                f"in {unfitted} of {self.epochs - self.warmup} epochs the collision entropies of "
                "the noisy labels had no two modes; they were used themselves to soften targets."
            )
        return found
