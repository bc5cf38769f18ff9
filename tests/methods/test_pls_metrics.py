import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from pseudoloss.data import OUT
from pseudoloss.methods import metrics, pls_metrics
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pseudo_labels import PLSState

N, C = 60, 5


@pytest.fixture
def judged():
    """A state in which half of the labels are flagged, and the true labels."""
    random = torch.Generator().manual_seed(0)
    given_N, true_N = (torch.randint(0, C, (N,), generator=random) for _ in range(2))
    state = PLSState.begin(given_N, C)
    state.noisy_N.copy_(torch.rand(N, generator=random) < 0.5)
    state.store(torch.arange(N), torch.rand(N, C, generator=random))
    state.trust_N.copy_(torch.rand(N, generator=random))
    state.pseudo_loss_N.copy_(torch.rand(N, generator=random))
    true_N[:5] = OUT  # every pseudo-label of an out-of-distribution image is wrong
    return state, true_N


def test_metrics_of_pseudo_labels_are_compared_by_their_auc_over_the_flagged_images(judged):
    state, true_N = judged
    noisy = state.noisy_N
    wrong = (state.pseudo_class_N != true_N)[noisy].numpy()
    assert (state.pseudo_class_N != true_N)[:5].all()
    aucs, more = pls_metrics.compare_pseudo_labels(state, true_N, state.trust_N)
    p = state.pseudo_labels(slice(None))
    values = {
        "pseudo-loss": state.pseudo_loss_N,
        "confidence": metrics.confidence(p),
        "entropy": metrics.entropy(p),
    }
    for name, value in values.items():
        assert aucs[name] == pytest.approx(roc_auc_score(wrong, value[noisy])), name
    assert aucs.keys() == values.keys()
    assert more.keys() == {"bias", "pseudo_loss"}


@pytest.mark.parametrize("whole", [2**40, 0])
def test_metrics_in_chunks_equal_those_of_all_images(whole, monkeypatch):
    state = PLSState.begin(torch.zeros(N, dtype=torch.long), 15, whole)
    state.store(torch.arange(N), torch.rand(N, 15))
    wanted = metrics.entropy(state.pseudo_labels(slice(None)))
    torch.testing.assert_close(pls_metrics.of_pseudo_labels(metrics.entropy, state), wanted)
    monkeypatch.setattr(pls_metrics, "SHARES_AT_ONCE", 7 * 15)
    torch.testing.assert_close(pls_metrics.of_pseudo_labels(metrics.entropy, state), wanted)


def test_confirmation_bias_counts_wrong_pseudo_labels_that_are_learned(judged):
    state, true_N = judged
    state.predicted_N[::2] = state.pseudo_class_N[::2].int()
    weight_N = state.trust_N.flip(0)
    learned = fitted = 0
    for i in range(N):
        wrong = state.noisy_N[i] and state.pseudo_class_N[i] != true_N[i]
        learned += bool(wrong and weight_N[i] >= 0.5)
        fitted += bool(wrong and state.predicted_N[i] == state.pseudo_class_N[i])
    noisy = int(state.noisy_N.sum())
    assert 0 < learned < noisy
    found = pls_metrics.confirmation_bias(state, true_N, weight_N)
    assert found == {"learned": learned / noisy, "fitted": fitted / noisy}


def test_confirmation_bias_is_undefined_where_no_label_is_flagged(judged):
    state, true_N = judged
    state.noisy_N.fill_(False)
    found = pls_metrics.confirmation_bias(state, true_N, state.trust_N)
    assert found == {"learned": None, "fitted": None}


def test_the_histogram_of_the_pseudo_loss_holds_every_flagged_image(judged):
    state, true_N = judged
    found = pls_metrics.pseudo_loss_histogram(state, true_N)
    noisy = state.noisy_N
    right = (state.pseudo_class_N == true_N)[noisy].numpy()
    value = state.pseudo_loss_N[noisy].double().numpy()
    edges = found["histogram"]["edges"]
    assert (edges[0], edges[-1], len(edges)) == (value.min(), value.max(), 51)
    assert sum(found["histogram"]["right"]) == right.sum()
    assert sum(found["histogram"]["wrong"]) == (~right).sum()
    assert found["histogram"]["right"] == np.histogram(value[right], edges)[0].tolist()
    mixture = fit_two_modes(torch.from_numpy(value).float())
    for name in ("means", "variances", "weights"):
        assert found["modes"][name] == pytest.approx(getattr(mixture, name).tolist())


def test_a_histogram_without_two_modes_or_without_flagged_images(judged):
    state, true_N = judged
    state.pseudo_loss_N.fill_(2.0)
    found = pls_metrics.pseudo_loss_histogram(state, true_N)
    assert found["modes"] is None
    counts = found["histogram"]["right"], found["histogram"]["wrong"]
    assert sum(map(sum, counts)) == int(state.noisy_N.sum())
    state.noisy_N.fill_(False)
    assert pls_metrics.pseudo_loss_histogram(state, true_N) is None


def test_pseudo_losses_that_are_not_finite_are_left_out_of_the_histogram(judged):
    state, true_N = judged
    first = state.noisy_N.nonzero()[0]
    state.pseudo_loss_N[first] = torch.inf
    found = pls_metrics.pseudo_loss_histogram(state, true_N)["histogram"]
    assert sum(found["right"]) + sum(found["wrong"]) == int(state.noisy_N.sum()) - 1
