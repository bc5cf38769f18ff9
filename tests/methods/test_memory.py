"""What is remembered: guesses against a slow NumPy form, and a size that does not grow."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.methods.memory import KEPT, Memory
from pseudoloss.methods.pls import by_max, by_sum, pseudo_loss

N = 12
ALL = slice(None)
norms = st.sampled_from([by_sum, by_max])


def make(classes, seed=0, normalise=by_sum, sharp=3.0):
    """A memory in which a batch of guesses was remembered; their indices; and the guesses."""
    random = torch.Generator().manual_seed(seed)
    memory = Memory.of(torch.randint(0, classes, (N,), generator=random), classes)
    index = torch.randperm(N, generator=random)[:8]
    guess = normalise(sharp * torch.randn(8, classes, generator=random))
    memory.remember_guesses(index, guess)
    return memory, index, guess


def slow_pseudo_loss(guess, logits):
    """-Σ ŷ log φ(x), image for image, with the guess cut to its largest ten numbers."""
    losses = []
    for y, z in zip(guess.double().numpy(), logits.double().numpy(), strict=True):
        log = z - z.max() - np.log(np.exp(z - z.max()).sum())
        order = np.argsort(-y)
        kept, others = order[:KEPT], order[KEPT:]
        loss = -sum(y[c] * log[c] for c in kept)
        loss -= sum(y[others].sum() / len(others) * log[c] for c in others)
        losses.append(loss)
    return np.array(losses)


def test_other_images_behind_it_and_a_part_of_all():
    first, second = make(5, seed=1)[0], make(5, seed=2)[0]
    both = first.followed_by(second)
    for part, wanted in ((slice(N), first), (slice(N, None), second)):
        for name, tensor in both.part(part).tensors().items():
            assert torch.equal(tensor, wanted.tensors()[name]), name
    both.noisy_N.fill_(True)
    assert not first.noisy_N.any()
    assert both.classes == both.part(ALL).classes == 5


def test_it_begins_without_doubt():
    memory = Memory.of(torch.tensor([2, 0, 1]), 3)
    assert memory.guess_N.tolist() == [2, 0, 1]
    assert memory.predicted_N.tolist() == [2, 0, 1]
    assert not memory.noisy_N.any()
    assert (memory.trust_N == 1).all()
    storages = [tensor.data_ptr() for tensor in memory.tensors().values()]
    assert len(set(storages)) == len(storages)  # no two are one and the same


@pytest.mark.parametrize("classes", [1, 2, 9, 10, 11, 100, 2**15 - 1, 2**15, 70_000])
def test_the_first_guess_is_the_given_label(classes):
    given_N = torch.tensor([0, classes // 2, classes - 1])
    memory = Memory.of(given_N, classes)
    assert torch.equal(memory.guesses(ALL), F.one_hot(given_N, classes).float())


@settings(max_examples=50, deadline=None)
@given(classes=st.integers(1, KEPT), seed=st.integers(0, 1000), normalise=norms)
def test_with_few_classes_a_guess_is_kept_whole(classes, seed, normalise):
    memory, index, guess = make(classes, seed, normalise)
    assert torch.equal(memory.guesses(index), guess)


@settings(max_examples=100, deadline=None)
@given(
    classes=st.integers(2, 80),
    seed=st.integers(0, 1000),
    normalise=norms,
    sharp=st.floats(0.1, 20),
)
def test_the_pseudo_loss_equals_a_slow_form(classes, seed, normalise, sharp):
    memory, index, guess = make(classes, seed, normalise, sharp)
    logits = 5 * torch.randn(8, classes, generator=torch.Generator().manual_seed(seed))
    loss = pseudo_loss(memory.guesses(index), logits)
    np.testing.assert_allclose(loss, slow_pseudo_loss(guess, logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [3, 11, 50, 40_000])
@pytest.mark.parametrize("normalise", [by_sum, by_max])
def test_a_guess_keeps_its_mass_and_its_class(classes, normalise):
    memory, index, guess = make(classes, normalise=normalise)
    remembered = memory.guesses(index)
    torch.testing.assert_close(remembered.sum(1), guess.sum(1))
    assert torch.equal(memory.guess_N[index], guess.argmax(1))
    assert torch.equal(remembered.argmax(1), guess.argmax(1))


def test_what_is_evenly_spread_beyond_the_tenth_is_kept_whole():
    guess = torch.tensor([[0.3, 0.2] + [0.05] * 8 + [0.01] * 10])
    memory = Memory.of(torch.tensor([0]), 20)
    memory.remember_guesses(torch.tensor([0]), guess)
    torch.testing.assert_close(memory.guesses(ALL), guess)


@pytest.mark.parametrize("classes", [4, 30])
def test_the_last_guess_counts_and_the_others_stay(classes):
    memory, index, _ = make(classes)
    before = memory.guesses(ALL)
    later = torch.rand(3, classes).softmax(1)
    memory.remember_guesses(index[:3], later)
    fresh = Memory.of(torch.zeros(N, dtype=torch.long), classes)
    fresh.remember_guesses(index[:3], later)
    assert torch.equal(memory.guesses(index[:3]), fresh.guesses(index[:3]))
    others = torch.ones(N, dtype=torch.bool)
    others[index[:3]] = False
    assert torch.equal(memory.guesses(ALL)[others], before[others])


@pytest.mark.parametrize("classes", [4, 30])
def test_a_slice_is_a_part(classes):
    memory, *_ = make(classes)
    assert torch.equal(memory.guesses(slice(3, 7)), memory.guesses(ALL)[3:7])
    assert memory.guesses(slice(10, 100)).shape == (2, classes)


def test_a_guess_that_is_not_a_number_stays_one():
    memory, index, guess = make(30)
    memory.remember_guesses(index, torch.full_like(guess, torch.nan))
    assert memory.guesses(index).isnan().all()
    assert ((memory.guess_N >= 0) & (memory.guess_N < 30)).all()


@pytest.mark.parametrize("classes", [2, 10, 11, 1000, 2**15 - 1, 2**15, 10**6, 2**31 - 1])
def test_at_most_100_bytes_an_image(classes):
    given_N = torch.zeros(N, dtype=torch.long)
    tensors = [given_N, *Memory.of(given_N, classes).tensors().values()]
    assert sum(tensor.nbytes for tensor in tensors) <= 100 * N


@pytest.mark.parametrize("classes", [4, 30, 2**15])
def test_written_and_read_again(classes, tmp_path):
    memory, *_ = make(classes)
    write_safetensors(tmp_path / "memory", memory.tensors(), {})
    read, _ = from_safetensors(tmp_path / "memory")
    assert read.keys() == memory.tensors().keys()
    for name, tensor in memory.tensors().items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("classes", [4, 30])
def test_remembering_can_be_compiled(classes):
    plain, index, guess = make(classes)
    compiled = Memory.of(torch.zeros(N, dtype=torch.long), classes)
    torch.compile(compiled.remember_guesses, fullgraph=True, backend="eager")(index, guess)
    assert torch.equal(compiled.guesses(index), plain.guesses(index))


def test_the_host_is_not_asked_on_a_gpu():
    """Tensors without values have a shape only: reading one back is an error."""
    with FakeTensorMode():
        memory = Memory.of(torch.empty(N, dtype=torch.long, device="cuda"), 30)
        index = torch.empty(8, dtype=torch.long, device="cuda")
        memory.remember_guesses(index, torch.empty(8, 30, device="cuda"))
        assert memory.guesses(index).shape == (8, 30)
