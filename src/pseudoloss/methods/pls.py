"""Pseudo-Loss Selection (Albert et al., "Is your noise correction noisy?", WACV 2023).

First the paper's equations, in its order; then Algorithm 1: the step, and both stages at the end of
an epoch. How stage 1 flags labels by their loss (section 3.1) is shared with the other methods and
is in detection.py. "Row n" is a row of docs/paper-and-code.md, which lists where the paper and the
released program differ and what we chose.

Shapes: N images in the dataset, B in a batch, C classes, D dimensions of the contrastive space.
Letters: γ gamma, μ mu, λ lam, w trust; ŷ pseudo-label.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods import pls_notices
from pseudoloss.methods.base import (
    NET,
    Batch,
    Detector,
    Method,
    Mix,
    Outputs,
    Phase,
    Scorer,
    Scoring,
    Step,
    Verdict,
    ViewBatch,
)
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.mixture import Mixture, fit_two_modes
from pseudoloss.methods.mixup import mixup_step
from pseudoloss.methods.pls_metrics import compare_pseudo_labels
from pseudoloss.methods.pseudo_labels import PLSState
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS, Views

# ---------------------------------- 3.2.1 Guessing labels for the detected noisy samples (Eq. 1)


def by_sum(log_BC: Tensor) -> Tensor:
    """Numbers, given as logarithms, divided by their sum."""
    return log_BC.softmax(1)


def by_max(log_BC: Tensor) -> Tensor:
    """Numbers, given as logarithms, divided by their maximum: the paper's form (row 3)."""
    return (log_BC - log_BC.amax(1, keepdim=True)).exp()


def make_pseudo_labels(
    first_BC: Tensor,
    second_BC: Tensor,
    gamma: float,
    normalise: Callable[[Tensor], Tensor] = by_sum,
) -> Tensor:
    """Eq. 1: ŷ = ((φ(x₁) + φ(x₂)) / 2)^γ, normalised, from the logits of two weak views.

    Computed in logarithms, so that no power of a small probability underflows.
    """
    return normalise(gamma * log_mean_prediction(first_BC, second_BC))


def log_mean_prediction(first_BC: Tensor, second_BC: Tensor) -> Tensor:
    """log of (φ(x₁) + φ(x₂)) / 2, from logits."""
    log_first_BC = F.log_softmax(first_BC.float(), dim=1)
    log_second_BC = F.log_softmax(second_BC.float(), dim=1)
    return torch.logaddexp(log_first_BC, log_second_BC) - math.log(2)


# ------------------------------------------------- 3.2.2 Correcting only confident pseudo-labels


def pseudo_loss(pseudo_BC: Tensor, logits_BC: Tensor) -> Tensor:
    """Eq. 2: l_pseudo = -ŷ log φ(x), of the pseudo-label and the plain view."""
    return cross_entropy(logits_BC, pseudo_BC)


def trust_by_mixture(pseudo_loss_N: Tensor, noisy_N: Tensor) -> tuple[Tensor, Mixture]:
    """w: P(low mode) of the pseudo-loss, or of another metric, over the noisy images; 1 for the
    others."""
    mixture = fit_two_modes(pseudo_loss_N, noisy_N)
    return mixture.low_N, mixture


def trust_confident(doubt_N: Tensor, noisy_N: Tensor, threshold: float) -> Tensor:
    """w as in the supplement's table of thresholds, for comparison: 1 where the confidence of the
    pseudo-label, 1 - doubt, exceeds the threshold, else 0; 1 for images that are not noisy."""
    return (~noisy_N | (1 - doubt_N > threshold)).float()


def weighted_mean(loss_B: Tensor, w_B: Tensor | None) -> Tensor:
    """Σ w·loss / Σ w; 0 where nothing in the batch is trusted. None: w = 1 everywhere."""
    if w_B is None:
        return loss_B.mean()  # not w = 1: some compilers of GPU code break on sums over a constant
    return (w_B * loss_B).sum() / w_B.sum().clamp(min=1e-12)


