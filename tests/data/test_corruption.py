"""Label noise and out-of-distribution images for experiments."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.data import OUT, arrays, corrupt
from pseudoloss.data.corruption import KINDS, Noise, next_in_group, parse_noise
from pseudoloss.errors import InputError

RATES = st.floats(0, 1)
SEEDS = st.integers(0, 99)


def image_set(n=1000, classes=10, superclasses=None):
    """Every image contains its index (in two bytes), so that replaced images can be found."""
    images = np.zeros((n, 8, 8), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.arange(n) % 200, np.arange(n) // 200
    data = arrays(images, np.arange(n) % classes, classes=[f"c{i}" for i in range(classes)])
    return replace(data.train, superclasses=superclasses)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """2,000 other images: 250 in every pixel but two, which contain the index."""
    images = np.full((2000, 8, 8), 250, np.uint8)
    images[:, 1, 0], images[:, 1, 1] = np.arange(2000) % 200, np.arange(2000) // 200
    path = tmp_path_factory.mktemp("pool") / "pool.npy"
    np.save(path, images)
    return str(path)


# ------------------------------------------------------------------------------------ labels


def test_symmetric_noise_replaces_by_any_class():
    """Row 18: the random class can be the true one, so r·(C-1)/C of the labels are wrong."""
    clean = image_set(100_000, 10)
    noisy = corrupt(clean, "symmetric:0.5", seed=1)
    assert noisy.noise_rate == pytest.approx(0.45, abs=0.01)
    table = np.zeros((10, 10))
    np.add.at(table, (noisy.true_N.numpy(), noisy.given_N.numpy()), 1e-4)
    np.testing.assert_allclose(np.diag(table), 0.55, atol=0.03)
    np.testing.assert_allclose(table[~np.eye(10, dtype=bool)], 0.05, atol=0.01)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(4, 300), classes=st.integers(2, 9), rate=RATES, seed=SEEDS)
def test_symmetric_exact_changes_the_exact_number_of_labels(n, classes, rate, seed):
    clean = image_set(n, classes)
    noisy = corrupt(clean, f"symmetric-exact:{rate}", seed)
    assert (noisy.given_N != clean.given_N).sum() == round(rate * n)
    assert ((noisy.given_N >= 0) & (noisy.given_N < classes)).all()


def test_symmetric_exact_uses_all_other_classes_equally():
    noisy = corrupt(image_set(90_000, 10), "symmetric-exact:1", seed=3)
    distance = (noisy.given_N - noisy.true_N) % 10
    counts = torch.bincount(distance, minlength=10)
    assert counts[0] == 0
    assert ((counts[1:] - 10_000).abs() < 500).all()


@settings(max_examples=60, deadline=None)
@given(group=st.lists(st.integers(0, 4), min_size=2, max_size=40))
def test_the_next_class_stays_in_its_group(group):
    """It is a permutation; starting at a class, it visits all of its group and nothing else."""
    group = np.array(group)
    following = next_in_group(group)
    assert sorted(following) == list(range(len(group)))
    for start in range(len(group)):
        seen, here = [start], following[start]
        while here != start:
            seen.append(here)
            here = following[here]
        assert sorted(seen) == np.flatnonzero(group == group[start]).tolist()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(20, 300), classes=st.integers(2, 20), rate=RATES, seed=SEEDS)
def test_asymmetric_noise_stays_in_its_group(n, classes, rate, seed):
    """A label stays or becomes the next class of its group; computed with a slow loop."""
    superclasses = tuple(np.random.default_rng(seed).integers(0, 4, classes).tolist())
    clean = image_set(n, classes, superclasses)
    groups = {
        "asymmetric": superclasses,
        "asymmetric-blocks": [label // 5 for label in range(classes)],
        "pair": [0] * classes,
    }
    for kind, group in groups.items():
        noisy = corrupt(clean, f"{kind}:{rate}", seed)
        for before, after in zip(clean.given_N.tolist(), noisy.given_N.tolist(), strict=True):
            members = [label for label in range(classes) if group[label] == group[before]]
            wanted = members[(members.index(before) + 1) % len(members)]
            assert after in (before, wanted)


@pytest.mark.parametrize("kind", ["asymmetric", "asymmetric-blocks", "pair"])
def test_asymmetric_noise_has_the_given_rate(kind):
    clean = image_set(100_000, 10, (0, 0, 1, 1, 2, 2, 2, 1, 1, 0))
    assert corrupt(clean, f"{kind}:0.4", 1).noise_rate == pytest.approx(0.4, abs=0.01)
    assert corrupt(clean, f"{kind}:1", 1).noise_rate == 1
    assert corrupt(clean, f"{kind}:0", 1).noise_rate == 0


def test_asymmetric_noise_needs_superclasses():
    with pytest.raises(InputError, match=r"has no superclasses .*asymmetric-blocks:RATE"):
        corrupt(image_set(), "asymmetric:0.4", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_noise(kind, pool):
    clean = image_set(superclasses=(0, 1) * 5)
    for noise, place in ((f"{kind}:0.4", None), (f"{kind}:0.4+out:0.2", pool)):
        a, b, other = (corrupt(clean, noise, seed, place) for seed in (1, 1, 2))
        assert torch.equal(a.given_N, b.given_N)
        assert torch.equal(a.images_NCHW, b.images_NCHW)
        assert torch.equal(a.true_N, b.true_N)
        assert not torch.equal(a.given_N, other.given_N)


def test_true_labels_are_kept():
    clean = image_set()
    noisy = corrupt(clean, "symmetric:0.4", 1)
    assert torch.equal(noisy.true_N, clean.given_N)
    assert noisy.images_NCHW is clean.images_NCHW
    assert clean.true_N is None  # the clean set is unchanged
    twice = corrupt(noisy, "symmetric:0.4", 2)
    assert torch.equal(twice.true_N, clean.given_N)
    assert twice.noise_rate > noisy.noise_rate


def test_no_noise_changes_nothing():
    clean = image_set()
    assert torch.equal(corrupt(clean, "symmetric:0", 1).given_N, clean.given_N)
    assert torch.equal(corrupt(clean, None, 1).given_N, clean.given_N)


# -------------------------------------------------------------------------- out of distribution


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(10, 400),
    kind=st.sampled_from(["", *KINDS]),
    inside=st.integers(0, 100),
    out=st.integers(0, 100),
    seed=SEEDS,
)
def test_images_are_replaced_and_keep_their_labels(pool, n, kind, inside, out, seed):
    inside = min(inside, 100 - out)
    clean = image_set(n, 5, (0, 0, 1, 1, 1))
    noise = f"{kind}:{inside / 100}+out:{out / 100}" if kind else f"out:{out / 100}"
    noisy = corrupt(clean, noise, seed, pool)
    is_out = noisy.true_N == OUT
    replaced = (noisy.images_NCHW != clean.images_NCHW).flatten(1).any(1)
    assert int(is_out.sum()) == round(out / 100 * n)
    assert torch.equal(is_out, replaced)
    assert torch.equal(noisy.given_N[is_out], clean.given_N[is_out])
    assert torch.equal(noisy.true_N[~is_out], clean.given_N[~is_out])
    drawn = noisy.images_NCHW[is_out]
    assert (drawn[:, 0, 0, 2] == 250).all()
    assert len(drawn.unique(dim=0)) == len(drawn)  # no image of the pool is used twice
    if kind == "symmetric-exact":
        assert round(noisy.noise["in"] * n) == pytest.approx(inside / 100 * n, abs=1.01)


def test_rates_are_shares_of_all_images(pool):
    """Row 18: the rate is r_in/(1-r_out) among the other images, of which a tenth stays correct."""
    noisy = corrupt(image_set(4000), "symmetric:0.3+out:0.4", 1, pool)
    assert noisy.noise["out"] == 0.4
    assert noisy.noise["in"] == pytest.approx(0.9 * 0.3, abs=0.03)
    assert noisy.noise_rate == pytest.approx(sum(noisy.noise.values()))


def test_noise_is_unknown_without_true_labels():
    assert image_set().noise == {"in": None, "out": None}


def test_pool_is_required_exactly_if_it_is_used(pool):
    clean = image_set(100)
    with pytest.raises(InputError, match=r"--corrupt out:0.2: needs --pool"):
        corrupt(clean, "out:0.2", 1)
    for noise in (None, "symmetric:0.2", "labels:x.csv"):
        with pytest.raises(InputError, match=r"--pool .*: nothing asks for it; add \+out:RATE"):
            corrupt(clean, noise, 1, pool)
    with pytest.raises(InputError, match=r"--pool .*: has 2,000 images, but 3,000 are needed"):
        corrupt(image_set(6000), "out:0.5", 1, pool)


# ----------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("symetric:0.4", "no such noise; did you mean symmetric"),
        ("symmetric", "expected symmetric:RATE"),
        ("symmetric:lots", "expected symmetric:RATE"),
        ("symmetric:1.5", "between 0 and 1"),
        ("symmetric:-0.1", "between 0 and 1"),
        ("symmetric:nan", "between 0 and 1"),
        ("symmetric:0.7\\+out:0.4", "sum of the rates must not exceed 1"),
        ("symmetric:0.7\\+out", "only out:RATE can follow"),
        ("symmetric:0.2\\+pair:0.2", "only out:RATE can follow"),
        ("symmetric:0.2\\+out:some", "expected symmetric:RATE|expected out:RATE"),
        ("out:0.2\\+out:0.2", "out must be last"),
        ("human", "expected human:FILE or human:FILE:NAME"),
        ("labels:", "expected labels:FILE.csv"),
    ],
)
def test_invalid_noise_is_refused(noise, message):
    with pytest.raises(InputError, match=rf"--corrupt {noise}.*({message})"):
        parse_noise(noise.replace("\\", ""))


@pytest.mark.parametrize(
    ("noise", "wanted"),
    [
        ("pair:0.2+out:0.4", Noise("pair", 0.2, 0.4)),
        ("out:0.4", Noise(out=0.4)),
        ("human:a/b.pt", Noise("human", file="a/b.pt")),
        ("human:a/b.pt:worse_label", Noise("human", file="a/b.pt", name="worse_label")),
        ("labels:a+out:b.csv", Noise("labels", file="a+out:b.csv")),
    ],
)
def test_parse_noise(noise, wanted):
    assert parse_noise(noise) == wanted
