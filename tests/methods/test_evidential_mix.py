"""EvidentialMix: its equations against slow forms, the groups, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import FakeScorer, outputs_of, softmax
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture

from conftest import make_images, make_trainer
from pseudoloss import arrays
from pseudoloss.config import Settings
from pseudoloss.methods import build, evidential_mix, mixmatch
from pseudoloss.methods.base import Batch, Mix, Outputs
from pseudoloss.methods.evidential_mix import CLASSIFIER, CLEAN, CLOSED, EVIDENTIAL, OPEN
from pseudoloss.nn.views import Views

N, B, C = 40, 3, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
VIEWS = Views(torch.zeros(1), torch.ones(1), (8, 8), 1, True)
EPOCHS, W = 40, 20


def method_of(**changes):
    values = {"method": "evidential-mix", "epochs": EPOCHS, "warmup": W, "batch_size": B} | changes
    return build(Settings(**values), GIVEN, C, False)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(seed=0, lam=0.7):
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2 * B, 1, 8, 8), dtype=torch.uint8, generator=random)
    draws = torch.rand(2 * B, mixmatch.DRAWS, generator=random)
    mix = Mix(torch.arange(2 * B), torch.tensor(lam))
    return Batch(INDEX, images, GIVEN[INDEX], (mix,), draws)


def pair(logits):
    return logits, torch.zeros(len(logits), 3)


# ----------------------------------------------------------------------------- evidential loss


def slow_evidential_loss(row, target):
    """Σ (y - α/S)² + Σ α(S - α) / (S²(S + 1))."""
    alpha = [max(v, 0) + 1 for v in row]
    S = sum(alpha)
    error = sum((y - a / S) ** 2 for y, a in zip(target, alpha, strict=True))
    return error + sum(a * (S - a) / (S * S * (S + 1)) for a in alpha)


def test_the_evidential_loss_equals_a_slow_form():
    logits, target = random_logits(B, C), random_logits(B, C, seed=1).softmax(1)
    wanted = [
        slow_evidential_loss(row, y)
        for row, y in zip(logits.tolist(), target.tolist(), strict=True)
    ]
    torch.testing.assert_close(evidential_mix.evidential_loss(logits, target), torch.tensor(wanted))


def test_doubtful_predictions_are_between_right_and_wrong_ones():
    logits = torch.tensor([[50.0, 0, 0, 0], [0.0, 0, 0, 0], [0.0, 50, 0, 0]])
    target = torch.eye(C)[[0, 0, 0]]
    right, doubtful, wrong = evidential_mix.evidential_loss(logits, target).tolist()
    assert right < 0.1 < 0.5 < doubtful < 1 < 1.5 < wrong < 2


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0, 1e6))
def test_the_evidential_loss_is_bounded(seed, scale):
    """Squared error of two distributions and the variance of one: at most 2 + 1."""
    logits = random_logits(B, C, seed=seed, scale=scale)
    loss = evidential_mix.evidential_loss(logits, torch.eye(C)[:B])
    assert (loss >= 0).all()
    assert (loss <= 3).all()


# --------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("lambda_u", [25.0, 0.0])
def test_the_classifier_is_trained_by_mixmatch_with_itself(lambda_u):
    """As DivideMix, tested against a slow form, with one network that guesses."""
    method = method_of(lambda_u=lambda_u)
    state, batch = method.start(GIVEN, C), batch_of()
    p_N3 = random_logits(N, 3).softmax(1)
    state.p_N3.copy_(p_N3)
    method.begin_epoch(state, W + 3)
    assert state.ramp.item() == pytest.approx(3.5 / 16)
    free = [random_logits(B, C, seed=seed) for seed in range(4)]
    mixed = random_logits(4 * B, C, seed=4)
    outputs = {CLASSIFIER: Outputs([pair(logits) for logits in free], [pair(mixed)])}
    found = method.loss_of_mixed(outputs, batch, state)
    u1, u2, x1, x2 = (logits.softmax(1) for logits in free)
    one_hot = F.one_hot(GIVEN[INDEX[:B]], C).float()
    w = p_N3[INDEX[:B], CLEAN][:, None]
    label = (w * one_hot + (1 - w) * (x1 + x2) / 2) ** 2
    guess = ((u1 + u2) / 2) ** 2
    target = torch.cat([p / p.sum(1, keepdim=True) for p in (label, guess, label, guess)])
    partner = batch.draws_BK[:, -2:].flatten().argsort()
    target = 0.7 * target + 0.3 * target[partner]
    is_label = torch.arange(4 * B) % (2 * B) < B
    p = mixed.softmax(1)
    fit = -(target * p.log()).sum(1)[is_label].mean()
    error = ((p - target) ** 2)[~is_label].mean()
    balance = (1 / C * (1 / C / p.mean(0)).log()).sum()
    wanted = fit + 3.5 / 16 * lambda_u * error + balance
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_what_is_trained_on_corrected_labels():
    """(1 - P(closed))·y + P(closed)·p: its class, for every image."""
    method = method_of()
    state, batch = method.start(GIVEN, C), batch_of()
    p_N3 = random_logits(N, 3, seed=7).softmax(1)
    state.p_N3.copy_(p_N3)
    judged, logits = random_logits(2 * B, C), random_logits(2 * B, C, seed=1)
    outputs = outputs_of(logits, role=EVIDENTIAL) | {CLASSIFIER: Outputs([], [], [pair(judged)])}
    found = method.loss_of_corrected(outputs, batch, state)
    losses = []
    for i in range(2 * B):
        closed, p = float(p_N3[INDEX[i], CLOSED]), softmax(judged[i].tolist())
        label = int(batch.given_B[i])
        mixed = [(1 - closed) * (c == label) + closed * p[c] for c in range(C)]
        sharp = [value**2 for value in mixed]
        target = [float(c == np.argmax(sharp)) for c in range(C)]
        losses.append(slow_evidential_loss(logits[i].tolist(), target))
    assert found.item() == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_warm_up_is_cross_entropy_and_evidential_loss():
    method = method_of()
    state, batch, logits = method.start(GIVEN, C), batch_of(), random_logits(2 * B, C)
    found = method.cross_entropy(outputs_of(logits, role=CLASSIFIER), batch, state)
    torch.testing.assert_close(found, F.cross_entropy(logits, batch.given_B))
    found = method.loss_of_given(outputs_of(logits, role=EVIDENTIAL), batch, state)
    target = F.one_hot(batch.given_B, C).tolist()
    wanted = [slow_evidential_loss(r, y) for r, y in zip(logits.tolist(), target, strict=True)]
    assert found.item() == pytest.approx(np.mean(wanted), rel=1e-5)


def test_what_the_networks_see_in_the_turn_of_the_evidential_one():
    batch = batch_of()
    shown = method_of().show_corrected(VIEWS, batch)
    (judged,) = shown[CLASSIFIER].in_eval
    assert torch.equal(judged, VIEWS.plain(batch.images_BCHW))
    (seen,) = shown[EVIDENTIAL].with_grad
    assert torch.equal(seen, VIEWS.weak(batch.images_BCHW, batch.draws_BK[:, :3]))


def test_phases():
    """The classifier has 10 epochs of warm-up; batches of given labels are twice as large."""
    first, second, third = method_of(batch_size=64).phases()
    assert [phase.epochs for phase in (first, second, third)] == [10, 10, 20]
    trained = [[step.trains[0] for step in phase.steps] for phase in (first, second, third)]
    assert trained == [[CLASSIFIER, EVIDENTIAL], [EVIDENTIAL], [CLASSIFIER, EVIDENTIAL]]
    assert [phase.batch_size for phase in (first, second, third)] == [128, 128, None]
    assert third.steps[1].streams[0].size == 128
    assert [phase.epochs for phase in method_of(warmup=3).phases()] == [3, 0, 37]


def test_the_rate_of_the_evidential_network_is_constant():
    settings = {"method": "evidential-mix", "epochs": 6, "warmup": 2, "schedule": "steps:3:0.1"}
    with make_trainer(lr=0.05, classifier_warmup=1, **settings) as trainer:
        rates = [
            [trainer.learning_rate(epoch, step) for step in trainer.phase(epoch).steps]
            for epoch in (0, 1, 2, 5)
        ]
        wanted = [0.05, 0.05], [0.05], [0.05, 0.05], [0.005, 0.05]
        for found, rate in zip(rates, wanted, strict=True):
            assert found == pytest.approx(rate)
        seen = []
        for entry in trainer.steps:
            for i, prepared in enumerate(entry):
                call = prepared.call
                entry[i] = prepared._replace(
                    call=lambda call=call, role=prepared.step.trains[0]: (
                        seen.append((role, float(trainer.lr))),
                        call(),
                    )
                )
        trainer.train_epoch(5)
    assert dict(seen) == pytest.approx({CLASSIFIER: 0.005, EVIDENTIAL: 0.05})


# -------------------------------------------------------------------------------------- groups


def three_kinds(n=600, seed=0):
    """Labels that are right, of open-set images and wrong, a third each."""
    random = torch.Generator().manual_seed(seed)
    kind_N, true_N = torch.arange(n) % 3, torch.randint(0, C, (n,), generator=random)
    given_N = torch.where(kind_N == CLOSED, (true_N + 1) % C, true_N)
    sure = 30.0 * F.one_hot(true_N, C) + torch.rand(n, C, generator=random)
    unsure = torch.rand(n, C, generator=random)
    logits = torch.where((kind_N == OPEN)[:, None], unsure, sure)
    plain = 4.0 * F.one_hot(true_N, C) + torch.randn(n, C, generator=random)
    return FakeScorer(given_N, plain, roles={CLASSIFIER: plain, EVIDENTIAL: logits}), kind_N, true_N


@pytest.mark.parametrize("as_released", [False, True])
def test_three_groups_are_told_apart(as_released):
    scorer, kind_N, _ = three_kinds()
    method = method_of(as_released=as_released)
    state = method.start(scorer.given_N, C)
    method.scoring(W).run(scorer, state)
    assert (state.p_N3.argmax(1) == kind_N).float().mean() > 0.98
    torch.testing.assert_close(state.p_N3.sum(1), torch.ones(600))
    assert torch.equal(state.clean_N, state.p_N3.argmax(1) == CLEAN)
    assert torch.equal(state.closed_N, state.p_N3.argmax(1) == CLOSED)
    target = F.one_hot(scorer.given_N, C).float()
    wanted = evidential_mix.evidential_loss(scorer.roles[EVIDENTIAL], target)
    torch.testing.assert_close(state.evidential_N, wanted)


def test_probabilities_of_groups_are_at_most_one():
    """However the sum over 20 components is rounded."""
    random = torch.Generator().manual_seed(0)
    low, middle, high = torch.rand(3, 3000, generator=random)
    loss_N = torch.cat([0.2 * low, 0.4 + 0.3 * middle, 0.9 + 0.2 * high])
    p_N3, _ = evidential_mix.probability_of_groups(loss_N, evidential_mix.RELEASED)
    assert p_N3.max() == 1


def test_groups_of_the_released_program():
    """Twenty components; means below 0.3 are clean, above 0.7 closed."""
    random = np.random.default_rng(0)
    loss = np.concatenate(
        [random.beta(1, 12, 3000), random.uniform(0, 1, 1000), random.beta(12, 1, 2000)]
    )
    loss = (loss - loss.min()) / (loss.max() - loss.min())
    ours, _ = evidential_mix.probability_of_groups(torch.from_numpy(loss), evidential_mix.RELEASED)
    theirs = GaussianMixture(20, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0)
    p = theirs.fit(loss[:, None]).predict_proba(loss[:, None])
    group = np.digitize(theirs.means_[:, 0], [0.3, 0.7])
    wanted = np.stack([p[:, group == k].sum(1) for k in range(3)], 1)
    assert (ours.numpy().argmax(1) == wanted.argmax(1)).mean() > 0.95


def test_means_are_grouped():
    means = torch.tensor([0.0, 0.29, 0.31, 0.69, 0.71, 1.0])
    assert evidential_mix.by_mean(means).tolist() == [0, 0, 1, 1, 2, 2]
    assert evidential_mix.by_rank(means[:3]).tolist() == [CLEAN, OPEN, CLOSED]


def test_the_image_with_the_lowest_loss_is_clean_and_the_one_with_the_highest_closed():
    p_N3, loss_N = torch.eye(3)[[OPEN] * 5], torch.tensor([0.3, 0.1, 0.5, 0.9, torch.nan])
    clean_N, closed_N = evidential_mix.likeliest(p_N3, loss_N)
    assert clean_N.tolist() == [False, True, False, False, False]
    assert closed_N.tolist() == [False, False, False, False, True]


# -------------------------------------------------------------------------------------- verdict


def test_images_of_no_class_are_flagged_and_no_suggestion_for_them_is_trusted():
    scorer, kind_N, true_N = three_kinds()
    method = method_of()
    state = method.start(scorer.given_N, C)
    method.scoring(W).run(scorer, state)
    verdict = method.verdict(state, W)
    torch.testing.assert_close(verdict.p_noisy_N, 1 - state.p_N3[:, CLEAN])
    assert (verdict.noisy_N == (kind_N != CLEAN)).float().mean() > 0.98
    assert torch.equal(verdict.suggested_N.long(), scorer.plain_NC.argmax(1))
    assert (verdict.suggested_N == true_N).float().mean() > 0.9
    assert verdict.trust_N[kind_N == OPEN].mean() < 0.05
    assert verdict.trust_N[kind_N == CLOSED].mean() > 0.8


def test_a_group_without_images_is_a_notice():
    method = method_of()
    state = method.start(GIVEN, C)

    def text():
        return method.notices(state, W, [], [str(c) for c in range(C)])["groups"]

    assert "all equal" in text()
    state.fitted.fill_(True)
    state.closed_N[::2] = True
    state.clean_N[::2] = False
    assert text() is None
    state.clean_N[1:] = False
    assert "only one label counts as clean" in text()
    state.clean_N.fill_(True)
    state.closed_N[1:] = False
    assert "only one label counts as wrong" in text()


def test_a_class_without_evidence_is_a_notice():
    """It has no gradient, so the network does not learn it any more."""
    scorer, _, _ = three_kinds()
    method = method_of()
    state = method.start(scorer.given_N, C)
    names = ["ant", "bee", "cat", "dog"]
    method.scoring(W).run(scorer, state)
    assert method.notices(state, W, [], names)["evidence"] is None
    torch.testing.assert_close(state.evidence_C, scorer.roles[EVIDENTIAL].amax(0))
    scorer.roles[EVIDENTIAL][:, 2] = -1.0
    method.scoring(W).run(scorer, state)
    text = method.notices(state, W, [], names)["evidence"]
    assert "no evidence for 1 of 4 classes (the first: cat)" in text
    logits = scorer.roles[EVIDENTIAL].clone().requires_grad_()
    target = F.one_hot(scorer.given_N, C).float()
    evidential_mix.evidential_loss(logits, target).sum().backward()
    assert not logits.grad[:, 2].any()


@pytest.mark.parametrize("groups", ["one clean", "one closed", "all open", "no label of a class"])
def test_any_groups_train(groups):
    images, labels = make_images()
    with make_trainer(arrays(images, labels), method="evidential-mix", epochs=3) as trainer:
        trainer.train_epoch(0)
        state = trainer.state
        state.clean_N.copy_(torch.arange(64) % 2 == 0)
        state.closed_N.copy_(~state.clean_N)
        if groups == "one clean":
            state.clean_N[1:] = False
        if groups == "one closed":
            state.closed_N[:-1] = False
        if groups == "all open":
            state.clean_N.fill_(False)
            state.closed_N.fill_(False)
        if groups == "no label of a class":
            state.clean_N[trainer.given_N == 0] = False
        state.p_N3.copy_(torch.eye(3)[torch.where(state.clean_N, CLEAN, CLOSED)])
        assert math.isfinite(trainer.train_epoch(1))
        assert trainer.skipped_steps() == 0
        trainer.score(1)
        assert state.p_N3.isfinite().all()
