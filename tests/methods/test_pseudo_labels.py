"""The state of PLS: pseudo-labels kept whole or cut, against a slow form; and its size."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.methods.base import tensors_of
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pls import by_max, by_sum, pseudo_loss
from pseudoloss.methods.pseudo_labels import KEPT, KEPT_OF_MANY, WHOLE, PLSState

N = 12
ALL = slice(None)
norms = st.sampled_from([by_sum, by_max])
FORMS = {"whole": 2**40, "cut": 0}
forms = pytest.mark.parametrize("form", FORMS)


def make(classes, form, seed=0, normalise=by_sum, sharp=3.0):
    """A state in which a batch of pseudo-labels was stored; their places; and the pseudo-labels."""
    random = torch.Generator().manual_seed(seed)
    given_N = torch.randint(0, classes, (N,), generator=random)
    state = PLSState.begin(given_N, classes, FORMS[form])
    index = torch.randperm(N, generator=random)[:8]
    pseudo = normalise(sharp * torch.randn(8, classes, generator=random))
    state.store(index, pseudo)
    return state, index, pseudo


def slow_cut(pseudo):
    """Only the most likely classes; the rest is spread evenly over the others."""
    rows = []
    for y in pseudo.double().numpy():
        order = np.argsort(-y)
        kept, others = order[:KEPT], order[KEPT:]
        row = np.zeros(len(y))
        for c in kept:
            row[c] = y[c]
        for c in others:
            row[c] = sum(y[k] for k in others) / len(others)
        rows.append(row)
    return np.array(rows)


def slow_pseudo_loss(pseudo, logits):
    """-Σ ŷ log φ(x), for one image after another."""
    losses = []
    for y, z in zip(pseudo, logits.double().numpy(), strict=True):
        log = z - z.max() - np.log(np.exp(z - z.max()).sum())
        losses.append(-sum(y[c] * log[c] for c in range(len(y))))
    return np.array(losses)


# ------------------------------------------------------------------------------------- the start


@forms
def test_at_the_start_no_label_is_flagged_and_pseudo_labels_are_the_given_labels(form):
    given_N = torch.tensor([2, 0, 14])
    state = PLSState.begin(given_N, 15, FORMS[form])
    assert state.is_whole == (form == "whole")
    assert state.pseudo_class_N.tolist() == [2, 0, 14]
    assert state.predicted_N.tolist() == [2, 0, 14]
    assert not state.noisy_N.any()
    assert (state.trust_N == 1).all()
    places = [tensor.data_ptr() for tensor in tensors_of(state).values() if tensor.numel()]
    assert len(set(places)) == len(places)  # no two tensors share their storage


@pytest.mark.parametrize("classes", [1, 2, 9, 10, 11, 100, 2**15 - 1, 2**15, 70_000])
@forms
def test_the_first_pseudo_label_is_the_given_label(classes, form):
    given_N = torch.tensor([0, classes // 2, classes - 1])
    state = PLSState.begin(given_N, classes, FORMS[form])
    assert torch.equal(state.pseudo_labels(ALL), F.one_hot(given_N, classes).float())


def test_pseudo_labels_are_kept_whole_where_they_fit():
    """CIFAR-100 fits, ImageNet does not; of ten classes or fewer there is nothing to cut."""

    def is_whole(images, classes):
        with FakeTensorMode():
            return PLSState.begin(torch.empty(images, dtype=torch.long), classes).is_whole

    assert is_whole(50_000, 100)
    assert is_whole(2**20, 2**8)
    assert WHOLE == 4 * 2**20 * 2**8
    assert not is_whole(2**20 + 1, 2**8)
    assert not is_whole(1_281_167, 1000)
    assert is_whole(10**9, KEPT)


# --------------------------------------------------------------------------------- store and read


@pytest.mark.parametrize("classes", [3, 11, 50])
@pytest.mark.parametrize("normalise", [by_sum, by_max])
def test_a_whole_pseudo_label_is_kept_exactly(classes, normalise):
    state, index, pseudo = make(classes, "whole", normalise=normalise)
    assert torch.equal(state.pseudo_labels(index), pseudo)
    assert torch.equal(state.pseudo_class_N[index], pseudo.argmax(1))


@settings(max_examples=30, deadline=None)
@given(classes=st.integers(1, KEPT), seed=st.integers(0, 1000), normalise=norms)
def test_with_ten_classes_or_fewer_both_forms_agree(classes, seed, normalise):
    cut, index, pseudo = make(classes, "cut", seed, normalise)
    whole, *_ = make(classes, "whole", seed, normalise)
    assert cut.is_whole
    assert torch.equal(cut.pseudo_labels(index), pseudo)
    assert torch.equal(cut.pseudo_labels(ALL), whole.pseudo_labels(ALL))


@settings(max_examples=40, deadline=None)
@given(
    classes=st.integers(KEPT + 1, 80),
    seed=st.integers(0, 1000),
    normalise=norms,
    sharp=st.floats(0.1, 20),
)
def test_a_cut_pseudo_label_and_its_loss_equal_slow_forms(classes, seed, normalise, sharp):
    state, index, pseudo = make(classes, "cut", seed, normalise, sharp)
    assert not state.is_whole
    np.testing.assert_allclose(state.pseudo_labels(index), slow_cut(pseudo), atol=1e-6)
    logits = 5 * torch.randn(8, classes, generator=torch.Generator().manual_seed(seed))
    loss = pseudo_loss(state.pseudo_labels(index), logits)
    wanted = slow_pseudo_loss(slow_cut(pseudo), logits)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [11, 50, 40_000])
@pytest.mark.parametrize("normalise", [by_sum, by_max])
def test_a_cut_pseudo_label_keeps_its_sum_and_its_class(classes, normalise):
    state, index, pseudo = make(classes, "cut", normalise=normalise)
    kept = state.pseudo_labels(index)
    torch.testing.assert_close(kept.sum(1), pseudo.sum(1))
    assert torch.equal(state.pseudo_class_N[index], pseudo.argmax(1))
    assert torch.equal(kept.argmax(1), pseudo.argmax(1))


def test_a_pseudo_label_that_is_uniform_beyond_the_tenth_class_loses_nothing():
    pseudo = torch.tensor([[0.3, 0.2] + [0.05] * 8 + [0.01] * 10])
    state = PLSState.begin(torch.tensor([0]), 20, 0)
    state.store(torch.tensor([0]), pseudo)
    torch.testing.assert_close(state.pseudo_labels(ALL), pseudo)


def test_what_the_cut_loses():
    """The share beyond the tenth class moves between the other classes: a lot in a flat
    pseudo-label, nearly nothing in a sharp one. Trust moves with it."""
    classes, images = 100, 2000
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(images, classes, generator=random)
    lost, trust_moved = [], []
    for gamma in (1.0, 2.0, 8.0):
        pseudo = by_sum(gamma * (logits + torch.randn(images, classes, generator=random)))
        state = PLSState.begin(torch.zeros(images, dtype=torch.long), classes, 0)
        state.store(torch.arange(images), pseudo)
        cut = state.pseudo_labels(ALL)
        beyond = pseudo.sort(1, descending=True).values[:, KEPT:]
        moved = (cut - pseudo).abs().sum(1)
        assert (moved <= 2 * beyond.sum(1) + 1e-6).all()
        lost.append(moved.mean().item())
        trust, trust_of_cut = (
            fit_two_modes(pseudo_loss(labels, logits)).low_N for labels in (pseudo, cut)
        )
        trust_moved.append((trust - trust_of_cut).abs().mean().item())
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 0.05
    assert lost[-1] < 1e-3
    assert trust_moved[-1] < 1e-3 < trust_moved[0] < 0.1


@pytest.mark.parametrize("classes", [4, 30])
@forms
def test_the_last_pseudo_label_counts_and_other_images_keep_theirs(classes, form):
    state, index, _ = make(classes, form)
    before = state.pseudo_labels(ALL).clone()
    later = torch.rand(3, classes).softmax(1)
    state.store(index[:3], later)
    fresh = PLSState.begin(torch.zeros(N, dtype=torch.long), classes, FORMS[form])
    fresh.store(index[:3], later)
    assert torch.equal(state.pseudo_labels(index[:3]), fresh.pseudo_labels(index[:3]))
    others = torch.ones(N, dtype=torch.bool)
    others[index[:3]] = False
    assert torch.equal(state.pseudo_labels(ALL)[others], before[others])


@forms
def test_pseudo_labels_of_a_slice(form):
    state, *_ = make(30, form)
    assert torch.equal(state.pseudo_labels(slice(3, 7)), state.pseudo_labels(ALL)[3:7])
    assert state.pseudo_labels(slice(10, 100)).shape == (2, 30)


@forms
def test_nan_stays_nan_and_classes_stay_valid(form):
    state, index, pseudo = make(30, form)
    state.store(index, torch.full_like(pseudo, torch.nan))
    assert state.pseudo_labels(index).isnan().all()
    assert ((state.pseudo_class_N >= 0) & (state.pseudo_class_N < 30)).all()


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("classes", [2, 10, 11, 1000, 2**15 - 1, 2**15, 10**6, 2**31 - 1])
def test_cut_pseudo_labels_take_at_most_100_bytes_per_image(classes):
    given_N = torch.zeros(N, dtype=torch.long)
    tensors = tensors_of(PLSState.begin(given_N[:1], 2, 0)).keys()
    with FakeTensorMode():
        state = PLSState.begin(torch.zeros(N, dtype=torch.long), classes, 0)
        values = tensors_of(state)
        assert values.keys() == tensors
        size = sum(value.nbytes for name, value in values.items() if name != "protected_C")
    assert size + given_N.nbytes <= 100 * N
    kept = state.share_NK.shape[1]
    assert kept == (min(classes, KEPT) if classes < 2**15 else KEPT_OF_MANY)


def test_whole_pseudo_labels_take_four_bytes_per_class():
    state = PLSState.begin(torch.zeros(N, dtype=torch.long), 100)
    assert state.share_NK.nbytes == 4 * 100 * N
    assert state.class_NK.nbytes == state.rest_N.nbytes == 0


@pytest.mark.parametrize("classes", [4, 30, 2**15])
@forms
def test_a_state_that_was_written_and_read_is_the_same(classes, form, tmp_path):
    state, *_ = make(classes, form)
    write_safetensors(tmp_path / "state", tensors_of(state), {})
    read, _ = from_safetensors(tmp_path / "state")
    assert read.keys() == tensors_of(state).keys()
    for name, value in tensors_of(state).items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)


# -------------------------------------------------------------------------------- compiled, on GPU


@forms
def test_storing_can_be_compiled(form):
    plain, index, pseudo = make(30, form)
    compiled = PLSState.begin(torch.zeros(N, dtype=torch.long), 30, FORMS[form])
    torch.compile(compiled.store, fullgraph=True, backend="eager")(index, pseudo)
    assert torch.equal(compiled.pseudo_labels(index), plain.pseudo_labels(index))


@forms
def test_nothing_is_read_back_from_a_gpu(form):
    """Fake tensors have a shape and no values: reading one back is an error."""
    with FakeTensorMode():
        state = PLSState.begin(torch.empty(N, dtype=torch.long, device="cuda"), 30, FORMS[form])
        index = torch.empty(8, dtype=torch.long, device="cuda")
        state.store(index, torch.empty(8, 30, device="cuda"))
        assert state.pseudo_labels(index).shape == (8, 30)
