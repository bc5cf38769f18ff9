"""Flagging noisy labels with a two-mode mixture: of the loss, or of another metric in its place.

This is stage 1 of PLS, which trains on the result; the other methods report it in the label table.

Shapes: N images, B of them at a time, C classes.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods import metrics
from pseudoloss.methods.base import LabelState, Scorer
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.scores import auc

# Metrics that are compared (capped-loss ranks images as the loss does, except for ties), and those
# that need nothing but the loss.
COMPARED = ("loss", "agreement", "disagreement", "js", "kl")
FROM_THE_LOSS = ("loss", "capped-loss")


def high_loss(low_N: Tensor, threshold: float) -> Tensor:
    """Noisy: in the high mode with a probability above the threshold."""
    return 1 - low_N > threshold


def not_low_loss(low_N: Tensor, threshold: float) -> Tensor:
    """The paper's rule: clean if in the low mode with a probability above the threshold (row 2)."""
    return ~(low_N > threshold)


def protect_rare_classes(
    noisy_N: Tensor, loss_N: Tensor, given_N: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Not in the paper: if most labels are kept but every label of a class is flagged, those labels
    of the class whose loss is at most its mean are kept. Also returns which classes these are.

    The network may not have learned a rare class yet when its labels are judged, and with all of
    them flagged it never would.
    """
    none_C = loss_N.new_zeros(classes)
    total_C, noisy_C, loss_C = (
        none_C.index_add(0, given_N, value_N.to(loss_N.dtype))
        for value_N in (torch.ones_like(loss_N), noisy_N, loss_N)
    )
    few = noisy_N.sum() * 2 <= len(noisy_N)
    flagged_C = (noisy_C == total_C) & (total_C > 0) & few
    low_N = loss_N <= (loss_C / total_C)[given_N]
    return noisy_N & ~(flagged_C[given_N] & low_N), flagged_C


def noise_metrics(names: Collection[str], scorer: Scorer, state: LabelState) -> dict[str, Tensor]:
    """The metrics with these names, one value per image; high means suspicious."""
    given_N, classes = scorer.given_N, scorer.classes
    found: dict[str, Tensor] = {}
    if "loss" in names:
        found["loss"] = state.loss_N
    if "capped-loss" in names:
        found["capped-loss"] = metrics.capped(state.loss_N, classes)
    if "agreement" in names or "disagreement" in names:
        near = metrics.neighbours(scorer.projections())
        if "agreement" in names:
            found["agreement"] = metrics.agreement(near, given_N)
        if "disagreement" in names:
            found["disagreement"] = metrics.disagreement(near, given_N, classes)
    if "js" in names:
        divergences = [
            metrics.label_divergence(logits_BC, given_N[rows])
            for rows, (logits_BC,) in scorer.logits()
        ]
        found["js"] = torch.cat(divergences)
    if "kl" in names:
        divergences = [
            metrics.view_divergence(plain_BC, weak_BC)
            for _, (plain_BC, weak_BC) in scorer.logits(weak=1)
        ]
        found["kl"] = torch.cat(divergences)
        if scorer.weak_is_plain:  # the two views are the same
            found["kl"].fill_(torch.nan)
    return found


@dataclass(frozen=True)
class LossDetector:
    """Flags the labels in the high mode of a metric."""

    metric: str
    rule: Callable[[Tensor, float], Tensor]  # from P(low mode)
    threshold: float
    protect: bool

    @property
    def weak_views(self) -> int:
        return int(self.metric == "kl")

    @property
    def fixed_shapes(self) -> bool:
        return self.metric in FROM_THE_LOSS

    def score(self, scorer: Scorer, state: LabelState) -> None:
        for rows, (logits_BC,) in scorer.logits():
            state.loss_N[rows] = F.cross_entropy(logits_BC, scorer.given_N[rows], reduction="none")
            state.predicted_N[rows] = logits_BC.argmax(1)

    def flag(self, scorer: Scorer, state: LabelState) -> None:
        mixture = fit_two_modes(self.values(scorer, state))
        state.fitted.copy_(mixture.fitted)
        self.flag_by(mixture.low_N, scorer, state)

    def flag_by(self, low_N: Tensor, scorer: Scorer, state: LabelState) -> None:
        """Flag labels by P(low mode) of a mixture that the method has fitted itself."""
        noisy_N = self.rule(low_N, self.threshold)
        state.p_noisy_N.copy_(1 - low_N)
        if self.protect:
            noisy_N, flagged_C = protect_rare_classes(
                noisy_N, state.loss_N, scorer.given_N, scorer.classes
            )
            state.protected_C.copy_(flagged_C)
        state.noisy_N.copy_(noisy_N)

    def values(self, scorer: Scorer, state: LabelState) -> Tensor:
        """The metric that the mixture is fitted to."""
        return noise_metrics((self.metric,), scorer, state)[self.metric]

    def compare(
        self, scorer: Scorer, state: LabelState, wrong_N: Tensor
    ) -> dict[str, float | None]:
        found = noise_metrics(COMPARED, scorer, state)
        return {name: auc(value_N, wrong_N) for name, value_N in found.items()}
