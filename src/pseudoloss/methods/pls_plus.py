"""PLS with additions, each behind a switch; docs/pls-plus.md describes them.

With all switches off it is PLS, bit for bit. First the equations, then the class, which overrides
parts of PLS.

Shapes: N images in the dataset, B in a batch, C classes, h×w pixels.
Letters as in pls.py; τ strength of debiasing, p̄ mean prediction, d′ distance of two modes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods import pls_notices
from pseudoloss.methods.base import (
    NET,
    Batch,
    Detector,
    Ema,
    Mix,
    Outputs,
    Phase,
    Scorer,
    Scoring,
    ViewBatch,
    uniform,
)
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.metrics import CAPTURED, neighbour_votes
from pseudoloss.methods.mixmatch import ramp_up
from pseudoloss.methods.mixture import Mixture, fit_two_modes
from pseudoloss.methods.pls import PLS, Options, log_mean_prediction, weighted_mean
from pseudoloss.methods.pseudo_labels import PLSState
from pseudoloss.nn.augment import CUTOUT_DRAWS, cutout, randaugment_view, trivial_augment_view
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS, Views

EMA = "ema"  # role of the network with averaged weights
PLS_DRAWS = 2 * WEAK_DRAWS + STRONG_DRAWS  # random numbers per image for the views of PLS
BOX_DRAWS = 2
SMALLEST = 1e-12
LEAST_SHARE = 0.01  # of its prior: a class is not made rarer than this when it is divided by p̄

# ------------------------------------------------------------------------------------- the views


def simclr_view(views: Views, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
    """The strong view of PLS."""
    return views.strong(images_BCHW, draws_BK)


STRONG_VIEWS: Mapping[str, Callable[[Views, Tensor, Tensor], Tensor]] = {
    "simclr": simclr_view,
    "trivial": trivial_augment_view,
    "rand": randaugment_view,
}


def opposite_flip(draws_BK: Tensor) -> Tensor:
    """The random numbers of a step, so that of the two weak views exactly one is mirrored."""
    first, second = WEAK_DRAWS - 1, 2 * WEAK_DRAWS - 1
    half = (draws_BK[:, first : first + 1] + 0.5) % 1
    return torch.cat([draws_BK[:, :second], half, draws_BK[:, second + 1 :]], 1)


def box_weights(lam: Tensor, draws_BK: Tensor, height: int, width: int) -> Tensor:
    """CutMix (Yun et al., ICCV 2019): how far each pixel lies in a box at a random place.

    The box has the shape of the image and exactly the share 1-λ of its area: pixels at its edge
    count in part. (B,1,h,w).
    """
    side = (1 - lam).clamp(0, 1).sqrt()
    parts = []
    for draw_B, length in ((draws_BK[:, 0], height), (draws_BK[:, 1], width)):
        first_B1 = (draw_B * (1 - side) * length)[:, None]
        pixel_L = torch.arange(length, device=draw_B.device)
        end_BL = torch.minimum(pixel_L + 1, first_B1 + side * length)
        parts.append((end_BL - torch.maximum(pixel_L, first_B1)).clamp(0, 1))
    in_rows_Bh, in_columns_Bw = parts
    return in_rows_Bh[:, None, :, None] * in_columns_Bw[:, None, None, :]


def cutmix(view_BChw: Tensor, mix: Mix, draws_BK: Tensor) -> Tensor:
    """Each view with a box of its partner's view, of the share 1-λ of the area."""
    box = box_weights(mix.lam, draws_BK, *view_BChw.shape[2:])
    return torch.lerp(view_BChw, view_BChw[mix.partner_B], box)


# --------------------------------------------------------------------------------------- the loss


def strong_cross_entropy(logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None) -> Tensor:
    """Σ w·CE(strong view, target) / Σ w: as in Eq. 3, without mixing."""
    return weighted_mean(cross_entropy(logits_BC, target_BC), w_B)


