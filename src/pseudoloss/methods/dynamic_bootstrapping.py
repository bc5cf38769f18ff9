"""Dynamic Bootstrapping, also called M-correction (Arazo et al., ICML 2019).

A mixture of two beta distributions of the losses says how probable it is that a label is wrong.
Each image is trained with its given label and with what the network predicts for it, weighted by
this probability, under mixup. M-DYR-H uses the predicted class and plain mixup; MD-DYR-SH the
prediction, sharpened more and more, and images that are mixed by how clean their labels are.

Shapes: N images in the dataset, B in a batch, C classes, T bins of the mixture. B_B is the paper's
w: the probability that a label is wrong.
"""

from collections.abc import Sequence
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
    Scorer,
    Scoring,
    Step,
    Verdict,
    ViewBatch,
    beta,
)
from pseudoloss.methods.beta_mixture import BINS, fit_two_betas, high_mode
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.mixup import loss as mixup_loss
from pseudoloss.methods.mixup import mixup_step
from pseudoloss.methods.pls import class_balance
from pseudoloss.nn.views import WEAK_DRAWS, Views

SMALLEST = 1e-4  # w is clipped to SMALLEST..1 - SMALLEST
HOT, COLD = 1.0, 0.001  # temperatures of soft predictions
COLD_FROM = 200 / 300  # share of the run after which the temperature is COLD
FEW_CLASSES = 0.5  # fewer of the classes predicted than this: the network has collapsed

# ------------------------------------------------------------------------------------- equations


def bootstrapped(given_BC: Tensor, predicted_BC: Tensor, B_B: Tensor) -> Tensor:
    """(1 - w)·y + w·z: the given label, corrected as far as it is probably wrong."""
    B_B1 = B_B[:, None]
    return (1 - B_B1) * given_BC + B_B1 * predicted_BC


def hard_prediction(logits_BC: Tensor) -> Tensor:
    """z: the predicted class, one-hot."""
    return F.one_hot(logits_BC.argmax(1), logits_BC.shape[1]).float()


def soft_prediction(logits_BC: Tensor, temperature: Tensor | float) -> Tensor:
    """h: softmax of logits / T."""
    return (logits_BC.float() / temperature).softmax(1)


def temperature(step: int, steps: int) -> float:
    """T: falls linearly from HOT to COLD over so many steps, then stays."""
    return HOT + (COLD - HOT) * min(step / max(steps - 1, 1), 1)


def clean_share(B_B: Tensor, partner_B: Tensor) -> Tensor:
    """δ_p / (δ_p + δ_q), where δ = 1 - w: the weight of an image beside its partner."""
    clean_B = 1 - B_B
    return clean_B / (clean_B + clean_B[partner_B])


def mixed_by(share_B: Tensor, images_BCHW: Tensor, partner_B: Tensor) -> Tensor:
    """Images, each mixed with its partner by a weight of its own."""
    share_B111 = share_B[:, None, None, None].to(images_BCHW.dtype)
    return share_B111 * images_BCHW + (1 - share_B111) * images_BCHW[partner_B]


# -------------------------------------------------------------------------------------- the method


@dataclass(frozen=True)
class BootstrappingState(LabelState):
    weak_loss_N: Tensor  # cross-entropy of a weak view: what the mixture is fitted to
    confidence_N: Tensor  # probability of the predicted class
    lowest: Tensor  # the mixture: see BetaMixture
    highest: Tensor
    high_T: Tensor
    temperature: Tensor  # scalar, of the epoch
    unfitted: Tensor  # int32, scalar: after how many epochs there were no two modes


