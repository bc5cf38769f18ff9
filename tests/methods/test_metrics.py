"""Metrics against slow NumPy forms; their bounds; and images in another order."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from sklearn.neighbors import KNeighborsClassifier

from pseudoloss.methods import metrics
from pseudoloss.methods.mixture import fit_two_modes

C = 5
SEEDS = st.integers(0, 10_000)


def space(seed, n, dimensions=6):
    random = torch.Generator().manual_seed(seed)
    features = metrics.normalise(torch.randn(n, dimensions, generator=random))
    return features, torch.randint(0, C, (n,), generator=random)


def slow_neighbours(features, k):
    """Positions and weights of the neighbours of each image."""
    x = features.double().numpy()
    rows = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        chosen = sorted(others, key=lambda j, i=i: -float(x[i] @ x[j]))[:k]
        weights = [math.exp(float(x[i] @ x[j]) / 0.1) for j in chosen]
        rows.append([(j, weight / sum(weights)) for j, weight in zip(chosen, weights, strict=True)])
    return rows


def slow_votes(row, labels):
    shares = np.zeros(C)
    for j, weight in row:
        shares[labels[j]] += weight
    return shares


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(metrics, "ROWS", 7)
    monkeypatch.setattr(metrics, "COLUMNS", 5)


@pytest.mark.parametrize("n", [2, 5, 12, 33])
def test_neighbours_equal_a_slow_form_whatever_the_size_of_parts(small_parts, n):
    features, _ = space(n, n)
    near = metrics.neighbours(features, K=8)
    slow = slow_neighbours(features, 8)
    assert near.index_NK.tolist() == [[j for j, _ in row] for row in slow]
    wanted = torch.tensor([[weight for _, weight in row] for row in slow])
    torch.testing.assert_close(near.weight_NK, wanted, atol=1e-5, rtol=1e-4)


def test_an_image_is_not_its_own_neighbour_but_its_copy_is():
    features, _ = space(0, 20)
    features[7] = features[3]
    near = metrics.neighbours(features, K=4)
    assert near.index_NK[3, 0] == 7
    assert near.index_NK[7, 0] == 3
    assert not (near.index_NK == torch.arange(20)[:, None]).any()


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, n=st.integers(2, 30))
def test_agreement_and_disagreement_equal_their_slow_forms(seed, n):
    features, labels = space(seed, n)
    near = metrics.neighbours(features, K=8)
    slow, K = slow_neighbours(features, 8), min(8, n - 1)
    agreement = [1 - slow_votes(row, labels)[labels[i]] for i, row in enumerate(slow)]
    corrected = [int(slow_votes(row, labels).argmax()) for row in slow]
    disagreement = [
        -math.log((K * slow_votes(row, corrected)[labels[i]] + 1 / C) / (K + 1))
        for i, row in enumerate(slow)
    ]
    np.testing.assert_allclose(metrics.agreement(near, labels), agreement, atol=1e-4)
    np.testing.assert_allclose(metrics.disagreement(near, labels, C), disagreement, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, n=st.integers(2, 40), k=st.integers(1, 50))
def test_bounds_and_order_of_agreement_and_disagreement(seed, n, k):
    features, labels = space(seed, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))

    def both(features, labels):
        near = metrics.neighbours(features, K=k)
        torch.testing.assert_close(near.weight_NK.sum(1), torch.ones(n))
        return metrics.agreement(near, labels), metrics.disagreement(near, labels, C)

    for value, permuted, most in zip(
        both(features, labels),
        both(features[order], labels[order]),
        (1.0, math.log(C * (min(k, n - 1) + 1))),
        strict=True,
    ):
        assert bool(((value >= -1e-6) & (value <= most + 1e-4)).all())
        torch.testing.assert_close(value[order], permuted, atol=1e-4, rtol=1e-3)


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.sampled_from([0.1, 1.0, 10.0]), st.integers(2, 1000))
def test_a_capped_loss_is_at_most_that_of_a_uniform_prediction(seed, scale, classes):
    logits = scale * torch.randn(40, classes, generator=torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(logits, torch.zeros(40, dtype=torch.long), reduction="none")
    capped = metrics.capped(loss, classes)
    uniform = F.cross_entropy(torch.zeros(1, classes), torch.tensor([0])).item()
    assert (capped <= uniform + 1e-6).all()
    assert torch.equal(capped < loss, loss > math.log(classes))
    assert torch.equal(capped[loss < uniform - 1e-6], loss[loss < uniform - 1e-6])
    assert metrics.capped(torch.tensor([math.nan]), classes).isnan()


def test_large_losses_make_no_mode_of_their_own_when_capped():
    """Four of five labels are wrong: the network is sure of some images, whose wrong labels have
    large losses, and less sure of the rest."""
    random = torch.Generator().manual_seed(0)

    def around(mean, spread, count):
        return mean + spread * torch.randn(count, generator=random)

    right, unsure, sure = around(2, 0.7, 2000), around(5, 0.4, 5500), around(9, 1.2, 2500)
    loss, wrong = torch.cat([right, unsure, sure]), torch.arange(10_000) >= 2000

    def flagged(values):
        return 1 - fit_two_modes(values).low_N > 0.5

    assert flagged(loss).float().mean() < 0.35
    found = flagged(metrics.capped(loss, 100))
    assert found[wrong].float().mean() > 0.9
    assert wrong[found].float().mean() > 0.97


def test_a_wrong_label_inside_a_cluster_is_suspicious():
    """Two clusters, one label wrong: it has the highest value of both metrics."""
    random = torch.Generator().manual_seed(0)
    centre = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat_interleave(20, 0)
    features = metrics.normalise(centre + 0.1 * torch.randn(40, 2, generator=random))
    labels = torch.arange(40) // 20
    labels[4] = 1
    near = metrics.neighbours(features, K=10)
    for value in (metrics.agreement(near, labels), metrics.disagreement(near, labels, 2)):
        assert value.argmax() == 4
        assert value[4] > 0.9
        assert value[torch.arange(40) != 4].max() < 0.3


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]))
def test_divergence_of_two_views(seed, scale):
    random = torch.Generator().manual_seed(seed)
    plain, weak = (scale * torch.randn(6, C, generator=random) for _ in range(2))
    ours = metrics.view_divergence(plain, weak)
    wanted = F.kl_div(
        weak.double().log_softmax(1),
        plain.double().log_softmax(1),
        log_target=True,
        reduction="none",
    ).sum(1)
    torch.testing.assert_close(ours.double(), wanted, atol=1e-5, rtol=1e-4)
    assert bool((ours >= 0).all())
    assert bool((metrics.view_divergence(plain, plain) == 0).all())
    order = torch.randperm(6, generator=random)
    torch.testing.assert_close(metrics.view_divergence(plain[order], weak[order]), ours[order])


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]))
def test_divergence_of_prediction_and_label(seed, scale):
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, C, generator=random)
    given_N = torch.randint(0, C, (6,), generator=random)
    ours = metrics.label_divergence(logits, given_N)
    share = logits.double().softmax(1).numpy()
    label = 0.6 / C + 0.4 * np.eye(C)[given_N]
    wanted = jensenshannon(share, label, axis=1) ** 2  # SciPy has its square root
    np.testing.assert_allclose(ours.numpy(), wanted, atol=1e-6)
    assert bool((ours >= 0).all())
    assert bool((ours <= math.log(2)).all())
    right = metrics.label_divergence(8 * F.one_hot(given_N, C).float(), given_N)
    wrong = metrics.label_divergence(8 * F.one_hot((given_N + 1) % C, C).float(), given_N)
    assert bool((right < wrong).all())


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, scale=st.sampled_from([0.1, 1.0, 30.0]), divide=st.sampled_from([1.0, 0.3]))
def test_confidence_and_entropy_of_a_pseudo_label(seed, scale, divide):
    """Also where it does not sum to one (row 3)."""
    random = torch.Generator().manual_seed(seed)
    share = (scale * torch.randn(6, C, generator=random)).softmax(1)
    pseudo = share / divide
    p = share.double().numpy()
    np.testing.assert_allclose(metrics.confidence(pseudo), 1 - p.max(1), atol=1e-5)
    slow = [-sum(q * math.log(q) for q in row if q > 0) for row in p]
    np.testing.assert_allclose(metrics.entropy(pseudo), slow, atol=1e-5)
    assert bool((metrics.confidence(pseudo) <= 1 - 1 / C + 1e-6).all())
    order = torch.randperm(6, generator=random)
    for metric in (metrics.confidence, metrics.entropy):
        assert bool((metric(pseudo) >= 0).all())
        torch.testing.assert_close(metric(pseudo[order]), metric(pseudo)[order])


def test_a_one_hot_pseudo_label_has_no_doubt_and_no_entropy():
    certain = torch.eye(C)
    assert metrics.confidence(certain).tolist() == [0.0] * C
    assert metrics.entropy(certain).tolist() == [0.0] * C
    assert metrics.entropy(torch.ones(1, C)).item() == pytest.approx(math.log(C))


@pytest.mark.parametrize("k", [1, 6, 200])
def test_knn_equals_that_of_scikit_learn(small_parts, k):
    """Row 24: cosine, weights exp(similarity / 0.1)."""
    features, labels = space(3, 40)
    asked, _ = space(4, 17)
    model = KNeighborsClassifier(
        min(k, 40), metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.1)
    )
    wanted = model.fit(features.numpy(), labels.numpy()).predict(asked.numpy())
    assert metrics.knn_predict(asked, features, labels, C, K=k).tolist() == wanted.tolist()
