"""MixMatch for labelled and unlabelled images: its equations against slow forms, and their laws."""

import math

import pytest
import torch
from fakes import slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.methods import mixmatch

B, C = 5, 4


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_labels(*shape, seed=0):
    return random_logits(*shape, seed=seed).softmax(-1)


def slow_sharpen(row, temperature):
    powers = [p ** (1 / temperature) for p in row]
    return [p / sum(powers) for p in powers]


@pytest.mark.parametrize(
    ("epochs", "wanted"), [(-1, 0), (0, 0), (4, 0.25), (8, 0.5), (16, 1), (100, 1)]
)
def test_the_ramp_rises_linearly_and_stays(epochs, wanted):
    assert mixmatch.ramp_up(epochs, 16) == wanted


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_mean_prediction_equals_a_slow_form(count):
    views = [random_logits(B, C, seed=seed) for seed in range(count)]
    wanted = [
        [sum(softmax(view[i].tolist())[c] for view in views) / count for c in range(C)]
        for i in range(B)
    ]
    torch.testing.assert_close(mixmatch.mean_prediction(views), torch.tensor(wanted))


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_sharpening_equals_a_slow_form(temperature):
    p_BC = random_labels(B, C)
    wanted = [slow_sharpen(row, temperature) for row in p_BC.tolist()]
    torch.testing.assert_close(mixmatch.sharpen(p_BC, temperature), torch.tensor(wanted))


def test_sharpening_survives_powers_that_underflow():
    p_BC = torch.tensor([[1e-30, 2e-30, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    sharp = mixmatch.sharpen(p_BC, 0.1)
    assert sharp.isfinite().all()
    assert (sharp[0, 1] / sharp[0, 0]).item() == pytest.approx(1024, rel=1e-4)
    assert torch.equal(sharp[1], p_BC[1])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), temperature=st.floats(0.05, 1))
def test_sharpening_keeps_the_order_of_classes_and_raises_the_largest(seed, temperature):
    p_BC = random_labels(B, C, seed=seed)
    sharp = mixmatch.sharpen(p_BC, temperature)
    torch.testing.assert_close(sharp.sum(1), torch.ones(B))
    assert torch.equal(sharp.argmax(1), p_BC.argmax(1))
    assert (sharp.amax(1) >= p_BC.amax(1) - 1e-5).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_refined_labels_equal_a_slow_form(temperature):
    given_BC = torch.eye(C)[torch.arange(B) % C]
    p_BC, w_B = random_labels(B, C), torch.rand(B, generator=torch.Generator().manual_seed(1))
    wanted = [
        slow_sharpen([w * y + (1 - w) * p for y, p in zip(label, row, strict=True)], temperature)
        for label, row, w in zip(given_BC.tolist(), p_BC.tolist(), w_B.tolist(), strict=True)
    ]
    found = mixmatch.refine(given_BC, p_BC, w_B, temperature)
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_a_label_that_is_surely_correct_is_kept_and_one_that_is_surely_wrong_is_replaced():
    given_BC, p_BC = torch.eye(C)[torch.arange(B) % C], random_labels(B, C)
    kept = mixmatch.refine(given_BC, p_BC, torch.ones(B), 0.5)
    replaced = mixmatch.refine(given_BC, p_BC, torch.zeros(B), 0.5)
    assert torch.equal(kept, given_BC)
    torch.testing.assert_close(replaced, mixmatch.sharpen(p_BC, 0.5))


def test_the_squared_error_equals_a_slow_form():
    logits, target = random_logits(B, C), random_labels(B, C, seed=1)
    total = sum(
        (p - t) ** 2
        for row, wanted in zip(logits.tolist(), target.tolist(), strict=True)
        for p, t in zip(softmax(row), wanted, strict=True)
    )
    found = mixmatch.squared_error(logits, target)
    assert found.item() == pytest.approx(total / (B * C), rel=1e-5)


def test_rows_are_joined_and_separated_again():
    labelled, unlabelled = random_logits(B, C), random_logits(B, C, seed=1)
    rows = mixmatch.of_both_kinds(labelled, unlabelled)
    assert torch.equal(rows, torch.cat([labelled, unlabelled, labelled, unlabelled]))
    found = mixmatch.separate(rows)
    assert torch.equal(found[0], torch.cat([labelled, labelled]))
    assert torch.equal(found[1], torch.cat([unlabelled, unlabelled]))


@pytest.mark.parametrize("strength", [0.0, 25.0])
def test_the_loss_of_mixed_views_equals_a_slow_form(strength):
    logits, target = random_logits(4 * B, C), random_labels(4 * B, C, seed=1)
    fit, error = [], []
    rows = zip(logits.tolist(), target.tolist(), strict=True)
    for i, (row, wanted) in enumerate(rows):
        if (i // B) % 2 == 0:  # labelled
            fit += slow_cross_entropy([row], [wanted])
        else:
            error += [(p - t) ** 2 for p, t in zip(softmax(row), wanted, strict=True)]
    wanted = math.fsum(fit) / len(fit) + strength * math.fsum(error) / len(error)
    found = mixmatch.mixed_loss(logits, target, strength)
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_without_strength_unlabelled_rows_have_no_gradient():
    logits = random_logits(4 * B, C).requires_grad_()
    mixmatch.mixed_loss(logits, random_labels(4 * B, C, seed=1), 0.0).backward()
    labelled, unlabelled = mixmatch.separate(logits.grad)
    assert (labelled.abs().sum(1) > 0).all()
    assert not unlabelled.any()
