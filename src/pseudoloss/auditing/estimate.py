"""The share of wrong labels with an interval, and whether the audit can know it.

N images, C classes.
"""

from dataclasses import dataclass

import numpy as np

SMALL_CLASS = 5  # a class with fewer images is too small to judge
FEW_IMAGES = 100
WEAK = 0.35  # accuracy of the predictions, with chance at 0, below which features are weak
ROUGH = 0.15  # relative error of the model
NORMAL_90 = 1.645


@dataclass(frozen=True)
class NoiseEstimate:
    """Share of wrong labels, with a 90% interval."""

    rate: float
    low: float
    high: float
    known: bool
    reasons: tuple[str, ...]  # why the audit cannot know, in sentences; empty if known
    by_class_C: np.ndarray  # (C, 3): rate, low, high by given class
    images_C: np.ndarray  # images by given class


def estimate_noise(
    p_noisy_N: np.ndarray,
    given_N: np.ndarray,
    classes: int,
    rate: float,
    confused: float,
    accuracy: float,
    *,
    between: float = 0.0,
    rates: tuple[float, float] | None = None,
) -> NoiseEstimate:
    """The share of wrong labels with a 90% interval.

    The interval has five sources: the number of wrong labels is random; the model is rough (15% of
    the rate); wrong labels on ambiguous images look like weak features, so that there may be half
    or twice as many of them; heads learn which classes are confused, so that there may be twice as
    many of those; and models that explain the labels about as well disagree.

    Args:
        p_noisy_N: probability that the given label is wrong.
        given_N: given labels.
        classes: number of classes.
        rate: expected share of wrong labels.
        confused: part of `rate` that is confusion of ambiguous images.
        accuracy: expected accuracy of the predictions, with respect to the true classes.
        between: part of `rate` that is confusion of classes.
        rates: the lowest and the highest rate of the models; None: all have the same.
    """
    N, images_C = len(given_N), np.bincount(given_N, minlength=classes)
    total_C = np.bincount(given_N, weights=p_noisy_N, minlength=classes)
    ambiguous, least, most = 0.0, 1.0, 1.0
    if rate > 1e-12:
        ambiguous = confused / rate  # share of the wrong labels
        least, most = (value / rate for value in rates or (rate, rate))
        most += between / rate
    by_class_C = _interval(total_C / np.maximum(images_C, 1), images_C, ambiguous, least, most)
    by_class_C[images_C < SMALL_CLASS, 1:] = (0, 1)
    reasons = []
    if ambiguous > 0.5 and rate > 0.02:
        reasons.append(
            "Many labels disagree with the predictions on ambiguous images. Wrong labels and hard "
            "images cannot be told apart there with certainty."
        )
    if (accuracy - 1 / classes) / (1 - 1 / classes) < WEAK:
        reasons.append(
            f"The features are weak for these classes: about {accuracy:.0%} of the images are "
            "predicted correctly. Other features may find more."
        )
    if N < FEW_IMAGES:
        reasons.append(f"There are only {N} images.")
    small_C = (images_C > 0) & (images_C < SMALL_CLASS)
    if images_C[small_C].sum() > N / 2:
        reasons.append(
            f"Most images are in classes with fewer than {SMALL_CLASS} images: too few to judge."
        )
    known = not reasons
    if small_C.any() and known:
        count = int(small_C.sum())
        classes_have = "1 class has" if count == 1 else f"{count} classes have"
        reasons.append(f"{classes_have} fewer than {SMALL_CLASS} images: too few to judge.")
    _, low, high = _interval(np.array(rate), np.array(N), ambiguous, least, most).tolist()
    return NoiseEstimate(rate, low, high, known, tuple(reasons), by_class_C, images_C)


def _interval(
    rate: np.ndarray, images: np.ndarray, ambiguous: float, least: float, most: float
) -> np.ndarray:
    """(..., 3): rate, low and high. `least` and `most`: how far the rate may be from this, as
    factors, without the other sources."""
    n = np.maximum(images, 1)
    smoothed = (rate * n + 1) / (n + 2)  # not 0 without any wrong label
    random = NORMAL_90 * np.sqrt(smoothed * (1 - smoothed) / n)
    width = np.hypot(random, ROUGH * (1 - ambiguous) * rate)
    low = rate - width - (0.5 * ambiguous + 1 - least) * rate
    high = rate + width + (ambiguous + most - 1) * rate
    return np.stack([rate, np.maximum(low, 0), np.minimum(high, 1)], -1)
