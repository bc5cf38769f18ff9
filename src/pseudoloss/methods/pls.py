"""Pseudo-Loss Selection (Albert et al., "Is your noise correction noisy?", WACV 2023).

First the paper's equations, in its order; then the step that calls them. "Row n" is a row of
docs/paper-and-code.md, which lists where paper and released program differ and what we chose.

Shapes: N images in the set, B in a batch, C classes, D dimensions of the contrastive space.
Letters: γ gamma, μ mu, λ lam, w trust; ŷ guess.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods.batch import Batch, Outputs, ViewBatch
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import Mixture, fit_two_modes
from pseudoloss.methods.mixup import Mixup, cross_entropy, mix
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS, Views

# ------------------------------------------------------------------ 3.1 Detecting noisy samples


def high_loss(mixture: Mixture, threshold: float) -> Tensor:
    """Noisy: in the high mode of the loss with a probability above the threshold."""
    return 1 - mixture.low_N > threshold


def not_low_loss(mixture: Mixture, threshold: float) -> Tensor:
    """The paper's side: clean if in the low mode with a probability above the threshold (row 2)."""
    return ~(mixture.low_N > threshold)


def protect_rare_classes(
    noisy_N: Tensor, loss_N: Tensor, given_N: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Ours: where most labels are believed, but none of a class, those of its labels count as right
    whose loss is not above its mean; and which classes these are.

    The network may not have learnt a rare class when its labels are judged, and with none of them
    left it never would.
    """
    none_C = loss_N.new_zeros(classes)
    total_C, noisy_C, loss_C = (
        none_C.index_add(0, given_N, value_N.to(loss_N.dtype))
        for value_N in (torch.ones_like(loss_N), noisy_N, loss_N)
    )
    few = noisy_N.sum() * 2 <= len(noisy_N)
    lost_C = (noisy_C == total_C) & (total_C > 0) & few
    low_N = loss_N <= (loss_C / total_C)[given_N]
    return noisy_N & ~(lost_C[given_N] & low_N), lost_C


# ------------------------------------------- 3.2.1 Guessing labels for the detected noisy samples


def by_sum(log_BC: Tensor) -> Tensor:
    """Numbers given by their logarithms, divided by their sum."""
    return log_BC.softmax(1)


def by_max(log_BC: Tensor) -> Tensor:
    """Numbers given by their logarithms, divided by their maximum: the paper's form (row 3)."""
    return (log_BC - log_BC.amax(1, keepdim=True)).exp()


def guess_labels(
    first_BC: Tensor,
    second_BC: Tensor,
    gamma: float,
    normalise: Callable[[Tensor], Tensor] = by_sum,
) -> Tensor:
    """Eq. 1: ŷ = ((φ(x₁) + φ(x₂)) / 2)^γ, normalised, from the logits of two weak views.

    In logarithms, so that no power of a small probability underflows the whole guess.
    """
    log_first_BC = F.log_softmax(first_BC.float(), dim=1)
    log_second_BC = F.log_softmax(second_BC.float(), dim=1)
    log_mean_BC = torch.logaddexp(log_first_BC, log_second_BC) - math.log(2)
    return normalise(gamma * log_mean_BC)


# ------------------------------------------------- 3.2.2 Correcting only confident pseudo-labels


def pseudo_loss(guess_BC: Tensor, logits_BC: Tensor) -> Tensor:
    """Eq. 2: l_pseudo = -ŷ log φ(x), of the guess and the plain view."""
    return cross_entropy(logits_BC, guess_BC)


def trust_guesses(pseudo_loss_N: Tensor, noisy_N: Tensor) -> tuple[Tensor, Mixture]:
    """w: P(low mode) of the pseudo-loss over the noisy images; 1 for the others.

    The same for another metric in its place (metrics.py).
    """
    mixture = fit_two_modes(pseudo_loss_N, noisy_N)
    return mixture.low_N, mixture


def trust_confident(doubt_N: Tensor, noisy_N: Tensor, threshold: float) -> Tensor:
    """w as the supplement's table of thresholds has it, for comparison: 1 where the confidence of
    the guess, 1 - doubt, exceeds the threshold, else 0; 1 for images that are not noisy."""
    return (~noisy_N | (1 - doubt_N > threshold)).float()


def weighted_mean(loss_B: Tensor, w_B: Tensor | None) -> Tensor:
    """Σ w·loss / Σ w; 0 where nothing in the batch is trusted. None: all is."""
    if w_B is None:
        return loss_B.mean()  # not w = 1: some compilers of GPU code break on sums over a constant
    return (w_B * loss_B).sum() / w_B.sum().clamp(min=1e-12)


def classification_apart(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None, partner_B: Tensor, lam: Tensor
) -> Tensor:
    """Eq. 3 as released: l_classif = λ·A + (1-λ)·B, each with its own normaliser (row 4)."""
    partners_w_B = None if w_B is None else w_B[partner_B]
    own = weighted_mean(cross_entropy(logits_BC, target_BC), w_B)
    partners = weighted_mean(cross_entropy(logits_BC, target_BC[partner_B]), partners_w_B)
    return lam * own + (1 - lam) * partners


def classification_together(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None, partner_B: Tensor, lam: Tensor
) -> Tensor:
    """Eq. 3 as printed: target and w interpolated, one normaliser (row 4)."""
    loss_B = cross_entropy(logits_BC, mix(target_BC, partner_B, lam))
    return weighted_mean(loss_B, None if w_B is None else mix(w_B, partner_B, lam))


def classification_own(
    logits_BC: Tensor, target_BC: Tensor, w_B: Tensor | None, partner_B: Tensor, lam: Tensor
) -> Tensor:
    """Eq. 3 as released too, at another commit: the target interpolated, w not (row 4)."""
    return weighted_mean(cross_entropy(logits_BC, mix(target_BC, partner_B, lam)), w_B)


def class_balance(logits_BC: Tensor, prior_C: Tensor) -> Tensor:
    """KL(prior ‖ mean prediction of the batch): no class may be forgotten (row 14)."""
    log_BC = F.log_softmax(logits_BC.float(), dim=1)
    log_mean_C = log_BC.logsumexp(0) - math.log(len(log_BC))
    return (torch.xlogy(prior_C, prior_C) - prior_C * log_mean_C).sum()


# ------------------------------------------------------------ 3.2.3 Supervised contrastive learning


def feature_similarity(weak_BD: Tensor, strong_BD: Tensor, mu: float) -> Tensor:
    """Eq. 4: P = g(φ(X₁)) g(φ(X′))ᵀ / μ, of L2-normalised projections."""
    return F.normalize(weak_BD.float()) @ F.normalize(strong_BD.float()).T / mu


def contrastive_loss(P_BB: Tensor, L_BB: Tensor) -> Tensor:
    """Eq. 5 and 7: the row-wise cross-entropy of P's softmax and L, whose rows are made to sum
    to one (row 9). Naive with L = Y Yᵀ, confidence guided with the labels of Eq. 6."""
    return (cross_entropy(P_BB, L_BB) / L_BB.sum(1)).mean()


# --------------------------------------- 3.2.4 Confidence guided contrastive learning under noise


def contrastive_label(class_BC: Tensor, w_B: Tensor | None) -> Tensor:
    """Eq. 6: y_cont = concat(w·ŷ, (1-w)·O(i, B)).

    Where the guess is trusted an image resembles its class; where not, only itself: O(i, B) is
    the one-hot code of its position in the batch. Where all are trusted (None) the class is left.
    """
    if w_B is None:
        return class_BC
    return torch.cat([w_B[:, None] * class_BC, torch.diag(1 - w_B)], dim=1)


def label_similarity(label_BX: Tensor, partner_B: Tensor, lam: Tensor) -> Tensor:
    """L′: how alike the labels are, for mixed images against the unmixed strong views.

    L = Y Yᵀ, then its rows mixed as the images were (row 7), with the same λ and partners (row 6).
    """
    return mix(label_BX @ label_BX.T, partner_B, lam)


def class_of_mixed(target_BC: Tensor, partner_B: Tensor, lam: Tensor) -> Tensor:
    """One-hot class of the mixed target, as released: a soft guess can take its partner's class
    (row 8)."""
    return one_hot_of(mix(target_BC, partner_B, lam))


def class_of_own(target_BC: Tensor, partner_B: Tensor, lam: Tensor) -> Tensor:
    """One-hot class of an image's own target, as the paper has it (row 8)."""
    return one_hot_of(target_BC)


def one_hot_of(target_BC: Tensor) -> Tensor:
    return F.one_hot(target_BC.argmax(1), target_BC.shape[1]).float()


# -------------------------------------------------------------------- Algorithm 1: the step


@dataclass(frozen=True)
class PLS:
    """The loss of a step, and what may be switched off in it."""

    guess: Callable[[Tensor, Tensor], Tensor] | None  # Eq. 1; None: nothing is corrected
    mu: float
    balance: float
    prior_C: Tensor
    classification: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]
    contrastive_class: Callable[[Tensor, Tensor, Tensor], Tensor]
    guess_in_eval: (
        bool  # without, as released: batch statistics count, the running ones move (row 12)
    )
    contrast: bool
    trust_in_classification: bool
    trust_in_contrast: bool

    draws = 2 * WEAK_DRAWS + STRONG_DRAWS

    @property
    def warm_up(self) -> Mixup:
        """Lines 1 to 7: mixup on the given labels."""
        return Mixup()

    def show(self, views: Views, batch: Batch) -> ViewBatch:
        """Lines 11 to 15: two weak views, of which the first is mixed too, and a strong one."""
        _, images_BCHW, _, partner_B, lam, draws_BK = batch
        first_draws, second_draws, strong_draws = draws_BK.split(
            [WEAK_DRAWS, WEAK_DRAWS, STRONG_DRAWS], dim=1
        )
        weak_view = views.weak(images_BCHW, first_draws)
        shown = ViewBatch([], [mix(weak_view, partner_B, lam)])
        if self.guess is not None:
            shown.no_grad.extend([weak_view, views.weak(images_BCHW, second_draws)])
        if self.contrast:
            shown.with_grad.append(views.strong(images_BCHW, strong_draws))
        return shown

    def loss(self, seen: Outputs, batch: Batch, memory: Memory) -> Tensor:
        """Lines 16 to 27."""
        index_B, _, given_B, partner_B, lam, _ = batch
        target_BC = F.one_hot(given_B, len(self.prior_C)).float()
        if self.guess is not None:
            (first_BC, _), (second_BC, _) = seen.guessed
            guess_BC = self.guess(first_BC, second_BC)
            memory.remember_guesses(index_B, guess_BC)
            target_BC = torch.where(memory.noisy_N[index_B, None], guess_BC, target_BC)
        w_B = memory.trust_N[index_B]

        logits_BC, weak_BD = seen.learnt[0]
        w_classif_B = w_B if self.trust_in_classification else None
        loss = self.classification(logits_BC, target_BC, w_classif_B, partner_B, lam)
        if self.balance > 0:
            loss = loss + self.balance * class_balance(logits_BC, self.prior_C)
        if self.contrast:
            _, strong_BD = seen.learnt[1]
            class_BC = self.contrastive_class(target_BC, partner_B, lam)
            label_BX = contrastive_label(class_BC, w_B if self.trust_in_contrast else None)
            L_BB = label_similarity(label_BX, partner_B, lam)
            P_BB = feature_similarity(weak_BD, strong_BD, self.mu)
            loss = loss + contrastive_loss(P_BB, L_BB)
        return loss
