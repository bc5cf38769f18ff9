import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pseudoloss.auditing.estimate import estimate_noise


def test_the_interval_contains_the_rate_of_calibrated_probabilities():
    inside = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        p_N = random.beta(0.3, 1.5, 500)
        wrong_N = random.random(500) < p_N
        label_N = random.integers(0, 4, 500)
        noise = estimate_noise(p_N, label_N, 4, p_N.mean(), 0.0, 0.9)
        inside += noise.low <= wrong_N.mean() <= noise.high
    assert inside >= 36


@settings(max_examples=60, deadline=None)
@example([(0.0, 0), (1.0, 0), (1.0, 0)], 0.0, 0.0, 0.0)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=2, max_size=60),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_every_input_has_an_ordered_interval(rows, rate, confused, accuracy):
    p_N, label_N = (np.array(column) for column in zip(*rows, strict=True))
    noise = estimate_noise(p_N, label_N, 5, rate, rate * confused, accuracy)
    assert 0 <= noise.low <= noise.rate + 1e-9
    assert noise.rate <= noise.high + 1e-9
    assert noise.high <= 1
    rate_C, low_C, high_C = noise.by_class_C.T
    assert (low_C <= rate_C + 1e-9).all()
    assert (rate_C <= high_C + 1e-9).all()
    assert noise.images_C.sum() == len(rows)


def test_confusion_makes_the_interval_wide():
    label_N, p_N = np.repeat(np.arange(4), 100), np.full(400, 0.2)
    swaps = estimate_noise(p_N, label_N, 4, 0.2, 0.0, 0.9)
    confused = estimate_noise(p_N, label_N, 4, 0.2, 0.2, 0.9)
    assert confused.low < 0.1 < swaps.low
    assert swaps.high < 0.3 < 0.4 < confused.high  # half to twice as many


def test_models_that_disagree_make_the_interval_wide():
    label_N, p_N = np.repeat(np.arange(4), 100), np.full(400, 0.2)
    agree = estimate_noise(p_N, label_N, 4, 0.2, 0.0, 0.9, rates=(0.2, 0.2))
    alone = estimate_noise(p_N, label_N, 4, 0.2, 0.0, 0.9)
    assert (agree.low, agree.high) == pytest.approx((alone.low, alone.high))
    differ = estimate_noise(p_N, label_N, 4, 0.2, 0.0, 0.9, rates=(0.15, 0.3))
    assert agree.low - differ.low == pytest.approx(0.05)
    assert differ.high - agree.high == pytest.approx(0.1)
    assert (differ.by_class_C[:, 2] > agree.by_class_C[:, 2]).all()


def test_confusion_of_classes_raises_the_upper_end():
    label_N, p_N = np.repeat(np.arange(4), 100), np.full(400, 0.2)
    swaps = estimate_noise(p_N, label_N, 4, 0.2, 0.0, 0.9)
    between = estimate_noise(p_N, label_N, 4, 0.2, 0.0, 0.9, between=0.15)
    assert between.low == swaps.low
    assert between.high - swaps.high == pytest.approx(0.15)


def test_reasons_not_to_know():
    label_N = np.repeat(np.arange(4), 100)
    few = np.full(400, 0.1)
    assert estimate_noise(few, label_N, 4, 0.1, 0.0, 0.9).known
    weak = estimate_noise(few, label_N, 4, 0.1, 0.0, 0.3)
    assert not weak.known
    assert "weak" in weak.reasons[0]
    confused = estimate_noise(few, label_N, 4, 0.1, 0.08, 0.9)
    assert not confused.known
    assert "ambiguous" in confused.reasons[0]
    tiny = estimate_noise(few[:20], np.arange(20), 20, 0.1, 0.0, 0.9)
    assert not tiny.known
    assert len(tiny.reasons) == 2


def test_classes_too_small_to_judge():
    label_N = np.array([0] * 200 + [1] * 200 + [2])
    noise = estimate_noise(np.full(401, 0.01), label_N, 3, 0.01, 0.0, 0.9)
    assert noise.known
    assert noise.reasons == ("1 class has fewer than 5 images: too few to judge.",)
    assert noise.by_class_C[2, 1:] == pytest.approx([0, 1])
