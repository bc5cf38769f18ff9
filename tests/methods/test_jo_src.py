"""Jo-SRC: its equations against slow forms, their laws, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
from fakes import FakeScorer, make_batch, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.errors import InputError
from pseudoloss.methods import build, jo_src
from pseudoloss.methods.base import NET, Outputs
from pseudoloss.methods.jo_src import EMA
from pseudoloss.nn.views import WEAK_DRAWS, Views

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
LABELS = GIVEN[INDEX].tolist()
EPSILON = 0.2


def method_of(classes=C, **changes):
    values = {"method": "jo-src", "epochs": 13, "warmup": 3, "label_smoothing": EPSILON} | changes
    return build(Settings(**values), GIVEN % classes, classes, False)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs_of(views, ema_views=()):
    def pairs(found):
        return [(logits_BC, torch.zeros(len(logits_BC), 3)) for logits_BC in found]

    return {NET: Outputs([], pairs(views)), EMA: Outputs(pairs(ema_views), [])}


# ------------------------------------------------------------------------------------ slow forms


def slow_label(label, epsilon=EPSILON, classes=C):
    return [1 - epsilon if c == label else epsilon / (classes - 1) for c in range(classes)]


def slow_kl(p, q):
    return sum(a * math.log2(a / b) for a, b in zip(p, q, strict=True) if a)


def slow_js(p, q):
    mean = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (slow_kl(p, mean) + slow_kl(q, mean)) / 2


def slow_step(first, second, ema, labels, tau, alpha, largest):
    """The loss, and what each image is: clean, id or ood."""
    loss, kinds = 0.0, []
    for i, label in enumerate(labels):
        p, q, target = softmax(first[i]), softmax(second[i]), slow_label(label)
        soft = [(a + b) / 2 for a, b in zip(softmax(ema[0][i]), softmax(ema[1][i]), strict=True)]
        divergence = slow_kl(p, q) + slow_kl(q, p)
        kind = "clean"
        if 1 - slow_js(p, target) < tau:
            kind = "id" if np.argmax(p) == np.argmax(q) else "ood"
            target = soft if kind == "id" else softmax([s / 10 for s in soft])
        kinds.append(kind)
        classification = sum(slow_cross_entropy([row[i]], [target])[0] for row in (first, second))
        signed = -min(divergence, largest) if kind == "ood" else divergence
        loss += (1 - alpha) * classification + alpha * signed
    return loss / len(labels), kinds


def test_smoothed_labels():
    ours = jo_src.smoothed(GIVEN[INDEX], C, 0.6)
    np.testing.assert_allclose(ours, [slow_label(c, 0.6) for c in LABELS], rtol=1e-6)
    torch.testing.assert_close(ours.sum(1), torch.ones(B))


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_divergence_of_prediction_and_label(scale):
    p = random_logits(B, C, scale=scale).softmax(1)
    ours = jo_src.js_divergence(p, jo_src.smoothed(GIVEN[INDEX], C, EPSILON))
    pairs = zip(p.tolist(), LABELS, strict=True)
    wanted = [slow_js(row, slow_label(c)) for row, c in pairs]
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)


def test_divergence_of_two_views():
    first, second = random_logits(B, C), random_logits(B, C, seed=1)
    p, q = ([softmax(row) for row in logits.tolist()] for logits in (first, second))
    wanted = [slow_kl(a, b) + slow_kl(b, a) for a, b in zip(p, q, strict=True)]
    np.testing.assert_allclose(jo_src.symmetric_kl(first, second), wanted, rtol=1e-4)


@pytest.mark.parametrize("largest", [10.0, 0.5])
@pytest.mark.parametrize(("alpha", "tau"), [(0.5, 0.75), (0.0, 0.6), (1.0, 0.9), (0.5, 0.01)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss(alpha, tau, largest, seed):
    method = method_of(consistency=alpha, largest_divergence=largest)
    state = method.start(GIVEN, C)
    state.tau.fill_(tau)
    logits = [random_logits(B, C, seed=4 * seed + i, scale=1.5) for i in range(4)]
    logits[0][0, LABELS[0]] += 3
    loss = method.loss(outputs_of(logits[:2], logits[2:]), make_batch(INDEX, GIVEN), state)
    first, second, *ema = (each.tolist() for each in logits)
    wanted, kinds = slow_step(first, second, ema, LABELS, tau, alpha, largest)
    assert loss.item() == pytest.approx(wanted, rel=1e-4)
    assert int(state.ood) == kinds.count("ood")
    if tau == 0.75:
        assert {"clean", "id", "ood"} >= set(kinds) >= {"ood"}


@pytest.mark.parametrize("tau", [0.0, 0.7, 1.1])
def test_the_loss_of_the_warm_up(tau):
    method = method_of()
    state = method.start(GIVEN, C)
    state.tau.fill_(tau)
    first, second = (random_logits(B, C, seed=seed, scale=1.5) for seed in (0, 1))
    loss = method.warm_up_loss(outputs_of([first, second]), make_batch(INDEX, GIVEN), state)
    chosen = []
    for one, other, label in zip(first.tolist(), second.tolist(), LABELS, strict=True):
        target = slow_label(label)
        if 1 - slow_js(softmax(one), target) >= tau:
            chosen.append(sum(slow_cross_entropy([row], [target])[0] for row in (one, other)))
    assert (0 < len(chosen) < B) == (tau == 0.7)
    assert loss.item() == pytest.approx(np.mean(chosen) if chosen else 0.0, rel=1e-5)
    assert int(state.empty) == (not chosen)


# ------------------------------------------------------------------------------------------ laws


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0, 300), classes=st.integers(2, 20))
def test_divergences_are_within_their_limits(seed, scale, classes):
    first, second = (random_logits(B, classes, seed=seed + i, scale=scale) for i in (0, 1))
    p, q = first.softmax(1), second.softmax(1)
    js = jo_src.js_divergence(p, q)
    assert ((js >= 0) & (js <= 1)).all()
    torch.testing.assert_close(js, jo_src.js_divergence(q, p), rtol=1e-4, atol=1e-6)
    kl = jo_src.symmetric_kl(first, second)
    assert (kl >= -1e-5).all()
    torch.testing.assert_close(kl, jo_src.symmetric_kl(second, first))
    assert (jo_src.symmetric_kl(first, first) == 0).all()
    assert jo_src.js_divergence(p, p).max() < 1e-6


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20), st.floats(0, 1)
)
def test_every_image_is_of_one_kind(images, tau):
    p_clean, agree = (torch.tensor(values) for values in zip(*images, strict=True))
    kinds = jo_src.sort_images(p_clean, torch.tensor(tau), agree)
    assert (sum(kind.int() for kind in kinds) == 1).all()
    assert torch.equal(kinds.clean_B, p_clean >= torch.tensor(tau))
    assert torch.equal(kinds.ood_B, ~kinds.clean_B & ~agree)


def test_the_threshold_rises_to_one_value_and_then_to_another():
    taus = [jo_src.clean_threshold(epoch, 200, 10, 0.75, 0.95) for epoch in range(200)]
    assert taus == sorted(taus)
    assert (taus[0], taus[10]) == (0, 0.75)
    assert taus[4] == pytest.approx(0.3)
    assert taus[105] == pytest.approx(0.85)
    assert 0.948 < taus[-1] < 0.95
    assert jo_src.clean_threshold(0, 5, 0, 0.75, 0.95) == 0.75


def test_the_views_of_an_out_of_distribution_image_are_pushed_apart_up_to_a_bound():
    divergence = torch.tensor([3.0, 3.0, 30.0, 30.0], requires_grad=True)
    ood = torch.tensor([False, True, False, True])
    found = jo_src.consistency(divergence, ood, 10.0)
    assert found.tolist() == [3, -3, 30, -10]
    found.sum().backward()
    assert divergence.grad.tolist() == [1, -1, 1, 0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0, 1e4))
def test_the_loss_has_a_lower_bound(seed, scale):
    method = method_of()
    state = method.start(GIVEN, C)
    state.tau.fill_(1.1)  # nothing is clean
    logits = [random_logits(B, C, seed=seed + i, scale=scale) for i in range(4)]
    loss = method.loss(outputs_of(logits[:2], logits[2:]), make_batch(INDEX, GIVEN), state)
    assert loss > -0.5 * 10 - 1e-4
    assert int(state.bounded) <= int(state.ood) <= B


def test_no_gradient_flows_through_the_decision_or_the_targets():
    method = method_of(consistency=0.0)
    views = [random_logits(B, C, seed=i).requires_grad_() for i in (0, 1)]
    ema = [random_logits(B, C, seed=i) for i in (2, 3)]
    state = method.start(GIVEN, C)
    method.loss(outputs_of(views, ema), make_batch(INDEX, GIVEN), state).backward()
    p, q = (view.detach().softmax(1) for view in views)
    label = jo_src.smoothed(GIVEN[INDEX], C, EPSILON)
    soft = (ema[0].softmax(1) + ema[1].softmax(1)) / 2
    agree = p.argmax(1) == q.argmax(1)
    kinds = jo_src.sort_images(1 - jo_src.js_divergence(p, label), state.tau, agree)
    target = jo_src.targets(kinds, label, soft)
    torch.testing.assert_close(views[0].grad, (p - target) / B, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(views[1].grad, (q - target) / B, rtol=1e-4, atol=1e-6)
    assert not state.p_clean_N.requires_grad


def test_both_networks_see_the_same_two_weak_views():
    warm_up, main = (phase.steps[0] for phase in method_of().phases())
    views = Views(torch.zeros(1), torch.ones(1), (8, 8), 1, True)
    images = torch.randint(0, 256, (B, 1, 8, 8), dtype=torch.uint8)
    batch = make_batch(INDEX, GIVEN, images)
    assert warm_up.show(views, batch).keys() == {NET}
    shown = main.show(views, batch)
    first, second = shown[NET].with_grad
    assert not torch.equal(first, second)
    assert shown[EMA].no_grad[0] is first
    assert shown[EMA].no_grad[1] is second
    torch.testing.assert_close(second, views.weak(images, batch.draws_BK[:, WEAK_DRAWS:6]))
    assert (main.trains, main.moves_norms) == ((NET,), ())
    method = method_of(ema_decay=0.8)
    assert (method.ema[EMA].of, method.ema[EMA].decay) == (NET, 0.8)
    assert method.predicts == (NET,)


# --------------------------------------------------------------------------------------- verdict


def after_a_step(seed=0):
    """Four kinds of images: right, wrong, and two predicted differently in each view."""
    method = method_of()
    state = method.start(GIVEN, C)
    method.begin_epoch(state, 3)
    sure = (math.log((1 - EPSILON) * (C - 1) / EPSILON) * torch.eye(C))[GIVEN[INDEX]]
    first, second = sure.clone(), sure.clone()
    first[1:], second[1:] = sure[1:].roll(1, 1), sure[1:].roll(1, 1)
    second[4:] = sure[4:].roll(2, 1)
    ema = 4 * torch.eye(C)[(GIVEN[INDEX] + 1) % C]
    method.loss(outputs_of([first, second], [ema, ema]), make_batch(INDEX, GIVEN), state)
    method.scoring(3).run(FakeScorer(GIVEN, random_logits(N, C)), state)
    return method, state


def test_the_averaged_network_suggests_a_class():
    method, state = after_a_step()
    verdict = method.verdict(state, 3)
    noisy, trust = verdict.noisy_N[INDEX], verdict.trust_N[INDEX]
    assert noisy.tolist() == [False] + [True] * 5
    right = (GIVEN[INDEX] + 1) % C
    assert verdict.suggested_N[INDEX].tolist() == [LABELS[0], *right[1:].tolist()]
    sure = math.exp(4) / (math.exp(4) + C - 1)
    assert trust.tolist() == pytest.approx([1, sure, sure, sure, 0, 0])
    assert verdict.p_noisy_N[INDEX][0] < 1e-6
    assert (verdict.p_noisy_N[INDEX][1:] > 0.25).all()
    assert int(state.ood) == 2


def test_images_that_no_step_saw_keep_what_was_said_before():
    method, state = after_a_step()
    unseen = torch.ones(N, dtype=torch.bool)
    unseen[INDEX] = False
    verdict = method.verdict(state, 3)
    assert not verdict.noisy_N[unseen].any()
    assert torch.equal(verdict.suggested_N[unseen].long(), GIVEN[unseen])


def test_counts_are_those_of_an_epoch():
    method, state = after_a_step()
    method.begin_epoch(state, 4)
    assert int(state.ood) == int(state.bounded) == 0


# --------------------------------------------------------------------------------------- notices


def notices(method, state, share, epoch):
    found = method.notices(state, epoch, [0.3, share], [])
    return {kind: text for kind, text in found.items() if text}


def test_it_says_what_may_have_gone_wrong():
    method = method_of()
    state = method.start(GIVEN, C)
    assert notices(method, state, 0.4, 12) == {}
    assert "99%" in notices(method, state, 0.99, 5)["noisy"]
    assert "no noisy label" in notices(method, state, 0.0, 5)["noisy"]
    assert notices(method, state, 0.0, 1) == {}
    state.empty.fill_(7)
    assert "7 steps" in notices(method, state, 0.4, 2)["empty"]
    state.ood.fill_(1000)
    state.bounded.fill_(600)
    assert "600 of 1,000" in notices(method, state, 0.4, 12)["bound"]
    assert notices(method, state, 0.4, 11) == {}


@pytest.mark.parametrize(
    ("classes", "epsilon", "close"), [(10, 0.6, True), (10, 0.1, False), (100, 0.6, False)]
)
def test_it_says_if_smoothed_labels_are_close_to_each_other(classes, epsilon, close):
    p_clean = 1 - slow_js(slow_label(0, epsilon, classes), slow_label(1, epsilon, classes))
    assert (p_clean >= 0.75) == close
    found = method_of(classes, label_smoothing=epsilon).notices_at_start()["smoothing"]
    assert (found is not None) == close
    if close:
        assert f"{p_clean:.2f}" in found


@pytest.mark.parametrize(("classes", "epsilon"), [(2, 0.6), (2, 0.5), (3, 0.7), (4, 0.9)])
def test_a_label_that_stands_for_another_class_is_refused(classes, epsilon):
    label = slow_label(0, epsilon, classes)
    assert label[0] <= max(label[1:]) + 1e-9
    with pytest.raises(InputError, match=rf"^--label-smoothing {epsilon:g}: .*with {classes} cla"):
        method_of(classes, label_smoothing=epsilon)
    method_of(classes, label_smoothing=1 - 1 / classes - 0.01)


def test_it_needs_a_warm_up():
    """Without one no label is clean at first, and on digits it stayed at chance."""
    with pytest.raises(InputError, match=r"^--warmup must be at least 1 for --method jo-src: the "):
        method_of(warmup=0)


def test_the_threshold_does_not_fall():
    with pytest.raises(InputError, match=r"^--last-clean-threshold 0.6 .*--clean-threshold 0.75$"):
        method_of(last_clean_threshold=0.6)
