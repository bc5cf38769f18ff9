"""ELR+: its equations against slow forms, their laws, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, make_batch, outputs_of, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.methods import build, elr_plus
from pseudoloss.methods.elr_plus import FIRST, FOLLOWS_FIRST, FOLLOWS_SECOND, SECOND
from pseudoloss.nn.views import Views

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])


def method_of(**changes):
    values = {"method": "elr-plus", "epochs": 9, "warmup": 3, "batch_size": B} | changes
    return build(Settings(**values), GIVEN, C, False)


def steps_of(method):
    return method.phases()[1].steps


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs_for(own, logits, other):
    """Of a network, and of the average that follows the other one."""
    follower = (FOLLOWS_SECOND, FOLLOWS_FIRST)[own]
    return outputs_of(logits, role=(FIRST, SECOND)[own]) | outputs_of(
        no_grad=[other], role=follower
    )


# ------------------------------------------------------------------------------------ slow forms


def slow_ramp(step, steps):
    return math.exp(-5 * (1 - min(max(step / steps, 0), 1)) ** 2)


def slow_loss(logits, labels, targets, lam, pairs, strength):
    """H(ỹ∘q / Σ) + λ·r·log(1 - ⟨q, p⟩), of mixed labels ỹ and targets q."""
    total = 0.0
    for i, j in enumerate(pairs):
        q = [lam * a + (1 - lam) * b for a, b in zip(targets[i], targets[j], strict=True)]
        y = [lam * (c == labels[i]) + (1 - lam) * (c == labels[j]) for c in range(C)]
        refined = [a * b for a, b in zip(y, q, strict=True)]
        refined = [v / sum(refined) for v in refined]
        p = [min(max(v, 1e-4), 1 - 1e-4) for v in softmax(logits[i])]
        total += slow_cross_entropy([logits[i]], [refined])[0]
        total += strength * math.log(1 - sum(a * b for a, b in zip(q, p, strict=True)))
    return total / len(logits)


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize(("strength", "beta"), [(7.0, 0.9), (3.0, 0.7), (0.0, 0.0)])
def test_the_loss_over_three_steps_of_a_network(own, strength, beta):
    """Its target moves towards what the average of the other network predicts; the regularisation
    rises with each step."""
    method = method_of(elr_lambda=strength, elr_beta=beta, ramp_steps=5)
    state, batch = method.start(GIVEN, C), make_batch(INDEX, GIVEN)  # λ = 0.7
    targets = [[0.0] * C for _ in range(B)]
    for step in range(1, 4):
        logits, other = random_logits(B, C, seed=step), random_logits(B, C, seed=10 + step)
        loss = steps_of(method)[own].loss(outputs_for(own, logits, other), batch, state)
        targets = [
            [beta * t + (1 - beta) * p for t, p in zip(target, softmax(row), strict=True)]
            for target, row in zip(targets, other.tolist(), strict=True)
        ]
        np.testing.assert_allclose(state.target_2NC[own, INDEX], targets, rtol=1e-5, atol=1e-7)
        wanted = slow_loss(
            logits.tolist(),
            batch.given_B.tolist(),
            targets,
            0.7,
            SWAP.tolist(),
            strength * slow_ramp(step, 5),
        )
        assert loss.item() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert (state.target_2NC[1 - own] == 0).all()
    assert state.seen_2.tolist() == ([18, 0] if own == 0 else [0, 18])


@pytest.mark.parametrize("steps", [1, 7, 40_000])
def test_the_ramp(steps):
    found = [
        float(elr_plus.sigmoid_ramp(torch.tensor(s), steps)) for s in range(0, 2 * steps, steps)
    ]
    assert found == pytest.approx([math.exp(-5), 1])
    every = elr_plus.sigmoid_ramp(torch.arange(0, 2 * steps, max(steps // 100, 1)), steps)
    assert (every.diff() >= 0).all()
    np.testing.assert_allclose(
        every, [slow_ramp(s, steps) for s in range(0, 2 * steps, max(steps // 100, 1))], rtol=1e-5
    )


def test_the_averages_follow_by_the_ramp_of_their_own_network():
    """The decay after step s is that of r(s + 1)."""
    method = method_of(ramp_steps=10)
    state = method.start(GIVEN, C)
    state.seen_2.copy_(torch.tensor([4 * B, 9 * B]))
    for role, step in ((FOLLOWS_FIRST, 5), (FOLLOWS_SECOND, 10)):
        decay = method.ema[role].decay(state)
        assert float(decay) == pytest.approx(0.997 * slow_ramp(step, 10))
    assert method.ema[FOLLOWS_FIRST].of == FIRST
    assert method.ema[FOLLOWS_SECOND].of == SECOND


def test_batches_in_parts_count_as_one_step():
    method = method_of(ramp_steps=10, batch_size=6, accumulate=2)
    state = method.start(GIVEN, C)
    half = make_batch(INDEX[:3], GIVEN, mixes=((torch.tensor([1, 2, 0]), 0.7),))
    for _ in range(2):
        steps_of(method)[0].loss(outputs_for(0, *random_logits(2, 3, C)), half, state)
    assert float(method.steps_of(0, state)) == 1


@pytest.mark.parametrize(("ramp_steps", "wanted"), [(None, 410), (123, 123)])
def test_without_a_number_the_ramp_takes_its_share_of_the_run(ramp_steps, wanted):
    method = method_of(epochs=100, batch_size=2, ramp_steps=ramp_steps)  # 10 steps per epoch
    assert method.ramp_steps == wanted


# ------------------------------------------------------------------------------------------ laws


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0, 30), lam=st.floats(0, 1))
def test_refined_labels_are_shares_of_the_mixed_classes(seed, scale, lam):
    q = random_logits(B, C, seed=seed, scale=scale).softmax(1)
    labels = F.one_hot(GIVEN[INDEX], C).float()
    mixed = lam * labels + (1 - lam) * labels[SWAP]
    found = elr_plus.refined(mixed, q)
    torch.testing.assert_close(found.sum(1), torch.ones(B))
    assert ((found > 0) <= (mixed > 0)).all()
    torch.testing.assert_close(elr_plus.refined(mixed, torch.full((B, C), 0.1)), mixed)


def test_a_target_that_excludes_both_classes_leaves_the_mixed_label():
    mixed = torch.tensor([[0.7, 0.3, 0, 0]])
    torch.testing.assert_close(elr_plus.refined(mixed, torch.tensor([[0, 0, 1.0, 0]])), mixed)


def test_of_two_mixed_classes_the_target_chooses():
    mixed, q = torch.tensor([[0.7, 0.3, 0, 0]]), torch.tensor([[0.001, 0.899, 0.1, 0]])
    assert elr_plus.refined(mixed, q)[0, 1] > 0.99


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_an_unmixed_batch_without_regularisation_gives_cross_entropy(seed):
    """The label of an image alone stays, whatever the target is."""
    method = method_of(elr_lambda=0)
    batch = make_batch(INDEX, GIVEN, mixes=((SWAP, 1.0),))
    logits, other = random_logits(2, B, C, seed=seed)
    loss = steps_of(method)[0].loss(outputs_for(0, logits, other), batch, method.start(GIVEN, C))
    torch.testing.assert_close(loss, F.cross_entropy(logits, GIVEN[INDEX]))


def test_agreement_with_the_target_lowers_the_loss():
    method = method_of(ramp_steps=1, elr_lambda=100)
    batch = make_batch(INDEX, GIVEN, mixes=((SWAP, 1.0),))
    predicted = (GIVEN[INDEX] + 1) % C
    other = 5 * F.one_hot(predicted, C).float()
    state = method.start(GIVEN, C)
    state.target_2NC[0, INDEX] = other.softmax(1)
    agrees, differs = 3 * F.one_hot(predicted, C).float(), 3 * F.one_hot(GIVEN[INDEX], C).float()
    low, high = (
        steps_of(method)[0].loss(outputs_for(0, logits, other), batch, state)
        for logits in (agrees, differs)
    )
    assert low < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 300.0, 0.0])
def test_gradients_are_finite_at_extreme_logits(scale, dtype):
    method = method_of(ramp_steps=1)
    state, batch = method.start(GIVEN, C), make_batch(INDEX, GIVEN)
    for sign in (1, 1, -1):  # a certain target is contradicted
        logits = (sign * scale * torch.eye(C)[[0, 1, 2, 3, 0, 1]]).to(dtype).requires_grad_()
        loss = steps_of(method)[1].loss(outputs_for(1, logits, -logits.detach()), batch, state)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert logits.grad.isfinite().all()
        assert state.target_2NC.isfinite().all()


# ------------------------------------------------------------------------------ steps and verdicts


def test_a_network_sees_mixed_images_and_the_average_of_the_other_one_the_same_before():
    views = Views(torch.zeros(1), torch.ones(1), (8, 8), 1, True)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (B, 1, 8, 8), dtype=torch.uint8, generator=random)
    batch = make_batch(INDEX, GIVEN, images)
    for own, step in enumerate(steps_of(method_of())):
        follower = (FOLLOWS_SECOND, FOLLOWS_FIRST)[own]
        shown = step.show(views, batch)
        assert shown.keys() == {(FIRST, SECOND)[own], follower}
        ((mixed,), (view,)) = shown[(FIRST, SECOND)[own]].with_grad, shown[follower].no_grad
        torch.testing.assert_close(mixed, batch.mixes[0].of(view))
        assert step.trains == ((FIRST, SECOND)[own],)
        assert step.moves_norms == (follower,)


def test_both_networks_predict():
    assert method_of().predicts == (FIRST, SECOND)


def test_the_class_of_both_targets_is_suggested():
    method = method_of()
    state = method.start(GIVEN, C)
    never_seen = method.verdict(state, 0)
    assert (never_seen.trust_N == 0).all()
    state.target_2NC[0] = torch.tensor([0.5, 0.1, 0, 0])
    state.target_2NC[1] = torch.tensor([0.1, 0.2, 0.0, 0])
    verdict = method.verdict(state, 0)
    assert (verdict.suggested_N == 0).all()
    torch.testing.assert_close(verdict.trust_N, torch.full((N,), 0.6 / 0.9))


@pytest.mark.parametrize(("ramp_steps", "share"), [(None, None), (27, None), (1000, "1%")])
def test_a_ramp_that_is_longer_than_the_run_is_noticed(ramp_steps, share):
    text = method_of(ramp_steps=ramp_steps).notices_at_start()["ramp"]
    assert text is None if share is None else f"only {share} of" in text
