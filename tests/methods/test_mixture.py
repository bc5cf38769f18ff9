"""The mixture against that of scikit-learn, and a defined result for every input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.mixture import GaussianMixture
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pseudoloss.methods import mixture
from pseudoloss.methods.mixture import fit_two_modes


def two_modes(n, seed, apart=4.0):
    """Values like losses of clean and noisy images: a narrow low mode and a broad high one."""
    random = np.random.default_rng(seed)
    low = np.abs(random.normal(0.3, 0.25, n * 6 // 10))
    high = np.abs(random.normal(0.3 + apart, 0.6, n - len(low)))
    return random.permutation(np.concatenate([low, high]))


def sklearn_fit(values, **start):
    x = ((values - values.min()) / (values.max() - values.min()))[:, None]
    model = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0, **start).fit(
        x
    )
    low = int(model.means_.argmin())
    return model.predict_proba(x)[:, low], model, low


def best_split(values):
    """Two-means by brute force, in extended precision: every cut of the sorted values is tried. How
    many values are below the best one, and the last of them."""
    s = np.sort(values)
    x = ((s - s[0]) / (s[-1] - s[0])).astype(np.longdouble)
    total = x.cumsum()
    below = np.arange(1, len(x))
    above = len(x) - below
    # The squared error is the sum of squares, which no cut changes, less this.
    spread = total[:-1] ** 2 / below + (total[-1] - total[:-1]) ** 2 / above
    best = int(np.argmax(spread))
    return best + 1, s[best]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", ["two modes", "overlapping modes", "one mode"])
def test_the_start_is_the_best_split_of_a_million_values(kind, dtype, monkeypatch):
    """Without any EM step, the weights tell how many values are below the cut."""
    n = 1_000_000
    values = {
        "two modes": lambda: two_modes(n, 0),
        "overlapping modes": lambda: two_modes(n, 0, apart=0.5),
        "one mode": lambda: np.random.default_rng(0).normal(size=n),
    }[kind]().astype(dtype)
    monkeypatch.setattr(mixture, "EM_STEPS", 0)
    start = fit_two_modes(torch.from_numpy(values))
    wanted, last = best_split(values.astype(np.float64))
    assert round(start.weights[0].item() * n) == wanted
    assert start.means[0].item() == pytest.approx(values[values <= last].mean(dtype=float))


@settings(max_examples=50, deadline=None)
@given(values=arrays(np.float64, st.integers(3, 40), elements=st.integers(0, 20).map(float)))
def test_the_start_is_the_best_split_of_few_values(values):
    """Equal values stay on one side; cuts that are equally good may be either."""
    if len(set(values)) < 2:
        return

    def error(last):
        sides = values[values <= last], values[values > last]
        return sum(((side - side.mean()) ** 2).sum() for side in sides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "EM_STEPS", 0)
        start = fit_two_modes(torch.from_numpy(values))
    below = round(start.weights[0].item() * len(values))
    last = np.sort(values)[below - 1]
    assert (values <= last).sum() == below
    least = min(error(value) for value in set(values) - {values.max()})
    assert error(last) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("n", [100, 1_000, 10_000, 300_000])
@pytest.mark.filterwarnings("ignore:Best performing initialization")
def test_equals_scikit_learn(n):
    values = two_modes(n, seed=n)
    wanted, model, low = sklearn_fit(values)
    ours = fit_two_modes(torch.from_numpy(values))
    np.testing.assert_allclose(ours.low_N, wanted, atol=1e-5)
    span = values.max() - values.min()
    order = [low, 1 - low]
    np.testing.assert_allclose(ours.weights, model.weights_[order], atol=1e-5)
    np.testing.assert_allclose(
        ours.means, values.min() + span * model.means_[order, 0], atol=1e-5 * span
    )
    np.testing.assert_allclose(
        ours.variances, span**2 * model.covariances_[order, 0, 0], atol=1e-5 * span**2
    )
    assert bool(ours.fitted)


@pytest.mark.parametrize("apart", [0.5, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.filterwarnings("ignore:Best performing initialization")
def test_equals_scikit_learn_from_the_best_split_where_modes_overlap(apart):
    """The start of scikit-learn is a k-means that stops early and depends on its random start; from
    the best split, found by brute force, it takes the same ten steps as ours."""
    values = two_modes(600, seed=3, apart=apart)
    x = (values - values.min()) / (values.max() - values.min())
    below = x <= best_split(x)[1]
    parts = [x[below], x[~below]]
    start = {
        "weights_init": [len(part) / len(x) for part in parts],
        "means_init": [[part.mean()] for part in parts],
        "precisions_init": [[[1 / (part.var() + 5e-4)]] for part in parts],
    }
    wanted, _, _ = sklearn_fit(values, **start)
    np.testing.assert_allclose(fit_two_modes(torch.from_numpy(values)).low_N, wanted, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(10, 60), inside=st.floats(0.2, 0.9))
def test_a_mask_equals_leaving_values_out(seed, n, inside):
    random = np.random.default_rng(seed)
    values = torch.from_numpy(two_modes(n, seed))
    where = torch.from_numpy(random.random(n) < inside)
    masked, alone = fit_two_modes(values, where), fit_two_modes(values[where])
    torch.testing.assert_close(masked.low_N[where], alone.low_N)
    assert torch.equal(masked.low_N[~where], torch.ones(int((~where).sum())))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), shift=st.floats(-1e3, 1e3), scale=st.floats(1e-3, 1e3))
def test_shift_scale_and_order_do_not_matter(seed, shift, scale):
    values = torch.from_numpy(two_modes(200, seed))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(200))
    low = fit_two_modes(values).low_N
    torch.testing.assert_close(
        fit_two_modes(values * scale + shift).low_N, low, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(fit_two_modes(values[order]).low_N, low[order])


@pytest.mark.parametrize("value", [0.0, 3.5, -1e30])
def test_constant_values_are_one_low_mode(value):
    mixture = fit_two_modes(torch.full((50,), value))
    assert not bool(mixture.fitted)
    assert torch.equal(mixture.low_N, torch.ones(50))


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 9.0]])
def test_fewer_than_three_values_are_one_low_mode(values):
    mixture = fit_two_modes(torch.tensor(values))
    assert not bool(mixture.fitted)
    assert torch.equal(mixture.low_N, torch.ones(len(values)))


def test_an_empty_mask_is_one_low_mode():
    mixture = fit_two_modes(torch.rand(10), torch.zeros(10, dtype=torch.bool))
    assert not bool(mixture.fitted)
    assert torch.equal(mixture.low_N, torch.ones(10))


def test_nan_and_infinity_are_left_out_of_the_fit():
    values = torch.from_numpy(two_modes(300, 5))
    dirty = torch.cat([values, torch.tensor([math.nan, math.inf, -math.inf])])
    mixture = fit_two_modes(dirty)
    torch.testing.assert_close(mixture.low_N[:300], fit_two_modes(values).low_N)
    assert mixture.low_N[300:].tolist() == [0, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_only_nan_or_infinity_is_high(bad):
    mixture = fit_two_modes(torch.full((9,), bad))
    assert not bool(mixture.fitted)
    assert torch.equal(mixture.low_N, torch.zeros(9))


def test_one_mode_has_a_defined_split():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixture = fit_two_modes(values)
    assert bool(mixture.fitted)
    assert mixture.low_N.isfinite().all()
    assert mixture.means[0] < mixture.means[1]
    low = mixture.low_N[values.argsort()]
    assert low[:400].mean() > 0.9
    assert low[-400:].mean() < 0.1


def test_two_equal_modes_have_equal_weights():
    half = torch.linspace(-0.1, 0.1, 101, dtype=torch.float64)
    mixture = fit_two_modes(torch.cat([half, 1 + half]))
    torch.testing.assert_close(mixture.weights, torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(mixture.means, torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(mixture.variances[0], mixture.variances[1])
    assert (mixture.low_N[:101] > 0.99).all()
    assert (mixture.low_N[101:] < 0.01).all()


def test_values_of_two_kinds_only():
    mixture = fit_two_modes(torch.tensor([0.0] * 30 + [1.0] * 10))
    assert (mixture.low_N[:30] > 0.999).all()
    assert (mixture.low_N[30:] < 0.001).all()


def test_float32_and_bfloat16_are_accepted():
    values = torch.from_numpy(two_modes(500, 2))
    low = fit_two_modes(values).low_N
    torch.testing.assert_close(fit_two_modes(values.float()).low_N, low, atol=1e-4, rtol=1e-4)
    assert fit_two_modes(values.bfloat16()).low_N.dtype == torch.float32


@settings(max_examples=200, deadline=None)
@given(values=arrays(np.float64, st.integers(0, 40), elements=st.floats(width=64)))
def test_every_input_has_a_defined_result(values):
    low = fit_two_modes(torch.from_numpy(values)).low_N
    assert low.shape == values.shape
    assert low.isfinite().all()
    assert ((low >= 0) & (low <= 1)).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(3, 100), size=st.integers(1, 40))
def test_the_size_of_parts_makes_no_difference(seed, n, size):
    values, where = torch.from_numpy(two_modes(n, seed)), torch.rand(n) < 0.8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "PART_ON_CPU", size)
        in_parts = fit_two_modes(values, where)
    for part, whole in zip(in_parts, fit_two_modes(values, where), strict=True):
        torch.testing.assert_close(part, whole, equal_nan=True)


def test_nothing_is_read_back_from_a_gpu(monkeypatch):
    """Fake tensors have a shape and no values: reading one back is an error."""
    monkeypatch.setattr(mixture, "PART", 400)
    with FakeTensorMode():
        values = torch.empty(1000, device="cuda")
        assert fit_two_modes(values, values > 1).low_N.shape == (1000,)
        with pytest.raises(DataDependentOutputException):
            bool(values.sum() > 0)
