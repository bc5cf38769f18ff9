"""EvidentialMix (Sachdeva et al., WACV 2021).

Labels may be right (clean), wrong (closed set) or of images that show none of the classes (open
set). A network that is trained with an evidential loss is uncertain about open-set images, so their
losses are between those of the others, and a mixture tells the three groups apart. A classifier is
trained by MixMatch on clean labels and on closed-set images without theirs; open-set images are
left out. Then the evidential network is trained on all images, with labels that the classifier has
corrected.

Shapes: N images in the dataset, B in a batch, C classes, K components of the mixture; 3 groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from pseudoloss.methods.gaussian_mixture import fit_gaussians, posterior_of_groups
from pseudoloss.methods.split_notices import empty_groups, no_evidence
from pseudoloss.nn.views import WEAK_DRAWS, Views

CLASSIFIER, EVIDENTIAL = "classifier", "evidential"
CLEAN, OPEN, CLOSED = range(3)
LEAST_EVIDENCE = 0.5  # a class with less for every image can hardly be learned any more
LOW, HIGH = 0.3, 0.7  # means of the released program's groups


def evidential_loss(logits_BC: Tensor, target_BC: Tensor) -> Tensor:
    """Σ (y - α/S)² + Σ α(S - α) / (S²(S + 1)) of each image, with the evidence α = relu(logit) + 1
    and S = Σ α: squared error and variance of a Dirichlet distribution."""
    alpha_BC = logits_BC.float().relu() + 1
    S_B1 = alpha_BC.sum(1, keepdim=True)
    p_BC = alpha_BC / S_B1
    variance_BC = p_BC * (1 - p_BC) / (S_B1 + 1)
    return ((target_BC - p_BC) ** 2 + variance_BC).sum(1)


def corrected_class(given_BC: Tensor, p_BC: Tensor, closed_B: Tensor) -> Tensor:
    """The class of (1 - P(closed))·y + P(closed)·p. Sharpening would not change it."""
    closed_B1 = closed_B[:, None]
    return ((1 - closed_B1) * given_BC + closed_B1 * p_BC).argmax(1)


def by_rank(means_K: Tensor) -> Tensor:
    """The group of each of the paper's three components: the lowest mean is clean, the highest
    closed."""
    return torch.arange(len(means_K), device=means_K.device)


def by_mean(means_K: Tensor) -> Tensor:
    """The same in the released program, from means of losses that are scaled to 0..1."""
    return (means_K >= LOW).long() + (means_K >= HIGH).long()


class Grouping(NamedTuple):
    """How many components there are, and the group of each."""

    components: int
    group_of: Callable[[Tensor], Tensor]  # from their means, in ascending order


PAPER, RELEASED = Grouping(3, by_rank), Grouping(20, by_mean)


def probability_of_groups(loss_N: Tensor, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """P(clean), P(open) and P(closed) of each image (N,3); and whether a mixture could be
    fitted."""
    found = fit_gaussians(loss_N, grouping.components)
    group_K3 = F.one_hot(grouping.group_of(found.means_K), 3).float()
    return posterior_of_groups(loss_N, found, group_K3), found.fitted


def likeliest(p_N3: Tensor, loss_N: Tensor) -> tuple[Tensor, Tensor]:
    """Which images are clean, and which closed. The one with the lowest loss is always clean, the
    one with the highest always closed."""
    group_N, place_N = p_N3.argmax(1), torch.arange(len(loss_N), device=loss_N.device)
    loss_N = loss_N.nan_to_num(torch.inf, torch.inf, -torch.inf)
    clean_N = (group_N == CLEAN) | (place_N == loss_N.argmin())
    return clean_N, (group_N == CLOSED) | (place_N == loss_N.argmax())


@dataclass(frozen=True)
class EvidentialMixState(LabelState):
    evidential_N: Tensor  # evidential loss
    p_N3: Tensor  # of the three groups
    clean_N: Tensor  # bool
    closed_N: Tensor  # bool
    ramp: Tensor  # scalar: share of λ_u in this epoch
    evidence_C: Tensor  # the largest of any image
    confidence_N: Tensor  # the classifier's probability of the predicted class


class EvidentialMix(Method):
    networks = (CLASSIFIER, EVIDENTIAL)
    predicts = (CLASSIFIER,)
    corrects = "EvidentialMix"

    def __init__(
        self,
        detector: Detector,
        options: mixmatch.MixMatchOptions,
        grouping: Grouping,
        epochs: int,
        warmup: int,
        classifier_warmup: int,
        batch_size: int,
        lr: float,
    ) -> None:
        super().__init__(detector, warmup)
        self.options = options
        self.grouping = grouping
        self.epochs = epochs
        self.classifier_warmup = classifier_warmup
        self.batch_size = batch_size
        self.lr = lr
        self.lambda_rule = beta(options.alpha, folded=True)

    def phases(self) -> tuple[Phase, ...]:
        """The classifier has the shorter warm-up, and is trained first in every epoch. The
        evidential network is trained in batches that are twice as large, at a constant rate."""
        twice = 2 * self.batch_size
        classifier = Step(
            self.show_classifier, self.cross_entropy, WEAK_DRAWS, trains=(CLASSIFIER,)
        )
        evidential = Step(
            self.show_evidential,
            self.loss_of_given,
            WEAK_DRAWS,
            trains=(EVIDENTIAL,),
            lr=self.constant_lr,
        )
        mixed = Step(
            self.show_mixed,
            self.loss_of_mixed,
            mixmatch.DRAWS,
            lambdas=(self.lambda_rule,),
            trains=(CLASSIFIER,),
            streams=(Stream(clean), Stream(closed)),
            cost=8,  # 4 views, 4 mixed ones with gradients; half of the labels are clean
        )
        corrected = Step(
            self.show_corrected,
            self.loss_of_corrected,
            WEAK_DRAWS,
            trains=(EVIDENTIAL,),
            streams=(Stream(size=twice),),
            lr=self.constant_lr,
            cost=4,
        )
        first, W = self.classifier_warmup, self.warmup
        return (
            Phase("warm-up", first, (classifier, evidential), batch_size=twice),
            Phase("warm-up, evidential", W - first, (evidential,), batch_size=twice),
            Phase("evidential-mix", self.epochs - W, (mixed, corrected)),
        )

    def constant_lr(self, epoch: int) -> float:
        return self.lr

    def start(self, given_N: Tensor, classes: int) -> EvidentialMixState:
        N, device = len(given_N), given_N.device
        return EvidentialMixState(
            **LabelState.start(given_N, classes),
            evidential_N=torch.zeros(N, device=device),
            p_N3=torch.eye(3, device=device)[CLEAN].repeat(N, 1),
            clean_N=torch.ones(N, dtype=torch.bool, device=device),
            closed_N=torch.zeros(N, dtype=torch.bool, device=device),
            ramp=torch.zeros((), device=device),
            evidence_C=torch.zeros(classes, device=device),
            confidence_N=torch.zeros(N, device=device),
        )

    def begin_epoch(self, state: EvidentialMixState, epoch: int) -> None:
        state.ramp.fill_(self.options.share(epoch - self.warmup))

    # ------------------------------------------------------------------------------ warm-up

    def show_classifier(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        return {CLASSIFIER: weak_view(views, batch)}

    def cross_entropy(
        self, outputs: dict[str, Outputs], batch: Batch, state: EvidentialMixState
    ) -> Tensor:
        ((logits_BC, _),) = outputs[CLASSIFIER].with_grad
        return F.cross_entropy(logits_BC.float(), batch.given_B)

    def show_evidential(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        return {EVIDENTIAL: weak_view(views, batch)}

    def loss_of_given(
        self, outputs: dict[str, Outputs], batch: Batch, state: EvidentialMixState
    ) -> Tensor:
        ((logits_BC, _),) = outputs[EVIDENTIAL].with_grad
        return evidential_loss(logits_BC, self.one_hot(batch.given_B)).mean()

    # ------------------------------------------------------------------------- after the warm-up

    def show_mixed(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        free, mixed = mixmatch.mixmatch_views(views, batch)
        return {CLASSIFIER: ViewBatch(free, [mixed])}

    def loss_of_mixed(
        self, outputs: dict[str, Outputs], batch: Batch, state: EvidentialMixState
    ) -> Tensor:
        """MixMatch of the classifier with itself alone."""
        w_N = state.p_N3[:, CLEAN]
        net = outputs[CLASSIFIER]
        return mixmatch.mixmatch_loss(net, [], batch, w_N, state.ramp, self.options)

    def show_corrected(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """The classifier judges the plain view. It stays as it is, so this is what it makes of all
        images after its own turn."""
        return {
            EVIDENTIAL: weak_view(views, batch),
            CLASSIFIER: ViewBatch([], [], in_eval=[views.plain(batch.images_BCHW)]),
        }

    def loss_of_corrected(
        self, outputs: dict[str, Outputs], batch: Batch, state: EvidentialMixState
    ) -> Tensor:
        """All images, with the labels that the classifier corrects."""
        ((logits_BC, _),) = outputs[EVIDENTIAL].with_grad
        ((judged_BC, _),) = outputs[CLASSIFIER].in_eval
        p_BC, closed_B = judged_BC.float().softmax(1), state.p_N3[batch.index_B, CLOSED]
        class_B = corrected_class(self.one_hot(batch.given_B), p_BC, closed_B)
        return evidential_loss(logits_BC, self.one_hot(class_B)).mean()

    def one_hot(self, class_B: Tensor) -> Tensor:
        return F.one_hot(class_B, len(self.options.prior_C)).float()

    # ---------------------------------------------------------------- the groups, after an epoch

    def scoring(self, epoch: int) -> Scoring:
        return Scoring(self.group, passes=2)

    def score(self, scorer: Scorer, state: EvidentialMixState) -> None:
        """Loss and prediction of the classifier, and the evidential loss."""
        for rows, (logits_BC,) in scorer.logits():
            given_B, (p_B, class_B) = scorer.given_N[rows], logits_BC.float().softmax(1).max(1)
            state.loss_N[rows] = F.cross_entropy(logits_BC, given_B, reduction="none")
            state.predicted_N[rows] = class_B.int()
            state.confidence_N[rows] = p_B
        state.evidence_C.zero_()
        for rows, (logits_BC,) in scorer.logits(role=EVIDENTIAL):
            evidence_C = torch.maximum(state.evidence_C, logits_BC.float().amax(0))
            state.evidence_C.copy_(evidence_C)
            given_BC = self.one_hot(scorer.given_N[rows])
            state.evidential_N[rows] = evidential_loss(logits_BC, given_BC)

    def group(self, scorer: Scorer, state: EvidentialMixState) -> None:
        """Which images are clean, which closed and which open."""
        self.score(scorer, state)
        p_N3, fitted = probability_of_groups(state.evidential_N, self.grouping)
        clean_N, closed_N = likeliest(p_N3, state.evidential_N)
        state.p_N3.copy_(p_N3)
        state.clean_N.copy_(clean_N)
        state.closed_N.copy_(closed_N)
        state.fitted.copy_(fitted)
        self.detector.flag_by(p_N3[:, CLEAN], scorer, state)

    # -------------------------------------------------------------------------- what it reports

    def verdict(self, state: EvidentialMixState, epoch: int) -> Verdict:
        """The class that the classifier predicts is suggested. It is trusted as far as the
        classifier is sure of it, and the image shows one of the classes at all."""
        known = super().verdict(state, epoch)
        trust_N = state.confidence_N * (1 - state.p_N3[:, OPEN]).clamp(0, 1)
        return known._replace(suggested_N=state.predicted_N, trust_N=trust_N)

    def notices(
        self, state: EvidentialMixState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        counts = int(state.clean_N.sum()), int(state.closed_N.sum())
        without = (state.evidence_C < LEAST_EVIDENCE).nonzero().flatten().tolist()
        return {
            "groups": empty_groups(*counts, len(state.clean_N), bool(state.fitted)),
            "evidence": no_evidence([classes[c] for c in without], len(classes)),
        }


def clean(state: EvidentialMixState) -> Tensor:
    return state.clean_N


def closed(state: EvidentialMixState) -> Tensor:
    return state.closed_N


def weak_view(views: Views, batch: Batch) -> ViewBatch:
    return ViewBatch([], [views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])])
