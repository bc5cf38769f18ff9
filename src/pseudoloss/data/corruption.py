"""Label noise for experiments: seeded, vectorised, with the truth kept beside it."""

import numpy as np
import torch

from pseudoloss.config import did_you_mean
from pseudoloss.data.images import ImageSet
from pseudoloss.errors import InputError


def corrupt(images: ImageSet, noise: str, seed: int) -> ImageSet:
    """`images` with noise such as "symmetric:0.4" in the given labels.

    The labels that were there become the truth (unless the truth is known already).
    """
    kind, rate = parse(noise)
    clean = images.given_N.numpy()
    random = np.random.default_rng([seed, 0xC0])
    wrong = KINDS[kind](clean, len(images.classes), rate, random)
    true_N = images.given_N if images.true_N is None else images.true_N
    return images.with_labels(torch.from_numpy(wrong), true_N)


def parse(noise: str) -> tuple[str, float]:
    """The kind and rate in "symmetric:0.4"."""
    kind, _, number = noise.partition(":")
    if kind not in KINDS:
        raise InputError(f"--corrupt {noise}: no such noise{did_you_mean(kind, KINDS)}")
    try:
        rate = float(number)
    except ValueError:
        raise InputError(f"--corrupt {noise}: expected {kind}:RATE, such as {kind}:0.4") from None
    if not 0 <= rate <= 1:
        raise InputError(f"--corrupt {noise}: the rate must be between 0 and 1")
    return kind, rate


def symmetric(
    clean_N: np.ndarray, classes: int, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label, with probability `rate`, is drawn anew from all classes.

    The draw can return the true class, so the true rate is rate·(C-1)/C on average (row 18).
    """
    drawn = random.integers(classes, size=len(clean_N))
    return np.where(random.random(len(clean_N)) < rate, drawn, clean_N)


def symmetric_exact(
    clean_N: np.ndarray, classes: int, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Exactly round(rate·N) labels move, each to one of the other classes, equally likely."""
    moved = random.choice(len(clean_N), size=round(rate * len(clean_N)), replace=False)
    wrong = clean_N.copy()
    wrong[moved] = (clean_N[moved] + random.integers(1, classes, size=len(moved))) % classes
    return wrong


KINDS = {"symmetric": symmetric, "symmetric-exact": symmetric_exact}
