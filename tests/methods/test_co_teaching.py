"""Co-teaching: its equations against slow forms, their laws, and what it says about labels."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import FakeScorer, make_batch, outputs_of, slow_cross_entropy
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.methods import build, co_teaching
from pseudoloss.methods.co_teaching import FIRST, SECOND
from pseudoloss.nn.views import Views

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])


def method_of(**changes):
    values = {"method": "co-teaching", "epochs": 20, "warmup": 3} | changes
    return build(Settings(**values), GIVEN, C, False)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs_of_both(first, second):
    return outputs_of(first, role=FIRST) | outputs_of(second, role=SECOND)


def slow_loss(first, second, labels, share):
    """Each network learns from the images with the smallest losses of the other one."""
    one_hot = [[float(c == label) for c in range(C)] for label in labels]
    losses = [slow_cross_entropy(logits, one_hot) for logits in (first, second)]
    count = max(1, int(share * len(labels)))
    total = 0.0
    for own, other in ((0, 1), (1, 0)):
        chosen = sorted(range(len(labels)), key=lambda i: losses[other][i])[:count]
        total += sum(losses[own][i] for i in chosen) / count
    return total


@pytest.mark.parametrize(("rate", "epochs"), [(0.2, 10), (0.5, 10), (0.8, 1), (0.0, 5)])
def test_the_kept_share_falls_from_one_to_what_is_not_forgotten(rate, epochs):
    """R(e) = 1 - τ·min(e / E_k, 1)."""
    shares = [co_teaching.kept_share(epoch, rate, epochs) for epoch in range(20)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[epochs:] == [pytest.approx(1 - rate)] * (20 - epochs)
    for epoch in range(epochs + 1):
        assert shares[epoch] == pytest.approx(1 - rate * epoch / epochs)


def test_the_state_holds_the_share_of_the_epoch():
    method = method_of(forget_rate=0.5, forget_epochs=4)
    state = method.start(GIVEN, C)
    place = state.kept.data_ptr()
    for epoch, wanted in enumerate([1.0, 0.875, 0.75, 0.625, 0.5, 0.5]):
        method.begin_epoch(state, epoch)
        assert state.kept.item() == wanted
    assert state.kept.data_ptr() == place


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 40), share=st.floats(0, 1))
def test_the_images_with_the_smallest_losses_are_chosen(seed, n, share):
    loss = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    share = torch.tensor(share)
    chosen = co_teaching.smallest(loss, share)
    assert chosen.sum() == max(1, int(np.floor(np.float32(share) * np.float32(n))))
    if not chosen.all():
        assert loss[chosen].max() <= loss[~chosen].min()


def test_equal_losses_choose_no_more_than_the_share():
    assert co_teaching.smallest(torch.ones(10), torch.tensor(0.3)).sum() == 3


@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.2, 0.01])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_equals_a_slow_form(share, seed):
    method = method_of()
    state = method.start(GIVEN, C)
    state.kept.fill_(share)
    first, second = random_logits(B, C, seed=seed), random_logits(B, C, seed=seed + 10)
    batch = make_batch(INDEX, GIVEN)
    loss = method.loss(outputs_of_both(first, second), batch, state)
    wanted = slow_loss(first.tolist(), second.tolist(), batch.given_B.tolist(), share)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_each_network_learns_only_from_what_the_other_one_chose():
    method = method_of()
    state = method.start(GIVEN, C)
    state.kept.fill_(0.5)
    first, second = (random_logits(B, C, seed=seed).requires_grad_() for seed in (0, 1))
    batch = make_batch(INDEX, GIVEN)
    method.loss(outputs_of_both(first, second), batch, state).backward()
    for own, other in ((first, second), (second, first)):
        losses = F.cross_entropy(other.detach(), batch.given_B, reduction="none")
        chosen = losses <= losses.sort().values[B // 2 - 1]
        assert torch.equal(own.grad.abs().sum(1) > 0, chosen)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), epoch=st.integers(0, 19))
def test_forget_rate_0_gives_the_sum_of_two_cross_entropies(seed, epoch):
    method = method_of(forget_rate=0)
    state = method.start(GIVEN, C)
    method.begin_epoch(state, epoch)
    first, second = random_logits(B, C, seed=seed), random_logits(B, C, seed=seed + 1)
    loss = method.loss(outputs_of_both(first, second), make_batch(INDEX, GIVEN), state)
    given_B = GIVEN[INDEX]
    wanted = F.cross_entropy(first, given_B) + F.cross_entropy(second, given_B)
    torch.testing.assert_close(loss, wanted)


def test_exchanging_the_networks_keeps_the_loss():
    method = method_of()
    state = method.start(GIVEN, C)
    state.kept.fill_(0.5)
    first, second, batch = (
        random_logits(B, C),
        random_logits(B, C, seed=1),
        make_batch(INDEX, GIVEN),
    )
    torch.testing.assert_close(
        method.loss(outputs_of_both(first, second), batch, state),
        method.loss(outputs_of_both(second, first), batch, state),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 300.0, 0.0])
def test_gradients_are_finite_at_extreme_logits(scale, dtype):
    method = method_of()
    state = method.start(GIVEN, C)
    state.kept.fill_(0.5)
    first, second = (
        (sign * scale * torch.eye(C)[[0, 1, 2, 3, 0, 1]]).to(dtype).requires_grad_()
        for sign in (1, -1)
    )
    loss = method.loss(outputs_of_both(first, second), make_batch(INDEX, GIVEN), state)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    for logits in (first, second):
        assert logits.grad.isfinite().all()


def test_both_networks_see_the_same_view_and_are_trained():
    method = method_of()
    (step,) = method.phases()[1].steps
    assert step.trains == method.networks == (FIRST, SECOND)
    views = Views(torch.zeros(1), torch.ones(1), (8, 8), 1, True)
    shown = step.show(views, make_batch(INDEX, GIVEN))
    assert shown[FIRST].with_grad[0] is shown[SECOND].with_grad[0]


@pytest.mark.parametrize(("ensemble", "roles"), [(False, (FIRST,)), (True, (FIRST, SECOND))])
def test_the_first_network_predicts_or_both_do(ensemble, roles):
    assert method_of(ensemble=ensemble).predicts == roles


def scored(seed=0, n=N):
    """A scorer whose networks mostly agree."""
    given = torch.arange(n) % C
    logits = random_logits(n, C, seed=seed)
    roles = {FIRST: logits, SECOND: logits + random_logits(n, C, seed=seed + 1, scale=0.5)}
    return FakeScorer(given, logits, roles=roles)


def test_the_predicted_class_is_suggested_and_trusted_as_far_as_both_networks_are_sure():
    method, scorer = method_of(), scored()
    state = method.start(GIVEN, C)
    method.scoring(5).run(scorer, state)
    verdict = method.verdict(state, 5)
    predicted = scorer.plain_NC.argmax(1)
    assert torch.equal(verdict.suggested_N.long(), predicted)
    rows = torch.arange(N)
    wanted = sum(logits.softmax(1)[rows, predicted] for logits in scorer.roles.values()) / 2
    torch.testing.assert_close(verdict.trust_N, wanted)
    assert ((verdict.trust_N >= 0) & (verdict.trust_N <= 1)).all()
