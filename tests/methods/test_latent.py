"""The latent-label model, against slow loops and labels made by the model itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.methods import latent
from pseudoloss.methods.latent import (
    Noise,
    class_confusion,
    estimate_rates,
    fit_latent_labels,
    likelihoods,
    mean_of,
    tempered,
    with_new_predictions,
)

N, C = 1500, 6


def predictions(sharpness=3.0, n=N, classes=C, seed=0):
    """Calibrated predictions (the true class is drawn from them) and true classes."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(n, classes)) * sharpness
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    true = (q.cumsum(1) > random.random((n, 1))).argmax(1)
    return torch.tensor(np.log(q + 1e-9), dtype=torch.float32), true


def swapped(true, rate, seed=1, classes=C):
    random = np.random.default_rng(seed)
    wrong = random.random(len(true)) < rate
    return np.where(wrong, (true + random.integers(1, classes, len(true))) % classes, true)


def slow_joint(q, y, K, noise):
    """P(t, y | x) of one image for all t, by loops over the equations in the module."""
    classes = len(q)
    c = min(noise.images * math.sqrt(1 - max(q)), latent.MAX_CONFUSION)
    joint = []
    for t in range(classes):
        if t == y:
            p = (1 - c) * (1 - noise.random - noise.classes)
        else:
            p = (1 - c) * (noise.random / (classes - 1) + noise.classes * K[t][y])
            p += c * min(q[y] / max(1 - q[t], 1e-6), 1)
        joint.append(q[t] * p)
    return joint


def test_temperature_depends_on_the_entropy():
    log_NC = torch.log_softmax(torch.tensor([[3.0, 0.0, -1.0], [0.2, 0.1, 0.0]]), 1)
    for row, found in zip(log_NC, tempered(log_NC, -0.5, 0.7), strict=True):
        entropy = -sum(math.exp(v) * v for v in row.tolist()) / math.log(3)
        tau = math.exp(-0.5 + 0.7 * (entropy - 0.5))
        weights = [math.exp(v / tau) for v in row.tolist()]
        np.testing.assert_allclose(found, np.array(weights) / sum(weights), rtol=1e-5)


def test_likelihoods_and_posterior_are_those_of_the_equations():
    log_NC, true = predictions(n=40)
    y_N = torch.from_numpy(swapped(true, 0.4))
    q_NC = tempered(log_NC, -0.3, 0.2)
    K_CC = class_confusion(q_NC.T @ q_NC)
    noise = Noise(-0.3, 0.2, random=0.1, classes=0.07, images=0.6)
    parts = likelihoods(q_NC, y_N, K_CC).mixed(noise)
    plain_NC, confused_NC = latent._posterior(q_NC, y_N, K_CC, noise)
    for i in range(40):
        expected = slow_joint(q_NC[i].tolist(), int(y_N[i]), K_CC.tolist(), noise)
        np.testing.assert_allclose(plain_NC[i] + confused_NC[i], expected, rtol=1e-4, atol=1e-7)
        assert float(sum(part[i] for part in parts)) == pytest.approx(sum(expected), rel=1e-4)


def test_class_confusion_is_a_distribution_over_other_classes():
    q_NC = predictions()[0].exp()
    K_CC = class_confusion(q_NC.T @ q_NC)
    assert (K_CC.diagonal() == 0).all()
    np.testing.assert_allclose(K_CC.sum(1), 1, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.02, 0.4), st.floats(0.02, 0.3), st.floats(0.1, 0.9))
def test_em_never_lowers_the_likelihood(random, classes, images):
    log_NC, true = predictions(n=200)
    q_NC = log_NC.exp()
    y_N = torch.from_numpy(swapped(true, 0.3))
    parts = likelihoods(q_NC, y_N, class_confusion(q_NC.T @ q_NC))
    noise = Noise(0.0, 0.0, random, classes, images)
    before = estimate_rates(parts, noise, steps=0)
    for _ in range(5):
        after = estimate_rates(parts, before, steps=1)
        # c is bounded for single images, so a step may lose a little at that bound.
        assert after.log_likelihood >= before.log_likelihood - 1e-3
        before = after


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
def test_random_swaps_are_measured(rate):
    log_NC, true = predictions()
    given_N = swapped(true, rate)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert fit.rate == pytest.approx((given_N != true).mean(), abs=0.035)
    assert fit.weight < 0.5
    assert fit.accuracy == pytest.approx((log_NC.argmax(1).numpy() == true).mean(), abs=0.05)


