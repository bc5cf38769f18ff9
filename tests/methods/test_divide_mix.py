"""DivideMix: its equations against slow forms, the split, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import FakeScorer, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture

from conftest import make_images, make_trainer
from pseudoloss import arrays
from pseudoloss.config import Settings
from pseudoloss.methods import build, divide_mix, mixmatch
from pseudoloss.methods.base import Batch, Mix, Outputs
from pseudoloss.methods.divide_mix import FIRST, SECOND
from pseudoloss.nn.views import Views

N, B, C = 40, 3, 4  # B images of either kind
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
VIEWS = Views(torch.zeros(1), torch.ones(1), (8, 8), 1, True)
EPOCHS, W = 40, 5


def method_of(**changes):
    values = {"method": "divide-mix", "epochs": EPOCHS, "warmup": W, "batch_size": B} | changes
    return build(Settings(**values), GIVEN, C, False)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(seed=0, lam=0.7):
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2 * B, 1, 8, 8), dtype=torch.uint8, generator=random)
    draws = torch.rand(2 * B, mixmatch.DRAWS, generator=random)
    mix = Mix(torch.arange(2 * B), torch.tensor(lam))
    return Batch(INDEX, images, GIVEN[INDEX], (mix,), draws)


def outputs_in(turn, seed=0, scale=3.0):
    """Random logits for what both networks see in a turn."""
    own, other = turn.roles
    free = [random_logits(B, C, seed=seed + i, scale=scale) for i in range(4)]
    helping = random_logits(2 * B, C, seed=seed + 4, scale=scale)
    mixed = random_logits(4 * B, C, seed=seed + 5, scale=scale).requires_grad_()

    def pair(logits):
        return logits, torch.zeros(len(logits), 3)

    return {
        own: Outputs([pair(logits) for logits in free], [pair(mixed)]),
        other: Outputs([], [], [pair(helping)]),
    }


# ------------------------------------------------------------------------------------ slow forms


def slow_sharpen(row, temperature):
    powers = [p ** (1 / temperature) for p in row]
    return [p / sum(powers) for p in powers]


def slow_mean(rows):
    """The mean of several distributions."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def slow_loss(outputs, turn, batch, w, lambda_u, temperature):
    """One image after the other, as the paper says."""
    own, other = turn.roles
    u1, u2, x1, x2 = ([softmax(r) for r in logits.tolist()] for logits, _ in outputs[own].no_grad)
    helping = [softmax(row) for row in outputs[other].in_eval[0][0].tolist()]
    targets = []
    for i in range(B):
        p, y = slow_mean([x1[i], x2[i]]), int(batch.given_B[i])
        wi = w[batch.index_B[i]]
        refined = [wi * (c == y) + (1 - wi) * p[c] for c in range(C)]
        targets.append(slow_sharpen(refined, temperature))
    for i in range(B):
        p = slow_mean([u1[i], u2[i], helping[i], helping[B + i]])
        targets.append(slow_sharpen(p, temperature))
    targets = targets * 2  # first views, then second views
    keys = batch.draws_BK[:, -2:].flatten().tolist()
    partner = sorted(range(4 * B), key=lambda row: keys[row])
    lam = float(batch.mixes[0].lam)
    mixed = [
        [lam * a + (1 - lam) * b for a, b in zip(targets[i], targets[partner[i]], strict=True)]
        for i in range(4 * B)
    ]
    logits = outputs[own].with_grad[0][0].tolist()
    fit, error = [], []
    for i, (row, wanted) in enumerate(zip(logits, mixed, strict=True)):
        if i % (2 * B) < B:
            fit += slow_cross_entropy([row], [wanted])
        else:
            error += [(p - t) ** 2 for p, t in zip(softmax(row), wanted, strict=True)]
    mean = slow_mean([softmax(row) for row in logits])
    balance = sum(1 / C * math.log(1 / C / p) for p in mean)
    return sum(fit) / len(fit) + lambda_u * sum(error) / len(error) + balance


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize(("lambda_u", "temperature"), [(25.0, 0.5), (0.0, 0.5), (150.0, 0.8)])
def test_the_loss_of_a_turn_equals_a_slow_form(own, lambda_u, temperature):
    method = method_of(lambda_u=lambda_u, temperature=temperature)
    state, turn = method.start(GIVEN, C), method.turns[own]
    state.w_2N.copy_(torch.rand(2, N, generator=torch.Generator().manual_seed(1)))
    for epoch, share in ((W, 0.5 / 16), (W + 3, 3.5 / 16), (W + 30, 1)):
        method.begin_epoch(state, epoch)
        batch, outputs = batch_of(epoch), outputs_in(turn, epoch)
        found = turn.loss(outputs, batch, state)
        w = state.w_2N[1 - own].tolist()
        wanted = slow_loss(outputs, turn, batch, w, share * lambda_u, temperature)
        assert found.item() == pytest.approx(wanted, rel=1e-5)
        found.backward()
        assert outputs[turn.roles[0]].with_grad[0][0].grad.abs().sum() > 0


