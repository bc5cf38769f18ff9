"""The mixture of two beta distributions: against a slow form, and a defined result for every
input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import beta as beta_distribution
from torch._subclasses.fake_tensor import FakeTensorMode

from pseudoloss.methods.beta_mixture import BINS, fit_two_betas, high_mode, peaks


def losses(n=2000, seed=0, noisy=0.4):
    """Like those of a network that has learned the clean labels but not the wrong ones."""
    random = np.random.default_rng(seed)
    wrong = random.random(n) < noisy
    found = np.where(wrong, random.gamma(20, 0.25, n), random.exponential(0.4, n))
    return found, wrong


def slow_fit(loss):
    """Percentiles by NumPy, densities by SciPy, and loops."""
    lowest, highest = np.percentile(loss, 5), np.percentile(loss, 95)
    x = [
        min(max((v - lowest) / (highest - lowest), 1e-3), 1 - 1e-3)
        for v in loss
        if lowest <= v <= highest
    ]
    modes = [(1.0, 2.0), (2.0, 1.0)]
    weights = [0.5, 0.5]
    for _ in range(10):
        density = np.array(
            [w * beta_distribution.pdf(x, a, b) for w, (a, b) in zip(weights, modes, strict=True)]
        )
        share = density / density.sum(0)
        modes, weights = [], share.sum(1) / len(x)
        for r in share:
            mean = np.average(x, weights=r)
            variance = np.average((x - mean) ** 2, weights=r)
            a = mean * (mean * (1 - mean) / variance - 1)
            modes.append((a, a * (1 - mean) / mean))
    return lowest, highest, modes, weights


@pytest.mark.parametrize("noisy", [0.2, 0.5, 0.8])
def test_the_fit_against_a_slow_one(noisy):
    loss, _ = losses(noisy=noisy)
    lowest, highest, modes, weights = slow_fit(loss)
    ours = fit_two_betas(torch.from_numpy(loss))
    assert ours.fitted
    assert ours.lowest.item() == pytest.approx(lowest, rel=1e-12)
    assert ours.highest.item() == pytest.approx(highest, rel=1e-12)
    np.testing.assert_allclose(ours.alphas, [a for a, _ in modes], rtol=1e-6)
    np.testing.assert_allclose(ours.betas, [b for _, b in modes], rtol=1e-6)
    np.testing.assert_allclose(ours.weights, weights, rtol=1e-6)


def test_the_table_is_the_posterior_and_constant_after_its_maximum():
    loss, _ = losses()
    _, _, modes, weights = slow_fit(loss)
    middles = (np.arange(BINS) + 0.5) / BINS
    low, high = (
        w * beta_distribution.pdf(middles, a, b) for w, (a, b) in zip(weights, modes, strict=True)
    )
    wanted = high / (low + high)
    wanted[wanted.argmax() :] = wanted.max()
    np.testing.assert_allclose(fit_two_betas(torch.from_numpy(loss)).high_T, wanted, atol=1e-6)


def test_high_losses_are_in_the_high_mode():
    loss, wrong = losses()
    mixture = fit_two_betas(torch.from_numpy(loss).float())
    assert (mixture.alphas / (mixture.alphas + mixture.betas)).diff() > 0.3
    p_N = high_mode(torch.from_numpy(loss), mixture.lowest, mixture.highest, mixture.high_T)
    assert ((p_N > 0.5).numpy() == wrong).mean() > 0.95
    extreme = torch.tensor([-torch.inf, -5.0, 1e9, torch.inf, torch.nan])
    found = high_mode(extreme, mixture.lowest, mixture.highest, mixture.high_T)
    assert (found[:2] < 0.1).all()
    assert (found[2:] > 0.8).all()


@settings(max_examples=50, deadline=None)
@given(arrays(np.float64, st.integers(0, 60), elements=st.floats(width=64, allow_nan=True)))
def test_every_input_has_a_defined_result(loss):
    mixture = fit_two_betas(torch.from_numpy(loss.copy()))
    assert all(part.isfinite().all() for part in mixture)
    assert ((mixture.high_T >= 0) & (mixture.high_T <= 1)).all()
    assert (mixture.alphas > 0).all()
    assert (mixture.betas > 0).all()
    assert mixture.weights.sum() == pytest.approx(1) or not mixture.fitted


@pytest.mark.parametrize(
    "loss",
    [
        [],
        [1.0],
        [1.0, 2.0],
        [3.0] * 100,
        [0.0] * 97 + [5.0] * 3,  # equal between the percentiles
        [np.nan] * 10,
        [np.inf] * 10,
    ],
    ids=["none", "one", "two", "equal", "outliers", "nan", "inf"],
)
def test_where_there_are_no_two_modes_every_loss_is_low(loss):
    loss_N = torch.tensor(loss, dtype=torch.float64)
    mixture = fit_two_betas(loss_N)
    assert not mixture.fitted
    assert (high_mode(loss_N, mixture.lowest, mixture.highest, mixture.high_T) == 0).all()


def test_some_of_the_losses_and_another_fit():
    """As if the others were not there."""
    loss, _ = losses()
    where = np.random.default_rng(1).random(len(loss)) < 0.5
    changed = {"rounds": 100, "percentiles": (0.0, 1.0)}
    ours = fit_two_betas(torch.from_numpy(loss), torch.from_numpy(where), **changed)
    alone = fit_two_betas(torch.from_numpy(loss[where]), **changed)
    for one, other in zip(ours, alone, strict=True):
        torch.testing.assert_close(one, other)
    assert ours.lowest == loss[where].min()
    assert ours.highest == loss[where].max()
    assert not torch.allclose(ours.alphas, fit_two_betas(torch.from_numpy(loss[where])).alphas)


def test_where_nothing_is_asked_for_nothing_is_fitted():
    loss_N = torch.from_numpy(losses()[0])
    mixture = fit_two_betas(loss_N, torch.zeros(len(loss_N), dtype=torch.bool))
    assert not mixture.fitted
    assert all(part.isfinite().all() for part in mixture)


@settings(max_examples=50, deadline=None)
@given(st.floats(1.01, 50), st.floats(1.01, 50))
def test_the_peak_of_a_beta_distribution(a, b):
    mixture = fit_two_betas(torch.zeros(3))._replace(
        alphas=torch.tensor([a, 2.0]).double(), betas=torch.tensor([b, 2.0]).double()
    )
    grid = np.linspace(0, 1, 20001)
    wanted = grid[beta_distribution.pdf(grid, a, b).argmax()]
    assert peaks(mixture)[0].item() == pytest.approx(wanted, abs=1e-4)
    assert peaks(mixture)[1] == 0.5


@pytest.mark.parametrize("spread", [0.0, 1e-12])
def test_a_mode_without_variance_stays_finite(spread):
    """Most losses are equal: the moments of the mode have no variance."""
    random = np.random.default_rng(0)
    loss = np.concatenate([np.full(600, 0.1), random.uniform(3, 5, 400)])
    loss += spread * random.normal(size=1000)
    mixture = fit_two_betas(torch.from_numpy(loss))
    assert mixture.fitted
    p_N = high_mode(torch.from_numpy(loss), mixture.lowest, mixture.highest, mixture.high_T)
    assert (p_N[:600] < 0.01).all()
    assert (p_N[600:] > 0.95).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 100), st.floats(-10, 10))
def test_shifted_and_scaled_losses_have_the_same_posterior(seed, scale, shift):
    loss, _ = losses(300, seed)
    first, second = (fit_two_betas(torch.from_numpy(v)) for v in (loss, scale * loss + shift))
    torch.testing.assert_close(first.high_T, second.high_T, rtol=1e-5, atol=1e-5)


def test_nothing_is_read_back_to_the_host():
    with FakeTensorMode():
        mixture = fit_two_betas(torch.zeros(1000))
        p_B = high_mode(torch.zeros(8), mixture.lowest, mixture.highest, mixture.high_T)
    assert p_B.shape == (8,)