def test_a_wrong_temperature_is_found():
    log_NC, true = predictions()
    given_N = torch.from_numpy(swapped(true, 0.2))
    flat_NC = torch.log_softmax(log_NC * 0.4, 1)  # the prediction is too unsure
    fit = fit_latent_labels(flat_NC, given_N)
    assert math.exp(fit.noise.a) == pytest.approx(0.4, abs=0.1)
    assert fit.rate == pytest.approx(0.2, abs=0.04)


def test_confusion_on_ambiguous_images_is_measured():
    log_NC, true = predictions()
    random = np.random.default_rng(2)
    q = log_NC.exp().numpy()
    confused = random.random(N) < 0.9 * np.sqrt(1 - q.max(1))
    others = q.copy()
    others[np.arange(N), true] = 0
    others /= others.sum(1, keepdims=True)
    other = (others.cumsum(1) > random.random((N, 1))).argmax(1)
    given_N = np.where(confused, other, true)
    # Predictions trained on such labels are as sharp as before on the images that are clear.
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert fit.weight > 0.5
    assert fit.confused > fit.rate / 2


def test_the_posterior_is_calibrated():
    log_NC, true = predictions()
    given_N = swapped(true, 0.3)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    p_N = 1 - fit.posterior_NC[torch.arange(N), torch.from_numpy(given_N)].numpy()
    wrong_N = given_N != true
    for low in (0.0, 0.25, 0.5, 0.75):
        chosen = (p_N >= low) & (p_N <= low + 0.25)
        assert p_N[chosen].mean() == pytest.approx(wrong_N[chosen].mean(), abs=0.12)
    np.testing.assert_allclose(fit.posterior_NC.sum(1), 1, rtol=1e-5)


def test_a_second_round_keeps_the_rates_and_joins_both():
    log_NC, true = predictions()
    given_N = torch.from_numpy(swapped(true, 0.3))
    first = fit_latent_labels(log_NC, given_N)
    again = with_new_predictions(first, torch.log_softmax(log_NC * 0.5, 1), given_N)
    for name in ("random", "classes", "images"):
        assert getattr(again.noise, name) == getattr(first.noise, name)
    assert math.exp(again.noise.a) == pytest.approx(0.5 * math.exp(first.noise.a), rel=0.2)
    both = mean_of(first, again)
    np.testing.assert_allclose(both.posterior_NC.sum(1), 1, rtol=1e-5)
    assert both.rate == first.rate


def test_the_result_does_not_depend_on_the_chunks(monkeypatch):
    log_NC, true = predictions(n=300)
    given_N = torch.from_numpy(swapped(true, 0.3))
    whole = fit_latent_labels(log_NC, given_N)
    monkeypatch.setattr(latent, "CHUNK", 7 * C)
    parts = fit_latent_labels(log_NC, given_N)
    np.testing.assert_allclose(parts.posterior_NC, whole.posterior_NC, atol=2e-3)
    assert parts.rate == pytest.approx(whole.rate, abs=1e-3)


def test_a_sample_of_many_images_is_enough(monkeypatch):
    log_NC, true = predictions()
    given_N = torch.from_numpy(swapped(true, 0.2))
    monkeypatch.setattr(latent, "FIT_IMAGES", 500)
    fit = fit_latent_labels(log_NC, given_N)
    assert fit.rate == pytest.approx(0.2, abs=0.04)
    assert len(fit.log_odds_N) == N


