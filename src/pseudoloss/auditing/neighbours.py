"""What the features of other images say about an image: duplicates, outliers, examples.

Similarity is the cosine of two feature vectors. Work is done in blocks, so that memory stays
bounded for any number of images.

N images, D features, P directions, K neighbours.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data.loops import Progress, no_progress

# Measured with the default features: on birds and on CIFAR-100 the pairs above 0.92 are copies,
# crops or frames of a series; below 0.91 there are different photographs. Other features have
# other scales, so a pair must also be far closer than two images usually are.
MIN_SIMILARITY = 0.92
MAX_RELATIVE = 0.3  # of the median distance (1 - similarity) of an image to its nearest neighbour
MIN_FEATURES = 16  # with fewer features, unrelated images can be close: only equal rows count

DIRECTIONS = 64  # principal directions in which most pairs are told apart
BLOCK = 4096  # rows and columns of similarities at a time
PAIRS = 8192  # pairs that are compared at a time
DENSE = 0.02  # from this share of candidate pairs on, a whole block is compared
SAMPLE = 1000  # images from which the usual distance is measured
ITERATIONS = 6  # of the search for the principal directions
BASIS_SAMPLE = 20_000  # images from which the principal directions are computed


@dataclass(frozen=True)
class Duplicates:
    """Groups of images that are equal or nearly so."""

    group_N: np.ndarray  # int64: number of the group, -1: none
    similarity_N: np.ndarray  # to the most similar image of the group; NaN: no group
    min_similarity: float  # of the pairs that were linked

    @property
    def folds_N(self) -> np.ndarray:
        """A number per group, and one for each other image."""
        alone_N = self.group_N < 0
        numbers_N = self.group_N.copy()
        numbers_N[alone_N] = self.group_N.max(initial=-1) + 1 + np.arange(alone_N.sum())
        return numbers_N


def find_duplicates(
    features_ND: np.ndarray,
    *,
    device: torch.device | str = "cpu",
    seed: int = 1,
    progress: Progress = no_progress,
) -> Duplicates:
    """Find images with equal or nearly equal features.

    Two images are linked if their similarity is at least 0.92, and their distance at most 0.3 of
    the usual distance of an image to its nearest neighbour. Linked images form groups.
    """
    count, dimensions = features_ND.shape
    first_N = _first_equal(features_ND)
    links = _Links(count)
    equal = np.flatnonzero(first_N != np.arange(count))
    links.add(first_N[equal], equal, np.ones(len(equal)))
    distinct = np.flatnonzero(first_N == np.arange(count))
    limit = 0.0
    if dimensions >= MIN_FEATURES and len(distinct) > 2:
        limit = min(1 - MIN_SIMILARITY, MAX_RELATIVE * _usual(features_ND, distinct, device, seed))
        search = _close_pairs(features_ND, distinct, limit, device, seed, progress)
        for left, right, similarity in search:
            links.add(distinct[left], distinct[right], similarity)
    return Duplicates(links.groups(), links.similarity_N, 1 - limit)


def _first_equal(features_ND: np.ndarray) -> np.ndarray:
    """For each image the first one with the same features."""
    seen: dict[bytes, int] = {}
    first_N = np.empty(len(features_ND), np.int64)
    for i, row in enumerate(features_ND):
        digest = hashlib.blake2b((row + 0).tobytes(), digest_size=16).digest()  # + 0: no -0.0
        first_N[i] = seen.setdefault(digest, i)
    return first_N


def _usual(
    features_ND: np.ndarray, rows: np.ndarray, device: torch.device | str, seed: int
) -> float:
    """The median distance of an image to its nearest neighbour."""
    chosen = rows
    if len(rows) > SAMPLE:
        chosen = np.sort(np.random.default_rng([seed, 0xD0]).choice(rows, SAMPLE, replace=False))
    sample_SD = unit_rows(features_ND, chosen, device)
    at_S = torch.from_numpy(chosen).to(device)
    best_S = torch.full((len(chosen),), -1.0, device=device)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        similarity_SB = sample_SD @ unit_rows(features_ND, block, device).T
        itself_SB = at_S[:, None] == torch.from_numpy(block).to(device)[None]
        best_S = torch.maximum(best_S, similarity_SB.masked_fill(itself_SB, -1.0).amax(1))
    return max(0.0, 1 - float(best_S.median()))


def _close_pairs(
    features_ND: np.ndarray,
    rows: np.ndarray,
    limit: float,
    device: torch.device | str,
    seed: int,
    progress: Progress,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs of `rows` (positions in it) with a distance of at most `limit`, and their similarity.

    A projection to orthonormal directions never increases a distance. So pairs that are far apart
    in a few principal directions are far apart, and only the others are compared in full.
    """
    if len(rows) <= BLOCK:
        yield from _compare_block(features_ND, rows, (0, 0), limit, device)
        return
    basis_DP = principal_directions(features_ND, rows, DIRECTIONS, device, seed)
    projected_NP = torch.cat(
        [
            unit_rows(features_ND, rows[start : start + BLOCK], device) @ basis_DP
            for start in range(0, len(rows), BLOCK)
        ]
    )
    # One product gives squared distances: |x|² - 2 x·y + |y|² = (-2x, |x|², 1) · (y, 1, |y|²).
    square_N1 = (projected_NP**2).sum(1, keepdim=True)
    one_N1 = torch.ones_like(square_N1)
    left_NP = torch.cat([-2 * projected_NP, square_N1, one_N1], 1)
    right_NP = torch.cat([projected_NP, one_N1, square_N1], 1)
    most = 2 * limit + 1e-5  # the squared distance of unit vectors is twice 1 - similarity
    starts = range(0, len(rows), BLOCK)
    total, done = len(starts) * (len(starts) + 1) // 2, 0
    for a in starts:
        for b in range(a, len(rows), BLOCK):
            close_AB = left_NP[a : a + BLOCK] @ right_NP[b : b + BLOCK].T <= most
            if a == b:
                close_AB = close_AB.triu(1)
            i, j = (close_AB.nonzero().T + torch.tensor([[a], [b]], device=device)).cpu().numpy()
            if len(i) > DENSE * close_AB.numel():
                yield from _compare_block(features_ND, rows, (a, b), limit, device)
            elif len(i):
                yield from _compare_pairs(features_ND, rows, (i, j), limit)
            done += 1
            progress("near duplicates", done, total)


