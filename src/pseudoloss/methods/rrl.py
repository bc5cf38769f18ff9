"""Robust Representation Learning (Li et al., "Learning from Noisy Data with Robust Representation
Learning", ICCV 2021).

A linear autoencoder on top of the features gives every image a low-dimensional embedding z, which
two contrastive losses shape: two views of an image are close, and mixed images are close to the
prototypes of their classes. Labels are then corrected by those of the neighbours in that space.

Shapes: N images in the dataset, B in a batch, C classes, D dimensions of the embedding.
Letters: τ temperature, λ lam, s soft label.
"""

from collections.abc import Callable, Sequence
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
)
from pseudoloss.methods.losses import cross_entropy, mean_over
from pseudoloss.methods.metrics import CAPTURED, neighbour_votes, normalise
from pseudoloss.methods.mixmatch import ramp_up
from pseudoloss.nn.augment import AUGMIX_DRAWS, augmix_view
from pseudoloss.nn.views import WEAK_DRAWS, Views

FEW_USED = 0.02  # of all images: a notice says so
PART = 2**14  # images at a time
ALL_KEPT = (
    "RRL keeps every given label, so nothing is corrected. If you know of wrong labels, try a "
    "higher --keep-threshold."
)

# ----------------------------------------------------------------------------- contrastive losses


def instance_contrast(weak_BD: Tensor, strong_BD: Tensor, tau: float) -> Tensor:
    """Each weak view finds the strong view of its image among both views of all other images: the
    mean cross-entropy of the similarities, z·z/τ."""
    own_BB = torch.eye(len(weak_BD), dtype=torch.bool, device=weak_BD.device)
    same_BB = (weak_BD @ weak_BD.T).masked_fill(own_BB, -torch.inf)
    similarity_BX = torch.cat([weak_BD @ strong_BD.T, same_BB], dim=1) / tau
    return F.cross_entropy(similarity_BX, torch.arange(len(weak_BD), device=weak_BD.device))


def prototype_contrast(
    mixed_BD: Tensor, target_BC: Tensor, prototype_CD: Tensor, tau: float
) -> Tensor:
    """-Σ ỹ·log softmax(z·c/τ) of each mixed image, with its mixed label."""
    return cross_entropy(mixed_BD @ prototype_CD.T / tau, target_BC)


def ramp(epoch: int, weight: float, epochs: int) -> float:
    """The weight of the prototypes in an epoch: it rises from 1 to `weight`, if that is larger.
    There are none in the first."""
    if epoch == 0:
        return 0.0
    start = min(1.0, weight)
    return start + (weight - start) * ramp_up(epoch, epochs) if epochs else weight


# ----------------------------------------------------------------------------- cleaning the labels


def keep_given(soft_NC: Tensor, given_N: Tensor, threshold: float) -> Tensor:
    """The soft label becomes the given one where its share of the soft label is large enough."""
    own_N1 = soft_NC.gather(1, given_N[:, None])
    kept_N1 = own_N1 > threshold
    others_NC = torch.where(kept_N1, 0, soft_NC)
    return others_NC.scatter_(1, given_N[:, None], torch.where(kept_N1, 1, own_N1))


def class_means(
    z_ND: Tensor, class_N: Tensor, used_N: Tensor, before_CD: Tensor
) -> tuple[Tensor, Tensor]:
    """Prototypes: the normalised means of the embeddings of each class, over the images that are
    used; and which classes have no such image. These keep the prototype that they had."""
    C = len(before_CD)
    sum_CD, count_C = torch.zeros_like(before_CD), before_CD.new_zeros(C)
    for z_BD, class_B, used_B in zip(
        *(tensor_N.split(PART) for tensor_N in (z_ND, class_N, used_N)), strict=True
    ):
        member_BC = (F.one_hot(class_B, C) * used_B[:, None]).to(z_BD.dtype)
        sum_CD = sum_CD + member_BC.T @ z_BD
        count_C = count_C + member_BC.sum(0)
    stale_C = count_C == 0
    mean_CD = sum_CD / count_C.clamp(min=1)[:, None]
    return torch.where(stale_C[:, None], before_CD, F.normalize(mean_CD)), stale_C


# -------------------------------------------------------------------------------------- the method


@dataclass(frozen=True)
class Options:
    """The constants of RRL; `methods.build` makes them from the settings."""

    temperature: float  # τ
    instance_weight: float
    prototype_weight: float
    ramp_epochs: int
    reconstruction_weight: float
    lambda_rule: Callable[[Tensor], Tensor]  # λ from a uniform random number
    neighbours: int
    keep_threshold: float
    use_threshold: float
    one_chain: bool  # as `augmix` says
    dimensions: int  # of the embedding


