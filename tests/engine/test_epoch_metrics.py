import pytest
import torch
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from pseudoloss.data import OUT
from pseudoloss.engine.epoch_metrics import detection, pseudo_labels
from pseudoloss.methods.base import Verdict

N, C = 60, 5


@pytest.fixture
def judged():
    """A verdict that flags half of the labels, the given labels and the true ones."""
    random = torch.Generator().manual_seed(0)
    given_N, true_N, predicted_N, suggested_N = (
        torch.randint(0, C, (N,), generator=random) for _ in range(4)
    )
    loss_N, p_noisy_N, trust_N = (torch.rand(N, generator=random) for _ in range(3))
    verdict = Verdict(p_noisy_N > 0.5, p_noisy_N, loss_N, predicted_N, suggested_N, trust_N)
    return verdict, given_N, true_N


def test_detection_equals_that_of_scikit_learn(judged):
    verdict, given_N, true_N = judged
    wrong = (given_N != true_N).numpy()
    found = detection(verdict, given_N, true_N)
    assert found["precision"] == pytest.approx(precision_score(wrong, verdict.noisy_N))
    assert found["recall"] == pytest.approx(recall_score(wrong, verdict.noisy_N))
    assert found["auc"] == pytest.approx(roc_auc_score(wrong, verdict.loss_N))


def test_suggestions_are_judged_on_flagged_images_alone(judged):
    verdict, _, true_N = judged
    noisy = verdict.noisy_N
    right = (verdict.suggested_N == true_N)[noisy].numpy()
    found = pseudo_labels(verdict, true_N)
    assert found["accuracy"] == pytest.approx(100 * right.mean())
    assert found["auc"] == pytest.approx(roc_auc_score(right, verdict.trust_N[noisy]))


def test_metrics_that_are_not_defined_are_none(judged):
    verdict, given_N, true_N = judged
    unflagged = verdict._replace(noisy_N=torch.zeros(N, dtype=torch.bool))
    assert pseudo_labels(unflagged, true_N) == {"accuracy": None, "auc": None}
    assert detection(unflagged, given_N, true_N)["precision"] is None
    assert set(detection(unflagged, given_N, given_N).values()) == {None}


def test_a_method_without_suggestions_has_no_metrics_of_pseudo_labels(judged):
    verdict, _, true_N = judged
    assert pseudo_labels(verdict._replace(suggested_N=None, trust_N=None), true_N) is None


def test_out_of_distribution_images(judged):
    """Their labels and all suggestions are wrong; their recall is counted separately too."""
    verdict, given_N, true_N = judged
    true_N[::3] = OUT
    noisy, out = verdict.noisy_N.numpy(), (true_N == OUT).numpy()
    inside = (given_N != true_N).numpy() & ~out
    found = detection(verdict, given_N, true_N)
    assert found["recall"] == pytest.approx(recall_score(inside | out, noisy))
    assert found["recall_in"] == pytest.approx(noisy[inside].mean())
    assert found["recall_out"] == pytest.approx(noisy[out].mean())
    right = (verdict.suggested_N == true_N).numpy()
    assert not right[out].any()
    assert pseudo_labels(verdict, true_N)["accuracy"] == pytest.approx(100 * right[noisy].mean())
    assert pseudo_labels(verdict, torch.full_like(true_N, OUT))["accuracy"] == 0