def classification_separate(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None, mix: Mix
) -> Tensor:
    """Eq. 3 as released: l_classif = λ·A + (1-λ)·B, each with its own normaliser (row 4)."""
    partner_w_B = None if w_B is None else w_B[mix.partner_B]
    own = weighted_mean(cross_entropy(logits_BC, target_BC), w_B)
    partner = weighted_mean(cross_entropy(logits_BC, target_BC[mix.partner_B]), partner_w_B)
    return mix.lam * own + (1 - mix.lam) * partner


def classification_interpolated(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None, mix: Mix
) -> Tensor:
    """Eq. 3 as printed: target and w interpolated, one normaliser (row 4)."""
    loss_B = cross_entropy(logits_BC, mix.of(target_BC))
    return weighted_mean(loss_B, None if w_B is None else mix.of(w_B))


def classification_first(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None, mix: Mix
) -> Tensor:
    """Eq. 3 as released at another commit: the target interpolated, w not (row 4)."""
    return weighted_mean(cross_entropy(logits_BC, mix.of(target_BC)), w_B)


def class_balance(logits_BC: Tensor, prior_C: Tensor) -> Tensor:
    """KL(prior ‖ mean prediction of the batch), so that no class is forgotten (row 14)."""
    log_BC = F.log_softmax(logits_BC.float(), dim=1)
    log_mean_C = log_BC.logsumexp(0) - math.log(len(log_BC))
    return (torch.xlogy(prior_C, prior_C) - prior_C * log_mean_C).sum()


# ------------------------------------------------------------ 3.2.3 Supervised contrastive learning


def feature_similarity(weak_BD: Tensor, strong_BD: Tensor, mu: float) -> Tensor:
    """Eq. 4: P = g(φ(X₁)) g(φ(X′))ᵀ / μ, of L2-normalised projections."""
    return F.normalize(weak_BD.float()) @ F.normalize(strong_BD.float()).T / mu


def contrastive_loss(P_BB: Tensor, L_BB: Tensor) -> Tensor:
    """Eq. 5 and 7: the row-wise cross-entropy of the softmax of P with L, whose rows are scaled
    to sum to one (row 9). Naive with L = Y Yᵀ, confidence guided with the labels of Eq. 6."""
    return (cross_entropy(P_BB, L_BB) / L_BB.sum(1)).mean()


# --------------------------------------- 3.2.4 Confidence guided contrastive learning under noise


def contrastive_label(class_BC: Tensor, w_B: Tensor | None) -> Tensor:
    """Eq. 6: y_cont = concat(w·ŷ, (1-w)·O(i, B)).

    A trusted image is similar to its class, another one only to itself: O(i, B) is the one-hot
    code of its position in the batch. With w = 1 everywhere (None) the class is left.
    """
    if w_B is None:
        return class_BC
    return torch.cat([w_B[:, None] * class_BC, torch.diag(1 - w_B)], dim=1)


def similarity_of_rows(label_BX: Tensor, mix: Mix) -> Tensor:
    """L′ as released: L = Y Yᵀ, then its rows mixed as the images were; the strong views that
    they are compared with are not mixed (row 7)."""
    return mix.of(label_BX @ label_BX.T)


def similarity_of_mixed(label_BX: Tensor, mix: Mix) -> Tensor:
    """L′ as printed: Y_mix Y_mixᵀ (row 7)."""
    mixed_BX = mix.of(label_BX)
    return mixed_BX @ mixed_BX.T


def class_of_mixed(target_BC: Tensor, mix: Mix) -> Tensor:
    """One-hot class of the mixed target, as released: a soft pseudo-label can take its partner's
    class (row 8)."""
    return one_hot_of(mix.of(target_BC))


