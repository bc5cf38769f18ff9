"""Each equation against a slow, independent form in NumPy loops; then the laws it must obey."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.methods import pls
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.mixup import cross_entropy, mix

B, C, D = 7, 5, 6
CLASSIFICATIONS = pls.classification_apart, pls.classification_together, pls.classification_own


# ------------------------------------------------------------------------ the slow, plain forms


def softmax(row):
    powers = [math.exp(v - max(row)) for v in row]
    return [p / sum(powers) for p in powers]


def slow_cross_entropy(logits, target):
    losses = []
    for row, wanted in zip(logits, target, strict=True):
        p = softmax(row)
        losses.append(-sum(t * math.log(q) for t, q in zip(wanted, p, strict=True)))
    return losses


def slow_guess(first, second, gamma, by):
    guesses = []
    for a, b in zip(first, second, strict=True):
        powers = [((p + q) / 2) ** gamma for p, q in zip(softmax(a), softmax(b), strict=True)]
        divisor = sum(powers) if by == "sum" else max(powers)
        guesses.append([p / divisor for p in powers])
    return guesses


def slow_classification_apart(logits, target, w, partner, lam):
    own, other, own_w, other_w = 0.0, 0.0, 0.0, 0.0
    for i in range(len(logits)):
        j = partner[i]
        own += w[i] * slow_cross_entropy([logits[i]], [target[i]])[0]
        other += w[j] * slow_cross_entropy([logits[i]], [target[j]])[0]
        own_w, other_w = own_w + w[i], other_w + w[j]
    return lam * own / own_w + (1 - lam) * other / other_w


def slow_classification_together(logits, target, w, partner, lam):
    total, divisor = 0.0, 0.0
    for i in range(len(logits)):
        j = partner[i]
        mixed = [lam * a + (1 - lam) * b for a, b in zip(target[i], target[j], strict=True)]
        w_mix = lam * w[i] + (1 - lam) * w[j]
        total += w_mix * slow_cross_entropy([logits[i]], [mixed])[0]
        divisor += w_mix
    return total / divisor


def slow_classification_own(logits, target, w, partner, lam):
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


def slow_label_similarity(classes, w, partner, lam):
    """Y_cont of Eq. 6 entry by entry, L = Y Yᵀ, rows mixed."""
    n = len(classes)
    labels = []
    for i in range(n):
        position = [(1 - w[i]) if k == i else 0.0 for k in range(n)]
        labels.append([w[i] * c for c in classes[i]] + position)
    L = [[sum(a * b for a, b in zip(u, v, strict=True)) for v in labels] for u in labels]
    return [[lam * L[i][k] + (1 - lam) * L[partner[i]][k] for k in range(n)] for i in range(n)]


# ----------------------------------------------------------------------------------- material


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
        partner = torch.randperm(B, generator=random)
        lam = torch.tensor(0.7)
        weak, strong = normal(B, D), normal(B, D)
        prior = normal(C).softmax(0)

    return Material


def close(ours, slow):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(slow), rtol=2e-5, atol=1e-6)


# --------------------------------------------------------------------- equation against loop


def test_cross_entropy(batch):
    close(
        cross_entropy(batch.logits, batch.target),
        slow_cross_entropy(batch.logits.tolist(), batch.target.tolist()),
    )


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("by", ["sum", "max"])
def test_guess(batch, gamma, by):
    normalise = {"sum": pls.by_sum, "max": pls.by_max}[by]
    ours = pls.guess_labels(batch.logits, batch.second, gamma, normalise)
    close(ours, slow_guess(batch.logits.tolist(), batch.second.tolist(), gamma, by))


def test_pseudo_loss(batch):
    ours = pls.pseudo_loss(batch.target, batch.logits)
    close(ours, slow_cross_entropy(batch.logits.tolist(), batch.target.tolist()))


@pytest.mark.parametrize(
    ("ours", "slow"),
    [
        (pls.classification_apart, slow_classification_apart),
        (pls.classification_together, slow_classification_together),
        (pls.classification_own, slow_classification_own),
    ],
)
def test_classification(batch, ours, slow):
    loss = ours(batch.logits, batch.target, batch.w, batch.partner, batch.lam)
    plain = (batch.logits.tolist(), batch.target.tolist(), batch.w.tolist())
    close(loss, slow(*plain, batch.partner.tolist(), batch.lam.item()))


def test_class_balance(batch):
    close(
        pls.class_balance(batch.logits, batch.prior),
        slow_balance(batch.logits.tolist(), batch.prior.tolist()),
    )


def test_class_balance_allows_classes_of_no_share(batch):
    prior = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    close(
        pls.class_balance(batch.logits, prior), slow_balance(batch.logits.tolist(), prior.tolist())
    )


def test_feature_similarity(batch):
    ours = pls.feature_similarity(batch.weak, batch.strong, 0.2)
    close(ours, slow_similarity(batch.weak.tolist(), batch.strong.tolist(), 0.2))


def test_confidence_guided_contrastive_loss(batch):
    classes = pls.one_hot_of(batch.target)
    label = pls.contrastive_label(classes, batch.w)
    L = pls.label_similarity(label, batch.partner, batch.lam)
    slow_L = slow_label_similarity(
        classes.tolist(), batch.w.tolist(), batch.partner.tolist(), batch.lam.item()
    )
    close(L, slow_L)
    P = pls.feature_similarity(batch.weak, batch.strong, 0.2)
    close(pls.contrastive_loss(P, L), slow_contrastive_loss(P.tolist(), slow_L))


def test_class_of_mixed_and_own():
    target = torch.tensor([[0.4, 0.35, 0.25], [0.0, 1.0, 0.0]])  # a soft guess, a sure label
    partner, lam = torch.tensor([1, 0]), torch.tensor(0.6)
    assert pls.class_of_own(target, partner, lam).argmax(1).tolist() == [0, 1]
    # 0.6·0.4 = 0.24 of class 0, but 0.6·0.35 + 0.4·1 = 0.61 of class 1: it takes its partner's.
    assert pls.class_of_mixed(target, partner, lam).argmax(1).tolist() == [1, 1]


def test_thresholds_of_stage_1():
    values = torch.cat([torch.linspace(0, 0.2, 50), torch.linspace(0.5, 1, 50)])
    mixture = fit_two_modes(values)
    noisy, not_clean = pls.high_loss(mixture, 0.95), pls.not_low_loss(mixture, 0.95)
    assert torch.equal(noisy, 1 - mixture.low_N > 0.95)
    assert torch.equal(not_clean, mixture.low_N <= 0.95)
    assert bool((not_clean >= noisy).all())  # above one half, the paper's side flags more


# ------------------------------------------------------------------------------------- laws

shuffles = st.permutations(list(range(B))).map(torch.tensor)


@settings(max_examples=25, deadline=None)
@given(order=shuffles, seed=st.integers(0, 1000))
def test_permuting_the_batch_changes_no_loss(order, seed):
    random = torch.Generator().manual_seed(seed)
    logits, other = (torch.randn(B, C, generator=random) for _ in range(2))
    target = torch.randn(B, C, generator=random).softmax(1)
    w = torch.rand(B, generator=random)
    partner = torch.randperm(B, generator=random)
    lam = torch.rand((), generator=random)
    weak, strong = (torch.randn(B, D, generator=random) for _ in range(2))
    place = order.argsort()
    moved_partner = place[partner[order]]

    guess = pls.guess_labels(logits, other, 2.0)
    torch.testing.assert_close(pls.guess_labels(logits[order], other[order], 2.0), guess[order])
    for loss in CLASSIFICATIONS:
        torch.testing.assert_close(
            loss(logits[order], target[order], w[order], moved_partner, lam),
            loss(logits, target, w, partner, lam),
        )

    def contrast(weak, strong, target, w, partner):
        label = pls.contrastive_label(pls.class_of_mixed(target, partner, lam), w)
        L = pls.label_similarity(label, partner, lam)
        return pls.contrastive_loss(pls.feature_similarity(weak, strong, 0.2), L), L

    loss, L = contrast(weak, strong, target, w, partner)
    moved, moved_L = contrast(weak[order], strong[order], target[order], w[order], moved_partner)
    torch.testing.assert_close(moved, loss)
    torch.testing.assert_close(moved_L, L[order][:, order])


@pytest.mark.parametrize("full", [torch.ones(B), None])
def test_full_trust_is_the_unweighted_loss(batch, full):
    mixed = mix(batch.target, batch.partner, batch.lam)
    plain = cross_entropy(batch.logits, mixed).mean()
    for loss in CLASSIFICATIONS:
        close(loss(batch.logits, batch.target, full, batch.partner, batch.lam), plain)


@pytest.mark.parametrize("full", [torch.ones(B), None])
def test_full_trust_is_the_naive_contrastive_loss(batch, full):
    classes = pls.one_hot_of(batch.target)
    label = pls.contrastive_label(classes, full)
    close(label @ label.T, classes @ classes.T)


def test_no_trust_contrasts_an_image_with_itself_alone(batch):
    label = pls.contrastive_label(pls.one_hot_of(batch.target), torch.zeros(B))
    L = pls.label_similarity(label, batch.partner, torch.tensor(1.0))
    assert torch.equal(L, torch.eye(B))
    P = pls.feature_similarity(batch.weak, batch.strong, 0.2)
    close(pls.contrastive_loss(P, L), F.cross_entropy(P, torch.arange(B)))


def test_no_trust_in_the_whole_batch_teaches_nothing(batch):
    logits = batch.logits.clone().requires_grad_()
    loss = pls.classification_apart(logits, batch.target, torch.zeros(B), batch.partner, batch.lam)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(B, C))


def test_gamma_one_is_the_mean_prediction(batch):
    mean = (batch.logits.softmax(1) + batch.second.softmax(1)) / 2
    close(pls.guess_labels(batch.logits, batch.second, 1.0), mean)


@settings(max_examples=50, deadline=None)
@given(
    gamma=st.floats(0.1, 60),
    scale=st.floats(0, 200),
    classes=st.integers(2, 3000),
    seed=st.integers(0, 100),
)
def test_guesses_are_distributions_or_have_maximum_one(gamma, scale, classes, seed):
    random = torch.Generator().manual_seed(seed)
    logits, other = (scale * torch.randn(3, classes, generator=random) for _ in range(2))
    by_sum = pls.guess_labels(logits, other, gamma, pls.by_sum)
    by_max = pls.guess_labels(logits, other, gamma, pls.by_max)
    torch.testing.assert_close(by_sum.sum(1), torch.ones(3), rtol=1e-4, atol=1e-4)
    assert torch.equal(by_max.amax(1), torch.ones(3))
    assert torch.equal(by_sum.argmax(1), by_max.argmax(1))


def test_balance_is_zero_only_at_the_prior():
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
def test_gradients_are_finite(name, dtype):
    n = 2 * C
    logits = EXTREMES[name].clone().to(dtype).requires_grad_()
    features = torch.zeros(n, D, dtype=dtype)
    features[:, 0] = 1e-20
    features[0] = 0
    features.requires_grad_()
    guess = pls.guess_labels(logits.detach(), -logits.detach(), 2.0)
    partner, lam = torch.arange(n).roll(1), torch.tensor(0.6)
    w = torch.linspace(0, 1, n)
    L = pls.label_similarity(pls.contrastive_label(pls.one_hot_of(guess), w), partner, lam)
    loss = (
        pls.classification_apart(logits, guess, w, partner, lam)
        + pls.classification_together(logits, guess, w, partner, lam)
        + pls.classification_own(logits, guess, w, partner, lam)
        + pls.class_balance(logits, torch.full((C,), 1 / C))
        + pls.contrastive_loss(pls.feature_similarity(features, features, 0.2), L)
    )
    loss.backward()
    assert guess.isfinite().all()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert features.grad.isfinite().all()


# ------------------------------------------------------------------------------------ rare classes


def test_a_class_of_which_no_label_is_believed_keeps_its_lower_losses():
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 3])
    loss = torch.tensor([0.1, 0.2, 0.1, 3.0, 0.3, 2.0, 4.0, 3.0, 0.1])
    noisy = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    found, lost = pls.protect_rare_classes(noisy, loss, labels, 4)
    assert lost.tolist() == [False, True, False, False]  # no image is of class 2
    assert found.nonzero().flatten().tolist() == [3, 6]
    assert noisy.sum() == 4  # as it was


def test_where_most_labels_are_taken_for_wrong_none_is_spared():
    """That is a collapse, or very much noise."""
    labels = torch.tensor([0, 0, 1, 1])
    noisy = torch.tensor([False, True, True, True])
    found, lost = pls.protect_rare_classes(noisy, torch.rand(4), labels, 2)
    assert torch.equal(found, noisy)
    assert not lost.any()


@given(st.integers(0, 10**6))
def test_with_a_believed_label_in_every_class_nothing_changes(seed):
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(60) % 6
    noisy = torch.rand(60, generator=chance) < 0.6
    noisy[:6] = False
    found, lost = pls.protect_rare_classes(noisy, torch.rand(60, generator=chance), labels, 6)
    assert torch.equal(found, noisy)
    assert not lost.any()
