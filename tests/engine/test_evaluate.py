import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    confusion_matrix,
    log_loss,
    precision_recall_fscore_support,
    precision_score,
    recall_score,
    roc_auc_score,
)

from pseudoloss.data import OUT
from pseudoloss.engine import evaluate
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import fit_two_modes


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


# ----------------------------------------------------------------------------- comparing metrics


def test_metrics_are_compared_by_auc():
    memory, given_N, true_N = remembered()
    true_N[:5] = -1  # belongs to no class: the label is wrong, and so is every guess
    score = torch.rand(60, generator=torch.Generator().manual_seed(9))
    wrong = (given_N != true_N).numpy()
    found = evaluate.noise_aucs({"a": score, "b": score * torch.nan}, given_N, true_N)
    assert found == {"a": pytest.approx(roc_auc_score(wrong, score)), "b": None}
    noisy = memory.noisy_N
    right = (memory.guess_N == true_N)[noisy].numpy()
    assert not (memory.guess_N == true_N)[:5].any()
    found = evaluate.guess_aucs({"a": score}, memory, true_N)
    assert found == {"a": pytest.approx(roc_auc_score(right, -score[noisy]))}


def test_bias_is_the_share_of_wrong_guesses_that_are_believed():
    memory, _, true_N = remembered()
    true_N[:5] = -1
    memory.predicted_N[::2] = memory.guess_N[::2].int()
    weight_N = memory.trust_N.flip(0)
    learnt = fitted = 0
    for i in range(60):
        wrong = memory.noisy_N[i] and memory.guess_N[i] != true_N[i]
        learnt += bool(wrong and weight_N[i] >= 0.5)
        fitted += bool(wrong and memory.predicted_N[i] == memory.guess_N[i])
    noisy = int(memory.noisy_N.sum())
    assert 0 < learnt < noisy
    found = evaluate.bias(memory, true_N, weight_N)
    assert found == {"learnt": learnt / noisy, "fitted": fitted / noisy}
    memory.noisy_N.fill_(False)
    assert evaluate.bias(memory, true_N, weight_N) == {"learnt": None, "fitted": None}


def test_the_histogram_of_the_pseudo_loss_holds_every_noisy_image():
    memory, _, true_N = remembered()
    memory.pseudo_loss_N.copy_(torch.rand(60, generator=torch.Generator().manual_seed(1)))
    found = evaluate.pseudo_losses(memory, true_N)
    noisy = memory.noisy_N
    right = (memory.guess_N == true_N)[noisy].numpy()
    value = memory.pseudo_loss_N[noisy].double().numpy()
    edges = found["histogram"]["edges"]
    assert (edges[0], edges[-1], len(edges)) == (value.min(), value.max(), 51)
    assert sum(found["histogram"]["right"]) == right.sum()
    assert sum(found["histogram"]["wrong"]) == (~right).sum()
    assert found["histogram"]["right"] == np.histogram(value[right], edges)[0].tolist()
    mixture = fit_two_modes(torch.from_numpy(value).float())
    for name in ("means", "variances", "weights"):
        assert found["modes"][name] == pytest.approx(getattr(mixture, name).tolist())


def test_pseudo_losses_without_two_modes_or_without_noisy_images():
    memory, _, true_N = remembered()
    memory.pseudo_loss_N.fill_(2.0)
    found = evaluate.pseudo_losses(memory, true_N)
    assert found["modes"] is None
    counts = found["histogram"]["right"], found["histogram"]["wrong"]
    assert sum(map(sum, counts)) == int(memory.noisy_N.sum())
    memory.noisy_N.fill_(False)
    assert evaluate.pseudo_losses(memory, true_N) is None


def classified(seed=0, n=200, classes=5):
    """Probabilities that are right more often than not; the last class has no images."""
    random = np.random.default_rng(seed)
    label_N = random.integers(0, classes - 1, n)
    logits_NC = random.normal(size=(n, classes)) + 2 * np.eye(classes)[label_N]
    p_NC = np.exp(logits_NC) / np.exp(logits_NC).sum(1, keepdims=True)
    return label_N, p_NC


def test_figures_of_the_classes_equal_scikit_learns():
    label_N, p_NC = classified()
    predicted_N = p_NC.argmax(1)
    found = evaluate.confusion(torch.from_numpy(label_N), torch.from_numpy(predicted_N), 5)
    np.testing.assert_array_equal(found, confusion_matrix(label_N, predicted_N, labels=range(5)))
    precision, recall, _, support = precision_recall_fscore_support(
        label_N, predicted_N, labels=range(5), zero_division=np.nan
    )
    rows = evaluate.by_class(found)
    as_nan = [np.nan if row["recall"] is None else row["recall"] for row in rows]
    np.testing.assert_allclose(as_nan, recall)
    np.testing.assert_allclose([row["precision"] for row in rows], precision)
    assert [row["support"] for row in rows] == support.tolist()
    assert rows[4]["accuracy"] is None
    assert rows[0]["accuracy"] == pytest.approx(100 * recall[0])
    assert sum(row["predicted"] for row in rows) == len(label_N)
    nothing = evaluate.by_class(torch.zeros(2, 2, dtype=torch.long))
    assert nothing[0]["precision"] is None


@pytest.mark.parametrize("seed", range(5))
def test_calibration_equals_scikit_learns(seed):
    label_N, p_NC = classified(seed)
    confidence_N, right_N = p_NC.max(1), p_NC.argmax(1) == label_N
    found = evaluate.calibration(torch.from_numpy(confidence_N), torch.from_numpy(right_N))
    accuracy, confidence = calibration_curve(right_N, confidence_N, n_bins=15)
    filled = [part for part in found["bins"] if part["images"]]
    np.testing.assert_allclose([part["accuracy"] / 100 for part in filled], accuracy)
    np.testing.assert_allclose([part["confidence"] for part in filled], confidence)
    share = np.array([part["images"] for part in filled]) / len(right_N)
    assert found["error"] == pytest.approx((share * abs(accuracy - confidence)).sum())
    assert all(part["low"] < part["confidence"] <= part["high"] for part in filled)


def test_the_edges_of_the_reliability_table():
    ends = torch.tensor([0.0, 1.0, 0.2], dtype=torch.float64)
    found = evaluate.calibration(ends, torch.tensor([False, True, True]), bins=5)
    assert [part["images"] for part in found["bins"]] == [2, 0, 0, 0, 1]
    assert found["error"] == pytest.approx(0.8 / 3)
    assert found["bins"][1]["accuracy"] is None


def test_negative_log_likelihood_equals_scikit_learns():
    label_N, p_NC = classified()
    own_N = torch.from_numpy(p_NC[np.arange(len(label_N)), label_N])
    wanted = log_loss(label_N, p_NC, labels=range(5))
    assert evaluate.negative_log_likelihood(own_N) == pytest.approx(wanted)
    assert np.isfinite(evaluate.negative_log_likelihood(torch.zeros(2)))
