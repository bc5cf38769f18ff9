"""The noise rate without held-out images: two ways, checked by the accuracy on test images."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pseudoloss.engine import without_held_out
from pseudoloss.engine.without_held_out import Judged, judge, with_interval
from pseudoloss.labels.table import LabelScores

N, C = 1000, 4


def state(rate, accuracy, agreement, tests=400, noisy_test=False):
    """A trainer whose network agrees with so many training labels, and scores whose losses have two
    modes, `rate` of them high."""
    random = np.random.default_rng(0)
    given_N = random.integers(0, C, N)
    predicted_N = np.where(np.arange(N) < agreement * N, given_N, (given_N + 1) % C)
    high_N = np.arange(N) >= (1 - rate) * N
    loss_N = np.where(high_N, 6, 0.2) * random.uniform(0.8, 1.2, N)
    trainer = SimpleNamespace(
        given_N=torch.from_numpy(given_N),
        device=torch.device("cpu"),
        data=SimpleNamespace(test=range(tests) if tests else None, noisy_test=noisy_test),
        validate=lambda: 100 * accuracy,
        accuracy=None,
    )
    plain = LabelScores(predicted_N, (given_N + 1) % C, np.exp(-loss_N), np.ones(N), np.ones(N))
    return trainer, plain


@pytest.fixture(autouse=True)
def features(monkeypatch):
    """What the features say: by default, that no label is wrong."""
    said = SimpleNamespace(rate=0.0, calls=0)

    def by_features(trainer, plain):
        said.calls += 1
        p_N = np.full(N, said.rate)
        scores = plain._replace(p_noisy_N=p_N, trust_N=p_N)
        return Judged(scores, said.rate, said.rate - 0.01, said.rate + 0.01, ())

    monkeypatch.setattr(without_held_out, "by_features", by_features)
    return said


def test_losses_that_explain_the_agreement_are_believed(features):
    trainer, plain = state(rate=0.3, accuracy=0.95, agreement=0.95 * 0.7)
    found = judge(trainer, plain)
    assert found.rate == pytest.approx(0.3, abs=0.01)
    assert found.low < 0.3 < found.high < found.low + 0.2
    assert found.reasons == ()
    assert features.calls == 0
    wrong_N = found.scores.p_noisy_N > 0.5
    assert wrong_N.tolist() == (np.arange(N) >= 700).tolist()


def test_a_network_that_knows_the_wrong_labels_by_heart_cannot_say(features):
    trainer, plain = state(rate=0.3, accuracy=0.7, agreement=1.0)
    found = judge(trainer, plain)
    assert (found.low, found.high) == (0, 1)
    assert "learned wrong labels by heart" in found.reasons[0]
    assert features.calls == 0


def test_features_are_judged_where_losses_only_show_hard_images(features):
    """A weak network and clean labels: a third of the losses is high."""
    trainer, plain = state(rate=0.33, accuracy=0.67, agreement=0.68)
    found = judge(trainer, plain)
    assert (found.rate, found.reasons) == (0.0, ())
    assert features.calls == 1


def test_features_wait_for_the_end_of_the_run(features):
    """A table of an unfinished run must not keep training waiting."""
    trainer, plain = state(rate=0.33, accuracy=0.67, agreement=0.68)
    found = judge(trainer, plain, thorough=False)
    assert found.rate == pytest.approx(0.33, abs=0.01)
    assert (found.low, found.high) == (0, 1)
    assert "when the run ends" in found.reasons[0]
    trainer, plain = state(rate=0.3, accuracy=0.95, agreement=0.66, tests=0)
    judge(trainer, plain, thorough=False)
    assert features.calls == 0
    judge(trainer, plain)
    assert features.calls == 1


def test_ways_that_contradict_each_other_are_not_believed(features):
    features.rate = 0.1
    trainer, plain = state(rate=0.38, accuracy=0.64, agreement=0.52)
    found = judge(trainer, plain)
    assert found.rate == pytest.approx(0.38, abs=0.01)
    assert "contradict" in found.reasons[0]


def test_a_network_at_chance_knows_nothing():
    trainer, plain = state(rate=0.3, accuracy=0.25, agreement=0.25)
    assert "too little" in judge(trainer, plain).reasons[0]


@pytest.mark.parametrize(("tests", "noisy_test"), [(0, False), (50, False), (400, True)])
def test_without_enough_test_images_with_correct_labels_nothing_is_known(tests, noisy_test):
    found = judge(*state(0.3, 0.95, 0.66, tests, noisy_test))
    assert (found.low, found.high) == (0, 1)
    assert "no images were held out" in found.reasons[0]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("accuracy", [0.6, 0.9, 1.0])
def test_the_interval_contains_the_rate_that_explains_the_agreement(rate, accuracy):
    """Wherever the estimate is within it, more test images make it narrower."""
    judged = Judged(None, rate, 0.0, 1.0, ())
    agreement = accuracy * (1 - rate)
    few, many = (with_interval(judged, agreement, accuracy, tests) for tests in (100, 10_000))
    assert few.low <= many.low <= rate <= many.high <= few.high
