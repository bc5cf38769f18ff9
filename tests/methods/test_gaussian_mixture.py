"""The mixture of several Gaussians, against scikit-learn's from the same start; and every input has
a defined result."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture
from torch._subclasses.fake_tensor import FakeTensorMode

from pseudoloss.methods import gaussian_mixture
from pseudoloss.methods.gaussian_mixture import fit_gaussians, posterior, posterior_of_groups


def losses(n=5000, seed=0):
    """Most are low, some high, and some between."""
    random = torch.Generator().manual_seed(seed)
    low = 0.3 * torch.rand(n // 2, generator=random) ** 4
    middle = torch.rand(n // 10, generator=random)  # so that no component is empty
    high = 1 + 0.05 * torch.randn(n - len(low) - len(middle), generator=random)
    return torch.cat([low, middle, high])


def in_one_part(values_N):
    x_N = (values_N.double() - values_N.min()) / (values_N.max() - values_N.min())
    return x_N, [(x_N, torch.ones_like(x_N))]


@pytest.mark.parametrize("part", [2**12, 700])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_from_the_same_start_it_is_that_of_scikit_learn(monkeypatch, count, part):
    monkeypatch.setattr(gaussian_mixture, "PART_ON_CPU", part)
    values_N = losses()
    x_N, parts = in_one_part(values_N)
    means, variances, weights = (t.numpy() for t in gaussian_mixture.start(parts, count))
    theirs = GaussianMixture(
        count,
        max_iter=10,
        tol=1e-2,
        reg_covar=5e-4,
        means_init=means[:, None],
        weights_init=weights,
        precisions_init=1 / variances[:, None, None],
    ).fit(x_N[:, None])
    order = theirs.means_[:, 0].argsort()
    ours = fit_gaussians(values_N, count)
    assert ours.fitted
    np.testing.assert_allclose(ours.means_K, theirs.means_[order, 0], atol=1e-6)
    np.testing.assert_allclose(ours.variances_K, theirs.covariances_[order, 0, 0], atol=1e-6)
    np.testing.assert_allclose(ours.weights_K, theirs.weights_[order], atol=1e-6)
    wanted = theirs.predict_proba(x_N[:, None])[:, order]
    np.testing.assert_allclose(posterior(values_N, ours), wanted, atol=1e-5)


def test_an_empty_component_stays_where_it_began():
    """scikit-learn would move it to 0, where it could be taken for the lowest."""
    values_N = torch.cat([torch.zeros(50), torch.full((50,), 0.5), torch.ones(50)])
    found = fit_gaussians(values_N, 5)
    torch.testing.assert_close(
        found.means_K, torch.tensor([0, 0.3, 0.5, 0.7, 1], dtype=torch.float64)
    )
    assert found.weights_K[[1, 3]].max() < 1e-9


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_start_is_a_clustering_that_no_step_of_k_means_changes(count):
    x_N, parts = in_one_part(losses())
    means, _, weights = gaussian_mixture.start(parts, count)
    nearest_N = (x_N[:, None] - means).abs().argmin(1)
    for k in range(count):
        assert x_N[nearest_N == k].mean().item() == pytest.approx(means[k].item(), abs=0.01)
        assert (nearest_N == k).float().mean().item() == pytest.approx(weights[k].item(), abs=0.01)


def test_three_groups_are_found():
    random = torch.Generator().manual_seed(0)
    centres = torch.tensor([0.1, 1.0, 1.9]).repeat(500)
    values_N = centres + 0.05 * torch.randn(1500, generator=random)
    found = fit_gaussians(values_N, 3)
    assert torch.equal(posterior(values_N, found).argmax(1), torch.arange(3).repeat(500))
    torch.testing.assert_close(found.weights_K, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_probabilities_of_groups_are_sums(monkeypatch):
    values_N = losses(500)
    found = fit_gaussians(values_N, 20)
    group_K3 = torch.eye(3)[torch.arange(20) % 3]
    whole = posterior(values_N, found)
    monkeypatch.setattr(gaussian_mixture, "PART_ON_CPU", 64)
    sums = posterior_of_groups(values_N, found, group_K3)
    wanted = torch.stack([whole[:, torch.arange(20) % 3 == g].sum(1) for g in range(3)], 1)
    torch.testing.assert_close(sums, wanted)
    torch.testing.assert_close(sums.sum(1), torch.ones(500))


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=30),
    count=st.sampled_from([1, 3, 20]),
)
def test_every_input_has_a_defined_result(values, count):
    values_N = torch.tensor(values)
    found = fit_gaussians(values_N, count)
    p_NK = posterior(values_N, found)
    assert p_NK.isfinite().all()
    torch.testing.assert_close(p_NK.sum(1), torch.ones(len(values)))
    finite = values_N[values_N.isfinite()].double()
    assert bool(found.fitted) == (len(finite) > 2 and bool(finite.max() > finite.min()))
    if not found.fitted:
        assert (p_NK[:, 0] == 1).all()
    elif count > 1:
        assert (p_NK[values_N.isnan() | (values_N == torch.inf), -1] == 1).all()
        assert (p_NK[values_N == -torch.inf, 0] == 1).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100), scale=st.floats(0.01, 100), shift=st.floats(-10, 10))
def test_other_units_and_another_order_change_nothing(seed, scale, shift):
    values_N = losses(400, seed)
    order_N = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
    found = fit_gaussians(values_N, 3)
    other_N = (values_N.double() * scale + shift)[order_N]
    other = fit_gaussians(other_N, 3)
    torch.testing.assert_close(other.means_K, found.means_K, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        posterior(other_N, other), posterior(values_N, found)[order_N], atol=1e-3, rtol=1e-3
    )


def test_nothing_is_read_back_from_a_gpu():
    with FakeTensorMode():
        values_N = torch.empty(100, device="cuda")
        found = fit_gaussians(values_N, 20)
        assert posterior_of_groups(values_N, found, torch.empty(20, 3, device="cuda")).shape == (
            *(100, 3),
        )