def class_of_own(target_BC: Tensor, mix: Mix) -> Tensor:
    """One-hot class of the image's own target, as in the paper (row 8)."""
    return one_hot_of(target_BC)


def one_hot_of(target_BC: Tensor) -> Tensor:
    return F.one_hot(target_BC.argmax(1), target_BC.shape[1]).float()


# ----------------------------------------------------------------------------------- Algorithm 1

Trust = Callable[[PLSState], tuple[Tensor, Mixture | None]]


@dataclass(frozen=True)
class Options:
    """The parts of PLS that can be exchanged or switched off; `methods.build` makes them from the
    settings."""

    make_pseudo_labels: Callable[[Tensor, Tensor], Tensor] | None  # None: labels stay as given
    pseudo_labels_in_eval: bool  # False: batch statistics, and running ones move (row 12)
    trust: Trust  # stage 2
    trust_values: str | None  # what its mixture is fitted to; None where a threshold decides
    initial_trust: bool  # trust before the first epoch after the warm-up (row 11)
    trust_in_classification: bool
    trust_in_contrast: bool
    classification: Callable[[Tensor, Tensor, Tensor | None, Mix], Tensor]
    lambda_rule: Callable[[Tensor], Tensor]  # λ from a uniform random number (row 5)
    contrast: bool
    mu: float
    contrastive_class: Callable[[Tensor, Mix], Tensor]
    label_similarity: Callable[[Tensor, Mix], Tensor]
    separate_contrast_mix: bool  # a λ and partners of its own (row 6)
    balance: float  # weight of the class-balance term
    prior_C: Tensor