def test_what_the_networks_see():
    """Views are mixed with the partners and the λ of their labels."""
    turn, batch = method_of().turns[1], batch_of()
    shown = turn.show(VIEWS, batch)
    assert shown.keys() == {FIRST, SECOND}
    u1, u2, x1, x2 = shown[SECOND].no_grad
    views = [
        VIEWS.weak(batch.images_BCHW, batch.draws_BK[:, 3 * i : 3 * i + 3]).tensor_split(2)
        for i in range(2)
    ]
    for found, (view, kind) in zip((u1, u2, x1, x2), ((0, 1), (1, 1), (0, 0), (1, 0)), strict=True):
        assert torch.equal(found, views[view][kind])
    (helping,) = shown[FIRST].in_eval
    assert torch.equal(helping, torch.cat([u1, u2]))
    assert (shown[FIRST].with_grad, shown[FIRST].no_grad) == ([], [])
    rows = torch.cat([x1, u1, x2, u2])
    mix = mixmatch.mixing(batch)
    assert sorted(mix.partner_B.tolist()) == list(range(4 * B))
    (mixed,) = shown[SECOND].with_grad
    torch.testing.assert_close(mixed, 0.7 * rows + 0.3 * rows[mix.partner_B])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_exchanging_both_views_of_all_images_keeps_the_loss_without_mixing(seed):
    method = method_of()
    turn, state, batch = method.turns[0], method.start(GIVEN, C), batch_of(lam=1.0)
    method.begin_epoch(state, W + 20)
    outputs = outputs_in(turn, seed)
    u1, u2, x1, x2 = outputs[FIRST].no_grad
    (mixed, projection), (helping, zeros) = (
        outputs[FIRST].with_grad[0],
        outputs[SECOND].in_eval[0],
    )
    exchanged = {
        FIRST: Outputs([u2, u1, x2, x1], [(mixed.roll(2 * B, 0), projection)]),
        SECOND: Outputs([], [], [(helping.roll(B, 0), zeros)]),
    }
    torch.testing.assert_close(turn.loss(exchanged, batch, state), turn.loss(outputs, batch, state))


# --------------------------------------------------------------------------------------- warm-up


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_warm_up_is_cross_entropy_and_a_penalty_for_confidence(penalty):
    method = method_of(warmup_penalty=penalty)
    logits = random_logits(2 * B, C)
    outputs = {FIRST: Outputs([], [(logits, torch.zeros(2 * B, 3))])}
    batch = batch_of()
    found = method.turns[0].loss_of_warm_up(outputs, batch, method.start(GIVEN, C))
    one_hot = [[float(c == label) for c in range(C)] for label in batch.given_B]
    losses = slow_cross_entropy(logits.tolist(), one_hot)
    confidence = [sum(p * math.log(p) for p in softmax(row)) for row in logits.tolist()]
    assert found.item() == pytest.approx(np.mean(losses) + penalty * np.mean(confidence), rel=1e-5)


def test_confident_predictions_are_penalised():
    sure, unsure = torch.eye(C) * 20, torch.zeros(C, C)
    assert divide_mix.negative_entropy(sure).item() == pytest.approx(0, abs=1e-4)
    assert divide_mix.negative_entropy(unsure).item() == pytest.approx(-math.log(C))


def test_batches_are_twice_as_large_in_the_warm_up():
    first, then = method_of(batch_size=64).phases()
    assert (first.batch_size, then.batch_size) == (128, None)
    assert [step.trains for step in (*first.steps, *then.steps)] == [(FIRST,), (SECOND,)] * 2


# -------------------------------------------------------------------------------------- the split


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20))
def test_scaled_values_fill_0_to_1(values):
    found = divide_mix.scaled(torch.tensor(values))
    assert found.min() == 0
    assert found.max() == (1 if max(values) - min(values) > 1e-30 else found.max())
    assert found.isfinite().all()


