"""The latent-label model, against slow loops and labels made by the model itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.methods import latent
from pseudoloss.methods.latent import (
    Swaps,
    fit_latent_labels,
    pseudo_labels,
    with_new_predictions,
)
from pseudoloss.methods.latent_noise import Noise, better_than_chance, transitions, with_floors

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


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
def test_random_swaps_are_measured(rate):
    log_NC, true = predictions()
    given_N = swapped(true, rate)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert fit.rate == pytest.approx((given_N != true).mean(), abs=0.035)
    assert fit.confusion_weight < 0.5
    assert fit.accuracy == pytest.approx((log_NC.argmax(1).numpy() == true).mean(), abs=0.05)


def test_a_wrong_temperature_is_found():
    log_NC, true = predictions()
    given_N = torch.from_numpy(swapped(true, 0.2))
    flat_NC = torch.log_softmax(log_NC * 0.4, 1)  # the prediction is too unsure
    fit = fit_latent_labels(flat_NC, given_N)
    assert math.exp(fit.noise.a) == pytest.approx(0.4, abs=0.1)
    assert fit.rate == pytest.approx(0.2, abs=0.04)


def confused_labels(log_NC, true, sharpness, rate=0.9):
    """Labels of people who confuse ambiguous images with another class in proportion to q^κ."""
    random, q = np.random.default_rng(2), log_NC.exp().numpy()
    others = q**sharpness
    others[np.arange(len(q)), true] = 0
    others /= others.sum(1, keepdims=True)
    other = (others.cumsum(1) > random.random((len(q), 1))).argmax(1)
    return np.where(random.random(len(q)) < rate * np.sqrt(1 - q.max(1)), other, true)


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_confusion_on_ambiguous_images_is_measured(sharpness):
    log_NC, true = predictions(sharpness=2.0, n=4000)
    given_N = confused_labels(log_NC, true, sharpness)
    # Predictions trained on such labels are as sharp as before on the images that are clear.
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert fit.confusion_weight > 0.5
    assert fit.confused > fit.rate / 2
    assert fit.noise.sharpness == sharpness


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-3, 0), min_size=2, max_size=4), st.integers(2, 10**6))
def test_weights_of_models(log_likelihoods, images):
    prices = [0.0] + [1.0] * (len(log_likelihoods) - 1)
    weights = latent._weights(log_likelihoods, prices, images)
    assert sum(weights) == pytest.approx(1)
    more = latent._weights([value + 1 for value in log_likelihoods], prices, images)
    assert more == pytest.approx(weights, abs=1e-9)
    equal = latent._weights([log_likelihoods[0]] * len(log_likelihoods), prices, images)
    assert equal[0] == pytest.approx(math.e * equal[1])  # a price of 1


def uneven_swaps(true, seed=3):
    """Half of the labels of class 0 say class 1, a fifth of those of class 2 say class 4."""
    random = np.random.default_rng(seed).random(len(true))
    given_N = np.where((true == 0) & (random < 0.5), 1, true)
    return np.where((true == 2) & (random < 0.2), 4, given_N)


def test_classes_that_differ_have_learned_transitions():
    log_NC, true = predictions(n=3000)
    given_N = uneven_swaps(true)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert fit.learned_weight > 0.9
    found_CC = fit.swaps[-1].T_CC
    assert float(found_CC[0, 1]) > 2 * float(found_CC[2, 4]) > 0.1
    assert float(found_CC[3, 3]) > 0.95
    np.testing.assert_allclose(found_CC.sum(1), 1, rtol=1e-5)
    assert fit.rate == pytest.approx((given_N != true).mean(), abs=0.05)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_random_swaps_need_no_learned_transitions(rate):
    log_NC, true = predictions(n=2000)
    fit = fit_latent_labels(log_NC, torch.from_numpy(swapped(true, rate)))
    assert fit.learned_weight < 0.05


def test_mistakes_of_the_predictions_are_not_learned_as_wrong_labels():
    """Ambiguous images of class 0 are really of class 1; random swaps hit all classes."""
    log_NC, true = predictions(n=3000, sharpness=1.5)
    random = np.random.default_rng(0).random(len(true))
    ambiguous = log_NC.exp().max(1).values.numpy() < 0.7
    other = np.where((true == 0) & ambiguous & (random < 0.6), 1, true)
    given_N = swapped(other, 0.1)
    fit = fit_latent_labels(log_NC, torch.from_numpy(given_N))
    assert fit.learned_weight < 0.1


def test_models_that_disagree_give_a_range_of_rates():
    log_NC, true = predictions()
    labels = latent._Labels(log_NC, torch.from_numpy(swapped(true, 0.3)))
    models = [Noise(0.0, 0.0, 0.3), Noise(0.0, 0.0, 0.1), Noise(0.0, 0.0, 0.5)]
    each = [latent._judge(labels, [noise], [1.0]).rate for noise in models]
    fit = latent._judge(labels, models, [0.6, 0.38, 0.02])
    assert fit.rates == pytest.approx((each[1], each[0]))  # the third hardly counts
    assert fit.rates[0] < fit.rate < fit.rates[1] + 1e-9


def test_the_part_of_the_rate_that_is_confusion_of_classes():
    log_NC, true = predictions()
    labels = latent._Labels(log_NC, torch.from_numpy(swapped(true, 0.3)))
    assert latent._judge(labels, [Noise(0.0, 0.0, 0.2, 0.0)], [1.0]).between == 0
    one = latent._judge(labels, [Noise(0.0, 0.0, 0.0, 0.3)], [1.0])
    assert one.between == pytest.approx(one.rate)
    both = latent._judge(labels, [Noise(0.0, 0.0, 0.2, 0.1, 0.4)], [1.0])
    assert both.between == pytest.approx((both.rate - both.confused) / 3)


def test_pseudo_labels_replace_swaps_but_not_confusion():
    log_NC, true = predictions()
    swaps_N = torch.from_numpy(swapped(true, 0.3))
    fit = fit_latent_labels(log_NC, swaps_N)
    pseudo_NC = pseudo_labels(fit, log_NC, swaps_N)
    np.testing.assert_allclose(pseudo_NC.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(pseudo_NC, fit.posterior_NC, atol=0.05)
    confused_N = torch.from_numpy(confused_labels(log_NC, true, 1.0))
    fit = fit_latent_labels(log_NC, confused_N)
    kept_N = pseudo_labels(fit, log_NC, confused_N).gather(1, confused_N[:, None])[:, 0]
    posterior_N = fit.posterior_NC.gather(1, confused_N[:, None])[:, 0]
    assert bool((kept_N >= posterior_N - 1e-5).all())
    assert float((1 - kept_N).mean()) == pytest.approx(fit.rate - fit.confused, abs=1e-3)


def test_labels_are_ranked_by_the_average_of_the_models():
    log_NC, true = predictions()
    given_N = torch.from_numpy(swapped(true, 0.3))
    models = [Noise(0.0, 0.0, 0.2, 0.1), Noise(-0.2, 0.1, 0.1, 0.05, 0.5, 2.0)]
    fit = latent._judge(latent._Labels(log_NC, given_N), models, [0.25, 0.75])
    p_N = 1 - fit.posterior_NC.double().gather(1, given_N[:, None])[:, 0]
    # All rates are above the floors, so the log odds are those of the posterior.
    clear_N = (p_N > 1e-3) & (p_N < 1 - 1e-3)
    np.testing.assert_allclose(fit.log_odds_N[clear_N], p_N[clear_N].logit(), atol=1e-2)
    # Where nothing is wrong, the least likely labels are still the most doubtful.
    sure = latent._judge(latent._Labels(log_NC, given_N), [Noise(0.0, 0.0)], [1.0])
    assert sure.rate == 0
    likely_N = log_NC.gather(1, given_N[:, None])[:, 0]
    assert float(sure.log_odds_N[likely_N < -4].min()) > float(
        sure.log_odds_N[likely_N > -0.1].max()
    )


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


def test_a_second_round_keeps_the_rates():
    log_NC, true = predictions()
    given_N = torch.from_numpy(swapped(true, 0.3))
    first = fit_latent_labels(log_NC, given_N)
    again = with_new_predictions(first, torch.log_softmax(log_NC * 0.5, 1), given_N)
    assert again.weights == pytest.approx(first.weights)
    assert again.swaps == first.swaps
    for one, other in zip(again.models, first.models, strict=True):
        for name in ("random", "classes", "images", "sharpness"):
            assert getattr(one, name) == getattr(other, name)
    assert math.exp(again.noise.a) == pytest.approx(0.5 * math.exp(first.noise.a), rel=0.2)
    assert again.rate == pytest.approx(first.rate, abs=0.02)


def test_a_second_round_remembers_which_classes_were_swapped():
    """The first predictions follow swaps of each class to the next; better ones show none."""
    random, true = np.random.default_rng(0), np.arange(1200) % 6
    given_N = torch.from_numpy(np.where(random.random(1200) < 0.2, (true + 1) % 6, true))
    right = np.full((1200, 6), 0.01)
    right[np.arange(1200), true] = 0.95
    log_NC = torch.tensor(np.log(right), dtype=torch.float32)
    next_CC = torch.eye(6).roll(1, 1)
    labels = latent._Labels(log_NC, given_N)
    noise = Noise(0.0, 0.0, 0.0, 0.2)
    T_CC = transitions(noise, next_CC)
    first = latent._judge(labels, [noise], [1.0], [Swaps(T_CC, with_floors(T_CC, next_CC))])
    again = with_new_predictions(first, log_NC, given_N)
    wrong_N = 1 - again.posterior_NC.gather(1, given_N[:, None])[:, 0].numpy() >= 0.5
    assert (wrong_N == (given_N.numpy() != true)).all()
    assert again.rate == pytest.approx((given_N.numpy() != true).mean(), abs=0.02)


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
    assert not better_than_chance(log_NC, given_N)
    fit = fit_latent_labels(log_NC, given_N)
    assert fit.rate == 0
    assert bool((fit.posterior_NC.gather(1, given_N[:, None]) > 0.5).all())


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