class PLS(Method):
    """Algorithm 1. Methods that add to it can override single parts of it."""

    compared = ("metrics", "bias", "pseudo_loss")
    corrects = "PLS"
    scored_by: str | None = None  # role of the network that both stages ask; None: that predicts
    pseudo_labels_by: str = NET  # ... and of the one that makes pseudo-labels

    def __init__(self, detector: Detector, options: Options, epochs: int, warmup: int) -> None:
        super().__init__(detector, warmup)
        self.options = options
        self.epochs = epochs

    @property
    def uses_strong_view(self) -> bool:
        return self.options.contrast

    def phases(self) -> tuple[Phase, ...]:
        o = self.options
        forward = 2 * (o.make_pseudo_labels is not None)
        backward = 1 + self.uses_strong_view + (o.contrast and o.separate_contrast_mix)
        step = Step(
            self.show,
            self.loss,
            draws=2 * WEAK_DRAWS + STRONG_DRAWS,
            lambdas=(o.lambda_rule, o.lambda_rule) if o.separate_contrast_mix else (o.lambda_rule,),
            cost=forward + 3 * backward,
        )
        return (
            Phase("warm-up", self.warmup, (mixup_step(o.lambda_rule),)),  # lines 1 to 7
            Phase("pls", self.epochs - self.warmup, (step,)),
        )

    def start(self, given_N: Tensor, classes: int) -> PLSState:
        return PLSState.begin(given_N, classes)

    # ------------------------------------------------------------------------------- the step

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """Lines 11 to 15: two weak views, of which the first is mixed too, and a strong one."""
        o, images_BCHW = self.options, batch.images_BCHW
        first_draws, second_draws, strong_draws = batch.draws_BK.split(
            [WEAK_DRAWS, WEAK_DRAWS, batch.draws_BK.shape[1] - 2 * WEAK_DRAWS], dim=1
        )
        weak_view = views.weak(images_BCHW, first_draws)
        for_pseudo_labels = []
        if o.make_pseudo_labels is not None:
            for_pseudo_labels = [weak_view, views.weak(images_BCHW, second_draws)]
        with_grad = [self.mixed_view(weak_view, batch)]
        if self.uses_strong_view:
            with_grad.append(self.strong_view(views, images_BCHW, strong_draws))
        if o.contrast and o.separate_contrast_mix:
            with_grad.append(batch.mixes[1].of(weak_view))
        if o.pseudo_labels_in_eval:
            return {NET: ViewBatch([], with_grad, in_eval=for_pseudo_labels)}
        return {NET: ViewBatch(for_pseudo_labels, with_grad)}

    def mixed_view(self, weak_view: Tensor, batch: Batch) -> Tensor:
        """The view of the classification loss."""
        return self.mixing(batch).of(weak_view)

    def mixing(self, batch: Batch) -> Mix:
        """How views and targets of the classification loss are mixed."""
        return batch.mixes[0]

    def strong_view(self, views: Views, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
        """The view that contrastive learning compares with the mixed one."""
        return views.strong(images_BCHW, draws_BK)

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: PLSState) -> Tensor:
        """Lines 16 to 27."""
        target_BC = self.targets(outputs, batch, state)
        return self.terms(outputs[NET], target_BC, state.trust_N[batch.index_B], batch)

    def targets(self, outputs: dict[str, Outputs], batch: Batch, state: PLSState) -> Tensor:
        """Lines 16 to 18: given labels, or pseudo-labels where these are noisy."""
        target_BC = F.one_hot(batch.given_B, len(self.options.prior_C)).float()
        if self.options.make_pseudo_labels is None:
            return target_BC
        pseudo_BC = self.pseudo_labels_of(outputs, state)
        state.store(batch.index_B, pseudo_BC)
        return torch.where(state.noisy_N[batch.index_B, None], pseudo_BC, target_BC)

    def pseudo_labels_of(self, outputs: dict[str, Outputs], state: PLSState) -> Tensor:
        """The pseudo-labels of a batch."""
        return self.make_pseudo_labels(*self.weak_logits(outputs), state)

    def weak_logits(self, outputs: dict[str, Outputs]) -> tuple[Tensor, Tensor]:
        """Logits of the two weak views that pseudo-labels are made of."""
        net, in_eval = outputs[self.pseudo_labels_by], self.options.pseudo_labels_in_eval
        (first_BC, _), (second_BC, _) = net.in_eval if in_eval else net.no_grad
        return first_BC, second_BC

    def make_pseudo_labels(self, first_BC: Tensor, second_BC: Tensor, state: PLSState) -> Tensor:
        """Eq. 1, from the logits of two weak views."""
        assert self.options.make_pseudo_labels is not None
        return self.options.make_pseudo_labels(first_BC, second_BC)

    def terms(self, net: Outputs, target_BC: Tensor, w_B: Tensor, batch: Batch) -> Tensor:
        """Lines 19 to 27: the terms of the loss."""
        o, mix = self.options, self.mixing(batch)
        logits_BC, weak_BD = net.with_grad[0]
        w_classif_B = w_B if o.trust_in_classification else None
        loss = o.classification(logits_BC, target_BC, w_classif_B, mix)
        if o.balance > 0:
            loss = loss + o.balance * class_balance(logits_BC, o.prior_C)
        if o.contrast:
            _, strong_BD = net.with_grad[1]
            if o.separate_contrast_mix:
                (_, weak_BD), mix = net.with_grad[2], batch.mixes[1]
            class_BC = o.contrastive_class(target_BC, mix)
            label_BX = contrastive_label(class_BC, w_B if o.trust_in_contrast else None)
            L_BB = o.label_similarity(label_BX, mix)
            P_BB = feature_similarity(weak_BD, strong_BD, o.mu)
            loss = loss + contrastive_loss(P_BB, L_BB)
        return loss

    # ----------------------------------------------------------- both stages, after an epoch

    def scoring(self, epoch: int) -> Scoring:
        """Stage 1 from the last warm-up epoch on; stage 2 from the first epoch on that has made
        pseudo-labels (row 11)."""
        if self._has_trust(epoch):
            if self.in_warm_up(epoch):  # row 11: trust before there was an epoch to make them
                return Scoring(self.initial_stages, weak_views=2, fixed_shapes=False)
            stages = self.both_stages
        else:
            stages = self.stage1
        return Scoring(stages, self.detector.weak_views, self.detector.fixed_shapes)

    def stage1(self, scorer: Scorer, state: PLSState) -> None:
        """Section 3.1: which labels are noisy."""
        self.score(scorer, state)
        self.flag(scorer, state)

    def flag(self, scorer: Scorer, state: PLSState) -> None:
        self.detector.flag(scorer, state)

    def both_stages(self, scorer: Scorer, state: PLSState) -> None:
        """... and section 3.2.2: which pseudo-labels can be trusted."""
        self.stage1(scorer, state)
        self.stage2(state)

    def initial_stages(self, scorer: Scorer, state: PLSState) -> None:
        self.update_pseudo_labels(scorer, state)
        self.both_stages(scorer, state)

    def stage2(self, state: PLSState) -> None:
        trust_N, mixture = self.options.trust(state)
        state.trust_N.copy_(trust_N)
        if mixture is not None:
            state.trust_fitted.copy_(mixture.fitted)

    def score(self, scorer: Scorer, state: PLSState) -> None:
        """Losses, pseudo-losses and predictions of all images."""
        for rows, (logits_BC,) in scorer.logits(role=self.scored_by):
            self.record(state, rows, logits_BC, scorer.given_N[rows])

    def record(self, state: PLSState, rows: slice, logits_BC: Tensor, given_B: Tensor) -> None:
        """... of some images."""
        state.loss_N[rows] = F.cross_entropy(logits_BC, given_B, reduction="none")
        state.pseudo_loss_N[rows] = pseudo_loss(state.pseudo_labels(rows), logits_BC)
        state.predicted_N[rows] = logits_BC.argmax(1)

    def update_pseudo_labels(self, scorer: Scorer, state: PLSState) -> None:
        """Pseudo-labels of all images, in evaluation mode; in training, the steps make them."""
        role = None if self.predicts == (self.pseudo_labels_by,) else self.pseudo_labels_by
        for rows, (first_BC, second_BC) in scorer.logits(plain=False, weak=2, role=role):
            index_B = torch.arange(rows.start, rows.stop, device=first_BC.device)
            state.store(index_B, self.make_pseudo_labels(first_BC, second_BC, state))

    def _has_trust(self, epoch: int) -> bool:
        first = self.warmup - self.options.initial_trust
        return self.options.make_pseudo_labels is not None and epoch >= first

    # ------------------------------------------------------------------------ what it reports

    def verdict(self, state: PLSState, epoch: int) -> Verdict:
        known = Verdict(state.noisy_N, state.p_noisy_N, state.loss_N, state.predicted_N)
        if not self._has_trust(epoch):
            return known
        return known._replace(suggested_N=state.pseudo_class_N, trust_N=state.trust_N)

    def compare(
        self, scorer: Scorer, state: PLSState, true_N: Tensor, epoch: int
    ) -> dict[str, Any]:
        found = super().compare(scorer, state, true_N, epoch)
        if self._has_trust(epoch):
            used_N = state.trust_N
            if not self.options.trust_in_classification:
                used_N = torch.ones_like(used_N)
            aucs, more = compare_pseudo_labels(state, true_N, used_N)
            found["metrics"]["pseudo_labels"] = aucs
            found |= more
        return found

    def notices(
        self, state: PLSState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        values, metric = self.options.trust_values, self.detector.metric
        found = {
            "stage 1": pls_notices.stage1_collapsed(state, metric),
            "swings": pls_notices.stage1_swings(noisy, metric),
        }
        if values is not None and self._has_trust(epoch):
            found["stage 2"] = pls_notices.stage2_collapsed(state, values)
        if epoch + 1 == self.epochs:
            found["classes"] = pls_notices.classes_flagged(state, classes)
        return found
