"""Outliers among clusters whose classes are known."""

import numpy as np
import pytest
import torch

from pseudoloss.auditing.outliers import OUTLIER, class_distances, outlier_scores
from pseudoloss.scores import auc


@pytest.fixture
def clusters():
    """Three classes of 60 images, and 8 images that belong to none; their labels are random."""
    random = np.random.default_rng(0)
    centres = 3 * random.standard_normal((4, 24))
    kind = np.r_[np.repeat([0, 1, 2], 60), np.repeat(3, 8)]
    features = (centres[kind] + random.standard_normal((len(kind), 24))).astype(np.float32)
    given = np.where(kind == 3, random.integers(0, 3, len(kind)), kind)
    return features, given, kind == 3


def test_images_of_no_class_have_the_highest_scores(clusters):
    features, given, out = clusters
    p_noisy, trust = np.where(out, 0.95, 0.02), np.where(out, 0.4, 0.01)
    score = outlier_scores(features, given, p_noisy, trust, 3)
    assert score[out].min() > score[~out].max()
    assert (score >= OUTLIER).tolist() == out.tolist()
    assert 0 <= score.min() <= score.max() <= 1


def test_an_image_near_another_class_is_no_outlier(clusters):
    features, given, out = clusters
    swapped = np.zeros(len(given), bool)
    swapped[:5] = True
    given = np.where(swapped, 1, given)
    wrong = swapped | out
    score = outlier_scores(features, given, np.where(wrong, 0.95, 0.02), np.where(wrong, 0.5, 0), 3)
    assert score[swapped].max() < OUTLIER <= score[out].min()


def test_distances_are_those_of_the_definition(clusters):
    """The other folds give the means and covariances."""
    features, given, _ = clusters
    weight = np.random.default_rng(1).uniform(0.2, 1, len(given))
    found = class_distances(features, given, weight, 3, seed=3)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    x = (unit - unit.mean(0)).astype(np.float64)
    fold = np.random.default_rng([3, 0x0D]).permutation(len(x)) % 5
    wanted = np.empty(len(x))
    for k in range(5):
        rest = fold != k
        means = [
            np.average(x[rest & (given == c)], 0, weight[rest & (given == c)]) for c in (0, 1, 2)
        ]
        residual = x[rest] - np.array(means)[given[rest]]
        within = _shrunk((weight[rest, None] * residual).T @ residual / weight[rest].sum())
        overall = _shrunk(x[rest].T @ x[rest] / rest.sum())
        for i in np.flatnonzero(~rest):
            near = min((x[i] - m) @ np.linalg.solve(within, x[i] - m) for m in means)
            wanted[i] = near - x[i] @ np.linalg.solve(overall, x[i])
    assert np.allclose(found, wanted, rtol=1e-3, atol=1e-2)
    assert auc(torch.from_numpy(found), torch.arange(len(x)) >= 180) > 0.9


def _shrunk(covariance):
    size = len(covariance)
    return 0.9 * covariance + 0.1 * np.trace(covariance) / size * np.eye(size)


def test_duplicates_are_measured_without_each_other(clusters):
    features, given, _ = clusters
    features[1] = features[0]
    groups = np.arange(len(given))
    groups[1] = 0
    far = class_distances(features, given, np.ones(len(given)), 3, groups_N=groups)
    assert far[0] == pytest.approx(far[1], rel=1e-5)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_few_images_give_finite_scores(n):
    features = np.random.default_rng(0).standard_normal((n, 6)).astype(np.float32)
    half = np.full(n, 0.5)
    assert np.isfinite(outlier_scores(features, np.arange(n) % 2, half, half, 2)).all()
