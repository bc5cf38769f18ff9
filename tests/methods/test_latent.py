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
    look,
    pseudo_labels,
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
    h = [value**noise.sharpness for value in q]
    h = [value / sum(h) for value in h]
    joint = []
    for t in range(classes):
        if t == y:
            p = (1 - c) * (1 - noise.random - noise.classes)
        else:
            p = (1 - c) * (noise.random / (classes - 1) + noise.classes * K[t][y])
            p += c * min(h[y] / max(1 - h[t], 1e-6), 1)
        joint.append(q[t] * p)
    return joint


def test_temperature_depends_on_the_entropy():
    log_NC = torch.log_softmax(torch.tensor([[3.0, 0.0, -1.0], [0.2, 0.1, 0.0]]), 1)
    for row, found in zip(log_NC, tempered(log_NC, -0.5, 0.7), strict=True):
        entropy = -sum(math.exp(v) * v for v in row.tolist()) / math.log(3)
        tau = math.exp(-0.5 + 0.7 * (entropy - 0.5))
        weights = [math.exp(v / tau) for v in row.tolist()]
        np.testing.assert_allclose(found, np.array(weights) / sum(weights), rtol=1e-5)


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_likelihoods_and_posterior_are_those_of_the_equations(sharpness):
    log_NC, true = predictions(n=40)
    y_N = torch.from_numpy(swapped(true, 0.4))
    q_NC = tempered(log_NC, -0.3, 0.2)
    K_CC = class_confusion(q_NC.T @ q_NC)
    noise = Noise(-0.3, 0.2, random=0.1, classes=0.07, images=0.6, sharpness=sharpness)
    parts = likelihoods(q_NC, y_N, K_CC, sharpness).mixed(noise)
    plain_NC, confused_NC = latent._posterior(q_NC, y_N, K_CC, noise)
    for i in range(40):
        expected = slow_joint(q_NC[i].tolist(), int(y_N[i]), K_CC.tolist(), noise)
        np.testing.assert_allclose(plain_NC[i] + confused_NC[i], expected, rtol=1e-4, atol=1e-7)
        assert float(sum(part[i] for part in parts)) == pytest.approx(sum(expected), rel=1e-4)


def test_people_who_look_sharply_consider_fewer_classes():
    q_NC = predictions()[0].exp()
    assert look(q_NC, 1.0) is q_NC
    h_NC = look(q_NC, 2.0)
    np.testing.assert_allclose(h_NC.sum(1), 1, rtol=1e-5)
    assert bool((h_NC.max(1).values >= q_NC.max(1).values - 1e-6).all())
    assert bool((h_NC.argmax(1) == q_NC.argmax(1)).all())


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


def test_labels_that_nobody_would_choose_are_less_doubtful_if_confusion_is_sharp():
    """With κ = 1 all labels but the most likely class are equally doubtful; with κ = 2 an unlikely
    class is rather the true one, on which the prediction is wrong."""
    q_NC = torch.tensor([[0.6, 0.3, 0.08, 0.02]] * 2)
    given_N, K_CC = torch.tensor([1, 3]), torch.zeros(4, 4)
    for sharpness in (1.0, 2.0):
        noise = Noise(0.0, 0.0, images=0.5, sharpness=sharpness)
        plain_NC, confused_NC = latent._posterior(q_NC, given_N, K_CC, noise)
        likely, unlikely = (confused_NC.sum(1) / (plain_NC + confused_NC).sum(1)).tolist()
        assert (likely > 2 * unlikely) == (sharpness == 2.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-3, 0), min_size=2, max_size=4), st.integers(2, 10**6))
def test_weights_of_models(log_likelihoods, images):
    weights = latent._weights(log_likelihoods, images)
    assert sum(weights) == pytest.approx(1)
    more = latent._weights([value + 1 for value in log_likelihoods], images)
    assert more == pytest.approx(weights, abs=1e-9)
    equal = latent._weights([log_likelihoods[0]] * len(log_likelihoods), images)
    assert equal[0] > sum(equal[1:])  # confusion must explain something


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
    assert again.weights == first.weights
    assert again.confusions == first.confusions
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
    first = latent._judge(labels, [Noise(0.0, 0.0, 0.0, 0.2)], [1.0], [next_CC])
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
