import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from pseudoloss import evaluate
from pseudoloss.data import OUT
from pseudoloss.memory import Memory


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 80), levels=st.integers(1, 50))
def test_auc_equals_scikit_learns_ties_included(seed, n, levels):
    random = np.random.default_rng(seed)
    scores = random.integers(0, levels, n) / 7
    positive = random.random(n) < 0.4
    ours = evaluate.auc(torch.from_numpy(scores), torch.from_numpy(positive))
    if positive.all() or not positive.any():
        assert ours is None
    else:
        assert ours == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)


def test_auc_of_nan_is_undefined():
    assert evaluate.auc(torch.tensor([1.0, torch.nan]), torch.tensor([True, False])) is None


def remembered(seed=0, n=60, classes=5):
    random = torch.Generator().manual_seed(seed)
    given_N = torch.randint(0, classes, (n,), generator=random)
    true_N = torch.randint(0, classes, (n,), generator=random)
    memory = Memory.of(given_N, classes)
    memory.loss_N.copy_(torch.rand(n, generator=random))
    memory.noisy_N.copy_(torch.rand(n, generator=random) < 0.5)
    memory.remember_guesses(torch.arange(n), torch.rand(n, classes, generator=random))
    memory.trust_N.copy_(torch.rand(n, generator=random))
    return memory, given_N, true_N


def test_detection_equals_scikit_learns():
    memory, given_N, true_N = remembered()
    wrong = (given_N != true_N).numpy()
    found = evaluate.detection(memory, given_N, true_N)
    assert found["precision"] == pytest.approx(precision_score(wrong, memory.noisy_N))
    assert found["recall"] == pytest.approx(recall_score(wrong, memory.noisy_N))
    assert found["auc"] == pytest.approx(roc_auc_score(wrong, memory.loss_N))


def test_guesses_are_judged_on_noisy_images_alone():
    memory, _, true_N = remembered()
    noisy = memory.noisy_N
    right = (memory.guesses(slice(None)).argmax(1) == true_N)[noisy].numpy()
    found = evaluate.guesses(memory, true_N)
    assert found["accuracy"] == pytest.approx(100 * right.mean())
    assert found["auc"] == pytest.approx(roc_auc_score(right, memory.trust_N[noisy]))


def test_figures_that_are_not_defined_are_none():
    memory, given_N, true_N = remembered()
    memory.noisy_N.fill_(False)
    assert evaluate.guesses(memory, true_N) == {"accuracy": None, "auc": None}
    assert evaluate.detection(memory, given_N, true_N)["precision"] is None
    clean = evaluate.detection(memory, given_N, given_N)
    assert set(clean.values()) == {None}


def test_images_of_no_class():
    """Their labels are wrong, and so is every guess; recall is counted for them apart too."""
    memory, given_N, true_N = remembered()
    true_N[::3] = OUT
    noisy, out = memory.noisy_N.numpy(), (true_N == OUT).numpy()
    inside = (given_N != true_N).numpy() & ~out
    found = evaluate.detection(memory, given_N, true_N)
    assert found["recall"] == pytest.approx(recall_score(inside | out, noisy))
    assert found["recall_in"] == pytest.approx(noisy[inside].mean())
    assert found["recall_out"] == pytest.approx(noisy[out].mean())
    right = (memory.guess_N == true_N).numpy()
    assert not right[out].any()
    assert evaluate.guesses(memory, true_N)["accuracy"] == pytest.approx(100 * right[noisy].mean())
    assert evaluate.guesses(memory, torch.full_like(true_N, OUT))["accuracy"] == 0