def test_what_is_not_finite_counts_as_high():
    values = torch.tensor([1.0, 3.0, torch.nan, torch.inf, 2.0])
    assert divide_mix.scaled(values).tolist() == [0, 1, 1, 1, 0.5]
    assert divide_mix.scaled(torch.full((3,), torch.nan)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("length", [1, 3])
def test_recent_values_are_averaged(length):
    recent = torch.zeros(length, 5)
    history = [torch.rand(5, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    for epoch, values in enumerate(history, 1):
        found = divide_mix.mean_of_recent(recent, values, torch.tensor(epoch))
        wanted = torch.stack(history[max(0, epoch - length) : epoch]).mean(0)
        torch.testing.assert_close(found, wanted)


def scorer_of(seed=0, n=400, wrong=0.4):
    """Two networks that mostly know the true labels."""
    random = np.random.default_rng(seed)
    true = np.arange(n) % C
    given = np.where(random.random(n) < wrong, (true + 1) % C, true)
    roles = {
        role: 4 * F.one_hot(torch.from_numpy(true), C) + random_logits(n, C, seed=k, scale=1.0)
        for k, role in enumerate((FIRST, SECOND))
    }
    plain = (roles[FIRST] + roles[SECOND]) / 2
    scorer = FakeScorer(torch.from_numpy(given), plain, roles=roles, predicts=(FIRST, SECOND))
    return scorer, torch.from_numpy(true)


def test_the_split_is_that_of_scikit_learn():
    scorer, _ = scorer_of()
    method = method_of()
    state = method.start(scorer.given_N, C)
    method.scoring(W).run(scorer, state)
    for k, logits in enumerate(scorer.roles.values()):
        loss = F.cross_entropy(logits, scorer.given_N, reduction="none")
        torch.testing.assert_close(state.loss_2N[k], loss)
        x = ((loss - loss.min()) / (loss.max() - loss.min())).numpy()[:, None]
        means = np.array([[x[x < 0.4].mean()], [x[x > 0.4].mean()]])
        theirs = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, means_init=means).fit(x)
        low = theirs.predict_proba(x)[:, theirs.means_.argmin()]
        assert np.abs(state.w_2N[k].numpy() - low).max() < 0.05
        assert ((state.w_2N[k].numpy() > 0.5) == (low > 0.5)).mean() > 0.99
        assert torch.equal(state.keeps_2N[k], state.w_2N[k] > 0.5)


def test_each_network_trains_on_the_split_of_the_other_one():
    method = method_of()
    state = method.start(GIVEN, C)
    state.keeps_2N[0, 5:] = False
    state.keeps_2N[1, 9:] = False
    for own, wanted in ((0, 9), (1, 5)):
        labelled, unlabelled = method.turns[own].step().streams
        assert labelled.mask(state).sum() == wanted
        assert torch.equal(labelled.mask(state), ~unlabelled.mask(state))


def test_the_threshold_decides_what_is_kept():
    scorer, _ = scorer_of()
    kept = []
    for threshold in (0.2, 0.5, 0.99):
        method = method_of(threshold=threshold, protect_rare_classes=False)
        state = method.start(scorer.given_N, C)
        method.scoring(W).run(scorer, state)
        assert torch.equal(state.keeps_2N, state.w_2N > threshold)
        kept.append(int(state.keeps_2N.sum()))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


# --------------------------------------------------------------------------------------- verdict


def test_the_verdict_is_what_both_networks_believe():
    scorer, true = scorer_of()
    method = method_of()
    state = method.start(scorer.given_N, C)
    method.scoring(W).run(scorer, state)
    verdict = method.verdict(state, W)
    w = state.w_2N.mean(0)
    torch.testing.assert_close(verdict.p_noisy_N, 1 - w)
    assert torch.equal(verdict.noisy_N, ~(w > 0.5))
    mean = sum(scorer.roles.values()) / 2
    assert torch.equal(verdict.suggested_N.long(), mean.argmax(1))
    p = sum(logits.softmax(1) for logits in scorer.roles.values()) / 2
    torch.testing.assert_close(verdict.trust_N, p.gather(1, mean.argmax(1)[:, None])[:, 0])
    assert (verdict.noisy_N == (scorer.given_N != true)).float().mean() > 0.95


# ---------------------------------------------------------------- splits with an empty side


def notices_of(method, state):
    found = method.notices(state, W, [], [str(c) for c in range(C)])
    return {kind: text for kind, text in found.items() if text}


def test_an_empty_side_of_a_split_is_a_notice():
    method = method_of()
    state = method.start(GIVEN, C)
    state.fitted_2.fill_(True)
    state.keeps_2N[:, ::2] = False
    assert notices_of(method, state) == {}
    state.keeps_2N[1] = False
    ((kind, text),) = notices_of(method, state).items()
    assert kind == "split of the second network"
    assert "keeps no label" in text
    state.keeps_2N[1] = True
    ((_, text),) = notices_of(method, state).items()
    assert "keeps every label" in text
    state.fitted_2[0] = False
    assert "no two modes" in notices_of(method, state)["split of the first network"]


@pytest.mark.parametrize("kept", ["none", "one", "all", "no label of a class"])
def test_any_split_trains(kept):
    images, labels = make_images()
    with make_trainer(arrays(images, labels), method="divide-mix", epochs=3) as trainer:
        trainer.train_epoch(0)
        keeps_2N = trainer.state.keeps_2N
        keeps_2N.fill_(kept != "none")
        if kept == "one":
            keeps_2N[:, 1:] = False
        if kept == "no label of a class":
            keeps_2N[:, trainer.given_N == 0] = False
        trainer.state.w_2N.copy_(torch.where(keeps_2N, 0.9, 0.1))
        assert math.isfinite(trainer.train_epoch(1))
        assert trainer.skipped_steps() == 0
        trainer.score(1)
        assert all(tensor.isfinite().all() for tensor in (trainer.state.w_2N, trainer.state.loss_N))
