"""Duplicates and examples. The oracles: all similarities at once in NumPy, SciPy's components."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pseudoloss.auditing import neighbours
from pseudoloss.auditing.neighbours import (
    MAX_RELATIVE,
    MIN_SIMILARITY,
    _Links,
    find_duplicates,
    nearest_examples,
    principal_directions,
)


def similarities(features):
    unit = features.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return unit @ unit.T


def with_copies(n=120, dimensions=40, copies=6, seed=0):
    """Random features; the last rows are slightly changed copies of the first ones."""
    random = np.random.default_rng(seed)
    features = random.standard_normal((n, dimensions)).astype(np.float32)
    features[-copies:] = features[:copies] * (1 + 0.02 * random.standard_normal(dimensions))
    return features


def expected_pairs(features):
    similarity = similarities(features)
    np.fill_diagonal(similarity, -1)
    usual = 1 - np.sort(similarity.max(1))[(len(features) - 1) // 2]
    limit = min(1 - MIN_SIMILARITY, MAX_RELATIVE * usual)
    return {(int(i), int(j)) for i, j in zip(*np.where(1 - similarity <= limit), strict=True)}


@pytest.mark.parametrize("block", [4096, 32])  # one block; several, with few or many candidates
@pytest.mark.parametrize("dense", [0.02, -1.0])
def test_near_duplicates_are_those_of_all_similarities(block, dense, monkeypatch):
    monkeypatch.setattr(neighbours, "BLOCK", block)
    monkeypatch.setattr(neighbours, "DENSE", dense)
    monkeypatch.setattr(neighbours, "DIRECTIONS", 8)
    features = with_copies()
    found = find_duplicates(features)
    pairs = {
        (i, j)
        for i in range(len(features))
        for j in range(len(features))
        if i != j and found.group_N[i] == found.group_N[j] >= 0
    }
    assert pairs == expected_pairs(features)
    assert len(pairs) == 12
    similarity = similarities(features)
    for i, j in pairs:
        assert found.similarity_N[i] == pytest.approx(similarity[i, j], abs=1e-5)
    assert np.isnan(found.similarity_N[found.group_N < 0]).all()


def test_equal_rows_are_duplicates_with_any_number_of_features():
    features = np.array([[0, 1], [1, 0], [0, 1], [1, 1e-3], [-0.0, 1]], dtype=np.float32)
    found = find_duplicates(features)
    assert found.group_N.tolist() == [0, -1, 0, -1, 0]
    assert found.similarity_N[0] == 1
    assert len(set(found.folds_N[[1, 3]]) | {found.folds_N[0]}) == 3
    assert found.folds_N[0] == found.folds_N[2] == found.folds_N[4]


def test_crowded_features_have_no_near_duplicates():
    """All similarities are above 0.92, but no pair is much closer than the others."""
    random = np.random.default_rng(0)
    features = 10 + random.standard_normal((200, 64)).astype(np.float32)
    assert similarities(features).min() > MIN_SIMILARITY
    assert (find_duplicates(features).group_N == -1).all()


def test_groups_do_not_depend_on_length_of_the_vectors():
    features = with_copies()
    scaled = features * np.random.default_rng(1).uniform(0.5, 2, (len(features), 1))
    assert np.array_equal(find_duplicates(features).group_N, find_duplicates(scaled).group_N)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=15))
def test_groups_are_connected_components(pairs):
    left, right = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    links = _Links(10)
    links.add(left, right, np.full(len(pairs), 0.95))
    graph = coo_matrix((np.ones(len(pairs)), (left, right)), shape=(10, 10))
    _, wanted = connected_components(graph, directed=False)
    sizes = np.bincount(wanted)
    groups = links.groups()
    assert np.array_equal(groups >= 0, sizes[wanted] > 1)
    for i in range(10):
        for j in range(10):
            if groups[i] >= 0 and groups[j] >= 0:
                assert (groups[i] == groups[j]) == (wanted[i] == wanted[j])
    first_seen = [group for group in dict.fromkeys(groups.tolist()) if group >= 0]
    assert first_seen == list(range(len(first_seen)))


def test_principal_directions_are_orthonormal_and_hold_the_variance():
    random = np.random.default_rng(0)
    features = random.standard_normal((300, 5)) @ random.standard_normal((5, 50)) + 3
    basis = principal_directions(features.astype(np.float32), np.arange(300), 6, "cpu", 1).numpy()
    assert np.allclose(basis.T @ basis, np.eye(6), atol=1e-5)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    unit -= unit.mean(0)
    assert ((unit @ basis) ** 2).sum() == pytest.approx((unit**2).sum(), rel=1e-3)


def test_examples_are_the_nearest_of_the_class():
    random = np.random.default_rng(0)
    features = random.standard_normal((60, 12)).astype(np.float32)
    labels = random.integers(0, 3, 60)
    pool = random.random(60) < 0.7
    queries, classes = np.array([0, 7, 31]), np.array([2, 0, 2])
    found = nearest_examples(features, queries, classes, pool, labels)
    similarity = similarities(features)
    for query, label, row in zip(queries, classes, found, strict=True):
        members = [i for i in np.flatnonzero(pool & (labels == label)) if i != query]
        wanted = sorted(members, key=lambda i: -similarity[query, i])[:3]
        assert row.tolist() == wanted


def test_missing_examples_are_minus_one():
    features = np.eye(4, dtype=np.float32)
    labels, pool = np.array([0, 1, 1, 2]), np.array([True, True, True, False])
    found = nearest_examples(features, np.array([0, 1, 3]), np.array([0, 1, 2]), pool, labels)
    assert found.tolist() == [[-1, -1, -1], [2, -1, -1], [-1, -1, -1]]
