import numpy as np
import pytest

from pseudoloss.auditing.scoring import score_labels
from pseudoloss.errors import InputError

N, D, C = 400, 12, 5


def noisy_blobs(noise, seed=0):
    random = np.random.default_rng(seed)
    true_N = random.integers(0, C, N)
    features_ND = random.normal(size=(C, D))[true_N] * 2 + random.normal(size=(N, D))
    wrong_N = random.random(N) < noise
    given_N = np.where(wrong_N, (true_N + random.integers(1, C, N)) % C, true_N)
    return features_ND.astype(np.float32), given_N, true_N


@pytest.fixture(scope="module")
def scored():
    features_ND, given_N, true_N = noisy_blobs(0.2)
    return score_labels(features_ND, given_N, C), given_N, true_N


def test_wrong_labels_are_found(scored):
    scores, given_N, true_N = scored
    wrong_N, flagged_N = given_N != true_N, scores.p_noisy_N > 0.5
    assert (flagged_N == wrong_N).mean() > 0.97
    sure_N = flagged_N & (scores.trust_N > 0.5)
    assert (scores.candidate_N == true_N)[sure_N].mean() > 0.95
    assert abs(scores.noise.rate - wrong_N.mean()) < 0.03
    assert scores.noise.low <= scores.noise.rate <= scores.noise.high


def test_scores_are_consistent(scored):
    scores, given_N, _ = scored
    assert (scores.candidate_N != given_N).all()
    assert (scores.trust_N <= scores.p_noisy_N + 1e-6).all()
    for values in (scores.p_noisy_N, scores.trust_N, scores.label_score_N):
        assert values.shape == (N,)
        assert ((values >= 0) & (values <= 1)).all()
    assert scores.pred_probs_NC.dtype == np.float32
    np.testing.assert_allclose(scores.pred_probs_NC.sum(1), 1, atol=1e-5)
    assert scores.noise.by_class_C.shape == (C, 3)
    assert scores.noise.images_C.sum() == N


@pytest.mark.parametrize("method", ["latent", "two-mixtures"])
def test_same_seed_same_scores(method):
    features_ND, given_N, _ = noisy_blobs(0.2)
    one, two = (score_labels(features_ND, given_N, C, method=method, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one.p_noisy_N, two.p_noisy_N)
    np.testing.assert_array_equal(one.pred_probs_NC, two.pred_probs_NC)


def test_clean_labels_are_kept():
    features_ND, given_N, _ = noisy_blobs(0.0)
    scores = score_labels(features_ND, given_N, C)
    assert (scores.p_noisy_N > 0.5).mean() < 0.02


def test_tiny_classes_are_reported():
    features_ND, given_N, _ = noisy_blobs(0.1)
    given_N[0], given_N[1:3] = C, C + 1
    scores = score_labels(features_ND.astype(np.float16), given_N, C + 3)
    assert any("too few" in reason for reason in scores.noise.reasons)
    np.testing.assert_array_equal(scores.noise.by_class_C[C, 1:], [0, 1])
    assert np.isfinite(scores.p_noisy_N).all()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(N), "integer"),
        (np.zeros(N - 1, dtype=int), "labels"),
        (np.full(N, C), f"0 to {C - 1}"),
    ],
)
def test_bad_labels_are_refused(labels, message):
    features_ND, _, _ = noisy_blobs(0.0)
    with pytest.raises(InputError, match=message):
        score_labels(features_ND, labels, C)


@pytest.mark.parametrize("classes", [2, 5])
def test_features_that_say_nothing_flag_nothing(classes):
    """Classes must not trade names where the features cannot tell them apart."""
    random = np.random.default_rng(0)
    features_ND = random.normal(size=(300, 4)).astype(np.float32)
    scores = score_labels(features_ND, np.arange(300) % classes, classes, repeats=1)
    assert (scores.p_noisy_N >= 0.5).mean() < 0.05
    assert not scores.noise.known


def test_the_weight_decay_falls_with_many_images():
    """The loss is a mean over the images, and the decay is not."""
    found = []
    for count in (10_000, 20_000):
        random = np.random.default_rng(0)
        label_N = random.integers(0, 2, count)
        features_ND = random.normal(size=(count, 2)) + label_N[:, None]
        scores = score_labels(features_ND.astype(np.float32), label_N, 2, rounds=1)
        found.append(scores.details["l2"])
    assert found[1] == pytest.approx(found[0] / 2)
