"""The label table of a run: scores of all labels, and the estimated noise rate.

Shapes: N images, M held out, B of them in a chunk, C classes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pseudoloss.data import ImageSet
from pseudoloss.data.storage import DeviceImages
from pseudoloss.engine.first_audit import FirstAudit
from pseudoloss.engine.health import at_chance
from pseudoloss.engine.history import History
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.without_held_out import WIDE, judge
from pseudoloss.inference.passes import predict, with_rows
from pseudoloss.labels.table import LabelScores, label_table
from pseudoloss.methods.label_scores import (
    Noise,
    count_flips,
    estimate_noise,
    even_flips,
    matching_shift,
    probability_wrong,
    weigh,
)

CHUNK = 2**22  # predictions at a time
SAMPLE = 2**24  # predictions that flips are counted in
FEWEST = 20  # held-out images that a noise rate is estimated from


class Predictions(NamedTuple):
    """Of B images."""

    rows: slice
    log_prob_BC: Tensor  # mean over the epochs
    predicted_B: Tensor  # class, after the last epoch


def label_scores(trainer: Trainer, thorough: bool = True) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The label table after the epochs so far, and `estimated_noise` of summary.json. A table that
    is not `thorough` takes seconds: training waits for it."""
    train, given_N = trainer.data.train, trainer.given_N
    held_out, noise, reasons = _held_out(trainer)
    audit = known_audit(trainer)
    if audit is not None:
        scores = audit.scores(_not_judged(trainer).predicted_N)
        rate, low, high = audit.rates
    elif noise is not None:
        scores = _scores(trainer, trainer.images, trainer.history, given_N, noise, match=True)
        rate, low, high = noise.rate, noise.low, noise.high
    else:
        judged = judge(trainer, _not_judged(trainer), thorough)
        scores, rate, low, high = judged[:4]
        reasons = reasons or judged.reasons
    parts = None
    if held_out is not None and trainer.test_images is not None:
        given_M = held_out.given_N.to(trainer.device)
        images, history = trainer.test_images, trainer.held_out_history
        known = noise or Noise(rate, low, high, 1.0, even_flips(trainer.classes).to(trainer.device))
        parts = held_out, _scores(trainer, images, history, given_M, known)
    table = label_table(train, scores, parts)
    by_class = _by_class(scores.p_noisy_N, train, rate, low, high)
    return table, {
        "rate": rate,
        "low": low,
        "high": high,
        "known": not reasons,
        "reasons": list(reasons),
        "by_class": by_class,
    }


def known_audit(trainer: Trainer) -> FirstAudit | None:
    """The audit of the head start, if there was one and it knows the noise rate."""
    audit = trainer.first_audit
    return audit if audit is not None and audit.known else None


def _held_out(trainer: Trainer) -> tuple[ImageSet | None, Noise | None, Sequence[str]]:
    """The held-out images, if any; the noise rate estimated on them, if it is needed and possible;
    and why it is not known."""
    test, images = trainer.data.test, trainer.test_images
    if test is None or images is None or not trainer.data.noisy_test:
        return None, None, ()
    if known_audit(trainer) is not None:
        return test, None, ()
    if trainer.settings.corrupt is not None:
        return test, None, ("the held-out images kept their labels (--corrupt changes the others)",)
    if len(test) < FEWEST:
        return test, None, (f"only {len(test)} images were held out; {FEWEST} are needed",)
    found = list(_predictions(trainer, images, trainer.held_out_history))
    log_prob_MC = torch.cat([part.log_prob_BC for part in found])
    predicted_M = torch.cat([part.predicted_B for part in found])
    given_M = test.given_N.to(trainer.device)
    noise = estimate_noise(log_prob_MC, given_M, _flips(trainer))
    reasons = []
    chance = at_chance(predicted_M, given_M)
    if chance:
        reasons.append(f"the model has learned too little: {chance}")
    elif noise.high - noise.low > WIDE:
        reasons.append(
            f"with {len(test):,} held-out images and a model this accurate, it can be anything "
            f"from {noise.low:.0%} to {noise.high:.0%}"
        )
    return test, noise, reasons