class DynamicBootstrapping(Method):
    corrects = "Dynamic Bootstrapping"

    def __init__(
        self,
        detector: Detector,
        epochs: int,
        warmup: int,
        hard: bool,
        alpha: float,
        balance: float,
        guided_epochs: int,
        prior_C: Tensor,
    ) -> None:
        super().__init__(detector, warmup)
        self.epochs = epochs
        self.hard = hard
        self.lambda_rule = beta(alpha)
        self.balance = balance  # weight of the class-balance term, η
        self.guided_epochs = 0 if hard else min(guided_epochs, epochs - warmup)
        self.prior_C = prior_C

    def phases(self) -> tuple[Phase, ...]:
        lambdas = (self.lambda_rule,)
        warm_up = Phase("warm-up", self.warmup, (mixup_step(self.lambda_rule),))
        rest = self.epochs - self.warmup - self.guided_epochs
        if self.hard:
            step = Step(self.show, self.hard_loss, WEAK_DRAWS, lambdas, cost=5)
            return warm_up, Phase("bootstrapping", rest, (step,))
        guided = Step(
            self.show_in_eval, mixup_loss, WEAK_DRAWS, lambdas, cost=4, show_next=self.show_guided
        )
        # Of `mixes`, this step uses the partners only.
        step = Step(
            self.show_both, self.soft_loss, WEAK_DRAWS, lambdas, cost=5, show_next=self.show_guided
        )
        return (
            warm_up,
            Phase("guided mixup", self.guided_epochs, (guided,)),
            Phase("bootstrapping", rest, (step,)),
        )

    def start(self, given_N: Tensor, classes: int) -> BootstrappingState:
        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, device=given_N.device)

        N = len(given_N)
        return BootstrappingState(
            **LabelState.start(given_N, classes),
            weak_loss_N=zero(N),
            confidence_N=zero(N),
            lowest=zero(),
            highest=zero(),
            high_T=zero(BINS),
            temperature=zero() + HOT,
            unfitted=zero().int(),
        )

    def begin_epoch(self, state: BootstrappingState, epoch: int) -> None:
        start = self.warmup + self.guided_epochs
        steps = round(COLD_FROM * self.epochs) - start - 1
        state.temperature.fill_(temperature(max(epoch - start, 0), steps))

    # -------------------------------------------------------------------------------- the steps

    def weak_view(self, views: Views, batch: Batch) -> Tensor:
        return views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """A weak view, which the network judges and predicts, and the same one mixed."""
        view = self.weak_view(views, batch)
        return {NET: ViewBatch([view], [batch.mixes[0].of(view)], in_eval=[view])}

    def show_in_eval(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        return {NET: ViewBatch([], [], in_eval=[self.weak_view(views, batch)])}

    def show_both(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        view = self.weak_view(views, batch)
        return {NET: ViewBatch([view], [], in_eval=[view])}

    def show_guided(
        self, views: Views, batch: Batch, outputs: dict[str, Outputs], state: BootstrappingState
    ) -> dict[str, ViewBatch]:
        """The weak view, mixed by how clean the labels are."""
        partner_B = batch.mixes[0].partner_B
        share_B = clean_share(self.noise_probability(outputs, batch, state), partner_B)
        mixed = mixed_by(share_B, self.weak_view(views, batch), partner_B)
        return {NET: ViewBatch([], [mixed])}

    def noise_probability(
        self, outputs: dict[str, Outputs], batch: Batch, state: BootstrappingState
    ) -> Tensor:
        """w = P(high mode) of the present losses, in evaluation mode."""
        ((logits_BC, _),) = outputs[NET].in_eval
        loss_B = F.cross_entropy(logits_BC.float(), batch.given_B, reduction="none")
        B_B = high_mode(loss_B, state.lowest, state.highest, state.high_T)
        return B_B.clamp(SMALLEST, 1 - SMALLEST)

    def hard_loss(
        self, outputs: dict[str, Outputs], batch: Batch, state: BootstrappingState
    ) -> Tensor:
        """M-DYR-H: λ·l_p + (1 - λ)·l_q, each with its corrected label, and the class balance."""
        ((predicting_BC, _),), ((logits_BC, _),) = outputs[NET].no_grad, outputs[NET].with_grad
        given_BC = F.one_hot(batch.given_B, logits_BC.shape[1]).float()
        B_B = self.noise_probability(outputs, batch, state)
        target_BC = bootstrapped(given_BC, hard_prediction(predicting_BC), B_B)
        return self.with_balance(logits_BC, batch.mixes[0].of(target_BC))

    def soft_loss(
        self, outputs: dict[str, Outputs], batch: Batch, state: BootstrappingState
    ) -> Tensor:
        """MD-DYR-SH: both labels of a pair have the weight 1/2, however the images are mixed."""
        ((predicting_BC, _),), ((logits_BC, _),) = outputs[NET].no_grad, outputs[NET].with_grad
        given_BC = F.one_hot(batch.given_B, logits_BC.shape[1]).float()
        B_B = self.noise_probability(outputs, batch, state)
        predicted_BC = soft_prediction(predicting_BC, state.temperature)
        target_BC = bootstrapped(given_BC, predicted_BC, B_B)
        return self.with_balance(logits_BC, (target_BC + target_BC[batch.mixes[0].partner_B]) / 2)

    def with_balance(self, logits_BC: Tensor, target_BC: Tensor) -> Tensor:
        loss = cross_entropy(logits_BC, target_BC).mean()
        if self.balance == 0:
            return loss
        return loss + self.balance * class_balance(logits_BC, self.prior_C)

    # ------------------------------------------------------------------------ the end of an epoch

    def scoring(self, epoch: int) -> Scoring:
        views, fixed = self.detector.weak_views, self.detector.fixed_shapes
        return Scoring(self.score_and_flag, max(views, 1), fixed, passes=2)

    def score(self, scorer: Scorer, state: BootstrappingState) -> None:
        """Losses of a plain view and of a weak one, and predictions for the plain one."""
        for rows, (logits_BC,) in scorer.logits():
            p_BC = logits_BC.float().softmax(1)
            state.loss_N[rows] = F.cross_entropy(logits_BC, scorer.given_N[rows], reduction="none")
            state.confidence_N[rows], state.predicted_N[rows] = p_BC.max(1)[0], p_BC.argmax(1).int()
        if scorer.weak_is_plain:
            state.weak_loss_N.copy_(state.loss_N)
            return
        for rows, (logits_BC,) in scorer.logits(plain=False, weak=1):
            loss_B = F.cross_entropy(logits_BC, scorer.given_N[rows], reduction="none")
            state.weak_loss_N[rows] = loss_B

    def score_and_flag(self, scorer: Scorer, state: BootstrappingState) -> None:
        """Where there are no two modes, the mixture of an earlier epoch is kept."""
        self.score(scorer, state)
        mixture = fit_two_betas(state.weak_loss_N)
        for own, new in (
            (state.lowest, mixture.lowest),
            (state.highest, mixture.highest),
            (state.high_T, mixture.high_T),
        ):
            own.copy_(torch.where(mixture.fitted, new, own.to(new.dtype)))
        state.fitted.copy_(mixture.fitted)
        state.unfitted.add_(~mixture.fitted)
        if self.detector.metric != "loss":
            self.detector.flag(scorer, state)
            return
        B_N = high_mode(state.weak_loss_N, state.lowest, state.highest, state.high_T)
        self.detector.flag_by(1 - B_N, scorer, state)

    def verdict(self, state: BootstrappingState, epoch: int) -> Verdict:
        """The predicted class is suggested, as it corrects the label in training."""
        known = super().verdict(state, epoch)
        return known._replace(suggested_N=state.predicted_N, trust_N=state.confidence_N)

    def notices_at_start(self) -> dict[str, str | None]:
        only = self.epochs - self.warmup == self.guided_epochs > 0
        text = (
            f"the {self.guided_epochs} epochs after the warm-up are guided mixup, so labels are "
            "never corrected. Use more --epochs or fewer --guided-epochs."
        )
        return super().notices_at_start() | {"guided only": text if only else None}

    def notices(
        self,
        state: BootstrappingState,
        epoch: int,
        noisy: Sequence[float],
        classes: Sequence[str],
    ) -> dict[str, str | None]:
        found: dict[str, str | None] = {"mixture": None, "collapse": None}
        if int(state.unfitted):
            found["mixture"] = (
                "the losses had no two modes after some epochs "
                f"({int(state.unfitted)} so far), and an earlier mixture was used. Try a longer "
                "--warmup or a lower --lr."
            )
        predicted = len(state.predicted_N.unique())
        if not self.in_warm_up(epoch) and predicted < FEW_CLASSES * len(classes):
            found["collapse"] = (
                f"the network predicts only {predicted} of {len(classes)} classes: it learns its "
                "own mistakes. Try a longer --warmup or a higher --balance."
            )
        return found
