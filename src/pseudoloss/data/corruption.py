"""Noise for experiments: seeded, vectorised, with the truth kept beside it.

Shapes: N images, M of them that may get another label, C classes.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from pseudoloss.data import label_files
from pseudoloss.data import pools as pool
from pseudoloss.data.images import OUT, ImageFiles, ImageSet
from pseudoloss.errors import InputError, name_hint

BLOCK = 5  # classes that asymmetric-blocks takes together


def corrupt(
    images: ImageSet,
    noise: str | None,
    seed: int,
    pool_place: str | None = None,
    held_out: ImageSet | None = None,
    tell: Callable[[str], object] = warnings.warn,
) -> ImageSet:
    """`images` with noise in the given labels, in the images, or in both.

    Args:
        images: the set. The labels that it has become the truth, unless the truth is known already.
        noise: words such as "symmetric:0.4", "symmetric:0.2+out:0.4" or "labels:FILE.csv".
        seed: decides everything random here.
        pool_place: where the images for "+out" come from (see `pool`).
        held_out: images of the same source that keep their labels; a table may name them too.
        tell: is told what in the pool cannot be read.
    """
    where = f"--corrupt {noise}"
    asked = asked_for(noise, pool_place)
    if asked.kind == "human":
        return label_files.human(images, asked.file, asked.name, where)
    if asked.kind == "labels":
        return label_files.table(images, asked.file, where, held_out)
    true_N = (images.given_N if images.true_N is None else images.true_N).clone()
    out = replaced(len(images), asked.out or 0, seed)
    inside = np.ones(len(images), dtype=bool)
    inside[out] = False
    given = images.given_N.numpy().copy()
    if asked.kind:
        # Row 18: the labels of the other images change so often that r_in of all are hit.
        rate = min(1.0, asked.rate / max(1 - (asked.out or 0), 1e-9))
        random = np.random.default_rng([seed, 0xC0])
        given[inside] = KINDS[asked.kind](given[inside], images, rate, random)
    changed = images.with_labels(torch.from_numpy(given), true_N)
    if pool_place is None:
        return changed
    random = np.random.default_rng([seed, 0xC2])
    drawn = pool.draw(pool_place, len(out), images.size, images.channels, random, tell)
    if isinstance(images.images_NCHW, ImageFiles):
        raise InputError(
            f"--pool {pool_place}: images that stay in their files cannot be replaced; "
            "--images host reads them into memory"
        )
    pixels = images.images_NCHW.clone()
    pixels[torch.from_numpy(out)] = drawn
    true_N[torch.from_numpy(out)] = OUT
    return replace(changed, images_NCHW=pixels, digest="")


@dataclass(frozen=True)
class Noise:
    """What words ask for."""

    kind: str = ""  # of the labels; none: they stay
    rate: float = 0.0
    out: float | None = None  # share of images to replace; None: not asked for
    file: str = ""
    name: str | None = None  # of the labels in the file


def asked_for(noise: str | None, pool_place: str | None) -> Noise:
    """The words of --corrupt, and whether --pool fits them."""
    asked = Noise() if noise is None else parse(noise)
    if asked.out is None and pool_place is not None:
        raise InputError(
            f"--pool {pool_place}: nothing asks for it; add +out:RATE to --corrupt, "
            "such as symmetric:0.2+out:0.4"
        )
    if asked.out is not None and pool_place is None:
        raise InputError(f"--corrupt {noise}: needs --pool, the images that belong to no class")
    return asked


def parse(noise: str) -> Noise:
    """The words of --corrupt."""
    kind, _, rest = noise.partition(":")
    if kind == "human":
        named = re.fullmatch(r"(.+):(\w+)", rest)
        file, name = named.groups() if named else (rest, None)
        return Noise(kind, file=_file(noise, file, "human:FILE or human:FILE:NAME"), name=name)
    if kind == "labels":
        return Noise(kind, file=_file(noise, rest, "labels:FILE.csv"))
    first, plus, second = noise.partition("+")
    if plus and not second.startswith("out:"):
        raise InputError(f"--corrupt {noise}: only out:RATE can stand behind +")
    kind, rate = _rate(noise, first)
    if kind == "out":
        if plus:
            raise InputError(f"--corrupt {noise}: out stands last, as in symmetric:0.2+out:0.4")
        return Noise(out=rate)
    out = _rate(noise, second)[1] if plus else None
    if rate + (out or 0) > 1 + 1e-9:
        raise InputError(f"--corrupt {noise}: the rates must not exceed 1 together")
    return Noise(kind, rate, out)


def _rate(noise: str, words: str) -> tuple[str, float]:
    kind, _, number = words.partition(":")
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


def replaced(n: int, rate: float, seed: int) -> np.ndarray:
    """Which images another one takes the place of: exactly round(rate·N), in order."""
    random = np.random.default_rng([seed, 0xC1])
    return np.sort(random.choice(n, size=round(rate * n), replace=False))


def symmetric(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label, with probability `rate`, is drawn anew from all classes.

    The draw can return the true class, so the true rate is rate·(C-1)/C on average (row 18).
    """
    drawn = random.integers(len(images.classes), size=len(clean_M))
    return np.where(random.random(len(clean_M)) < rate, drawn, clean_M)


def symmetric_exact(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Exactly round(rate·M) labels move, each to one of the other classes, equally likely."""
    classes = len(images.classes)
    moved = random.choice(len(clean_M), size=round(rate * len(clean_M)), replace=False)
    wrong = clean_M.copy()
    wrong[moved] = (clean_M[moved] + random.integers(1, classes, size=len(moved))) % classes
    return wrong


def asymmetric(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label, with probability `rate`, becomes the next of its superclass (row 19)."""
    if images.superclasses is None:
        raise InputError(
            "--corrupt asymmetric: the source knows no superclasses (cifar100:DIR does); "
            "asymmetric-blocks:RATE and pair:RATE need none"
        )
    return _flip(clean_M, np.array(images.superclasses), rate, random)


def asymmetric_blocks(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label, with probability `rate`, becomes the next in its block of five (row 19)."""
    return _flip(clean_M, np.arange(len(images.classes)) // BLOCK, rate, random)


def pair(
    clean_M: np.ndarray, images: ImageSet, rate: float, random: np.random.Generator
) -> np.ndarray:
    """Each label, with probability `rate`, becomes the next of all classes."""
    return _flip(clean_M, np.zeros(len(images.classes)), rate, random)


KINDS = {
    "symmetric": symmetric,
    "symmetric-exact": symmetric_exact,
    "asymmetric": asymmetric,
    "asymmetric-blocks": asymmetric_blocks,
    "pair": pair,
}


def next_in_group(group_C: np.ndarray) -> np.ndarray:
    """For each class the next one of its group, after the last the first; alone, itself."""
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
