"""The latent-label model of training, against slow loops and on labels that we made wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from pseudoloss.methods import label_scores as ls

C = 5


def make(n=600, rate=0.3, sharpness=4.0, flips="even", seed=0):
    """Predictions of a model that makes mistakes, and labels of which some are wrong. The model is
    calibrated at the temperature 1/`sharpness`: true classes are drawn from its predictions."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, C, generator=random)
    true = torch.multinomial((sharpness * logits).softmax(1), 1, generator=random)[:, 0]
    wrong = torch.rand(n, generator=random) < rate
    step = torch.randint(1, C, (n,), generator=random) if flips == "even" else 1
    labels = torch.where(wrong, (true + step) % C, true)
    return logits.log_softmax(1), labels, true


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("sharpness", [3.0, 10.0])
def test_the_noise_rate_is_found(rate, sharpness):
    log_prob, labels, _ = make(4000, rate, sharpness)
    noise = ls.estimate_noise(log_prob, labels, ls.even_flips(C))
    assert noise.low <= noise.rate <= noise.high
    assert noise.rate == pytest.approx(rate, abs=0.04)
    assert noise.low - 0.02 <= rate <= noise.high + 0.02
    assert noise.high - noise.low < 0.15
    assert noise.temperature == pytest.approx(1 / sharpness, rel=0.3)


def test_fewer_images_say_less():
    widths = []
    for n in (50, 500, 5000):
        noise = ls.estimate_noise(*make(n)[:2], ls.even_flips(C))
        widths.append(noise.high - noise.low)
    assert widths[0] > widths[1] > widths[2]


def test_the_likelihood_is_that_of_a_slow_loop():
    log_prob, labels, _ = make(20)
    flips = torch.rand(C, C, generator=torch.Generator().manual_seed(1)).double().fill_diagonal_(0)
    flips /= flips.sum(1, keepdim=True)
    found = ls._log_likelihoods(log_prob, labels, flips)
    for k in (0, 20, 39):
        for r in (0, 50, 100):
            tau, rate, total = ls.TEMPERATURES[k].item(), ls.RATES[r].item(), 0.0
            for row, y in zip(log_prob.double().numpy(), labels.tolist(), strict=True):
                q = np.exp(row / tau) / np.exp(row / tau).sum()
                flipped = sum(q[t] * flips[t, y].item() for t in range(C))
                total += np.log(max((1 - rate) * q[y] + rate * flipped, 1e-12))
            assert found[k, r].item() == pytest.approx(total, rel=1e-9)


def test_the_posterior_is_that_of_a_slow_loop():
    log_prob, labels, _ = make(20)
    flips = ls.count_flips(log_prob, labels)
    noise = ls.Noise(0.3, 0.2, 0.4, 0.7, flips)
    found = ls.weigh(log_prob, labels, noise)
    for i, (row, y) in enumerate(zip(log_prob.double().numpy(), labels.tolist(), strict=True)):
        q = np.exp(row / 0.7) / np.exp(row / 0.7).sum()
        joint = np.array([q[t] * (0.7 if t == y else 0.3 * flips[t, y].item()) for t in range(C)])
        joint /= joint.sum()
        wrong = float(ls.probability_wrong(found.log_odds_B)[i])
        assert wrong == pytest.approx(1 - joint[y], rel=1e-6)
        others = np.where(np.arange(C) == y, -1, joint)
        assert found.candidate_B[i] == others.argmax()
        assert found.share_B[i].item() * wrong == pytest.approx(others.max(), rel=1e-6)


def test_flips_to_one_class_are_noticed():
    log_prob, labels, true = make(3000, 0.3, 10.0, flips="next")
    flips = ls.count_flips(log_prob, labels)
    torch.testing.assert_close(flips.sum(1), torch.ones(C).double())
    assert (flips.argmax(1) == (torch.arange(C) + 1) % C).all()
    noise = ls.estimate_noise(log_prob, labels, flips)
    assert noise.rate == pytest.approx(0.3, abs=0.04)
    wrong = ls.probability_wrong(ls.weigh(log_prob, labels, noise).log_odds_B)
    assert roc_auc_score(labels != true, wrong) > 0.9


def test_probabilities_are_calibrated_after_the_network_has_seen_the_labels():
    """It adds a constant to the logit of each given label; the held-out rate takes it away."""
    log_prob, labels, true = make(5000, 0.3, 6.0)
    noise = ls.estimate_noise(log_prob, labels, ls.even_flips(C))
    seen = log_prob.scatter_add(1, labels[:, None], torch.full((len(labels), 1), 2.0))
    odds = ls.weigh(seen, labels, noise).log_odds_B
    wrong = ls.probability_wrong(odds, ls.matching_shift(odds, noise.rate))
    truly = (labels != true).double()
    for low in np.arange(0, 1, 0.2):
        inside = (wrong >= low) & (wrong < low + 0.2)
        if inside.sum() > 50:
            assert float(wrong[inside].mean()) == pytest.approx(
                float(truly[inside].mean()), abs=0.1
            )
    assert float(ls.probability_wrong(odds).mean()) < 0.5 * float(truly.mean())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=30),
    st.floats(0.001, 0.999),
)
def test_the_shift_gives_the_rate_and_keeps_the_order(odds, rate):
    odds = torch.tensor(odds, dtype=torch.float64).clamp(-ls.LARGEST_SHIFT, ls.LARGEST_SHIFT)
    wrong = ls.probability_wrong(odds, ls.matching_shift(odds, rate))
    assert wrong.mean().item() == pytest.approx(rate, abs=1e-3)
    order = odds.argsort()
    assert (wrong[order].diff() <= 1e-12).all()


@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_extreme_predictions_give_finite_scores(size):
    labels = torch.tensor([0, 1, 2, 0])
    log_prob = (size * torch.eye(3)[[0, 1, 0, 2]]).log_softmax(1)
    flips = ls.count_flips(log_prob, labels)
    noise = ls.estimate_noise(log_prob, labels, flips)
    evidence = ls.weigh(log_prob, labels, noise)
    assert all(value.isfinite().all() for value in (*evidence, flips))
    assert (evidence.candidate_B != labels).all()
    assert ((evidence.share_B >= 0) & (evidence.share_B <= 1 + 1e-9)).all()


def test_two_classes():
    labels = torch.tensor([0, 1, 1, 0] * 10)
    log_prob = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    noise = ls.estimate_noise(log_prob, labels, ls.count_flips(log_prob, labels))
    evidence = ls.weigh(log_prob, labels, noise)
    assert torch.equal(evidence.candidate_B, 1 - labels)
    torch.testing.assert_close(evidence.share_B, torch.ones(40).double())