@pytest.mark.parametrize("shrink", [1.0, 0.3])
@pytest.mark.parametrize("m", [2.0, 8.0])
def test_the_temperature_of_two_gaussian_classes(m, shrink):
    random = np.random.default_rng(0)
    true = random.integers(0, 2, 20_000)
    odds = random.normal(np.where(true == 0, m, -m), math.sqrt(2 * m)) * shrink
    log_N2 = torch.log_softmax(torch.tensor(np.stack([odds / 2, -odds / 2], 1)), 1)
    found = latent.two_class_temperature(log_N2, torch.from_numpy(true))
    assert found == pytest.approx(shrink, rel=0.15)


def test_two_classes_that_cannot_be_told_apart_have_the_highest_temperature():
    random = np.random.default_rng(0)
    odds, label = random.normal(size=2000), torch.from_numpy(random.integers(0, 2, 2000))
    log_N2 = torch.log_softmax(torch.tensor(np.stack([odds, -odds], 1)), 1)
    assert latent.two_class_temperature(log_N2, label) == pytest.approx(3)
    one = torch.log_softmax(torch.tensor([[2.0, 0.0]]).repeat(2000, 1), 1)
    assert latent.two_class_temperature(one, label) == pytest.approx(3)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3])
def test_swaps_of_two_gaussian_classes_are_measured(rate):
    random = np.random.default_rng(1)
    true = random.integers(0, 2, 4000)
    odds = random.normal(np.where(true == 0, 4.5, -4.5), 3.0)
    given_N = swapped(true, rate, classes=2)
    p = 1 / (1 + np.exp(-odds))
    noisy = p * (1 - rate) + (1 - p) * rate  # what a model of the given labels predicts
    log_N2 = torch.tensor(np.log(np.stack([noisy, 1 - noisy], 1)), dtype=torch.float32)
    fit = fit_latent_labels(log_N2, torch.from_numpy(given_N))
    assert fit.rate == pytest.approx(rate, abs=0.06)


def test_predictions_no_better_than_chance_flag_nothing():
    random = np.random.default_rng(0)
    log_NC = torch.log_softmax(torch.tensor(random.normal(size=(2000, 20)) * 0.2), 1).float()
    given_N = torch.from_numpy(random.integers(0, 20, 2000))
    assert not latent.better_than_chance(log_NC, given_N)
    fit = fit_latent_labels(log_NC, given_N)
    assert fit.rate == 0
    assert bool((fit.posterior_NC.gather(1, given_N[:, None]) > 0.5).all())


def test_a_plateau_is_found_only_where_accurate_predictions_are_unsure():
    random = np.random.default_rng(0)
    for m in (0.5, 1.5, 5.0):  # Gaussian classes, from hard to easy
        odds = torch.tensor(random.normal(m, math.sqrt(2 * m), 5000))
        assert latent.plateau(torch.stack([odds.sigmoid(), (-odds).sigmoid()], 1)) == 0
    mixed = torch.tensor([[0.9, 0.1, 0.0]]).repeat(500, 1)
    assert latent.plateau(mixed) > 0.5


def test_labels_of_one_class_that_say_another_are_found():
    """Every image of a class is clear, and a tenth of the labels say the next class."""
    true = np.arange(2000) % 4
    random = np.random.default_rng(0)
    given_N = np.where(random.random(2000) < 0.1, (true + 1) % 4, true)
    p = np.full((2000, 4), 0.001)
    p[np.arange(2000), true], p[np.arange(2000), (true + 1) % 4] = 0.898, 0.1
    p *= np.exp(random.normal(0, 0.1, p.shape))
    log_NC = torch.tensor(np.log(p / p.sum(1, keepdims=True)), dtype=torch.float32)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    wrong_N = 1 - fit.posterior_NC[torch.arange(2000), torch.from_numpy(given_N)].numpy() >= 0.5
    assert (wrong_N == (given_N != true)).mean() > 0.97
    assert fit.rate == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("classes", [3, 40])
def test_any_number_of_classes(classes):
    log_NC, true = predictions(classes=classes, n=800)
    given_N = swapped(true, 0.15, classes=classes)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert bool(fit.posterior_NC.isfinite().all())
    assert fit.rate == pytest.approx(0.15, abs=0.08)
