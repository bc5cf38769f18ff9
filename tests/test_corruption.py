import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.data import arrays, corrupt
from pseudoloss.data.corruption import KINDS, parse
from pseudoloss.errors import InputError


def image_set(n=1000, classes=10):
    return arrays(np.zeros((n, 8, 8), np.uint8), np.arange(n) % classes).train


def test_symmetric_draws_from_all_classes():
    """Row 18: the draw can return the true class, so the true rate is r·(C-1)/C."""
    clean = image_set(100_000, 10)
    noisy = corrupt(clean, "symmetric:0.5", seed=1)
    assert noisy.noise_rate == pytest.approx(0.45, abs=0.01)
    table = np.zeros((10, 10))
    np.add.at(table, (noisy.true_N.numpy(), noisy.given_N.numpy()), 1e-4)
    np.testing.assert_allclose(np.diag(table), 0.55, atol=0.03)
    np.testing.assert_allclose(table[~np.eye(10, dtype=bool)], 0.05, atol=0.01)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(4, 300), classes=st.integers(2, 9), rate=st.floats(0, 1), seed=st.integers(0, 99)
)
def test_symmetric_exact_moves_exactly_so_many(n, classes, rate, seed):
    clean = np.arange(n) % classes
    noisy = KINDS["symmetric-exact"](clean, classes, rate, np.random.default_rng(seed))
    assert (noisy != clean).sum() == round(rate * n)
    assert ((noisy >= 0) & (noisy < classes)).all()


def test_symmetric_exact_moves_to_each_other_class_equally():
    noisy = corrupt(image_set(90_000, 10), "symmetric-exact:1", seed=3)
    distance = (noisy.given_N - noisy.true_N) % 10
    counts = torch.bincount(distance, minlength=10)
    assert counts[0] == 0
    assert ((counts[1:] - 10_000).abs() < 500).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    clean = image_set()
    a, b, other = (corrupt(clean, f"{kind}:0.4", seed) for seed in (1, 1, 2))
    assert torch.equal(a.given_N, b.given_N)
    assert not torch.equal(a.given_N, other.given_N)


def test_the_truth_is_kept_beside():
    clean = image_set()
    noisy = corrupt(clean, "symmetric:0.4", 1)
    assert torch.equal(noisy.true_N, clean.given_N)
    assert noisy.images_NCHW is clean.images_NCHW
    assert clean.true_N is None  # the clean set is as it was
    twice = corrupt(noisy, "symmetric:0.4", 2)
    assert torch.equal(twice.true_N, clean.given_N)
    assert twice.noise_rate > noisy.noise_rate


def test_no_noise_changes_nothing():
    clean = image_set()
    assert torch.equal(corrupt(clean, "symmetric:0", 1).given_N, clean.given_N)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("symetric:0.4", "no such noise; did you mean symmetric"),
        ("symmetric", "expected symmetric:RATE"),
        ("symmetric:lots", "expected symmetric:RATE"),
        ("symmetric:1.5", "between 0 and 1"),
        ("symmetric:-0.1", "between 0 and 1"),
        ("symmetric:nan", "between 0 and 1"),
    ],
)
def test_bad_noise(noise, message):
    with pytest.raises(InputError, match=rf"--corrupt {noise}.*{message}"):
        parse(noise)
