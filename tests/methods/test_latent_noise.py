"""The mathematics of the latent-label model, against slow loops over the equations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.methods import latent_noise
from pseudoloss.methods.latent_noise import (
    PRIOR_IMAGES,
    Noise,
    class_confusion,
    estimate_rates,
    joint,
    learn_from_others,
    learned_transitions,
    likelihoods,
    look,
    plateau,
    tempered,
    transitions,
    two_class_temperature,
    with_floors,
)

C = 6


def predictions(sharpness=3.0, n=1500, classes=C, seed=0):
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
    c = min(noise.images * math.sqrt(1 - max(q)), latent_noise.MAX_CONFUSION)
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
    plain_NC, confused_NC = joint(q_NC, y_N, transitions(noise, K_CC), noise)
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


def test_labels_that_nobody_would_choose_are_less_doubtful_if_confusion_is_sharp():
    """With κ = 1 all labels but the most likely class are equally doubtful; with κ = 2 an unlikely
    class is rather the true one, on which the prediction is wrong."""
    q_NC = torch.tensor([[0.6, 0.3, 0.08, 0.02]] * 2)
    given_N, K_CC = torch.tensor([1, 3]), torch.zeros(4, 4)
    for sharpness in (1.0, 2.0):
        noise = Noise(0.0, 0.0, images=0.5, sharpness=sharpness)
        plain_NC, confused_NC = joint(q_NC, given_N, transitions(noise, K_CC), noise)
        likely, unlikely = (confused_NC.sum(1) / (plain_NC + confused_NC).sum(1)).tolist()
        assert (likely > 2 * unlikely) == (sharpness == 2.0)


@pytest.mark.parametrize("shrink", [1.0, 0.3])
@pytest.mark.parametrize("m", [2.0, 8.0])
def test_the_temperature_of_two_gaussian_classes(m, shrink):
    random = np.random.default_rng(0)
    true = random.integers(0, 2, 20_000)
    odds = random.normal(np.where(true == 0, m, -m), math.sqrt(2 * m)) * shrink
    log_N2 = torch.log_softmax(torch.tensor(np.stack([odds / 2, -odds / 2], 1)), 1)
    found = two_class_temperature(log_N2, torch.from_numpy(true))
    assert found == pytest.approx(shrink, rel=0.15)


def test_two_classes_that_cannot_be_told_apart_have_the_highest_temperature():
    random = np.random.default_rng(0)
    odds, label = random.normal(size=2000), torch.from_numpy(random.integers(0, 2, 2000))
    log_N2 = torch.log_softmax(torch.tensor(np.stack([odds, -odds], 1)), 1)
    assert two_class_temperature(log_N2, label) == pytest.approx(3)
    one = torch.log_softmax(torch.tensor([[2.0, 0.0]]).repeat(2000, 1), 1)
    assert two_class_temperature(one, label) == pytest.approx(3)


def test_a_plateau_is_found_only_where_accurate_predictions_are_unsure():
    random = np.random.default_rng(0)
    for m in (0.5, 1.5, 5.0):  # Gaussian classes, from hard to easy
        odds = torch.tensor(random.normal(m, math.sqrt(2 * m), 5000))
        assert plateau(torch.stack([odds.sigmoid(), (-odds).sigmoid()], 1)) == 0
    mixed = torch.tensor([[0.9, 0.1, 0.0]]).repeat(500, 1)
    assert plateau(mixed) > 0.5


def test_transitions_are_those_of_the_two_rates():
    K_CC = class_confusion(predictions()[0].exp().T @ predictions()[0].exp())
    T_CC = transitions(Noise(0.0, 0.0, 0.1, 0.07), K_CC)
    for t in range(C):
        for y in range(C):
            expected = 1 - 0.1 - 0.07 if t == y else 0.1 / (C - 1) + 0.07 * float(K_CC[t, y])
            assert float(T_CC[t, y]) == pytest.approx(expected, rel=1e-5)


def test_for_sorting_every_label_can_be_wrong_and_no_transition_falls():
    K_CC = torch.full((C, C), 1 / (C - 1)).fill_diagonal_(0.0)
    T_CC = torch.eye(C)
    T_CC[0, 0], T_CC[0, 1] = 0.3, 0.7
    floored_CC = with_floors(T_CC, K_CC)
    others = ~torch.eye(C, dtype=torch.bool)
    assert float(floored_CC[others].min()) == pytest.approx(0.03 / (C - 1))
    assert bool((floored_CC[others] >= T_CC[others]).all())
    np.testing.assert_allclose(floored_CC.sum(1), 1, rtol=1e-5)


def test_learned_transitions_are_between_the_prior_and_the_counts():
    prior_CC = torch.eye(3)
    counts_CC = torch.tensor([[60.0, 30.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    T_CC = learned_transitions(counts_CC, prior_CC)
    expected = [(60 + PRIOR_IMAGES) / (90 + PRIOR_IMAGES), 30 / (90 + PRIOR_IMAGES), 0]
    np.testing.assert_allclose(T_CC[0], expected, rtol=1e-6)
    np.testing.assert_allclose(T_CC[1:], prior_CC[1:])  # nothing was counted, or nothing else


@pytest.mark.parametrize("ambiguous", [False, True])
def test_the_likelihood_of_a_label_is_learned_from_the_others(ambiguous):
    log_NC, true = predictions(n=30, sharpness=1.5)
    q_NC, y_N = log_NC.exp(), torch.from_numpy(swapped(true, 0.3))
    prior_CC = transitions(Noise(0.0, 0.0, 0.2), torch.zeros(C, C))
    counts_CC = 5 * torch.rand(C, C, generator=torch.Generator().manual_seed(0))
    found_NC, learned_NC = learn_from_others(q_NC, y_N, counts_CC, prior_CC, ambiguous)
    T_CC = learned_transitions(counts_CC, prior_CC).tolist()
    for i, y in enumerate(y_N.tolist()):
        q = q_NC[i].tolist()
        share = math.sqrt(1 - max(q)) if ambiguous else 1.0
        rest = [q[t] * (1 - share) * float(prior_CC[t, y]) for t in range(C)]
        own = [q[t] * share * T_CC[t][y] for t in range(C)]
        own = [value / (sum(rest) + sum(own)) for value in own]  # its part of the counts
        for t in range(C):
            label = max(float(counts_CC[t, y]) - own[t], 0)
            images = max(float(counts_CC[t].sum()) - own[t], 0)
            others = (label + PRIOR_IMAGES * float(prior_CC[t, y])) / (images + PRIOR_IMAGES)
            assert float(learned_NC[i, t]) == pytest.approx(q[t] * share * others, rel=1e-3)
            expected = q[t] * share * others + rest[t]
            assert float(found_NC[i, t]) == pytest.approx(expected, rel=1e-3)
