"""Flagging noisy labels: the rules, the metrics, the protection of rare classes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import FakeScorer
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.errors import InputError
from pseudoloss.methods import build, build_detector, detection, metrics
from pseudoloss.methods.base import LabelState
from pseudoloss.methods.mixture import fit_two_modes

N, C = 60, 4
METRICS = ("loss", "capped-loss", "agreement", "disagreement", "js", "kl")


def scored(seed=0):
    """Labels of which a third are wrong, a state with their losses, and a scorer."""
    random = torch.Generator().manual_seed(seed)
    given = torch.arange(N) % C
    wrong = torch.arange(N) % 3 == 0
    true = torch.where(wrong, (given + 1) % C, given)
    plain, weak = (4 * F.one_hot(true, C) + torch.randn(N, C, generator=random) for _ in range(2))
    scorer = FakeScorer(given, plain, weak=[weak], projections_ND=metrics.normalise(plain))
    state = LabelState(**LabelState.start(given, C))
    return scorer, state, wrong


def detector(**changes):
    return build_detector(Settings(threshold=0.5, **changes).method_settings)


# ------------------------------------------------------------------------------------- the rules


def test_both_sides_of_the_threshold():
    """Row 2: flagged if P(high) > threshold, or kept only if P(low) > threshold."""
    values = torch.cat([torch.linspace(0, 0.2, 50), torch.linspace(0.5, 1, 50)])
    mixture = fit_two_modes(values)
    noisy = detection.high_loss(mixture.low_N, 0.95)
    not_clean = detection.not_low_loss(mixture.low_N, 0.95)
    assert torch.equal(noisy, 1 - mixture.low_N > 0.95)
    assert torch.equal(not_clean, mixture.low_N <= 0.95)
    assert bool((not_clean >= noisy).all())  # above one half, the rule of the paper flags more


@pytest.mark.parametrize(("side", "rule"), [("noisy", "high_loss"), ("clean", "not_low_loss")])
def test_the_side_of_the_threshold_is_chosen_by_its_setting(side, rule):
    assert detector(threshold_on=side).rule is getattr(detection, rule)


def test_a_nan_loss_is_flagged_by_both_rules():
    mixture = fit_two_modes(torch.tensor([0.0, 0.1, 1.0, 1.1, torch.nan]))
    assert detection.high_loss(mixture.low_N, 0.95)[-1]
    assert detection.not_low_loss(mixture.low_N, 0.95)[-1]


# ------------------------------------------------------------------------------------- a detector


def test_losses_and_predictions_are_those_of_the_plain_view():
    scorer, state, _ = scored()
    detector().score(scorer, state)
    wanted = F.cross_entropy(scorer.plain_NC, scorer.given_N, reduction="none")
    torch.testing.assert_close(state.loss_N, wanted)
    assert torch.equal(state.predicted_N.long(), scorer.plain_NC.argmax(1))
    assert scorer.asked == [(True, 0, None)]


def test_labels_in_the_high_mode_of_the_loss_are_flagged():
    scorer, state, wrong = scored()
    found = detector()
    found.score(scorer, state)
    found.flag(scorer, state)
    low = fit_two_modes(state.loss_N).low_N
    torch.testing.assert_close(state.p_noisy_N, 1 - low)
    assert torch.equal(state.noisy_N, 1 - low > 0.5)
    assert bool(state.fitted)
    assert (state.noisy_N == wrong).float().mean() > 0.95


@pytest.mark.parametrize("metric", METRICS)
def test_any_metric_can_flag_labels(metric):
    scorer, state, _ = scored()
    found = detector(noise_metric=metric, protect_rare_classes=False)
    found.score(scorer, state)
    found.flag(scorer, state)
    value = detection.noise_metrics([metric], scorer, state)[metric]
    assert torch.equal(state.noisy_N, 1 - fit_two_modes(value).low_N > 0.5)
    assert (found.weak_views, found.fixed_shapes) == (
        int(metric == "kl"),
        metric in ("loss", "capped-loss"),
    )


def test_equal_losses_flag_nothing_and_are_reported():
    scorer, state, _ = scored()
    state.loss_N.fill_(1.5)
    detector().flag(scorer, state)
    assert not state.noisy_N.any()
    assert not bool(state.fitted)


def test_only_the_metrics_that_are_asked_for_are_computed():
    scorer, state, _ = scored()
    detector().score(scorer, state)
    scorer.asked.clear()
    found = detection.noise_metrics(METRICS, scorer, state)
    assert tuple(found) == METRICS
    for name in METRICS:
        alone = detection.noise_metrics([name], scorer, state)
        assert list(alone) == [name]
        torch.testing.assert_close(alone[name], found[name])
    scorer.asked.clear()
    detection.noise_metrics(["loss", "capped-loss", "agreement"], scorer, state)
    assert scorer.asked == []


def test_metrics_in_chunks_equal_those_of_all_images():
    scorer, state, _ = scored()
    found = detection.noise_metrics(["js", "kl"], scorer, state)
    wanted = metrics.label_divergence(scorer.plain_NC, scorer.given_N)
    torch.testing.assert_close(found["js"], wanted)
    wanted = metrics.view_divergence(scorer.plain_NC, scorer.weak[0])
    torch.testing.assert_close(found["kl"], wanted)


def test_views_that_do_not_differ_have_no_divergence():
    scorer, state, wrong = scored()
    scorer.weak_is_plain = True
    assert detection.noise_metrics(["kl"], scorer, state)["kl"].isnan().all()
    assert detector().compare(scorer, state, wrong)["kl"] is None


def test_kl_is_refused_where_views_do_not_differ():
    with pytest.raises(InputError, match=r"--noise-metric kl compares .* Use --pad 1 or more"):
        build(Settings(noise_metric="kl"), torch.arange(4), 4, weak_is_plain=True)
    build(Settings(noise_metric="kl"), torch.arange(4), 4, weak_is_plain=False)


def test_metrics_are_compared_by_their_auc():
    scorer, state, wrong = scored()
    detector().score(scorer, state)
    found = detector().compare(scorer, state, wrong)
    assert tuple(found) == detection.COMPARED
    pairs = [(a, b) for a in state.loss_N[wrong] for b in state.loss_N[~wrong]]
    above = np.mean([float(a > b) + 0.5 * float(a == b) for a, b in pairs])
    assert found["loss"] == pytest.approx(above)
    assert found["agreement"] > 0.9


# ----------------------------------------------------------------------------------- rare classes


def rare():
    """Class 1 has three labels, all flagged; no image is of class 2."""
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 3])
    loss = torch.tensor([0.1, 0.2, 0.1, 3.0, 0.3, 2.0, 4.0, 3.0, 0.1])
    noisy = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    return noisy, loss, labels


def test_a_class_with_every_label_flagged_keeps_those_with_the_lower_losses():
    noisy, loss, labels = rare()
    found, flagged = detection.protect_rare_classes(noisy, loss, labels, 4)
    assert flagged.tolist() == [False, True, False, False]
    assert found.nonzero().flatten().tolist() == [3, 6]
    assert noisy.sum() == 4  # the input is unchanged


def test_no_class_is_protected_where_most_labels_are_flagged():
    """Then the mixture has collapsed, or most labels are wrong."""
    labels = torch.tensor([0, 0, 1, 1])
    noisy = torch.tensor([False, True, True, True])
    found, flagged = detection.protect_rare_classes(noisy, torch.rand(4), labels, 2)
    assert torch.equal(found, noisy)
    assert not flagged.any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_changes_where_every_class_keeps_a_label(seed):
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(60) % 6
    noisy = torch.rand(60, generator=random) < 0.6
    noisy[:6] = False
    loss = torch.rand(60, generator=random)
    found, flagged = detection.protect_rare_classes(noisy, loss, labels, 6)
    assert torch.equal(found, noisy)
    assert not flagged.any()


@pytest.mark.parametrize("method", ["pls", "ce", "mixup", "elr", "co-teaching"])
def test_the_protection_of_rare_classes_can_be_switched_off(method):
    given = torch.tensor([0] * 40 + [1] * 4)
    loss = torch.where(given == 1, 5.0, 0.1) + torch.linspace(0, 0.05, 44)
    scorer = FakeScorer(given, torch.zeros(44, 2))
    for protect in (True, False):
        settings = Settings(method=method, protect_rare_classes=protect)
        chosen = build(settings, given, 2, False)
        state = chosen.start(given, 2)
        state.loss_N.copy_(loss)
        chosen.detector.flag(scorer, state)
        assert int(state.noisy_N.sum()) == (2 if protect else 4)
        assert state.protected_C.tolist() == [False, protect]
