"""`pl.LabelAudit` beside `pl.audit`."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import pseudoloss as pl
from audits import blobs


@pytest.fixture(scope="module")
def fitted():
    features, given, _ = blobs()
    return pl.LabelAudit(device="cpu").fit(features, given)


def test_it_is_the_audit(fitted, blob_audit):
    issues = fitted.label_issues_
    assert np.array_equal(issues["p_noisy"], blob_audit.labels["p_noisy"])
    assert np.array_equal(fitted.p_noisy_, blob_audit.labels["p_noisy"])
    assert np.array_equal(fitted.pred_probs_, blob_audit.pred_probs)
    noise = blob_audit.summary["estimated_noise"]
    assert fitted.noise_rate_ == noise["rate"]
    assert fitted.noise_interval_ == (noise["low"], noise["high"])
    assert list(issues)[:4] == [
        "is_label_issue",
        "label_score",
        "given_label",
        "predicted_label",
    ]
    assert (fitted.n_features_in_, fitted.classes_.tolist()) == (100, [0, 1, 2, 3])


def test_labels_keep_their_type(fitted):
    _, given, _ = blobs()
    issues = fitted.label_issues_
    assert issues["given_label"].dtype == given.dtype
    assert np.array_equal(issues["given_label"], given)
    assert issues["predicted_label"].dtype == given.dtype
    relabel = issues[issues["action"] == "relabel"]
    assert (relabel["suggested_label"] == relabel["candidate_label"]).all()


def test_text_negative_numbers_and_frames(fitted):
    features, given, _ = blobs()
    frame = pd.DataFrame(features, index=[f"r{i}" for i in range(len(given))]).add_prefix("x")
    for names in (np.array(["d", "c", "b", "a"]), np.array([-5, -1, 0, 30])):
        found = pl.LabelAudit(device="cpu").fit(frame, names[given])
        assert found.label_issues_.index.tolist() == frame.index.tolist()
        assert found.label_issues_["given_label"].tolist() == names[given].tolist()
        assert found.feature_names_in_.tolist() == list(frame.columns)
    same_order = found  # of the numbers
    assert np.array_equal(same_order.p_noisy_, fitted.p_noisy_)


def test_parameters():
    audit = pl.LabelAudit(threshold=0.7, seed=3)
    copy = clone(audit)
    assert copy.get_params() == audit.get_params()
    assert copy.set_params(folds=4).folds == 4
    with pytest.raises(ValueError, match="Invalid parameter"):
        audit.set_params(nothing=1)


def test_a_mask_of_issues(fitted):
    features, given, _ = blobs()
    mask = pl.LabelAudit(device="cpu").fit_predict(features, given)
    assert mask.dtype == bool
    assert np.array_equal(mask, fitted.label_issues_["is_label_issue"])


def test_reviews_have_no_suggestion():
    features, given, _ = blobs()
    found = pl.LabelAudit(threshold=0, min_trust=1, device="cpu").fit(features, given)
    assert found.label_issues_["suggested_label"].isna().all()


@pytest.mark.parametrize(
    ("y", "message"),
    [(None, "requires y"), ([0, 1], "2 labels for 160"), ([0.5] * 160, "continuous|one class")],
)
def test_wrong_labels(y, message):
    with pytest.raises(ValueError, match=message):
        pl.LabelAudit().fit(blobs()[0], y)
