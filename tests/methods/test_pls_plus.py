"""PLS with additions: every equation against a slow form, and what the switches change."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import FakeScorer, make_batch, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.errors import InputError
from pseudoloss.methods import build, metrics, pls, pls_plus
from pseudoloss.methods.base import Mix, Outputs, tensors_of
from pseudoloss.methods.metrics import neighbour_votes
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.nn.augment import cutout, randaugment_view, trivial_augment_view
from pseudoloss.nn.views import Views

B, C, N = 6, 4, 60
EPOCHS, W = 9, 3
GIVEN = torch.arange(N) % C
VIEWS = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
RANDOM = torch.Generator().manual_seed(0)


def normal(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def method_of(**switches):
    values = {"method": "pls-plus", "epochs": EPOCHS, "warmup": W}
    return build(Settings(**(values | switches)), GIVEN, C, False)


def batch_of(draws=40, mixes=1, lam=0.7):
    images = torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8, generator=RANDOM)
    swap = torch.tensor([2, 0, 5, 1, 3, 4])
    index_B = torch.tensor([4, 1, 10, 7, 18, 3])
    return make_batch(index_B, GIVEN, images, [(swap, lam)] * mixes, draws)


def outputs_for(shown, seed=0):
    def pairs(views, k):
        return [(normal(B, C, seed=seed + k + i), normal(B, 5)) for i in range(len(views))]

    return {
        role: Outputs(*(pairs(v, 10 * k) for k, v in enumerate(found)))
        for role, found in shown.items()
    }


# ------------------------------------------------------------------------------------- the views


def slow_box(lam, draws, height, width):
    """The part of each pixel in the box, from a grid of 40×40 points in each pixel."""
    side, fine = math.sqrt(1 - lam), 40
    found = np.zeros((len(draws), height, width))
    points_y = (np.arange(height * fine) + 0.5) / fine
    points_x = (np.arange(width * fine) + 0.5) / fine
    for i, (u, v) in enumerate(draws):
        top, left = u * (1 - side) * height, v * (1 - side) * width
        y = (points_y >= top) & (points_y < top + side * height)
        x = (points_x >= left) & (points_x < left + side * width)
        inside = np.outer(y, x).reshape(height, fine, width, fine)
        found[i] = inside.mean((1, 3))
    return found


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.75, 0.999, 1.0])
def test_the_box_of_cutmix_covers_its_part_of_each_pixel(lam):
    draws = torch.rand(5, 2, generator=RANDOM)
    found = pls_plus.box_weights(torch.tensor(lam), draws, 8, 12)[:, 0]
    wanted = torch.from_numpy(slow_box(lam, draws.tolist(), 8, 12)).float()
    torch.testing.assert_close(found, wanted, atol=0.06, rtol=0)
    torch.testing.assert_close(found.mean((1, 2)), torch.full((5,), 1 - lam), atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(lam=st.floats(0, 1), u=st.floats(0, 1), v=st.floats(0, 1))
def test_a_box_always_has_its_area(lam, u, v):
    found = pls_plus.box_weights(torch.tensor(lam), torch.tensor([[u, v]]), 9, 7)
    assert found.mean().item() == pytest.approx(1 - lam, abs=1e-5)
    assert found.min() >= 0
    assert found.max() <= 1


def test_cutmix_takes_a_box_of_the_partner():
    view, draws = normal(B, 3, 8, 8), torch.rand(B, 2, generator=RANDOM)
    mix = Mix(torch.tensor([1, 2, 3, 4, 5, 0]), torch.tensor(0.75))
    box = pls_plus.box_weights(mix.lam, draws, 8, 8)
    found = pls_plus.cutmix(view, mix, draws)
    torch.testing.assert_close(found, (1 - box) * view + box * view[mix.partner_B])
    assert ((found == view).all(1).float().mean() > 0.5).item()


@pytest.mark.parametrize(
    ("kind", "wanted"), [("trivial", trivial_augment_view), ("rand", randaugment_view)]
)
def test_strong_views(kind, wanted):
    batch, method = batch_of(), method_of(strong_view=kind, strong_cutout=0.5)
    _, strong = method.show(VIEWS, batch)["net"].with_grad
    draws = batch.draws_BK[:, 6:]
    plain = wanted(VIEWS, batch.images_BCHW, draws)
    assert torch.equal(strong, cutout(plain, draws[:, 30:], 0.5))
    assert not torch.equal(strong, plain)


def test_exactly_one_of_the_two_weak_views_is_mirrored():
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(B, 3, 8, 8).contiguous()
    draws = torch.rand(B, 36, generator=RANDOM)
    draws[:, [0, 1, 3, 4]] = 0.5  # nothing is shifted: one pixel of padding on both sides
    batch = batch_of()._replace(images_BCHW=images, draws_BK=draws)
    first, second = method_of(opposite_flips=True).show(VIEWS, batch)["net"].no_grad
    assert torch.equal(first.flip(3), second)
    plain = VIEWS.plain(images)
    mirrored = [torch.equal(view, plain[0].flip(2)) for view in first]
    assert mirrored == (draws[:, 2] < 0.5).tolist()
    changed = pls_plus.opposite_flip(draws)
    assert (changed != draws).any(0).nonzero().flatten().tolist() in ([], [5])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_pseudo_label_of_one_view(mode):
    method, batch = method_of(pseudo_label_views=1, pseudo_label_mode=mode, debias=0.5), batch_of()
    shown = method.show(VIEWS, batch)
    views = shown["net"].in_eval if mode == "eval" else shown["net"].no_grad
    both = method_of(pseudo_label_mode=mode).show(VIEWS, batch)["net"]
    assert torch.equal(views[0], (both.in_eval if mode == "eval" else both.no_grad)[0])
    assert len(views) == 1
    outputs = outputs_for(shown)
    found = outputs["net"].in_eval if mode == "eval" else outputs["net"].no_grad
    wanted = pls.by_sum(2 * found[0][0].log_softmax(1))
    state = method.start(GIVEN, C)
    torch.testing.assert_close(method.pseudo_labels_of(outputs, state), wanted)
    costs = [m.phases()[1].steps[0].cost for m in (method, method_of())]
    assert costs == [7, 8]


def test_a_share_of_the_batches_is_mixed_by_cutmix():
    method = method_of(cutmix=0.5)
    (step,) = method.phases()[1].steps
    assert len(step.lambdas) == 2
    for lam, patched in ((0.4, True), (0.6, False)):
        batch = batch_of(step.draws, mixes=2)
        batch = batch._replace(
            mixes=(batch.mixes[0], Mix(batch.mixes[1].partner_B, torch.tensor(lam)))
        )
        mixed = method.show(VIEWS, batch)["net"].with_grad[0]
        weak = method.show(VIEWS, batch)["net"].no_grad[0]
        by_mixup = batch.mixes[0].of(weak)
        wanted = (
            pls_plus.cutmix(weak, batch.mixes[0], batch.draws_BK[:, 38:]) if patched else by_mixup
        )
        torch.testing.assert_close(mixed, wanted)


# --------------------------------------------------------------------------------------- the loss


def test_cross_entropy_on_the_strong_view_in_loops():
    logits_BC, target_BC = normal(B, C), normal(B, C, seed=1).softmax(1)
    w_B = torch.tensor([0.0, 1.0, 0.5, 0.2, 0.0, 0.9])
    losses = slow_cross_entropy(logits_BC.tolist(), target_BC.tolist())
    wanted = sum(w * loss for w, loss in zip(w_B.tolist(), losses, strict=True)) / w_B.sum()
    torch.testing.assert_close(pls_plus.strong_cross_entropy(logits_BC, target_BC, w_B), wanted)
    mean = torch.tensor(losses).mean()
    torch.testing.assert_close(pls_plus.strong_cross_entropy(logits_BC, target_BC, None), mean)


@pytest.mark.parametrize(
    ("ramp", "epoch", "share"), [(0, W, 1), (4, W, 0), (4, W + 1, 0.25), (4, 8, 1)]
)
def test_the_loss_of_the_strong_view_is_added_with_its_weight(ramp, epoch, share):
    plain, method = method_of(), method_of(strong_loss=2.0, strong_loss_ramp=ramp)
    batch = batch_of()
    outputs = outputs_for(method.show(VIEWS, batch))
    state, other = method.start(GIVEN, C), plain.start(GIVEN, C)
    for each in (state, other):
        each.noisy_N[::2] = True
        each.trust_N[::2] = 0.3
    method.begin_epoch(state, epoch)
    target_BC = plain.targets(outputs, batch, other)
    strong_BC = outputs["net"].with_grad[1][0]
    term = pls_plus.strong_cross_entropy(strong_BC, target_BC, other.trust_N[batch.index_B])
    wanted = plain.loss(outputs, batch, other) + 2 * share * term
    torch.testing.assert_close(method.loss(outputs, batch, state), wanted)


def test_the_strong_view_is_there_without_contrast():
    method = method_of(strong_loss=1.0, contrast=False)
    shown = method.show(VIEWS, batch_of())
    assert len(shown["net"].with_grad) == 2
    assert method.phases()[1].steps[0].cost == 2 + 6
    assert len(method_of(contrast=False).show(VIEWS, batch_of())["net"].with_grad) == 1


def test_flagged_images_are_not_trusted_in_the_first_epoch():
    method, batch = method_of(first_epoch_trust=False), batch_of()
    state = method.start(GIVEN, C)
    state.noisy_N[batch.index_B[:2]] = True
    for epoch, wanted in ((W, [0, 0, 1, 1, 1, 1]), (W + 1, [1] * 6)):
        method.begin_epoch(state, epoch)
        assert method.trust(batch, state).tolist() == wanted
    method.begin_epoch(state, W)
    assert method_of().trust(batch, state).tolist() == [1] * 6


def slow_debiased(first, second, mean, prior, strength, gamma, by):
    rows = []
    for a, b in zip(first, second, strict=True):
        p = [(x + y) / 2 for x, y in zip(softmax(a), softmax(b), strict=True)]
        fair = [x / max(m / q, 0.01) ** strength for x, m, q in zip(p, mean, prior, strict=True)]
        powers = [x**gamma for x in fair]
        divisor = sum(powers) if by == "sum" else max(powers)
        rows.append([x / divisor for x in powers])
    return torch.tensor(rows)


@pytest.mark.parametrize("by", ["sum", "max"])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_debiased_pseudo_labels_in_loops(by, strength):
    first, second = normal(B, C), normal(B, C, seed=1)
    mean, prior = torch.tensor([0.7, 0.2, 0.1, 0.0]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    normalise = {"sum": pls.by_sum, "max": pls.by_max}[by]
    log_mean_BC = pls.log_mean_prediction(first, second)
    found = pls_plus.debiased_pseudo_labels(log_mean_BC, mean, prior, strength, 2.0, normalise)
    lists = (first.tolist(), second.tolist(), mean.tolist(), prior.tolist())
    torch.testing.assert_close(
        found, slow_debiased(*lists, strength, 2.0, by), rtol=1e-4, atol=1e-6
    )


def test_a_mean_like_the_prior_changes_no_pseudo_label():
    log_mean_BC = normal(B, C).log_softmax(1)
    uniform = torch.full((C,), 1 / C)
    found = pls_plus.debiased_pseudo_labels(log_mean_BC, uniform, uniform, 1.0, 2.0, pls.by_sum)
    torch.testing.assert_close(found, (2 * log_mean_BC).softmax(1))


def test_the_mean_prediction_follows_the_batches():
    method, batch = method_of(debias=1.0, debias_momentum=0.9), batch_of()
    state = method.start(GIVEN, C)
    outputs = outputs_for(method.show(VIEWS, batch))
    (first_BC, _), (second_BC, _) = outputs["net"].no_grad
    method.loss(outputs, batch, state)
    p = np.mean([softmax(row) for row in [*first_BC.tolist(), *second_BC.tolist()]], axis=0)
    wanted = torch.tensor(0.9 / C + 0.1 * p).float()
    torch.testing.assert_close(state.class_mean_C, wanted)
    # The pseudo-labels of this batch were made with the mean before it: a uniform one.
    torch.testing.assert_close(
        state.pseudo_labels(batch.index_B), pls.make_pseudo_labels(first_BC, second_BC, 2.0)
    )


# ---------------------------------------------------------------------------------------- stage 1


def test_the_margin_in_loops():
    logits_BC, given_B = normal(B, C), torch.tensor([0, 1, 2, 3, 0, 1])
    wanted = []
    for row, label in zip(logits_BC.tolist(), given_B.tolist(), strict=True):
        p = softmax(row)
        wanted.append(p[label] - max(q for c, q in enumerate(p) if c != label))
    torch.testing.assert_close(pls_plus.margin(logits_BC, given_B), torch.tensor(wanted))


def test_the_accumulated_loss_in_loops():
    values = normal(5, 7).abs()
    values[2, 3], values[0, 4] = math.inf, math.nan
    total, weight = torch.zeros(7), torch.zeros(())
    for value_N in values:
        total, weight = pls_plus.accumulated(total, weight, value_N, 0.8)
    for i in range(7):
        mean, before = 0.0, 0.0
        for t, value in enumerate(values[:, i].tolist()):
            known = value if math.isfinite(value) else before
            mean = 0.8 * mean + 0.2 * known
            before = mean / (1 - 0.8 ** (t + 1))
        assert (total[i] / weight).item() == pytest.approx(before, rel=1e-5)


def test_the_accumulated_loss_of_one_epoch_is_its_loss():
    loss_N = normal(9).abs()
    total, weight = pls_plus.accumulated(torch.zeros(9), torch.zeros(()), loss_N, 0.8)
    torch.testing.assert_close(total / weight, loss_N)


def test_the_separation_of_two_modes():
    random = np.random.default_rng(0)
    values = np.concatenate([random.normal(1, 0.1, 500), random.normal(3, 0.2, 300)])
    mixture = fit_two_modes(torch.from_numpy(values).float())
    (a, b), (s, t) = mixture.means.tolist(), mixture.variances.tolist()
    wanted = abs(a - b) / math.sqrt((s + t) / 2)
    assert pls_plus.separation(mixture).item() == pytest.approx(wanted, rel=1e-5)
    assert wanted > 8
    assert pls_plus.separation(fit_two_modes(torch.ones(9))).item() == 0
    assert pls_plus.separation(fit_two_modes(torch.ones(0))).item() == 0


def test_two_standard_deviations_tell_one_mode_from_two():
    """The gate of the program: samples of distributions with one mode stay below, two that are
    three standard deviations apart are above."""
    random = np.random.default_rng(0)
    one = [random.normal(size=9000), random.exponential(size=9000), random.gamma(2, size=9000)]
    two = [
        np.concatenate([random.normal(size=a), random.normal(3, size=9000 - a)])
        for a in (4500, 6500)
    ]
    for samples, is_two in ((one, False), (two, True)):
        for sample in samples:
            found = pls_plus.separation(fit_two_modes(torch.from_numpy(sample).float()))
            assert (found.item() > 2) == is_two


def scored(method, loss_of, epochs=(W - 1,)):
    """The state after the scoring of some epochs; `loss_of` gives logits by epoch."""
    state = method.start(GIVEN, C)
    for epoch in epochs:
        method.begin_epoch(state, epoch)
        logits_NC = loss_of(epoch)
        scorer = FakeScorer(GIVEN, logits_NC, roles={"net": logits_NC, "ema": logits_NC})
        method.scoring(epoch).run(scorer, state)
    return state


def sure_of(label_N, strength=4.0, seed=0):
    return strength * F.one_hot(label_N, C) + 0.3 * normal(N, C, seed=seed)


def test_the_gate_is_closed_where_modes_overlap():
    wrong_N = torch.where(torch.arange(N) % 3 == 0, (GIVEN + 1) % C, GIVEN)
    apart, one = (lambda epoch: sure_of(wrong_N)), (lambda epoch: normal(N, C))
    for logits, flags in ((apart, True), (one, False)):
        method = method_of(mode_gate=6.0, threshold=0.5)
        state = scored(method, logits)
        assert (state.separation > 6) == flags
        assert state.noisy_N.any() == flags
        found = method.notices(state, W - 1, [0.0], "abcd")["stage 1"]
        assert (found is None) == flags
        if not flags:
            assert not state.p_noisy_N.any()
            assert "--mode-gate 6" in found
        assert scored(method_of(threshold=0.5), logits).noisy_N.any()


def test_labels_whose_margin_rose_are_kept():
    """The network changes its mind about images 0 and 3: from the given label, or to it."""
    wrong_N = torch.where(torch.arange(N) % 3 == 0, (GIVEN + 1) % C, GIVEN)

    def logits(epoch):
        found = sure_of(wrong_N, strength=1.0 + 2 * epoch)
        found[0] = torch.tensor([-4.0 + 1.5 * epoch, 0, 0, 0])  # rises, and stays high in loss
        return found

    method = method_of(warmup_trend=True, threshold=0.5)
    assert [method.scores_after(epoch) for epoch in range(W)] == [True] * W
    state = scored(method, logits, range(W))
    slope = np.polyfit(range(W), [pls_plus.margin(logits(e), GIVEN).numpy() for e in range(W)], 1)[
        0
    ]
    spread = sum((t - (W - 1) / 2) ** 2 for t in range(W))
    np.testing.assert_allclose(state.trend_N / spread, slope, atol=1e-5)
    plain = scored(method_of(threshold=0.5), logits)
    assert plain.noisy_N[0]
    assert plain.noisy_N[3]
    assert not state.noisy_N[0]
    assert state.p_noisy_N[0] == 0
    assert state.noisy_N[3]
    before = state.trend_N.clone()
    method.begin_epoch(state, W)
    method.scoring(W).run(FakeScorer(GIVEN, logits(0)), state)
    assert torch.equal(state.trend_N, before)


def test_before_the_end_of_the_warm_up_nothing_is_flagged_or_noticed():
    method = method_of(warmup_trend=True)
    state = scored(method, lambda epoch: sure_of((GIVEN + 1) % C), [0])
    assert not state.noisy_N.any()
    assert method.notices(state, 0, [0.0], "abcd") == {}
    assert "trend" not in method.notices_at_start()
    assert "--warmup-trend" in method_of(warmup_trend=True, warmup=1).notices_at_start()["trend"]


def slow_support(features, voted, given_label, K, temperature):
    classes = max(*voted, *given_label) + 1
    share = np.bincount(voted, minlength=classes) / len(voted)
    found = []
    for i, own in enumerate(features):
        near = sorted(
            (j for j in range(len(features)) if j != i), key=lambda j: -(own @ features[j])
        )
        votes = np.zeros(classes)
        for j in near[:K]:
            votes[voted[j]] += math.exp(own @ features[j] / temperature)
        fair = [v / s if s else 0 for v, s in zip(votes, share, strict=True)]
        found.append(fair[given_label[i]] / max(fair))
    return found


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_vote_of_neighbours_in_loops(share):
    wrong_N = torch.where(torch.arange(N) % 3 == 0, (GIVEN + 1) % C, GIVEN)
    features_ND = F.normalize(sure_of(wrong_N))
    logits_NC = sure_of(wrong_N)
    switches = {"neighbours": 9, "neighbour_share": share, "relabel": 0.95}
    method = method_of(selection="neighbours", **switches)
    state = method.start(GIVEN, C)
    scorer = FakeScorer(GIVEN, logits_NC, projections_ND=features_ND)
    assert method.scoring(W - 1).fixed_shapes
    method.scoring(W - 1).run(scorer, state)
    p_NC = logits_NC.softmax(1)
    voted_N = torch.where(p_NC.amax(1) > 0.95, p_NC.argmax(1), GIVEN)
    assert 10 < (voted_N != GIVEN).sum() < 20
    wanted = slow_support(features_ND.numpy(), voted_N.tolist(), GIVEN.tolist(), 9, 0.1)
    np.testing.assert_allclose(1 - state.p_noisy_N, wanted, atol=1e-5)
    assert state.noisy_N.tolist() == [s < share - 1e-7 for s in wanted]
    assert state.noisy_N[::3].float().mean() > 0.9


def test_the_vote_of_a_huge_dataset_is_not_captured():
    """Its many chunks would make too large a graph."""
    for selection, captured in (("neighbours", False), ("mixture", True)):
        m = method_of(selection=selection)
        many = metrics.CAPTURED + 1
        huge = pls_plus.PLSPlus(m.detector, m.options, m.switches, EPOCHS, W, many)
        assert huge.scoring(W).fixed_shapes == captured


def test_votes_are_shares_of_the_weights():
    features_ND, label_NC = F.normalize(normal(30, 5)), F.one_hot(torch.arange(30) % C, C).float()
    (rows, votes_BC) = next(iter(neighbour_votes(features_ND, label_NC, 7)))
    assert rows == slice(0, 30)
    torch.testing.assert_close(votes_BC.sum(1), torch.ones(30))


# ----------------------------------------------------------------------------------- the networks


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_who_makes_pseudo_labels_who_is_scored_and_who_predicts(mode):
    switches = ("ema_pseudo_labels", "ema_scoring", "ema_prediction")
    for number in range(8):
        on = {name: bool(number >> i & 1) for i, name in enumerate(switches)}
        method = method_of(pseudo_label_mode=mode, ema_decay=0.99, **on)
        assert set(method.ema) == {"ema"}
        predictor = "ema" if on["ema_prediction"] else "net"
        assert method.predicts == (predictor,)
        assert method.validated == (({"ema", "net"} - {predictor}).pop(),)
        assert (method.scored_by or predictor) == ("ema" if on["ema_scoring"] else "net")
        shown = method.show(VIEWS, batch_of())
        maker = "ema" if on["ema_pseudo_labels"] else "net"
        for role, views in shown.items():
            found = views.in_eval if mode == "eval" else views.no_grad
            assert len(found) == 2 * (role == maker)
        assert len(shown["net"].with_grad) == 2


def test_switches_that_contradict_each_other_are_refused():
    for switches, message in (
        ({"initial_trust": True, "first_epoch_trust": False}, "--no-first-epoch-trust"),
        ({"selection": "neighbours", "loss_momentum": 0.8}, "--loss-momentum"),
        ({"selection": "neighbours", "mode_gate": 2.0}, "--mode-gate"),
        ({"noise_metric": "js", "ema_scoring": True, "ema_decay": 0.9}, "--noise-metric js"),
        ({"ema_prediction": True}, "--ema-prediction: needs --ema-decay"),
        ({"mixup": False, "cutmix": 0.5}, "--cutmix: does nothing with --no-mixup"),
        ({"mixup": False, "mixup_alpha": 4}, "--mixup-alpha: does nothing with --no-mixup"),
        ({"correct": False, "debias": 1}, "--debias: does nothing with --no-correct"),
        (
            {"correct": False, "ema_decay": 0.9, "ema_pseudo_labels": True},
            "--ema-pseudo-labels: does nothing with --no-correct",
        ),
    ):
        with pytest.raises(InputError, match=message):
            method_of(**switches)
    method_of(noise_metric="js", ema_scoring=True, ema_prediction=True, ema_decay=0.9)


# ------------------------------------------------------------------------------ all switches off


def test_with_all_switches_off_a_step_and_both_stages_are_those_of_pls():
    plus, plain = method_of(), build(Settings(epochs=EPOCHS, warmup=W), GIVEN, C, False)
    for ours, theirs in zip(plus.phases(), plain.phases(), strict=True):
        (a,), (b,) = ours.steps, theirs.steps
        same = {"draws", "lambdas", "trains", "streams", "cost"}
        assert all(getattr(a, name) == getattr(b, name) for name in same)
        assert replace(ours, steps=()) == replace(theirs, steps=())
    batch = batch_of(36)
    states = []
    for method in (plus, plain):
        state = method.start(GIVEN, C)
        method.begin_epoch(state, W)
        loss = method.loss(outputs_for(method.show(VIEWS, batch)), batch, state)
        method.scoring(W).run(FakeScorer(GIVEN, normal(N, C)), state)
        states.append(tensors_of(state) | {"loss": loss})
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


def test_own_metrics():
    method = method_of(warmup_trend=True)
    state = scored(method, lambda epoch: sure_of(GIVEN), range(W))
    true_N = torch.where(torch.arange(N) % 3 == 0, (GIVEN + 1) % C, GIVEN)
    state.store(
        torch.arange(N), F.one_hot(torch.where(torch.arange(N) < 30, true_N, GIVEN), C).float()
    )
    found = method.own_metrics(state, GIVEN, true_N)
    assert found.keys() == {"separation", "rose", "right_on_wrong"}
    assert found["right_on_wrong"] == 50
    assert method.own_metrics(state, GIVEN, None).keys() == {"separation", "rose"}
    assert "right_on_wrong" not in method.own_metrics(state, GIVEN, GIVEN)
