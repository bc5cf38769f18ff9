"""The equations of PLS: each against a slow form in loops, then the laws that it obeys."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.methods import pls
from pseudoloss.methods.base import Mix
from pseudoloss.methods.losses import cross_entropy

B, C, D = 7, 5, 6
CLASSIFICATIONS = (
    pls.classification_separate,
    pls.classification_interpolated,
    pls.classification_first,
)


# ---------------------------------------------------------------------------------- slow forms


def slow_pseudo_labels(first, second, gamma, by):
    found = []
    for a, b in zip(first, second, strict=True):
        powers = [((p + q) / 2) ** gamma for p, q in zip(softmax(a), softmax(b), strict=True)]
        divisor = sum(powers) if by == "sum" else max(powers)
        found.append([p / divisor for p in powers])
    return found


def slow_classification_separate(logits, target, w, partner, lam):
    own, other, own_w, other_w = 0.0, 0.0, 0.0, 0.0
    for i in range(len(logits)):
        j = partner[i]
        own += w[i] * slow_cross_entropy([logits[i]], [target[i]])[0]
        other += w[j] * slow_cross_entropy([logits[i]], [target[j]])[0]
        own_w, other_w = own_w + w[i], other_w + w[j]
    return lam * own / own_w + (1 - lam) * other / other_w


def slow_classification_interpolated(logits, target, w, partner, lam):
    total, divisor = 0.0, 0.0
    for i in range(len(logits)):
        j = partner[i]
        mixed = [lam * a + (1 - lam) * b for a, b in zip(target[i], target[j], strict=True)]
        w_mix = lam * w[i] + (1 - lam) * w[j]
        total += w_mix * slow_cross_entropy([logits[i]], [mixed])[0]
        divisor += w_mix
    return total / divisor


def slow_classification_first(logits, target, w, partner, lam):
    total = 0.0
    for i, j in enumerate(partner):
        mixed = [lam * a + (1 - lam) * b for a, b in zip(target[i], target[j], strict=True)]
        total += w[i] * slow_cross_entropy([logits[i]], [mixed])[0]
    return total / sum(w)


def slow_balance(logits, prior):
    predictions = [softmax(row) for row in logits]
    mean = [sum(p[c] for p in predictions) / len(predictions) for c in range(len(prior))]
    return sum(q * math.log(q / m) for q, m in zip(prior, mean, strict=True) if q > 0)


def slow_similarity(weak, strong, mu):
    def unit(v):
        length = math.sqrt(sum(a * a for a in v))
        return [a / length for a in v]

    return [
        [sum(a * b for a, b in zip(unit(u), unit(v), strict=True)) / mu for v in strong]
        for u in weak
    ]


def slow_contrastive_loss(P, L):
    total = 0.0
    for p_row, l_row in zip(P, L, strict=True):
        p = softmax(p_row)
        total -= sum(y * math.log(q) for y, q in zip(l_row, p, strict=True)) / sum(l_row)
    return total / len(P)


def slow_contrastive_labels(classes, w):
    """Eq. 6, entry by entry."""
    n = len(classes)
    return [
        [w[i] * c for c in classes[i]] + [(1 - w[i]) if k == i else 0.0 for k in range(n)]
        for i in range(n)
    ]


def slow_products(labels):
    """Y Yᵀ."""
    return [[sum(a * b for a, b in zip(u, v, strict=True)) for v in labels] for u in labels]


def slow_mix(rows, partner, lam):
    return [
        [lam * a + (1 - lam) * b for a, b in zip(row, rows[j], strict=True)]
        for row, j in zip(rows, partner, strict=True)
    ]


# ------------------------------------------------------------------------------------ inputs


@pytest.fixture
def batch():
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).float()

    class Material:
        logits = 3 * normal(B, C)
        second = 3 * normal(B, C)
        target = normal(B, C).softmax(1)
        w = torch.rand(B, generator=random)
        mix = Mix(torch.randperm(B, generator=random), torch.tensor(0.7))
        partner, lam = mix.partner_B.tolist(), mix.lam.item()
        weak, strong = normal(B, D), normal(B, D)
        prior = normal(C).softmax(0)

    return Material


def close(ours, slow):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(slow), rtol=2e-5, atol=1e-6)


# ------------------------------------------------------------------------ against slow forms


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("by", ["sum", "max"])
def test_pseudo_labels(batch, gamma, by):
    """Eq. 1, and row 3."""
    normalise = {"sum": pls.by_sum, "max": pls.by_max}[by]
    ours = pls.make_pseudo_labels(batch.logits, batch.second, gamma, normalise)
    close(ours, slow_pseudo_labels(batch.logits.tolist(), batch.second.tolist(), gamma, by))


def test_pseudo_loss(batch):
    """Eq. 2."""
    ours = pls.pseudo_loss(batch.target, batch.logits)
    close(ours, slow_cross_entropy(batch.logits.tolist(), batch.target.tolist()))


@pytest.mark.parametrize(
    ("ours", "slow"),
    [
        (pls.classification_separate, slow_classification_separate),
        (pls.classification_interpolated, slow_classification_interpolated),
        (pls.classification_first, slow_classification_first),
    ],
)
def test_classification(batch, ours, slow):
    """Eq. 3, and row 4."""
    loss = ours(batch.logits, batch.target, batch.w, batch.mix)
    plain = (batch.logits.tolist(), batch.target.tolist(), batch.w.tolist())
    close(loss, slow(*plain, batch.partner, batch.lam))


def test_class_balance(batch):
    close(
        pls.class_balance(batch.logits, batch.prior),
        slow_balance(batch.logits.tolist(), batch.prior.tolist()),
    )


def test_class_balance_with_classes_of_share_zero(batch):
    prior = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    close(
        pls.class_balance(batch.logits, prior), slow_balance(batch.logits.tolist(), prior.tolist())
    )


def test_feature_similarity(batch):
    ours = pls.feature_similarity(batch.weak, batch.strong, 0.2)
    close(ours, slow_similarity(batch.weak.tolist(), batch.strong.tolist(), 0.2))


def test_contrastive_labels(batch):
    """Eq. 6."""
    classes = pls.one_hot_of(batch.target)
    ours = pls.contrastive_label(classes, batch.w)
    close(ours, slow_contrastive_labels(classes.tolist(), batch.w.tolist()))


def test_label_similarity_with_mixed_rows(batch):
    """Row 7, as released: L = Y Yᵀ, then its rows are mixed."""
    classes = pls.one_hot_of(batch.target)
    ours = pls.similarity_of_rows(pls.contrastive_label(classes, batch.w), batch.mix)
    products = slow_products(slow_contrastive_labels(classes.tolist(), batch.w.tolist()))
    close(ours, slow_mix(products, batch.partner, batch.lam))


def test_label_similarity_of_mixed_labels(batch):
    """Row 7, as in the paper: L' = Y_mix Y_mixᵀ."""
    classes = pls.one_hot_of(batch.target)
    ours = pls.similarity_of_mixed(pls.contrastive_label(classes, batch.w), batch.mix)
    labels = slow_contrastive_labels(classes.tolist(), batch.w.tolist())
    close(ours, slow_products(slow_mix(labels, batch.partner, batch.lam)))
    Y = np.array(slow_mix(labels, batch.partner, batch.lam))
    close(ours, Y @ Y.T)
    close(ours, ours.T)
    assert not torch.allclose(
        ours, pls.similarity_of_rows(pls.contrastive_label(classes, batch.w), batch.mix)
    )


