"""Which training labels are wrong, where none were held out to estimate the noise rate on.

Two ways find wrong labels among those that were trained on. Neither always works:

    losses     two modes of the mean loss over the epochs. Good for accurate networks, even if they
               learn wrong labels by heart in the end. Weak networks have high losses on hard
               images, too.
    features   cross-validated heads on the features of the network, as in an audit. Good for weak
               networks; useless once wrong labels are learned by heart.

Test images have labels that count as correct, so the accuracy A on them is known. If a share r of
the training labels is wrong, and none of these is learned by heart, the network agrees with A (1-r)
of the training labels. The way whose r passes this check is used; the losses come first, since they
cost nothing. If neither passes, the noise rate is not known (benchmarks/train_table.py).

Shapes: N images, C classes.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from pseudoloss.engine.health import at_chance
from pseudoloss.engine.self_audit import self_audit, training_features
from pseudoloss.engine.trainer import Trainer
from pseudoloss.labels.table import LabelScores
from pseudoloss.methods.mixture import fit_two_modes

MARGIN = 0.05  # of the check: by how much the network may agree more often, ...
FEWER = 0.03  # ... or less often, where features are judged
FITTED = 0.85  # a network that agrees with so many training labels may have learned them by heart
FEWEST_TEST = 100  # images that A is measured on
FEWEST = 200  # training images that features are judged by
MOST_FEATURES = 2**30  # values
WIDE = 0.25  # an interval of the noise rate that is wider than this says too little
SURE = 1.645  # standard errors of a 90% interval
LATER = "the losses do not tell, and the features of the network are judged when the run ends"


class Judged(NamedTuple):
    """Scores of the training labels, and the noise rate with its 90% interval."""

    scores: LabelScores
    rate: float
    low: float
    high: float
    reasons: tuple[str, ...]  # why it is not known; none if it is


def judge(trainer: Trainer, plain: LabelScores, thorough: bool = True) -> Judged:
    """Judge the labels.

    Args:
        trainer: of the run.
        plain: scores whose p_noisy is not known yet; its trust is that of a wrong label.
        thorough: judge features too, which may take a minute.
    """
    losses = by_losses(trainer, plain)
    agreement = float((plain.predicted_N == trainer.given_N.cpu().numpy()).mean())
    test = trainer.data.test
    accuracy = trainer.validate() if trainer.accuracy is None else trainer.accuracy
    if trainer.data.noisy_test or test is None or accuracy is None or len(test) < FEWEST_TEST:
        reason = "no images were held out to estimate it on, and there are too few test images"
        fitted = agreement >= FITTED
        found = by_features(trainer, plain) if thorough and not fitted else None
        return (found or losses)._replace(low=0.0, high=1.0, reasons=(reason,))
    chance = at_chance(torch.from_numpy(plain.predicted_N), trainer.given_N.cpu())
    if chance:
        return losses._replace(reasons=(f"the model has learned too little: {chance}",))
    accuracy /= 100
    if abs(agreement - accuracy * (1 - losses.rate)) <= MARGIN:
        narrowed = with_interval(losses, agreement, accuracy, len(test))
        if narrowed.high - narrowed.low <= WIDE:
            return narrowed
    reason = (
        f"the network agrees with {agreement:.0%} of the training labels and is {accuracy:.0%} "
        "accurate on test images: it may have learned wrong labels by heart"
    )
    if agreement - accuracy > MARGIN:  # then features cannot pass either
        return losses._replace(reasons=(reason,))
    if not thorough:
        return losses._replace(low=0.0, high=1.0, reasons=(LATER,))
    found = by_features(trainer, plain)
    excess = 0.0 if found is None else agreement - accuracy * (1 - found.rate)
    if found is None or excess > MARGIN:
        return losses._replace(reasons=(reason,))
    if excess < -FEWER:
        reason = "the losses and the features of the network contradict each other"
        return losses._replace(reasons=(reason,))
    return found


def by_losses(trainer: Trainer, plain: LabelScores) -> Judged:
    """The two modes of the mean loss."""
    loss_N = -torch.from_numpy(plain.label_score_N).clamp(min=1e-30).log()
    mixture = fit_two_modes(loss_N.float().to(trainer.device))
    wrong_N = (1 - mixture.low_N).double().cpu().numpy()
    scores = plain._replace(p_noisy_N=wrong_N, trust_N=wrong_N * plain.trust_N)
    return Judged(scores, float(wrong_N.mean()), 0.0, 1.0, ())


def by_features(trainer: Trainer, plain: LabelScores) -> Judged | None:
    """Cross-validated heads on the features; None if there are too few images, or too many."""
    if trainer.classes < 2 or len(trainer.images) < FEWEST:
        return None
    width = trainer.networks[trainer.method.networks[0]].classifier.in_features
    if len(trainer.images) * width > MOST_FEATURES:
        return None
    found = self_audit(trainer, training_features(trainer), repeats=1, rounds=1)
    scores = plain._replace(
        p_noisy_N=found.p_noisy_N, candidate_N=found.candidate_N, trust_N=found.trust_N
    )
    noise = found.noise
    reasons = () if noise.known else tuple(noise.reasons)
    return Judged(scores, noise.rate, noise.low, noise.high, reasons)


def with_interval(judged: Judged, agreement: float, accuracy: float, test_images: int) -> Judged:
    """The rates that pass the check, with the standard error of the accuracy."""
    error = SURE * math.sqrt(accuracy * (1 - accuracy) / test_images)
    low = 1 - (agreement + MARGIN) / max(accuracy - error, 1e-6)
    high = 1 - (agreement - MARGIN) / min(accuracy + error, 1.0)
    return judged._replace(
        low=float(np.clip(low, 0, judged.rate)), high=float(np.clip(high, judged.rate, 1))
    )