def _flips(trainer: Trainer) -> Tensor:
    """Counted in a sample of the training images."""
    step = max(1, math.ceil(len(trainer.given_N) * trainer.classes / SAMPLE))
    log_prob, given = [], []
    for rows, log_prob_BC, _ in _predictions(trainer, trainer.images, trainer.history):
        first = -rows.start % step
        log_prob.append(log_prob_BC[first::step])
        given.append(trainer.given_N[rows][first::step])
    return count_flips(torch.cat(log_prob), torch.cat(given))


def _predictions(
    trainer: Trainer, images: DeviceImages, history: History | None
) -> Iterator[Predictions]:
    """For one chunk of images after another."""
    if history is None:
        network = trainer.model.network
        for rows, logits_BC in with_rows(predict(network, trainer.views, images)):
            yield Predictions(rows, logits_BC.float().log_softmax(1), logits_BC.argmax(1))
        return
    size = max(1, CHUNK // trainer.classes)
    for start in range(0, len(history.sum_NC), size):
        rows = slice(start, min(start + size, len(history.sum_NC)))
        yield Predictions(rows, history.mean(rows), history.latest_NC[rows].argmax(1))


def _scores(
    trainer: Trainer,
    images: DeviceImages,
    history: History | None,
    given_N: Tensor,
    noise: Noise,
    match: bool = False,
) -> LabelScores:
    """With `match`, the labels were trained on: their log-odds are lowered to match the rate."""
    found = []
    for rows, log_prob_BC, predicted_B in _predictions(trainer, images, history):
        given_B = given_N[rows]
        score_B = log_prob_BC.gather(1, given_B[:, None])[:, 0].exp()
        evidence = weigh(log_prob_BC, given_B, noise)
        found.append((predicted_B, score_B, *evidence))
    predicted_N, score_N, log_odds_N, candidate_N, share_N = map(
        torch.cat, zip(*found, strict=True)
    )
    shift = matching_shift(log_odds_N, noise.rate) if match else 0.0
    wrong_N = probability_wrong(log_odds_N, shift)
    return _as_arrays(predicted_N, candidate_N, score_N, wrong_N, share_N)


def _not_judged(trainer: Trainer) -> LabelScores:
    """Scores of the training labels as if each of them were wrong."""
    plain = Noise(0.5, 0.0, 1.0, 1.0, even_flips(trainer.classes).to(trainer.device))
    scores = _scores(trainer, trainer.images, trainer.history, trainer.given_N, plain)
    share_N = scores.trust_N / np.maximum(scores.p_noisy_N, 1e-300)
    return scores._replace(p_noisy_N=np.ones_like(share_N), trust_N=share_N.clip(max=1))


def _as_arrays(
    predicted_N: Tensor, candidate_N: Tensor, score_N: Tensor, wrong_N: Tensor, share_N: Tensor
) -> LabelScores:
    tensors = (predicted_N, candidate_N, score_N, wrong_N, wrong_N * share_N)
    return LabelScores(*(tensor.cpu().numpy() for tensor in tensors))


def _by_class(
    p_noisy_N: np.ndarray, images: ImageSet, rate: float, low: float, high: float
) -> dict[str, dict[str, Any]]:
    """The noise rate of each given class. Its interval is that of all labels, in proportion, and
    two standard deviations of the number of wrong labels wider."""
    given, classes = images.given_N.numpy(), len(images.classes)
    count_C = np.bincount(given, minlength=classes)
    safe_C = np.maximum(count_C, 1)
    rate_C = np.bincount(given, p_noisy_N, minlength=classes) / safe_C
    variance_C = np.bincount(given, p_noisy_N * (1 - p_noisy_N), minlength=classes)
    more_C = 2 * np.sqrt(variance_C) / safe_C
    factors = (low / rate, high / rate) if rate > 0 else (1.0, 1.0)
    low_C = (rate_C * factors[0] - more_C).clip(0, 1)
    high_C = np.maximum(rate_C * factors[1], rate_C + (high - rate) / 2) + more_C
    return {
        name: {
            "rate": float(rate_C[c]),
            "low": float(min(low_C[c], rate_C[c])),
            "high": float(high_C[c].clip(rate_C[c], 1)),
            "images": int(count_C[c]),
        }
        for c, name in enumerate(images.classes)
    }
