"""Label noise for experiments, decided by a seed. The true labels are kept.

Shapes: N images, M of them may get another label, C classes.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from pseudoloss.data import label_files, pools
from pseudoloss.data.images import OUT, ImageFiles, ImageSet
from pseudoloss.errors import InputError, name_hint

BLOCK = 5  # classes in a block of asymmetric-blocks


def corrupt(
    images: ImageSet,
    noise: str | None,
    seed: int,
    pool: str | None = None,
    held_out: ImageSet | None = None,
    tell: Callable[[str], object] = warnings.warn,
) -> ImageSet:
    """Add noise to the given labels, to the images, or to both.

    Args:
        images: the image set. Its labels become the true labels, unless those are known already.
        noise: text such as "symmetric:0.4", "symmetric:0.2+out:0.4" or "labels:FILE.csv".
        seed: the seed of all random numbers used here.
        pool: the source of the images for "+out" (see pools.py).
        held_out: images of the same source that keep their labels. A table of labels may have rows
            for them.
        tell: called with a message if images of the pool cannot be read.
    """
    where = f"--corrupt {noise}"
    parsed = check_noise(noise, pool)
    if parsed.kind == "human":
        return label_files.human(images, parsed.file, parsed.name, where)
    if parsed.kind == "labels":
        return label_files.table(images, parsed.file, where, held_out)
    true_N = (images.given_N if images.true_N is None else images.true_N).clone()
    out = replaced_images(len(images), parsed.out or 0, seed)
    inside = np.ones(len(images), dtype=bool)
    inside[out] = False
    given = images.given_N.numpy().copy()
    if parsed.kind:
        # Row 18: the rate among the other images is such that r_in of all images are affected.
        rate = min(1.0, parsed.rate / max(1 - (parsed.out or 0), 1e-9))
        random = np.random.default_rng([seed, 0xC0])
        given[inside] = KINDS[parsed.kind](given[inside], images, rate, random)
    changed = images.with_labels(torch.from_numpy(given), true_N)
    if pool is None:
        return changed
    random = np.random.default_rng([seed, 0xC2])
    drawn = pools.draw(pool, len(out), images.size, images.channels, random, tell)
    if isinstance(images.images_NCHW, ImageFiles):
        raise InputError(
            f"--pool {pool}: images that stay in their files cannot be replaced; "
            "use --images host, which reads them into memory"
        )
    pixels = images.images_NCHW.clone()
    pixels[torch.from_numpy(out)] = drawn
    true_N[torch.from_numpy(out)] = OUT
    return replace(changed, images_NCHW=pixels, digest="")


@dataclass(frozen=True)
class Noise:
    """The value of --corrupt, parsed."""

    kind: str = ""  # of label noise; empty: the labels stay
    rate: float = 0.0
    out: float | None = None  # share of images to replace; None: not given
    file: str = ""
    name: str | None = None  # of the labels in the file


def check_noise(noise: str | None, pool: str | None) -> Noise:
    """Parse --corrupt, and check that --pool is given exactly if it is needed."""
    parsed = Noise() if noise is None else parse_noise(noise)
    if parsed.out is None and pool is not None:
        raise InputError(
            f"--pool {pool}: nothing asks for it; add +out:RATE to --corrupt, "
            "such as symmetric:0.2+out:0.4"
        )
    if parsed.out is not None and pool is None:
        raise InputError(f"--corrupt {noise}: needs --pool, the images that belong to no class")
    return parsed


def parse_noise(noise: str) -> Noise:
    """Parse --corrupt."""
    kind, _, rest = noise.partition(":")
    if kind == "human":
        named = re.fullmatch(r"(.+):(\w+)", rest)
        file, name = named.groups() if named else (rest, None)
        return Noise(kind, file=_file(noise, file, "human:FILE or human:FILE:NAME"), name=name)
    if kind == "labels":
        return Noise(kind, file=_file(noise, rest, "labels:FILE.csv"))
    first, plus, second = noise.partition("+")
    if plus and not second.startswith("out:"):
        raise InputError(f"--corrupt {noise}: only out:RATE can follow a +")
    kind, rate = _rate(noise, first)
    if kind == "out":
        if plus:
            raise InputError(f"--corrupt {noise}: out must be last, as in symmetric:0.2+out:0.4")
        return Noise(out=rate)
    out = _rate(noise, second)[1] if plus else None
    if rate + (out or 0) > 1 + 1e-9:
        raise InputError(f"--corrupt {noise}: the sum of the rates must not exceed 1")
    return Noise(kind, rate, out)


def _rate(noise: str, term: str) -> tuple[str, float]:
    kind, _, number = term.partition(":")
    if kind not in (*KINDS, "out"):
        known = (*KINDS, "out", "human", "labels")
        raise InputError(f"--corrupt {noise}: no such noise{name_hint(kind, known)}")
    try:
        rate = float(number)
    except ValueError:
        raise InputError(f"--corrupt {noise}: expected {kind}:RATE, such as {kind}:0.4") from None
    if not 0 <= rate <= 1:
        raise InputError(f"--corrupt {noise}: the rate must be between 0 and 1")
    return kind, rate


def _file(noise: str, file: str, expected: str) -> str:
    if not file:
        raise InputError(f"--corrupt {noise}: expected {expected}")
    return file


def replaced_images(n: int, rate: float, seed: int) -> np.ndarray:
    """The indices of the images that are replaced: exactly round(rate·N), sorted."""
    random = np.random.default_rng([seed, 0xC1])
    return np.sort(random.choice(n, size=round(rate * n), replace=False))


def symmetric(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label is replaced, with probability `rate`, by a random class.

    The random class can be the true one, so on average rate·(C-1)/C of the labels are wrong
    (row 18).
    """
    drawn = random.integers(len(images.classes), size=len(clean_M))
    return np.where(random.random(len(clean_M)) < rate, drawn, clean_M)


