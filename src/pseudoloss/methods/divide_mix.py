"""DivideMix (Li et al., ICLR 2020).

Two networks judge every label: a mixture of two modes is fitted to the losses of each, and labels
in the high mode are dropped. Each network trains on the split of the other one, so that it does not
confirm its own errors, by MixMatch: labels that were kept are refined, the others are replaced by
what both networks predict.

Shapes: N images in the dataset, B labelled and as many unlabelled ones in a batch, C classes, X all
4·B mixed views, E epochs whose losses are averaged; 2 networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods import mixmatch
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
    Stream,
    Verdict,
    ViewBatch,
    beta,
)
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.split_notices import empty_split
from pseudoloss.nn.views import WEAK_DRAWS, Views

FIRST, SECOND = "first", "second"


def negative_entropy(logits_BC: Tensor) -> Tensor:
    """Σ p log p, the mean over the batch: high where the network is confident."""
    log_p_BC = F.log_softmax(logits_BC.float(), dim=1)
    return (log_p_BC.exp() * log_p_BC).sum(1).mean()


def scaled(values_N: Tensor) -> Tensor:
    """Values scaled to 0..1. What is not finite counts as high; if all are equal, all are 0."""
    finite_N = values_N.isfinite()
    lowest = values_N.masked_fill(~finite_N, torch.inf).min()
    highest = values_N.masked_fill(~finite_N, -torch.inf).max()
    span = torch.where(highest > lowest, highest - lowest, torch.inf)
    return torch.where(finite_N, (values_N - lowest) / span, 1.0)


def mean_of_recent(recent_EN: Tensor, values_N: Tensor, scored: Tensor) -> Tensor:
    """Add the newest values in place of the oldest, and average those that are known: `scored`
    epochs were so far, this one included."""
    recent_EN.copy_(torch.cat([recent_EN[1:], values_N[None]]))
    return recent_EN.sum(0) / scored.clamp(max=len(recent_EN))


@dataclass(frozen=True)
class DivideMixState(LabelState):
    loss_2N: Tensor  # of each network
    recent_2EN: Tensor  # scaled values of the last epochs; 0 before the first one
    scored: Tensor  # int64, scalar: epochs that were scored
    w_2N: Tensor  # P(low mode): the label is right
    keeps_2N: Tensor  # bool: the network keeps the label
    fitted_2: Tensor  # bool: there are two modes
    ramp: Tensor  # scalar: share of λ_u in this epoch
    confidence_N: Tensor  # mean probability of the predicted class over both networks


class DivideMix(Method):
    networks = (FIRST, SECOND)
    predicts = (FIRST, SECOND)
    corrects = "DivideMix"

    def __init__(
        self,
        detector: Detector,
        options: mixmatch.MixMatchOptions,
        epochs: int,
        warmup: int,
        batch_size: int,
        warmup_penalty: float,
        loss_epochs: int,
    ) -> None:
        super().__init__(detector, warmup)
        self.options = options
        self.epochs = epochs
        self.batch_size = batch_size
        self.warmup_penalty = warmup_penalty
        self.loss_epochs = loss_epochs
        self.lambda_rule = beta(options.alpha, folded=True)
        self.turns = tuple(Turn(self, own, 1 - own) for own in range(2))

    def phases(self) -> tuple[Phase, ...]:
        """The networks are trained one after the other, in batches that are twice as large during
        the warm-up."""
        first = tuple(turn.warm_up_step() for turn in self.turns)
        then = tuple(turn.step() for turn in self.turns)
        return (
            Phase("warm-up", self.warmup, first, batch_size=2 * self.batch_size),
            Phase("divide-mix", self.epochs - self.warmup, then),
        )

    def start(self, given_N: Tensor, classes: int) -> DivideMixState:
        N, device = len(given_N), given_N.device
        return DivideMixState(
            **LabelState.start(given_N, classes),
            loss_2N=torch.zeros(2, N, device=device),
            recent_2EN=torch.zeros(2, self.loss_epochs, N, device=device),
            scored=torch.zeros((), dtype=torch.long, device=device),
            w_2N=torch.ones(2, N, device=device),
            keeps_2N=torch.ones(2, N, dtype=torch.bool, device=device),
            fitted_2=torch.zeros(2, dtype=torch.bool, device=device),
            ramp=torch.zeros((), device=device),
            confidence_N=torch.zeros(N, device=device),
        )

    def begin_epoch(self, state: DivideMixState, epoch: int) -> None:
        state.ramp.fill_(self.options.share(epoch - self.warmup))

    # ----------------------------------------------------------------- the split, after an epoch

    def scoring(self, epoch: int) -> Scoring:
        return Scoring(self.divide)

    def score(self, scorer: Scorer, state: DivideMixState) -> None:
        """Losses of each network and of both together, and what they predict."""
        for rows, each in scorer.members():
            given_B, mean_BC = scorer.given_N[rows], torch.stack(each).mean(0)
            for k, logits_BC in enumerate(each):
                loss_B = F.cross_entropy(logits_BC, given_B, reduction="none")
                state.loss_2N[k, rows] = loss_B
            class_B = mean_BC.argmax(1)
            p_BC = mixmatch.mean_prediction(each)
            state.loss_N[rows] = F.cross_entropy(mean_BC, given_B, reduction="none")
            state.predicted_N[rows] = class_B.int()
            state.confidence_N[rows] = p_BC.gather(1, class_B[:, None])[:, 0]

    def divide(self, scorer: Scorer, state: DivideMixState) -> None:
        """Co-divide: which labels each network keeps. The label table has the mean of both."""
        self.score(scorer, state)
        state.scored.add_(1)
        for k in range(2):
            own = replace(state, loss_N=state.loss_2N[k])  # shares all other tensors
            values_N = scaled(self.detector.values(scorer, own))
            values_N = mean_of_recent(state.recent_2EN[k], values_N, state.scored)
            mixture = fit_two_modes(values_N)
            self.detector.flag_by(mixture.low_N, scorer, own)
            state.w_2N[k] = mixture.low_N
            state.keeps_2N[k] = ~state.noisy_N
            state.fitted_2[k] = mixture.fitted
        state.fitted.copy_(state.fitted_2.all())
        self.detector.flag_by(state.w_2N.mean(0), scorer, state)

    # -------------------------------------------------------------------------- what it reports

    def verdict(self, state: DivideMixState, epoch: int) -> Verdict:
        """The predicted class is suggested, and trusted as far as both networks are sure of it."""
        known = super().verdict(state, epoch)
        return known._replace(suggested_N=state.predicted_N, trust_N=state.confidence_N)

    def notices(
        self, state: DivideMixState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        N = state.keeps_2N.shape[1]
        counts = zip(self.networks, state.keeps_2N.sum(1).tolist(), state.fitted_2, strict=True)
        return {
            f"split of the {role} network": empty_split(role, kept / N, bool(fitted))
            for role, kept, fitted in counts
        }


@dataclass(frozen=True)
class Turn:
    """The turn of one network, in which the other one stays as it is."""

    method: DivideMix
    own: int
    other: int

    @property
    def roles(self) -> tuple[str, str]:
        return self.method.networks[self.own], self.method.networks[self.other]

    def warm_up_step(self) -> Step:
        return Step(self.show_warm_up, self.loss_of_warm_up, WEAK_DRAWS, trains=self.roles[:1])

    def step(self) -> Step:
        return Step(
            self.show,
            self.loss,
            mixmatch.DRAWS,
            lambdas=(self.method.lambda_rule,),
            trains=self.roles[:1],
            streams=(Stream(self.kept), Stream(self.dropped)),
            cost=9,  # 4 + 2 views, 4 mixed ones with gradients; half of the labels are kept
        )

    def kept(self, state: DivideMixState) -> Tensor:
        return state.keeps_2N[self.other]

    def dropped(self, state: DivideMixState) -> Tensor:
        return ~state.keeps_2N[self.other]

    # ------------------------------------------------------------------------------ warm-up

    def show_warm_up(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return {self.roles[0]: ViewBatch([], [view])}

    def loss_of_warm_up(
        self, outputs: dict[str, Outputs], batch: Batch, state: DivideMixState
    ) -> Tensor:
        """Cross-entropy; and a penalty for confidence, which asymmetric noise leads to."""
        ((logits_BC, _),) = outputs[self.roles[0]].with_grad
        loss = F.cross_entropy(logits_BC.float(), batch.given_B)
        if self.method.warmup_penalty > 0:
            loss = loss + self.method.warmup_penalty * negative_entropy(logits_BC)
        return loss

    # ------------------------------------------------------------------------------ MixMatch

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """The other network helps with the unlabelled images, in evaluation mode."""
        own, other = self.roles
        free, mixed = mixmatch.mixmatch_views(views, batch)
        return {
            own: ViewBatch(free, [mixed]),
            other: ViewBatch([], [], in_eval=[torch.cat(free[:2])]),
        }

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: DivideMixState) -> Tensor:
        """Co-refinement of the labels that the other network keeps, co-guessing of the others."""
        own, other = self.roles
        (helping, _) = outputs[other].in_eval[0]
        w_N = state.w_2N[self.other]
        return mixmatch.mixmatch_loss(
            outputs[own], helping.tensor_split(2), batch, w_N, state.ramp, self.method.options
        )
