import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from pseudoloss.auditing import heads
from pseudoloss.errors import InputError


def blobs(N=120, D=6, C=3, seed=0):
    random = np.random.default_rng(seed)
    label_N = random.integers(0, C, N)
    centre_CD = random.normal(size=(C, D)) * 1.5
    return (centre_CD[label_N] + random.normal(size=(N, D))).astype(np.float32), label_N


def test_out_of_fold_matches_scikit_learn():
    features_ND, label_N = blobs()
    x_ND = heads.normalise(features_ND)
    fold_RN = heads.assign_folds(label_N, 4, 1, seed=1)
    l2 = 1e-2
    prob_NC = heads.out_of_fold(x_ND, torch.tensor(label_N), torch.tensor(fold_RN), 3, l2)
    for k in range(4):
        train_N, test_N = fold_RN[0] != k, fold_RN[0] == k
        # scikit-learn: sum of losses + ||W||² / 2C
        model = LogisticRegression(C=1 / (2 * l2 * train_N.sum()), max_iter=2000, tol=1e-8)
        model.fit(x_ND[train_N].numpy(), label_N[train_N])
        expected = model.predict_proba(x_ND[test_N].numpy())
        np.testing.assert_allclose(prob_NC[test_N].numpy(), expected, atol=2e-3)


def test_soft_targets_of_one_class_are_labels():
    features_ND, label_N = blobs()
    x_ND, y_N = heads.normalise(features_ND), torch.tensor(label_N)
    fold_RN = torch.tensor(heads.assign_folds(label_N, 3, 2, seed=1))
    hard = heads.out_of_fold(x_ND, y_N, fold_RN, 3, 1e-3)
    soft = heads.out_of_fold(x_ND, torch.eye(3)[y_N], fold_RN, 3, 1e-3)
    assert torch.allclose(hard, soft, atol=1e-3)


def test_chunks_change_nothing(monkeypatch):
    features_ND, label_N = blobs()
    fold_RN = torch.tensor(heads.assign_folds(label_N, 3, 2, seed=1))
    whole = heads.out_of_fold(heads.normalise(features_ND), torch.tensor(label_N), fold_RN, 3, 1e-2)
    monkeypatch.setattr(heads, "CHUNK_VALUES", 100)
    parts = heads.out_of_fold(heads.normalise(features_ND), torch.tensor(label_N), fold_RN, 3, 1e-2)
    assert torch.allclose(whole, parts, atol=2e-3)


def test_one_head_for_all_images_matches_scikit_learn():
    """Also with weights, and for features that are not normalised."""
    features_ND, label_N = blobs()
    features_ND = features_ND * np.linspace(1, 9, 6, dtype=np.float32) + 5
    weight_N = np.random.default_rng(1).uniform(0.1, 1, len(label_N))
    targets_NC = torch.eye(3)[label_N] * torch.tensor(weight_N).float()[:, None]
    l2, x_ND = 1e-2, heads.normalise(features_ND).numpy()
    weight_CD, bias_C = heads.fit_head(features_ND, targets_NC, l2)
    model = LogisticRegression(C=1 / (2 * l2 * weight_N.sum()), max_iter=2000, tol=1e-8)
    model.fit(x_ND, label_N, sample_weight=weight_N)
    found = (torch.tensor(features_ND) @ weight_CD.T + bias_C).softmax(1)
    np.testing.assert_allclose(found.numpy(), model.predict_proba(x_ND), atol=2e-3)


def test_features_that_hardly_vary_get_no_large_weights():
    """A network goes on from the head: large weights would make its first steps far too large."""
    features_ND, label_N = blobs()
    features_ND[:, 0] *= 1e-4
    weight_CD, _ = heads.fit_head(features_ND, torch.eye(3)[label_N], 1e-4)
    largest_D = weight_CD.abs().amax(0)
    assert 0 < largest_D[0] < largest_D[1:].max()


def test_own_label_has_no_influence():
    features_ND, label_N = blobs()
    x_ND = heads.normalise(features_ND)
    fold_RN = torch.tensor(heads.assign_folds(label_N, 5, 1, seed=1))
    other_N = label_N.copy()
    other_N[7] = (other_N[7] + 1) % 3
    a, b = (heads.out_of_fold(x_ND, torch.tensor(y), fold_RN, 3, 1e-2) for y in (label_N, other_N))
    same_fold = fold_RN[0] == fold_RN[0, 7]
    assert torch.allclose(a[same_fold], b[same_fold], atol=1e-3)
    assert not torch.allclose(a[~same_fold], b[~same_fold], atol=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=2, max_size=60))
def test_groups_stay_in_one_fold(rows):
    label_N = np.array([label for label, _ in rows])
    group_N = np.array([group for _, group in rows])
    for fold_N in heads.assign_folds(label_N, 3, 2, 1, group_N):
        assert all(len(set(fold_N[group_N == group])) == 1 for group in group_N)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(2, 6))
def test_classes_are_spread_over_folds(labels, folds):
    label_N = np.array(labels)
    for fold_N in heads.assign_folds(label_N, folds, 2, 1):
        for c in range(5):
            sizes = np.bincount(fold_N[label_N == c], minlength=folds)
            assert sizes.max() - sizes.min() <= 1


def test_normalised_features():
    features_ND, _ = blobs()
    x_ND = heads.normalise(features_ND)
    assert torch.allclose(x_ND.mean(0), torch.zeros(6), atol=1e-5)
    assert torch.allclose(x_ND.std(0, correction=0) * 6**0.5, torch.ones(6), atol=1e-3)


def test_bad_features_are_refused():
    features_ND, _ = blobs()
    features_ND[11, 2] = np.nan
    with pytest.raises(InputError, match="row 11"):
        heads.normalise(features_ND)
    with pytest.raises(InputError, match="N × D"):
        heads.normalise(features_ND[0])