def principal_directions(
    features_ND: np.ndarray, rows: np.ndarray, count: int, device: torch.device | str, seed: int
) -> Tensor:
    """`count` orthonormal directions (or D, if fewer) that span about the directions in which unit
    rows differ most; by subspace iteration, which is far quicker than all eigenvectors."""
    dimensions = features_ND.shape[1]
    if dimensions <= count:
        return torch.eye(dimensions, device=device)
    random = np.random.default_rng([seed, 0xD1])
    if len(rows) > BASIS_SAMPLE:
        rows = np.sort(random.choice(rows, BASIS_SAMPLE, replace=False))
    second_DD = torch.zeros(dimensions, dimensions, device=device)
    mean_D = torch.zeros(dimensions, device=device)
    for start in range(0, len(rows), BLOCK):
        x_BD = unit_rows(features_ND, rows[start : start + BLOCK], device)
        second_DD.addmm_(x_BD.T, x_BD)
        mean_D += x_BD.sum(0)
    covariance = (second_DD - torch.outer(mean_D, mean_D) / len(rows)) / len(rows)
    start_DP = torch.from_numpy(random.standard_normal((dimensions, count)).astype(np.float32))
    basis_DP = torch.linalg.qr(start_DP.to(device)).Q
    for _ in range(ITERATIONS):
        basis_DP = torch.linalg.qr(covariance @ basis_DP).Q
    return cast(Tensor, basis_DP)


