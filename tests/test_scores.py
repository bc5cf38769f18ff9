"""Scores; scikit-learn is the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    confusion_matrix,
    log_loss,
    precision_recall_fscore_support,
    recall_score,
    roc_auc_score,
)

from pseudoloss import scores


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 80), levels=st.integers(1, 50))
def test_auc_equals_scikit_learn_with_ties(seed, n, levels):
    random = np.random.default_rng(seed)
    values = random.integers(0, levels, n) / 7
    positive = random.random(n) < 0.4
    ours = scores.auc(torch.from_numpy(values), torch.from_numpy(positive))
    if positive.all() or not positive.any():
        assert ours is None
    else:
        assert ours == pytest.approx(roc_auc_score(positive, values), abs=1e-12)


def test_auc_of_nan_is_undefined():
    assert scores.auc(torch.tensor([1.0, torch.nan]), torch.tensor([True, False])) is None


def test_auc_of_many_images_is_exact():
    """Ranks are integers, so nothing is rounded."""
    score = torch.arange(100_000, dtype=torch.float64)
    positive = score >= 50_000
    assert scores.auc(score, positive) == 1
    assert scores.auc(-score, positive) == 0
    assert scores.auc(torch.zeros(100_000), positive) == 0.5


def test_share_is_the_recall():
    random = torch.Generator().manual_seed(0)
    of_N, hit_N = torch.rand(2, 50, generator=random) < 0.4
    assert scores.share(of_N, hit_N) == pytest.approx(recall_score(of_N, hit_N))
    assert scores.share(torch.zeros(50, dtype=torch.bool), hit_N) is None


def classified(seed=0, n=200, classes=5):
    """Labels, and probabilities that are mostly right; the last class has no images."""
    random = np.random.default_rng(seed)
    label_N = random.integers(0, classes - 1, n)
    logits_NC = random.normal(size=(n, classes)) + 2 * np.eye(classes)[label_N]
    p_NC = np.exp(logits_NC) / np.exp(logits_NC).sum(1, keepdims=True)
    return label_N, p_NC


def test_scores_by_class_equal_scikit_learn():
    label_N, p_NC = classified()
    predicted_N = p_NC.argmax(1)
    found = scores.confusion(torch.from_numpy(label_N), torch.from_numpy(predicted_N), 5)
    np.testing.assert_array_equal(found, confusion_matrix(label_N, predicted_N, labels=range(5)))
    precision, recall, _, support = precision_recall_fscore_support(
        label_N, predicted_N, labels=range(5), zero_division=np.nan
    )
    rows = scores.by_class(found)
    as_nan = [np.nan if row["recall"] is None else row["recall"] for row in rows]
    np.testing.assert_allclose(as_nan, recall)
    np.testing.assert_allclose([row["precision"] for row in rows], precision)
    assert [row["support"] for row in rows] == support.tolist()
    assert rows[4]["accuracy"] is None
    assert rows[0]["accuracy"] == pytest.approx(100 * recall[0])
    assert sum(row["predicted"] for row in rows) == len(label_N)
    nothing = scores.by_class(torch.zeros(2, 2, dtype=torch.long))
    assert nothing[0]["precision"] is None


@pytest.mark.parametrize("seed", range(5))
def test_calibration_equals_scikit_learn(seed):
    label_N, p_NC = classified(seed)
    confidence_N, right_N = p_NC.max(1), p_NC.argmax(1) == label_N
    found = scores.calibration(torch.from_numpy(confidence_N), torch.from_numpy(right_N))
    accuracy, confidence = calibration_curve(right_N, confidence_N, n_bins=15)
    filled = [part for part in found["bins"] if part["images"]]
    np.testing.assert_allclose([part["accuracy"] / 100 for part in filled], accuracy)
    np.testing.assert_allclose([part["confidence"] for part in filled], confidence)
    weight = np.array([part["images"] for part in filled]) / len(right_N)
    assert found["error"] == pytest.approx((weight * abs(accuracy - confidence)).sum())
    assert all(part["low"] < part["confidence"] <= part["high"] for part in filled)


def test_edges_of_the_reliability_table():
    ends = torch.tensor([0.0, 1.0, 0.2], dtype=torch.float64)
    found = scores.calibration(ends, torch.tensor([False, True, True]), bins=5)
    assert [part["images"] for part in found["bins"]] == [2, 0, 0, 0, 1]
    assert found["error"] == pytest.approx(0.8 / 3)
    assert found["bins"][1]["accuracy"] is None


def test_negative_log_likelihood_equals_scikit_learn():
    label_N, p_NC = classified()
    own_N = torch.from_numpy(p_NC[np.arange(len(label_N)), label_N])
    wanted = log_loss(label_N, p_NC, labels=range(5))
    assert scores.negative_log_likelihood(own_N) == pytest.approx(wanted)
    assert np.isfinite(scores.negative_log_likelihood(torch.zeros(2)))