@dataclass(frozen=True)
class RRLState(LabelState):
    soft_NC: Tensor  # s: soft labels; the given ones before they are first corrected
    hard_N: Tensor  # int64: the class of the soft label
    used_N: Tensor  # bool: trained on the hard label
    prototype_CD: Tensor  # 0 before the first epoch
    stale_C: Tensor  # bool: classes without such an image, which kept their prototype
    prototype_weight: Tensor  # of this epoch, scalar


def used(state: RRLState) -> Tensor:
    return state.used_N


class RRL(Method):
    corrects = "RRL"
    decoder = True

    def __init__(
        self, detector: Detector, options: Options, epochs: int, warmup: int, images: int
    ) -> None:
        """`images`: how many there are."""
        super().__init__(detector, warmup)
        self.options = options
        self.epochs = epochs
        self.fixed_shapes = images <= CAPTURED

    def phases(self) -> tuple[Phase, ...]:
        """Both phases have the same step. In the first all images are used, with given labels."""
        step = Step(
            self.show,
            self.loss,
            draws=WEAK_DRAWS + AUGMIX_DRAWS + 1,
            lambdas=(self.options.lambda_rule,) * 2,
            mixes_within=used,
            cost=12,
        )
        return (
            Phase("warm-up", self.warmup, (step,)),
            Phase("rrl", self.epochs - self.warmup, (step,)),
        )

    def start(self, given_N: Tensor, classes: int) -> RRLState:
        device = given_N.device
        return RRLState(
            **LabelState.start(given_N, classes),
            soft_NC=torch.zeros(len(given_N), classes, device=device).scatter_(
                1, given_N[:, None], 1
            ),
            hard_N=given_N.clone(),
            used_N=torch.ones_like(given_N, dtype=torch.bool),
            prototype_CD=torch.zeros(classes, self.options.dimensions, device=device),
            stale_C=torch.zeros(classes, dtype=torch.bool, device=device),
            prototype_weight=torch.zeros((), device=device),
        )

    def begin_epoch(self, state: RRLState, epoch: int) -> None:
        o = self.options
        state.prototype_weight.fill_(ramp(epoch, o.prototype_weight, o.ramp_epochs))

    # ------------------------------------------------------------------------------- the step

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        """A weak and an AugMix view, and both mixed with one of the views of another image."""
        weak_draws, strong_draws, which_B1 = batch.draws_BK[
            :, : WEAK_DRAWS + AUGMIX_DRAWS + 1
        ].split([WEAK_DRAWS, AUGMIX_DRAWS, 1], dim=1)
        weak = views.weak(batch.images_BCHW, weak_draws)
        strong = augmix_view(views, batch.images_BCHW, strong_draws, self.options.one_chain)
        # Each view of an image is mixed into one view of another image; which one is random.
        swap = which_B1[:, :, None, None] < 0.5
        first, second = torch.where(swap, strong, weak), torch.where(swap, weak, strong)
        mixed = [
            mix.lam * own + (1 - mix.lam) * other[mix.partner_B]
            for mix, own, other in zip(
                batch.mixes[:2], (weak, strong), (first, second), strict=True
            )
        ]
        return {NET: ViewBatch([], [weak, strong, *mixed])}

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: RRLState) -> Tensor:
        """Cross-entropy and prototypes: over the images that are used; the rest over all images."""
        o, views = self.options, outputs[NET].with_grad
        (logits_BC, _, weak_error_B1), (_, _, strong_error_B1), *_ = views
        weak_BD, strong_BD, *mixed = (normalise(projection_BD) for _, projection_BD, _ in views)
        used_B, hard_B = state.used_N[batch.index_B], state.hard_N[batch.index_B]
        target_BC = F.one_hot(hard_B, logits_BC.shape[1]).float()
        fit = mean_over(cross_entropy(logits_BC, target_BC), used_B)
        reconstruction = weak_error_B1.float().mean() + strong_error_B1.float().mean()
        instance = instance_contrast(weak_BD, strong_BD, o.temperature)
        first_B, second_B = (
            prototype_contrast(z_BD, mix.of(target_BC), state.prototype_CD, o.temperature)
            for z_BD, mix in zip(mixed, batch.mixes[:2], strict=True)
        )
        prototype = mean_over((first_B + second_B) / 2, used_B)
        return (
            fit
            + o.reconstruction_weight * reconstruction
            + o.instance_weight * instance
            + state.prototype_weight * prototype
        )

    # --------------------------------------------------------------------- the end of an epoch

    def scores_after(self, epoch: int) -> bool:
        """Every epoch needs prototypes."""
        return True

    def scoring(self, epoch: int) -> Scoring:
        """Labels are corrected from the end of the warm-up on."""
        run = self.find_prototypes
        if epoch >= self.warmup - 1:
            run = self.first_cleaning if epoch == self.warmup - 1 else self.clean_labels
        return Scoring(run, fixed_shapes=self.fixed_shapes, passes=2)

    def find_prototypes(self, scorer: Scorer, state: RRLState) -> None:
        self.score(scorer, state)
        self._update_prototypes(scorer.projections(), state)

    def first_cleaning(self, scorer: Scorer, state: RRLState) -> None:
        """The neighbours' soft labels are the predictions at first."""
        p_NC = self.predictions(scorer, state)
        state.soft_NC.copy_(keep_given(p_NC, scorer.given_N, self.options.keep_threshold))
        self._clean(p_NC, scorer, state)

    def clean_labels(self, scorer: Scorer, state: RRLState) -> None:
        self._clean(self.predictions(scorer, state), scorer, state)

    def predictions(self, scorer: Scorer, state: RRLState) -> Tensor:
        """Losses, predicted classes and p: the predicted probabilities."""
        p_NC = torch.empty_like(state.soft_NC)
        for rows, (logits_BC,) in scorer.logits():
            state.loss_N[rows] = F.cross_entropy(logits_BC, scorer.given_N[rows], reduction="none")
            state.predicted_N[rows] = logits_BC.argmax(1)
            p_NC[rows] = logits_BC.float().softmax(1)
        return p_NC

    def _clean(self, p_NC: Tensor, scorer: Scorer, state: RRLState) -> None:
        """s ← ½·(mean s of the neighbours + p), or the given label where that keeps it. The hard
        label is its class, and is used where s is certain enough."""
        o, given_N, z_ND = self.options, scorer.given_N, scorer.projections()
        for rows, votes_BC in neighbour_votes(z_ND, state.soft_NC, o.neighbours, o.temperature):
            p_NC[rows] = (votes_BC + p_NC[rows]) / 2
        state.soft_NC.copy_(keep_given(p_NC, given_N, o.keep_threshold))
        largest_N, hard_N = state.soft_NC.max(1)
        state.hard_N.copy_(hard_N)
        state.used_N.copy_(largest_N > o.use_threshold)
        state.noisy_N.copy_((hard_N != given_N) | ~state.used_N)
        state.p_noisy_N.copy_(1 - state.soft_NC.gather(1, given_N[:, None])[:, 0])
        self._update_prototypes(z_ND, state)

    def _update_prototypes(self, z_ND: Tensor, state: RRLState) -> None:
        found = class_means(z_ND, state.hard_N, state.used_N, state.prototype_CD)
        for kept, new in zip((state.prototype_CD, state.stale_C), found, strict=True):
            kept.copy_(new)

    # ------------------------------------------------------------------------ what it reports

    def verdict(self, state: RRLState, epoch: int) -> Verdict:
        """The class of the soft label is suggested, and trusted by its share of it."""
        known = super().verdict(state, epoch)
        if epoch < self.warmup - 1:
            return known
        return known._replace(suggested_N=state.hard_N, trust_N=state.soft_NC.amax(1))

    def notices(
        self, state: RRLState, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        kept = not self.in_warm_up(epoch) and noisy[-1] == 0
        return {
            "prototypes": stale_prototypes(state, classes),
            "used": few_used(state),
            "kept": ALL_KEPT if kept else None,
        }


def stale_prototypes(state: RRLState, classes: Sequence[str]) -> str | None:
    """Classes whose prototype was kept, since no image of them is used."""
    found = [classes[c] for c in state.stale_C.nonzero().flatten().tolist()]
    if not found:
        return None
    if len(found) == 1:
        subject = f"the class {found[0]} has no image with a confident label and keeps its"
    else:
        subject = (
            f"{len(found)} of {len(classes)} classes have no image with a confident label, such as "
            f"{found[0]}, and keep their"
        )
    return (
        f"{subject} earlier prototype. If there are such images, try a lower --keep-threshold or "
        "--use-threshold."
    )


def few_used(state: RRLState) -> str | None:
    """Almost no label is confident enough to be trained on."""
    share = int(state.used_N.sum()) / len(state.used_N)
    if share >= FEW_USED:
        return None
    return (
        f"only {share:.1%} of the images have a label that is confident enough to be trained on. "
        "Try a lower --keep-threshold or --use-threshold, or a longer --warmup."
    )