def _compare_pairs(
    features_ND: np.ndarray,
    rows: np.ndarray,
    pairs: tuple[np.ndarray, np.ndarray],
    limit: float,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for start in range(0, len(pairs[0]), PAIRS):
        i, j = (part[start : start + PAIRS] for part in pairs)
        left, right = (unit_rows(features_ND, rows[part], "cpu").numpy() for part in (i, j))
        similarity = np.einsum("pd,pd->p", left, right)
        close = 1 - similarity <= limit
        yield i[close], j[close], similarity[close]


def _compare_block(
    features_ND: np.ndarray,
    rows: np.ndarray,
    starts: tuple[int, int],
    limit: float,
    device: torch.device | str,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    a, b = starts
    left, right = (unit_rows(features_ND, rows[at : at + BLOCK], device) for at in starts)
    similarity_AB = left @ right.T
    close_AB = 1 - similarity_AB <= limit
    if a == b:
        close_AB = close_AB.triu(1)
    i, j = close_AB.nonzero().cpu().numpy().T
    yield i + a, j + b, similarity_AB[close_AB].cpu().numpy()


class _Links:
    """Union-find over N images."""

    def __init__(self, count: int) -> None:
        self.parent = np.arange(count)
        self.similarity_N = np.full(count, np.nan)

    def root(self, i: int) -> int:
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = int(parent[i])
        return i

    def add(self, left: np.ndarray, right: np.ndarray, similarity: np.ndarray) -> None:
        for side in (left, right):
            np.fmax.at(self.similarity_N, side, np.minimum(similarity, 1.0))
        for i, j in zip(left.tolist(), right.tolist(), strict=True):
            a, b = self.root(i), self.root(j)
            self.parent[max(a, b)] = min(a, b)

    def groups(self) -> np.ndarray:
        """Groups of two or more, numbered in the order of their first images; -1 for the others."""
        roots = np.array([self.root(i) for i in range(len(self.parent))], dtype=np.int64)
        members_N = np.bincount(roots, minlength=len(roots))
        numbers_N = np.cumsum(members_N > 1) - 1
        return np.where(members_N[roots] > 1, numbers_N[roots], -1)


# ------------------------------------------------------------------------------------- examples


def nearest_examples(
    features_ND: np.ndarray,
    queries_M: np.ndarray,
    class_M: np.ndarray,
    pool_N: np.ndarray,
    labels_N: np.ndarray,
    *,
    count: int = 3,
    most: int = 5000,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """For each query image the nearest images of one class.

    Args:
        features_ND: one row per image.
        queries_M: the images to find examples for.
        class_M: the class whose images are wanted for each query.
        pool_N: images that may be examples (bool).
        labels_N: the class of each image.
        count: K, examples per query.
        most: images of a class that are compared; the first ones of a larger class.
        device: of the computation.

    Returns:
        int64 (M, K): images, the nearest first; -1 where there are no more.
    """
    found_MK = np.full((len(queries_M), count), -1, dtype=np.int64)
    members = _by_class(np.flatnonzero(pool_N), labels_N)
    wanted = _by_class(np.arange(len(queries_M)), class_M)
    for label, at in wanted.items():
        examples = members.get(label, np.empty(0, np.int64))[: most + 1]
        if not len(examples):
            continue
        example_ED = unit_rows(features_ND, examples, device)
        for start in range(0, len(at), BLOCK):
            rows = at[start : start + BLOCK]
            similarity = unit_rows(features_ND, queries_M[rows], device) @ example_ED.T
            itself = torch.from_numpy(queries_M[rows][:, None] == examples[None]).to(device)
            similarity[itself] = -torch.inf
            best, order = similarity.topk(min(count, len(examples)), dim=1)
            chosen = examples[order.cpu().numpy()]
            chosen[torch.isinf(best).cpu().numpy()] = -1
            found_MK[rows, : chosen.shape[1]] = chosen
    return found_MK


def _by_class(rows: np.ndarray, labels: np.ndarray) -> dict[int, np.ndarray]:
    """The rows of each class."""
    order = rows[np.argsort(labels[rows], kind="stable")]
    values, starts = np.unique(labels[order], return_index=True)
    parts = np.split(order, starts[1:])
    return dict(zip(values.tolist(), parts, strict=True)) if len(order) else {}


def unit_rows(features_ND: np.ndarray, rows: np.ndarray, device: torch.device | str) -> Tensor:
    """Rows of the features as float32, of length 1; rows of zeros stay zeros."""
    x_BD = torch.from_numpy(np.asarray(features_ND[rows], dtype=np.float32)).to(device)
    return torch.nn.functional.normalize(x_BD, dim=1)
