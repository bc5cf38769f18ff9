"""ELR: its equations against slow forms, their laws, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import make_batch, outputs_of, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.methods import build, elr

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])


def method_of(**changes):
    return build(Settings(**{"method": "elr", "epochs": 9, "warmup": 3} | changes), GIVEN, C, False)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------ slow forms


def slow_prediction(row):
    """p, clipped to 1e-4..1 - 1e-4."""
    return [min(max(q, 1e-4), 1 - 1e-4) for q in softmax(row)]


def slow_target(target, row, beta):
    """t ← β·t + (1 - β)·p / Σp."""
    p = slow_prediction(row)
    return [beta * t + (1 - beta) * q / sum(p) for t, q in zip(target, p, strict=True)]


def slow_loss(logits, given_labels, targets, strength, beta):
    """Mean cross-entropy + λ · mean log(1 - ⟨t, p⟩), with the updated t."""
    fit = regularisation = 0.0
    for row, label, target in zip(logits, given_labels, targets, strict=True):
        fit += slow_cross_entropy([row], [[float(c == label) for c in range(len(row))]])[0]
        t, p = slow_target(target, row, beta), slow_prediction(row)
        regularisation += math.log(1 - sum(a * b for a, b in zip(t, p, strict=True)))
    return fit / len(logits) + strength * regularisation / len(logits)


def test_clipped_prediction():
    logits = torch.cat([random_logits(B, C), torch.tensor([[50.0, 0, 0, 0]])])
    ours = elr.clipped_prediction(logits)
    np.testing.assert_allclose(ours, [slow_prediction(row) for row in logits.tolist()], rtol=1e-5)
    assert ours[-1].tolist() == pytest.approx([1 - 1e-4, 1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("beta", [0.0, 0.7, 0.9])
def test_the_moving_average_of_predictions(beta):
    logits, target = random_logits(B, C), random_logits(B, C, seed=1).softmax(1)
    ours = elr.update_target(target, elr.clipped_prediction(logits), beta)
    wanted = [
        slow_target(t, row, beta) for t, row in zip(target.tolist(), logits.tolist(), strict=True)
    ]
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-7)


def test_regularisation():
    target = random_logits(B, C, seed=1).softmax(1)
    p = elr.clipped_prediction(random_logits(B, C))
    wanted = np.mean(
        [
            math.log(1 - sum(a * b for a, b in zip(t, q, strict=True)))
            for t, q in zip(target.tolist(), p.tolist(), strict=True)
        ]
    )
    assert elr.regularisation(target, p).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("strength", "beta"), [(7.0, 0.9), (3.0, 0.7), (1.0, 0.0)])
def test_the_loss_over_three_steps(strength, beta):
    """The average of an image grows each time that it is seen."""
    method = method_of(elr_lambda=strength, elr_beta=beta)
    state = method.start(GIVEN, C)
    targets = [[0.0] * C for _ in range(B)]
    batch = make_batch(INDEX, GIVEN)
    for seed in range(3):
        logits = random_logits(B, C, seed=seed)
        loss = method.loss(outputs_of(logits), batch, state)
        wanted = slow_loss(logits.tolist(), batch.given_B.tolist(), targets, strength, beta)
        assert loss.item() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        targets = [
            slow_target(t, row, beta) for t, row in zip(targets, logits.tolist(), strict=True)
        ]
        np.testing.assert_allclose(state.target_NC[INDEX], targets, rtol=1e-5, atol=1e-7)
    others = torch.ones(N, dtype=torch.bool)
    others[INDEX] = False
    assert (state.target_NC[others] == 0).all()


# ------------------------------------------------------------------------------------------ laws


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0, 100))
def test_lambda_0_gives_cross_entropy(seed, scale):
    method = method_of(elr_lambda=0)
    logits = random_logits(B, C, seed=seed, scale=scale)
    loss = method.loss(outputs_of(logits), make_batch(INDEX, GIVEN), method.start(GIVEN, C))
    torch.testing.assert_close(loss, F.cross_entropy(logits, GIVEN[INDEX]))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), steps=st.integers(1, 6), beta=st.floats(0, 0.99))
def test_the_moving_average_sums_to_what_it_has_seen(seed, steps, beta):
    """Σt = 1 - β^n after n predictions, so 1 - ⟨t, p⟩ stays positive."""
    target = torch.zeros(B, C)
    for step in range(steps):
        p = elr.clipped_prediction(random_logits(B, C, seed=seed + step, scale=30))
        target = elr.update_target(target, p, beta)
        assert ((target * p).sum(1) < 1).all()
    torch.testing.assert_close(target.sum(1), torch.full((B,), 1 - beta**steps))


def test_agreement_with_the_average_lowers_the_loss():
    target = torch.tensor([[0.9, 0.03, 0.03, 0.03]])
    agrees, differs = torch.tensor([[3.0, 0, 0, 0]]), torch.tensor([[0.0, 3, 0, 0]])
    low, high = (
        elr.regularisation(target, elr.clipped_prediction(logits)) for logits in (agrees, differs)
    )
    assert low < high < 0


def test_no_gradient_flows_through_the_average():
    method = method_of()
    state = method.start(GIVEN, C)
    logits = random_logits(B, C).requires_grad_()
    method.loss(outputs_of(logits), make_batch(INDEX, GIVEN), state).backward()
    again = logits.detach().clone().requires_grad_()
    p = elr.clipped_prediction(again)
    fixed = state.target_NC[INDEX]
    assert not fixed.requires_grad
    (F.cross_entropy(again, GIVEN[INDEX]) + 7 * elr.regularisation(fixed, p)).backward()
    torch.testing.assert_close(logits.grad, again.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 300.0, 0.0])
def test_gradients_are_finite_at_extreme_logits(scale, dtype):
    method = method_of()
    state = method.start(GIVEN, C)
    batch = make_batch(INDEX, GIVEN)
    for sign in (1, 1, -1):  # the average has grown towards a certain class when it is contradicted
        logits = (sign * scale * torch.eye(C)[[0, 1, 2, 3, 0, 1]]).to(dtype).requires_grad_()
        loss = method.loss(outputs_of(logits), batch, state)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert logits.grad.isfinite().all()
        assert state.target_NC.isfinite().all()


# --------------------------------------------------------------------------------------- verdict


def test_the_class_of_the_average_is_suggested_and_trusted_by_its_share():
    method = method_of()
    state = method.start(GIVEN, C)
    never_seen = method.verdict(state, 0)
    assert (never_seen.trust_N == 0).all()
    wrong = (GIVEN[INDEX] + 1) % C
    sure, unsure = (size * F.one_hot(wrong, C).float() for size in (20, 0.5))
    for logits_BC in (sure, unsure):
        method.loss(outputs_of(logits_BC), make_batch(INDEX, GIVEN), state)
        verdict = method.verdict(state, 0)
        assert torch.equal(verdict.suggested_N[INDEX], wrong)
        share_N = state.target_NC.max(1).values[INDEX] / state.target_NC.sum(1)[INDEX]
        torch.testing.assert_close(verdict.trust_N[INDEX], share_N)
        assert (verdict.trust_N[INDEX] <= 1).all()
    assert (verdict.trust_N[INDEX] < 0.9).all()  # after one unsure prediction