def symmetric_exact(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Exactly round(rate·M) labels are replaced, each by a random other class."""
    classes = len(images.classes)
    moved = random.choice(len(clean_M), size=round(rate * len(clean_M)), replace=False)
    wrong = clean_M.copy()
    wrong[moved] = (clean_M[moved] + random.integers(1, classes, size=len(moved))) % classes
    return wrong


def asymmetric(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label becomes, with probability `rate`, the next class of its superclass (row 19)."""
    if images.superclasses is None:
        raise InputError(
            "--corrupt asymmetric: the source has no superclasses (only cifar100 has); "
            "asymmetric-blocks:RATE and pair:RATE need none"
        )
    return _flip(clean_M, np.array(images.superclasses), rate, random)


def asymmetric_blocks(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label becomes, with probability `rate`, the next class of its block of 5 (row 19)."""
    return _flip(clean_M, np.arange(len(images.classes)) // BLOCK, rate, random)


def pair(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label becomes, with probability `rate`, the next class."""
    return _flip(clean_M, np.zeros(len(images.classes)), rate, random)


KINDS = {
    "symmetric": symmetric,
    "symmetric-exact": symmetric_exact,
    "asymmetric": asymmetric,
    "asymmetric-blocks": asymmetric_blocks,
    "pair": pair,
}


def next_in_group(group_C: np.ndarray) -> np.ndarray:
    """For each class the next class of its group; the first class follows the last."""
    next_C = np.empty(len(group_C), dtype=np.int64)
    for group in np.unique(group_C):
        members = np.flatnonzero(group_C == group)
        next_C[members] = np.roll(members, -1)
    return next_C


def _flip(
    clean_M: np.ndarray, group_C: np.ndarray, rate: float, random: np.random.Generator
) -> np.ndarray:
    hit_M = random.random(len(clean_M)) < rate
    return np.where(hit_M, next_in_group(group_C)[clean_M], clean_M)