def debiased_pseudo_labels(
    log_mean_BC: Tensor,
    mean_C: Tensor,
    prior_C: Tensor,
    strength: float,
    gamma: float,
    normalise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Eq. 1 of p·(prior/p̄)^τ: classes that are predicted too often count less."""
    ratio_C = (mean_C / prior_C.clamp(min=torch.finfo(prior_C.dtype).tiny)).clamp(min=LEAST_SHARE)
    return normalise(gamma * (log_mean_BC - strength * ratio_C.log()))


def moving_mean(mean_C: Tensor, p_BC: Tensor, momentum: float) -> Tensor:
    """p̄ ← m·p̄ + (1-m)·mean of a batch."""
    return momentum * mean_C + (1 - momentum) * p_BC.mean(0)


# ---------------------------------------------------------------------------------------- stage 1


def margin(logits_BC: Tensor, given_B: Tensor) -> Tensor:
    """Probability of the given label minus that of the most likely other class; -1 to 1."""
    p_BC = logits_BC.float().softmax(1)
    own_B = p_BC.gather(1, given_B[:, None])[:, 0]
    return own_B - p_BC.scatter(1, given_B[:, None], -1).amax(1).clamp(min=0)


def accumulated(
    sum_N: Tensor, weight: Tensor, value_N: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """A moving average as a sum and its weight: s ← β·s + (1-β)·v and c ← β·c + (1-β). Their
    quotient is the average from the first value on. What is not finite is not added."""
    old_weight = weight.clone()
    weight = momentum * weight + (1 - momentum)
    before_N = sum_N / old_weight.clamp(min=torch.finfo(weight.dtype).tiny)
    counted_N = torch.where(value_N.isfinite(), value_N, before_N)
    return momentum * sum_N + (1 - momentum) * counted_N, weight


def separation(mixture: Mixture) -> Tensor:
    """d′ = |μ₁ - μ₂| / √((σ₁² + σ₂²) / 2); 0 where there are no two modes."""
    distance = (mixture.means[1] - mixture.means[0]).abs()
    spread = mixture.variances.mean().sqrt().clamp(min=torch.finfo(distance.dtype).tiny)
    return torch.where(mixture.fitted, distance / spread, 0).nan_to_num(0.0).float()


def support(votes_BC: Tensor, share_C: Tensor, given_B: Tensor) -> Tensor:
    """How far the neighbours support the given labels: votes for the label over those of the class
    with the most, both divided by the share of the class among all labels. 1: no class has more."""
    fair_BC = votes_BC / share_C.clamp(min=SMALLEST)
    own_B = fair_BC.gather(1, given_B[:, None])[:, 0]
    return own_B / fair_BC.amax(1).clamp(min=SMALLEST)


# -------------------------------------------------------------------------------------- the state


@dataclass(frozen=True)
class PLSPlusState(PLSState):
    """What the switches add. A tensor per image has no elements where its switch is off."""

    strong_weight: Tensor  # scalar: weight of the strong view's loss in this epoch
    first_epoch: Tensor  # bool, scalar: the present epoch is the first after the warm-up
    class_mean_C: Tensor  # p̄
    loss_sum_N: Tensor  # accumulated loss ...
    loss_weight: Tensor  # ... and its weight, scalar
    trend_N: Tensor  # Σ (t - t̄)·margin over the warm-up, whose sign is that of its slope
    trend_weight: Tensor  # scalar: t - t̄ in this epoch
    confidence_N: Tensor  # probability of the predicted class
    separation: Tensor  # scalar: d′ of stage 1

    @property
    def rose_N(self) -> Tensor:
        """The margin of the given label rose over the warm-up."""
        return self.trend_N > 0


@dataclass(frozen=True)
class Switches:
    """The additions to PLS; `methods.build` makes them from the settings."""

    strong_loss: float  # λs; 0: off
    strong_loss_ramp: int
    strong_view: Callable[[Views, Tensor, Tensor], Tensor]
    strong_cutout: float
    cutmix: float  # share of the batches
    first_epoch_trust: bool
    debias: float  # τ; 0: off
    debias_momentum: float
    one_view: bool
    opposite_flips: bool
    gamma: float
    normalise: Callable[[Tensor], Tensor]
    ema_decay: float  # 0: no averaged weights
    ema_pseudo_labels: bool
    ema_scoring: bool
    ema_prediction: bool
    loss_momentum: float  # β; 0: off
    warmup_trend: bool
    mode_gate: float  # d′; 0: off
    by_neighbours: bool
    neighbours: int
    neighbour_share: float
    relabel: float


class PLSPlus(PLS):
    def __init__(
        self,
        detector: Detector,
        options: Options,
        switches: Switches,
        epochs: int,
        warmup: int,
        images: int,
    ) -> None:
        """`images`: how many there are."""
        super().__init__(detector, options, epochs, warmup)
        s = self.switches = switches
        self.vote_is_captured = images <= CAPTURED
        if s.ema_decay > 0:
            self.ema = {EMA: Ema(NET, s.ema_decay)}
            self.predicts = (EMA if s.ema_prediction else NET,)
            self.validated = (NET if s.ema_prediction else EMA,)
        if s.ema_pseudo_labels:
            self.pseudo_labels_by = EMA
        if s.ema_scoring != s.ema_prediction:  # both stages do not ask the network that predicts
            self.scored_by = EMA if s.ema_scoring else NET

    @property
    def uses_strong_view(self) -> bool:
        return self.options.contrast or self.switches.strong_loss > 0

    def phases(self) -> tuple[Phase, ...]:
        warm_up, main = super().phases()
        (step,) = main.steps
        s = self.switches
        more = CUTOUT_DRAWS + BOX_DRAWS if s.cutmix else CUTOUT_DRAWS if s.strong_cutout else 0
        # The last λ decides whether a batch is mixed by CutMix.
        lambdas = (*step.lambdas, uniform) if s.cutmix else step.lambdas
        cost = step.cost - (s.one_view and self.options.make_pseudo_labels is not None)
        step = replace(step, draws=PLS_DRAWS + more, lambdas=lambdas, cost=cost)
        return warm_up, replace(main, steps=(step,))

    def start(self, given_N: Tensor, classes: int) -> PLSPlusState:
        s, device = self.switches, given_N.device
        zero_N = torch.zeros(len(given_N), device=device)
        zero = torch.zeros((), device=device)
        return PLSPlusState.begin(
            given_N,
            classes,
            strong_weight=zero.clone(),
            first_epoch=torch.zeros((), dtype=torch.bool, device=device),
            class_mean_C=self.options.prior_C.clone(),
            loss_sum_N=zero_N.clone()[: len(zero_N) * (s.loss_momentum > 0)],
            loss_weight=zero.clone(),
            trend_N=zero_N.clone()[: len(zero_N) * s.warmup_trend],
            trend_weight=zero.clone(),
            confidence_N=zero_N.clone()[: len(zero_N) * s.by_neighbours],
            separation=zero.clone(),
        )

    def begin_epoch(self, state: PLSPlusState, epoch: int) -> None:
        s, W = self.switches, self.warmup
        ramp = ramp_up(epoch - W, s.strong_loss_ramp) if s.strong_loss_ramp else 1.0
        state.strong_weight.fill_(s.strong_loss * ramp)
        state.first_epoch.fill_(epoch == W)
        state.trend_weight.fill_(epoch - (W - 1) / 2 if epoch < W else 0.0)

    # ------------------------------------------------------------------------------- the step

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        if self.switches.opposite_flips:
            batch = batch._replace(draws_BK=opposite_flip(batch.draws_BK))
        no_grad, with_grad, in_eval = super().show(views, batch)[NET]
        if self.switches.one_view:
            no_grad, in_eval = no_grad[:1], in_eval[:1]
        if self.pseudo_labels_by == NET:
            return {NET: ViewBatch(no_grad, with_grad, in_eval)}
        return {NET: ViewBatch([], with_grad), EMA: ViewBatch(no_grad, [], in_eval)}

    def mixed_view(self, weak_view: Tensor, batch: Batch) -> Tensor:
        mixed = super().mixed_view(weak_view, batch)
        if self.switches.cutmix == 0:
            return mixed
        start = PLS_DRAWS + CUTOUT_DRAWS
        patched = cutmix(weak_view, self.mixing(batch), batch.draws_BK[:, start:])
        view = torch.where(batch.mixes[-1].lam < self.switches.cutmix, patched, mixed)
        return view.contiguous(memory_format=torch.channels_last)

    def strong_view(self, views: Views, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
        view = self.switches.strong_view(views, images_BCHW, draws_BK[:, :STRONG_DRAWS])
        if self.switches.strong_cutout == 0:
            return view
        return cutout(view, draws_BK[:, STRONG_DRAWS:], self.switches.strong_cutout)

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: PLSState) -> Tensor:
        assert isinstance(state, PLSPlusState)
        target_BC, w_B = self.targets(outputs, batch, state), self.trust(batch, state)
        loss = self.terms(outputs[NET], target_BC, w_B, batch)
        if self.switches.strong_loss > 0:
            strong_BC, _ = outputs[NET].with_grad[1]
            used_B = w_B if self.options.trust_in_classification else None
            loss = loss + state.strong_weight * strong_cross_entropy(strong_BC, target_BC, used_B)
        return loss

    def trust(self, batch: Batch, state: PLSPlusState) -> Tensor:
        """w, before stage 2 has seen pseudo-labels: 1, or 0 for the noisy images."""
        w_B = state.trust_N[batch.index_B]
        if self.switches.first_epoch_trust:
            return w_B
        return torch.where(state.first_epoch & state.noisy_N[batch.index_B], 0, w_B)

    def pseudo_labels_of(self, outputs: dict[str, Outputs], state: PLSState) -> Tensor:
        pseudo_BC = super().pseudo_labels_of(outputs, state)
        if self.switches.debias > 0:
            assert isinstance(state, PLSPlusState)
            p_BC = log_mean_prediction(*self.weak_logits(outputs)).exp()
            mean_C = moving_mean(state.class_mean_C, p_BC, self.switches.debias_momentum)
            state.class_mean_C.copy_(mean_C)
        return pseudo_BC

    def weak_logits(self, outputs: dict[str, Outputs]) -> tuple[Tensor, Tensor]:
        if not self.switches.one_view:
            return super().weak_logits(outputs)
        net, in_eval = outputs[self.pseudo_labels_by], self.options.pseudo_labels_in_eval
        ((only_BC, _),) = net.in_eval if in_eval else net.no_grad
        return only_BC, only_BC

    def make_pseudo_labels(self, first_BC: Tensor, second_BC: Tensor, state: PLSState) -> Tensor:
        s = self.switches
        if s.debias == 0:
            return super().make_pseudo_labels(first_BC, second_BC, state)
        assert isinstance(state, PLSPlusState)
        return debiased_pseudo_labels(
            log_mean_prediction(first_BC, second_BC),
            state.class_mean_C,
            self.options.prior_C,
            s.debias,
            s.gamma,
            s.normalise,
        )

    # ----------------------------------------------------------------------- after an epoch

    def scores_after(self, epoch: int) -> bool:
        return super().scores_after(epoch) or self.switches.warmup_trend

    def scoring(self, epoch: int) -> Scoring:
        if epoch < self.warmup - 1:
            return Scoring(self.score)  # margins alone
        found = super().scoring(epoch)
        if not self.switches.by_neighbours:
            return found
        if found.run == self.initial_stages:
            return replace(found, weak_views=2)
        return replace(found, weak_views=0, fixed_shapes=self.vote_is_captured)

    def record(self, state: PLSState, rows: slice, logits_BC: Tensor, given_B: Tensor) -> None:
        assert isinstance(state, PLSPlusState)
        super().record(state, rows, logits_BC, given_B)
        if self.switches.warmup_trend:
            change_B = state.trend_weight * margin(logits_BC, given_B)
            state.trend_N[rows] += torch.where(change_B.isfinite(), change_B, 0)
        if self.switches.by_neighbours:
            state.confidence_N[rows] = logits_BC.float().softmax(1).amax(1)

    def flag(self, scorer: Scorer, state: PLSState) -> None:
        assert isinstance(state, PLSPlusState)
        if self.switches.by_neighbours:
            self.flag_by_neighbours(scorer, state)
        else:
            self.flag_by_mixture(scorer, state)
        if self.switches.warmup_trend:
            state.noisy_N.masked_fill_(state.rose_N, False)
            state.p_noisy_N.masked_fill_(state.rose_N, 0)

    def flag_by_mixture(self, scorer: Scorer, state: PLSPlusState) -> None:
        """As PLS does; of the accumulated loss, and only if the modes are far enough apart."""
        s = self.switches
        values_N = self.detector.values(scorer, state)
        if s.loss_momentum > 0:
            sum_N, weight = accumulated(
                state.loss_sum_N, state.loss_weight, values_N, s.loss_momentum
            )
            state.loss_sum_N.copy_(sum_N)
            state.loss_weight.copy_(weight)
            values_N = torch.where(values_N.isfinite(), sum_N / weight, values_N)
        mixture = fit_two_modes(values_N)
        state.fitted.copy_(mixture.fitted)
        state.separation.copy_(separation(mixture))
        low_N = mixture.low_N
        if s.mode_gate > 0:
            low_N = torch.where(state.separation < s.mode_gate, 1.0, low_N)
        self.detector.flag_by(low_N, scorer, state)

    def flag_by_neighbours(self, scorer: Scorer, state: PLSPlusState) -> None:
        """A label is noisy unless its neighbours vote for it. Images that are predicted with
        confidence vote for the predicted class (SSR, Feng et al., BMVC 2022)."""
        s, given_N, C = self.switches, scorer.given_N, scorer.classes
        sure_N = state.confidence_N > s.relabel
        label_NC = F.one_hot(torch.where(sure_N, state.predicted_N.long(), given_N), C).float()
        share_C = label_NC.mean(0)
        features_ND = scorer.projections(role=self.scored_by)
        low_N = torch.empty_like(state.loss_N)
        for rows, votes_BC in neighbour_votes(features_ND, label_NC, s.neighbours):
            low_N[rows] = support(votes_BC, share_C, given_N[rows])
        state.fitted.fill_(True)
        # Kept or not; what the rule of the detector makes of a probability does not matter here.
        self.detector.flag_by((low_N >= s.neighbour_share).float(), scorer, state)
        state.p_noisy_N.copy_(1 - low_N)

    # ------------------------------------------------------------------------ what it reports

    def own_metrics(
        self, state: PLSPlusState, given_N: Tensor, true_N: Tensor | None
    ) -> dict[str, Any]:
        """d′ of stage 1; the share of labels that the trend protects; and how many pseudo-labels of
        images with wrong labels are right, in percent (training does not know which these are)."""
        found: dict[str, Any] = {}
        if not self.switches.by_neighbours:
            found["separation"] = float(state.separation)
        if self.switches.warmup_trend:
            found["rose"] = float(state.rose_N.float().mean())
        wrong_N = None if true_N is None else given_N != true_N
        if true_N is not None and wrong_N is not None and bool(wrong_N.any()):
            right_N = state.pseudo_class_N[wrong_N] == true_N[wrong_N]
            found["right_on_wrong"] = 100 * float(right_N.float().mean())
        return found

    def notices_at_start(self) -> dict[str, str | None]:
        found = super().notices_at_start()
        if self.switches.warmup_trend and self.warmup < 2:
            found["trend"] = pls_notices.NO_TREND
        return found

    def notices(
        self, state: PLSState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        assert isinstance(state, PLSPlusState)
        if epoch < self.warmup - 1:  # nothing was flagged yet
            return {}
        s = self.switches
        found = super().notices(state, epoch, noisy[-(epoch - self.warmup + 2) :], classes)
        if s.by_neighbours:
            found["stage 1"] = pls_notices.neighbours_collapsed(state)
            found["swings"] = None
        elif s.mode_gate > 0 and bool(state.fitted) and float(state.separation) < s.mode_gate:
            found["stage 1"] = pls_notices.gate_closed(float(state.separation), s.mode_gate)
        return found