@pytest.mark.parametrize("similarity", [pls.similarity_of_rows, pls.similarity_of_mixed])
def test_contrastive_loss(batch, similarity):
    """Eq. 5 and 7."""
    L = similarity(pls.contrastive_label(pls.one_hot_of(batch.target), batch.w), batch.mix)
    P = pls.feature_similarity(batch.weak, batch.strong, 0.2)
    close(pls.contrastive_loss(P, L), slow_contrastive_loss(P.tolist(), L.tolist()))


def test_class_of_the_mixed_target_and_of_the_own_target():
    """Row 8."""
    target = torch.tensor([[0.4, 0.35, 0.25], [0.0, 1.0, 0.0]])  # a pseudo-label, a given label
    mix = Mix(torch.tensor([1, 0]), torch.tensor(0.6))
    assert pls.class_of_own(target, mix).argmax(1).tolist() == [0, 1]
    # 0.6·0.4 = 0.24 for class 0, but 0.6·0.35 + 0.4·1 = 0.61 for class 1, that of the partner.
    assert pls.class_of_mixed(target, mix).argmax(1).tolist() == [1, 1]


def test_trust_by_a_threshold_on_the_confidence():
    doubt, noisy = torch.tensor([0.0, 0.04, 0.06, 0.9]), torch.tensor([True, True, True, False])
    assert pls.trust_confident(doubt, noisy, 0.95).tolist() == [1, 1, 0, 1]


# ------------------------------------------------------------------------------------- laws

shuffles = st.permutations(list(range(B))).map(torch.tensor)


@settings(max_examples=25, deadline=None)
@given(order=shuffles, seed=st.integers(0, 1000))
def test_permuting_the_batch_changes_no_loss(order, seed):
    random = torch.Generator().manual_seed(seed)
    logits, other = (torch.randn(B, C, generator=random) for _ in range(2))
    target = torch.randn(B, C, generator=random).softmax(1)
    w = torch.rand(B, generator=random)
    mix = Mix(torch.randperm(B, generator=random), torch.rand((), generator=random))
    weak, strong = (torch.randn(B, D, generator=random) for _ in range(2))
    moved_mix = Mix(order.argsort()[mix.partner_B[order]], mix.lam)

    pseudo = pls.make_pseudo_labels(logits, other, 2.0)
    moved_pseudo = pls.make_pseudo_labels(logits[order], other[order], 2.0)
    torch.testing.assert_close(moved_pseudo, pseudo[order])
    for loss in CLASSIFICATIONS:
        torch.testing.assert_close(
            loss(logits[order], target[order], w[order], moved_mix), loss(logits, target, w, mix)
        )

    def contrast(similarity, weak, strong, target, w, mix):
        label = pls.contrastive_label(pls.class_of_mixed(target, mix), w)
        L = similarity(label, mix)
        return pls.contrastive_loss(pls.feature_similarity(weak, strong, 0.2), L), L

    for similarity in (pls.similarity_of_rows, pls.similarity_of_mixed):
        loss, L = contrast(similarity, weak, strong, target, w, mix)
        moved, moved_L = contrast(
            similarity, weak[order], strong[order], target[order], w[order], moved_mix
        )
        torch.testing.assert_close(moved, loss)
        torch.testing.assert_close(moved_L, L[order][:, order])


