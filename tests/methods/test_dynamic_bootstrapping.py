"""Dynamic Bootstrapping: its equations against slow forms, their laws, and what it says about
labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, FakeScorer, make_batch, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.methods import build
from pseudoloss.methods import dynamic_bootstrapping as db
from pseudoloss.methods.base import NET, Outputs
from pseudoloss.methods.beta_mixture import BINS
from pseudoloss.nn.views import Views

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
VIEWS = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)


def method_of(given_N=GIVEN, **changes):
    values = {"method": "dynamic-bootstrapping", "epochs": 30, "warmup": 3} | changes
    return build(Settings(**values), given_N, C, False)


def soft(**changes):
    return method_of(bootstrapping="soft-to-hard", **changes)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_mixture(method, lowest=0.5, highest=2.5):
    """A state whose mixture rises from 0 to 1 between these losses."""
    state = method.start(GIVEN, C)
    state.lowest.fill_(lowest)
    state.highest.fill_(highest)
    state.high_T.copy_(torch.linspace(0, 1, BINS))
    return state


def outputs_of(in_eval=None, predicting=None, mixed=None):
    def views(logits_BC):
        return [] if logits_BC is None else [(logits_BC, torch.zeros(len(logits_BC), 3))]

    return {NET: Outputs(views(predicting), views(mixed), views(in_eval))}


# ------------------------------------------------------------------------------------ slow forms


def slow_w(logits, labels, lowest=0.5, highest=2.5):
    """P(high mode) of the losses, from a table that is its own index."""
    losses = slow_cross_entropy(logits, [[float(c == y) for c in range(C)] for y in labels])
    found = []
    for loss in losses:
        x = min(max((loss - lowest) / (highest - lowest), 1e-3), 1 - 1e-3)
        found.append(min(max(int(x * BINS) / (BINS - 1), 1e-4), 1 - 1e-4))
    return found


def slow_balance(logits):
    p = np.mean([softmax(row) for row in logits], axis=0)
    return sum(math.log(1 / C / q) / C for q in p)


def slow_loss(logits, pairs, labels, w, predictions, weights, balance):
    """weight·[(1-w)·H(y) + w·H(z)] of both images of a pair, and the balance term."""
    total = 0.0
    for i, j in enumerate(pairs):
        for k, weight in zip((i, j), weights, strict=True):
            target = [w[k] * z for z in predictions[k]]
            target[labels[k]] += 1 - w[k]
            total += weight * slow_cross_entropy([logits[i]], [target])[0]
    return total / len(logits) + balance * slow_balance(logits)


@pytest.mark.parametrize("balance", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_hard_bootstrapping(seed, balance):
    """λ·l_p + (1 - λ)·l_q."""
    method = method_of(balance=balance)
    batch = make_batch(INDEX, GIVEN)  # λ = 0.7
    judged, predicting, mixed = (random_logits(B, C, seed=10 * seed + i) for i in range(3))
    outputs = outputs_of(judged, predicting, mixed)
    loss = method.hard_loss(outputs, batch, with_mixture(method))
    labels = batch.given_B.tolist()
    predictions = [[float(v == max(row)) for v in row] for row in predicting.tolist()]
    w = slow_w(judged.tolist(), labels)
    wanted = slow_loss(mixed.tolist(), SWAP.tolist(), labels, w, predictions, (0.7, 0.3), balance)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.001])
def test_soft_bootstrapping(temperature):
    """Both images of a pair weigh one half, whatever λ is."""
    method = soft()
    batch, state = make_batch(INDEX, GIVEN), with_mixture(method)
    state.temperature.fill_(temperature)
    judged, predicting, mixed = (random_logits(B, C, seed=i) for i in range(3))
    loss = method.soft_loss(outputs_of(judged, predicting, mixed), batch, state)
    labels = batch.given_B.tolist()
    predictions = [softmax([v / temperature for v in row]) for row in predicting.tolist()]
    w = slow_w(judged.tolist(), labels)
    wanted = slow_loss(mixed.tolist(), SWAP.tolist(), labels, w, predictions, (0.5, 0.5), 1.0)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_images_are_mixed_by_how_clean_their_labels_are():
    method = soft()
    batch, state = make_batch(INDEX, GIVEN, images()), with_mixture(method)
    judged = random_logits(B, C)
    shown = method.show_guided(VIEWS, batch, outputs_of(judged), state)[NET].with_grad[0]
    ((view,),) = [method.show_in_eval(VIEWS, batch)[NET].in_eval]
    w = slow_w(judged.tolist(), batch.given_B.tolist())
    for i, j in enumerate(SWAP.tolist()):
        share = (1 - w[i]) / ((1 - w[i]) + (1 - w[j]))
        torch.testing.assert_close(shown[i], share * view[i] + (1 - share) * view[j])


def images():
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8, generator=random)


# ------------------------------------------------------------------------------------------ laws


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-4, 1 - 1e-4), min_size=B, max_size=B))
def test_the_shares_of_a_pair_add_up_to_one(w):
    """With partners in both directions; a clean image beside a noisy one is hardly changed."""
    pairs = torch.tensor([1, 0, 3, 2, 5, 4])
    share_B = db.clean_share(torch.tensor(w, dtype=torch.float64), pairs)
    torch.testing.assert_close(share_B + share_B[pairs], torch.ones(B, dtype=torch.float64))
    extreme = db.clean_share(torch.tensor([1e-4, 1 - 1e-4]), torch.tensor([1, 0]))
    assert extreme[0] > 0.999


def test_the_temperature_falls_to_its_end_at_two_thirds_of_the_run():
    method = soft(epochs=300, warmup=105)
    state = method.start(GIVEN, C)

    def at(epoch):  # counted from 1, as in the paper
        method.begin_epoch(state, epoch - 1)
        return state.temperature.item()

    assert at(1) == at(106) == at(111) == 1
    assert at(112) == pytest.approx(1 - 0.999 / 88)
    assert at(155) == pytest.approx(0.5005, abs=1e-4)
    assert at(199) == at(300) == pytest.approx(0.001)
    assert at(198) > 0.01


@pytest.mark.parametrize(("epochs", "warmup"), [(2, 1), (3, 3), (10, 9), (10, 1)])
def test_short_runs_have_temperatures_too(epochs, warmup):
    method = soft(epochs=epochs, warmup=warmup)
    state = method.start(GIVEN, C)
    for epoch in range(epochs):
        method.begin_epoch(state, epoch)
        assert 0.001 <= state.temperature.item() <= 1.001


def test_phases_of_both_variants():
    assert [(p.name, p.epochs) for p in method_of().phases()] == [
        *(("warm-up", 3), ("bootstrapping", 27)),
    ]
    assert [(p.name, p.epochs) for p in soft().phases()] == [
        *(("warm-up", 3), ("guided mixup", 5), ("bootstrapping", 22)),
    ]
    assert [p.epochs for p in soft(epochs=6).phases()] == [3, 3, 0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_labels_of_low_losses_are_kept_and_those_of_high_losses_replaced(seed):
    """w is then nearly 0 or 1: the loss is that of mixup with the given or the predicted class."""
    method = method_of(balance=0)
    batch = make_batch(INDEX, GIVEN)
    judged, predicting, mixed = (random_logits(B, C, seed=seed + i) for i in range(3))
    outputs, lam = outputs_of(judged, predicting, mixed), 0.7
    for losses, labels in (((1e5, 2e5), batch.given_B), ((-2e5, -1e5), predicting.argmax(1))):
        loss = method.hard_loss(outputs, batch, with_mixture(method, *losses))
        own, partner = F.cross_entropy(mixed, labels), F.cross_entropy(mixed, labels[SWAP])
        torch.testing.assert_close(loss, lam * own + (1 - lam) * partner, rtol=5e-3, atol=5e-3)


def test_before_the_first_mixture_every_label_is_kept():
    method = method_of()
    state, batch = method.start(GIVEN, C), make_batch(INDEX, GIVEN)
    w = method.noise_probability(outputs_of(random_logits(B, C, scale=100)), batch, state)
    assert (w == torch.tensor(db.SMALLEST)).all()


def test_gradients_flow_through_the_mixed_view_only():
    for method in (method_of(), soft()):
        batch, state = make_batch(INDEX, GIVEN), with_mixture(method)
        views = [random_logits(B, C, seed=i).requires_grad_() for i in range(3)]
        frozen = [view.detach() for view in views[:2]]
        loss_of = method.phases()[-1].steps[0].loss
        loss_of(outputs_of(*frozen, views[2]), batch, state).backward()
        assert views[2].grad.abs().sum() > 0
        assert not state.high_T.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 300.0, 0.0])
def test_gradients_are_finite_at_extreme_logits(scale, dtype):
    for method in (method_of(), soft()):
        batch, state = make_batch(INDEX, GIVEN), with_mixture(method)
        method.begin_epoch(state, 29)
        logits = (scale * torch.eye(C)[[0, 1, 2, 3, 0, 1]]).to(dtype).requires_grad_()
        loss_of = method.phases()[-1].steps[0].loss
        loss = loss_of(outputs_of(logits.detach(), -logits.detach(), logits), batch, state)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert logits.grad.isfinite().all()


# ------------------------------------------------------------------------- scoring and verdicts


def scored(n=400, wrong=0.4, seed=0):
    """A network that predicts the true classes, with some noise."""
    random = torch.Generator().manual_seed(seed)
    given_N = torch.arange(n) % C
    wrong_N = torch.rand(n, generator=random) < wrong
    true_N = torch.where(wrong_N, (given_N + 1) % C, given_N)
    plain, weak = (4 * F.one_hot(true_N, C) + torch.randn(n, C, generator=random) for _ in range(2))
    return FakeScorer(given_N, plain, weak=[weak]), wrong_N


def test_the_mixture_is_fitted_to_weak_views_and_flags_wrong_labels():
    scorer, wrong_N = scored()
    method = method_of(scorer.given_N)
    state = method.start(scorer.given_N, C)
    method.scoring(5).run(scorer, state)
    verdict = method.verdict(state, 5)
    assert state.fitted
    assert verdict.noisy_N[wrong_N].float().mean() > 0.9
    assert verdict.noisy_N[~wrong_N].float().mean() < 0.05
    weak_loss = F.cross_entropy(scorer.weak[0], scorer.given_N, reduction="none")
    torch.testing.assert_close(state.weak_loss_N, weak_loss)
    order = weak_loss.argsort()
    assert (verdict.p_noisy_N[order].diff() >= -1e-6).float().mean() > 0.9
    p_NC = scorer.plain_NC.softmax(1)
    torch.testing.assert_close(verdict.trust_N, p_NC.max(1).values)
    assert torch.equal(verdict.suggested_N.long(), p_NC.argmax(1))


def test_where_weak_views_are_plain_they_are_not_shown():
    scorer, _ = scored()
    scorer.weak_is_plain = True
    method = method_of(scorer.given_N)
    state = method.start(scorer.given_N, C)
    method.scoring(5).run(scorer, state)
    assert scorer.asked == [(True, 0, None)]
    assert torch.equal(state.weak_loss_N, state.loss_N)


def test_another_metric_flags_labels_but_the_mixture_of_the_losses_trains():
    scorer, wrong_N = scored()
    method = method_of(scorer.given_N, noise_metric="js", threshold=0.95)
    state = method.start(scorer.given_N, C)
    method.scoring(5).run(scorer, state)
    assert state.noisy_N[wrong_N].float().mean() > 0.8
    assert state.high_T.max() > 0.8


def test_without_two_modes_the_mixture_before_is_kept_and_counted():
    scorer, _ = scored()
    method = method_of(scorer.given_N)
    state = method.start(scorer.given_N, C)
    method.scoring(5).run(scorer, state)
    before, flagged = state.high_T.clone(), state.noisy_N.clone()
    same = FakeScorer(scorer.given_N, torch.zeros(400, C), weak=[torch.zeros(400, C)])
    assert method.notices(state, 5, [], "abcd")["mixture"] is None
    method.scoring(6).run(same, state)
    assert torch.equal(state.high_T, before)
    assert not state.fitted
    assert int(state.unfitted) == 1
    assert "(1 so far)" in method.notices(state, 6, [], "abcd")["mixture"]
    method.scoring(7).run(scorer, state)
    assert torch.equal(state.noisy_N, flagged)


@pytest.mark.parametrize(("epochs", "never"), [(8, True), (9, False)])
def test_a_run_that_ends_with_guided_mixup_says_so(epochs, never):
    changes = {"epochs": epochs, "warmup": 3, "guided_epochs": 5}
    found = method_of(bootstrapping="soft-to-hard", **changes).notices_at_start()["guided only"]
    assert (found is not None) == never
    if never:
        assert found.startswith("the 5 epochs after the warm-up are guided mixup")
    assert method_of(bootstrapping="hard", **changes).notices_at_start()["guided only"] is None


def test_a_network_that_predicts_one_class_is_noticed():
    method = method_of()
    state = method.start(GIVEN, C)
    assert method.notices(state, 5, [], "abcd")["collapse"] is None
    state.predicted_N.fill_(2)
    assert "only 1 of 4 classes" in method.notices(state, 5, [], "abcd")["collapse"]
    assert method.notices(state, 2, [], "abcd")["collapse"] is None  # still the warm-up