@pytest.mark.parametrize("full", [torch.ones(B), None])
def test_full_trust_gives_the_unweighted_loss(batch, full):
    plain = cross_entropy(batch.logits, batch.mix.of(batch.target)).mean()
    for loss in CLASSIFICATIONS:
        close(loss(batch.logits, batch.target, full, batch.mix), plain)


@pytest.mark.parametrize("full", [torch.ones(B), None])
def test_full_trust_gives_the_naive_contrastive_loss(batch, full):
    classes = pls.one_hot_of(batch.target)
    label = pls.contrastive_label(classes, full)
    close(label @ label.T, classes @ classes.T)


def test_an_image_that_is_not_trusted_is_similar_only_to_itself(batch):
    label = pls.contrastive_label(pls.one_hot_of(batch.target), torch.zeros(B))
    unmixed = batch.mix._replace(lam=torch.tensor(1.0))
    P = pls.feature_similarity(batch.weak, batch.strong, 0.2)
    for similarity in (pls.similarity_of_rows, pls.similarity_of_mixed):
        L = similarity(label, unmixed)
        assert torch.equal(L, torch.eye(B))
        close(pls.contrastive_loss(P, L), F.cross_entropy(P, torch.arange(B)))


def test_a_batch_without_any_trust_has_no_gradient(batch):
    logits = batch.logits.clone().requires_grad_()
    loss = pls.classification_separate(logits, batch.target, torch.zeros(B), batch.mix)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(B, C))


def test_gamma_1_gives_the_mean_prediction(batch):
    mean = (batch.logits.softmax(1) + batch.second.softmax(1)) / 2
    close(pls.make_pseudo_labels(batch.logits, batch.second, 1.0), mean)


@settings(max_examples=50, deadline=None)
@given(
    gamma=st.floats(0.1, 60),
    scale=st.floats(0, 200),
    classes=st.integers(2, 1000),
    seed=st.integers(0, 100),
)
def test_pseudo_labels_sum_to_one_or_have_maximum_one(gamma, scale, classes, seed):
    random = torch.Generator().manual_seed(seed)
    logits, other = (scale * torch.randn(3, classes, generator=random) for _ in range(2))
    by_sum = pls.make_pseudo_labels(logits, other, gamma, pls.by_sum)
    by_max = pls.make_pseudo_labels(logits, other, gamma, pls.by_max)
    torch.testing.assert_close(by_sum.sum(1), torch.ones(3), rtol=1e-4, atol=1e-4)
    assert torch.equal(by_max.amax(1), torch.ones(3))
    assert torch.equal(by_sum.argmax(1), by_max.argmax(1))


def test_class_balance_is_zero_only_at_the_prior():
    uniform = torch.full((C,), 1 / C)
    assert pls.class_balance(torch.zeros(B, C), uniform).item() == pytest.approx(0, abs=1e-6)
    skewed = torch.zeros(B, C)
    skewed[:, 0] = 2
    assert pls.class_balance(skewed, uniform).item() > 0.1


EXTREMES = {
    "one-hot": 1e4 * torch.eye(C).repeat(2, 1),
    "saturated": torch.full((2 * C, C), -300.0).index_fill(1, torch.tensor([2]), 300.0),
    "underflowing": torch.linspace(-1e4, 1e4, C).repeat(2 * C, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_are_finite_at_extreme_logits(name, dtype):
    n = 2 * C
    logits = EXTREMES[name].clone().to(dtype).requires_grad_()
    features = torch.zeros(n, D, dtype=dtype)
    features[:, 0] = 1e-20
    features[0] = 0
    features.requires_grad_()
    pseudo = pls.make_pseudo_labels(logits.detach(), -logits.detach(), 2.0)
    mix = Mix(torch.arange(n).roll(1), torch.tensor(0.6))
    w = torch.linspace(0, 1, n)
    label = pls.contrastive_label(pls.one_hot_of(pseudo), w)
    P = pls.feature_similarity(features, features, 0.2)
    loss = (
        sum(loss(logits, pseudo, w, mix) for loss in CLASSIFICATIONS)
        + pls.class_balance(logits, torch.full((C,), 1 / C))
        + pls.contrastive_loss(P, pls.similarity_of_rows(label, mix))
        + pls.contrastive_loss(P, pls.similarity_of_mixed(label, mix))
    )
    loss.backward()
    assert pseudo.isfinite().all()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert features.grad.isfinite().all()
