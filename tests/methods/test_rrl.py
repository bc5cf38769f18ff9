"""RRL: its equations against slow forms, their laws, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, FakeScorer, make_batch, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.methods import build, metrics, rrl
from pseudoloss.methods.base import NET, Outputs
from pseudoloss.nn.augment import AUGMIX_DRAWS, augmix_view
from pseudoloss.nn.views import WEAK_DRAWS, Views

N, B, C, D = 40, 6, 4, 3
EPOCHS, W = 12, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
OTHERS = torch.tensor([1, 2, 0, 4, 5, 3])
MIXES = ((SWAP, 0.7), (OTHERS, 0.4))
CLASSES = ["a", "b", "c", "d"]


def method_of(**changes):
    values = {"method": "rrl", "epochs": EPOCHS, "warmup": W, "projection": D, "neighbours": 5}
    return build(Settings(**values | changes), GIVEN, C, False)


def randn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed))


def middle_of_a_run(method, seed=0):
    """A state with soft labels and prototypes, in which some images are not used."""
    state = method.start(GIVEN, C)
    state.soft_NC.copy_(randn(N, C, seed=seed, scale=3).softmax(1))
    state.hard_N.copy_(state.soft_NC.argmax(1))
    state.used_N.copy_(torch.arange(N) % 3 > 0)
    state.prototype_CD.copy_(unit(C, D, seed=seed + 1))
    method.begin_epoch(state, 8)
    return state


def outputs(seed=0, scale=2.0):
    """Logits, projections and reconstruction errors of the four views."""
    views = [
        (
            randn(B, C, seed=seed + i, scale=scale),
            randn(B, D, seed=seed + 10 + i, scale=scale),
            randn(B, 1, seed=seed + 20 + i).abs(),
        )
        for i in range(4)
    ]
    return {NET: Outputs([], [tuple(t.requires_grad_() for t in view) for view in views])}


# ------------------------------------------------------------------------------------ slow forms


def slow_normalise(rows):
    return [[v / math.sqrt(sum(w * w for w in row)) for v in row] for row in rows]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def slow_instance_contrast(weak, strong, tau):
    """-log of the share that the own strong view has among both views of the other images."""
    losses = []
    for i, z in enumerate(weak):
        own = math.exp(dot(z, strong[i]) / tau)
        others = sum(
            math.exp(dot(z, other) / tau)
            for views in (weak, strong)
            for j, other in enumerate(views)
            if j != i
        )
        losses.append(-math.log(own / (own + others)))
    return sum(losses) / len(losses)


def slow_prototype_contrast(mixed, target, prototypes, tau):
    logits = [[dot(z, c) / tau for c in prototypes] for z in mixed]
    return slow_cross_entropy(logits, target)


def slow_votes(z, soft, k, tau):
    """The mean soft label of the k nearest others, by exp(z·z/τ)."""
    found = []
    for i, own in enumerate(z):
        near = sorted((j for j in range(len(z)) if j != i), key=lambda j: -dot(own, z[j]))[:k]
        weights = [math.exp(dot(own, z[j]) / tau) for j in near]
        found.append(
            [
                sum(w * soft[j][c] for w, j in zip(weights, near, strict=True)) / sum(weights)
                for c in range(len(soft[0]))
            ]
        )
    return found


def slow_loss(method, found, batch, state):
    o, views = method.options, found[NET].with_grad
    logits = views[0][0].tolist()
    z = [slow_normalise(view[1].tolist()) for view in views]
    used = [bool(state.used_N[i]) for i in batch.index_B]
    target = [[float(c == state.hard_N[i]) for c in range(C)] for i in batch.index_B]
    number = max(sum(used), 1)
    fit = dot(slow_cross_entropy(logits, target), used) / number
    reconstruction = sum(view[2].mean().item() for view in views[:2])
    instance = slow_instance_contrast(z[0], z[1], o.temperature)
    prototype = 0.0
    for mixed, mix in zip(z[2:], batch.mixes, strict=True):
        lam, partner = float(mix.lam), mix.partner_B.tolist()
        labels = [
            [lam * a + (1 - lam) * b for a, b in zip(target[i], target[j], strict=True)]
            for i, j in enumerate(partner)
        ]
        losses = slow_prototype_contrast(mixed, labels, state.prototype_CD.tolist(), o.temperature)
        prototype += dot(losses, used) / number / 2
    return (
        fit
        + o.reconstruction_weight * reconstruction
        + o.instance_weight * instance
        + float(state.prototype_weight) * prototype
    )


@pytest.mark.parametrize("tau", [0.3, 1.0, 0.05])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_instance_contrast(tau, size):
    weak, strong = unit(size, D), unit(size, D, seed=1)
    wanted = slow_instance_contrast(weak.tolist(), strong.tolist(), tau)
    assert rrl.instance_contrast(weak, strong, tau).item() == pytest.approx(
        wanted, rel=1e-4, abs=1e-6
    )


def test_prototype_contrast():
    mixed, prototypes, target = unit(B, D), unit(C, D, seed=1), randn(B, C, seed=2).softmax(1)
    ours = rrl.prototype_contrast(mixed, target, prototypes, 0.3)
    wanted = slow_prototype_contrast(mixed.tolist(), target.tolist(), prototypes.tolist(), 0.3)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


@pytest.mark.parametrize("used", ["some", "all", "none"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"contrast_temperature": 0.1, "prototype_weight": 2, "prototype_ramp": 0},
        {"instance_weight": 0, "reconstruction_weight": 3},
    ],
    ids=str,
)
def test_the_loss(changes, used):
    method = method_of(**changes)
    state = middle_of_a_run(method)
    if used != "some":
        state.used_N.fill_(used == "all")
    batch, found = make_batch(INDEX, GIVEN, mixes=MIXES), outputs()
    assert 0 < state.used_N[INDEX].sum() < B or used != "some"
    loss = method.loss(found, batch, state)
    assert loss.item() == pytest.approx(slow_loss(method, found, batch, state), rel=1e-4)


def test_the_weight_of_the_prototypes():
    """0 without prototypes, then min(1 + 4·e/40, 5)."""
    found = [rrl.ramp(epoch, 5, 40) for epoch in (0, 1, 10, 39, 40, 41, 199)]
    assert found == pytest.approx([0, 1.1, 2, 4.9, 5, 5, 5])
    assert [rrl.ramp(epoch, 5, 0) for epoch in (0, 1, 2)] == [0, 5, 5]
    assert [rrl.ramp(epoch, 0.5, 40) for epoch in (0, 1, 2, 199)] == [0, 0.5, 0.5, 0.5]
    assert {rrl.ramp(epoch, 0, 40) for epoch in range(200)} == {0}  # off
    method = method_of()
    state = method.start(GIVEN, C)
    method.begin_epoch(state, 10)
    assert float(state.prototype_weight) == 2


# ------------------------------------------------------------------------------- cleaning labels


@pytest.mark.parametrize("chunk", [3, 1000])
def test_prototypes_are_normalised_means_of_their_classes(monkeypatch, chunk):
    monkeypatch.setattr(rrl, "PART", chunk)
    z, before = unit(N, D), unit(C, D, seed=1)
    used = torch.arange(N) % 3 > 0
    used[GIVEN == 2] = False
    ours, stale = rrl.class_means(z, GIVEN, used, before)
    assert stale.tolist() == [False, False, True, False]
    for c in range(C):
        rows = [z[i].tolist() for i in range(N) if used[i] and GIVEN[i] == c]
        if not rows:
            assert torch.equal(ours[c], before[c])  # the guard: no mean of nothing
            continue
        (wanted,) = slow_normalise([np.mean(rows, axis=0).tolist()])
        np.testing.assert_allclose(ours[c], wanted, rtol=1e-4, atol=1e-5)


def test_without_any_used_image_all_prototypes_stay():
    before = unit(C, D)
    ours, stale = rrl.class_means(
        unit(N, D, seed=1), GIVEN, torch.zeros(N, dtype=torch.bool), before
    )
    assert torch.equal(ours, before)
    assert stale.all()


def test_a_given_label_is_kept_where_it_is_plausible():
    soft = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.05, 0.05, 0.9]])
    given_labels = torch.tensor([1, 2, 2])
    ours = rrl.keep_given(soft, given_labels, 0.2)
    assert ours.tolist() == [[0, 1, 0], pytest.approx([0.6, 0.3, 0.1]), [0, 0, 1]]


def scorer_of(logits_NC, z_ND):
    return FakeScorer(GIVEN, logits_NC, projections_ND=z_ND)


def slow_cleaning(p, soft, z, method):
    """New soft labels, hard labels, which are used, and which are flagged."""
    o = method.options
    votes = slow_votes(z, soft, o.neighbours, o.temperature)
    new, hard, used, flagged = [], [], [], []
    for p_C, votes_C, y in zip(p, votes, GIVEN.tolist(), strict=True):
        s = [(a + b) / 2 for a, b in zip(p_C, votes_C, strict=True)]
        if s[y] > o.keep_threshold:
            s = [float(c == y) for c in range(C)]
        new.append(s)
        hard.append(max(range(C), key=s.__getitem__))
        used.append(max(s) > o.use_threshold)
        flagged.append(hard[-1] != y or not used[-1])
    return new, hard, used, flagged


def assert_cleaned(state, wanted):
    soft, hard, used, flagged = wanted
    np.testing.assert_allclose(state.soft_NC, soft, rtol=1e-4, atol=1e-6)
    assert state.hard_N.tolist() == hard
    assert state.used_N.tolist() == used
    assert state.noisy_N.tolist() == flagged
    assert 0 < sum(flagged) < N
    given_share = [s[y] for s, y in zip(soft, GIVEN.tolist(), strict=True)]
    np.testing.assert_allclose(state.p_noisy_N, [1 - s for s in given_share], atol=1e-5)


def test_cleaning_over_three_epochs(monkeypatch):
    """The first soft labels of the neighbours are the predictions; later ones are those of the
    epoch before."""
    monkeypatch.setattr(metrics, "ROWS", 7)
    monkeypatch.setattr(metrics, "COLUMNS", 9)
    method = method_of(keep_threshold=0.3, use_threshold=0.5)
    state, soft = method.start(GIVEN, C), None
    for epoch in range(W - 1, W + 2):
        logits, z = randn(N, C, seed=epoch, scale=3), unit(N, D, seed=epoch + 50)
        p = [softmax(row) for row in logits.tolist()]
        if soft is None:
            one_hot = F.one_hot(GIVEN, C).double().tolist()
            soft = [
                hot if row[y] > 0.3 else row
                for row, hot, y in zip(p, one_hot, GIVEN.tolist(), strict=True)
            ]
        wanted = slow_cleaning(p, soft, z.tolist(), method)
        before = state.prototype_CD.clone()
        scoring = method.scoring(epoch)
        assert scoring.fixed_shapes
        scoring.run(scorer_of(logits, z), state)
        assert_cleaned(state, wanted)
        prototypes, stale = rrl.class_means(z, state.hard_N, state.used_N, before)
        assert torch.equal(state.prototype_CD, prototypes)
        assert torch.equal(state.stale_C, stale)
        soft = wanted[0]


def test_before_the_first_cleaning_all_images_train_with_given_labels():
    method = method_of()
    state = method.start(GIVEN, C)
    z = unit(N, D)
    for epoch in range(W - 1):
        assert method.scores_after(epoch)
        method.scoring(epoch).run(scorer_of(randn(N, C, seed=epoch), z), state)
        assert state.used_N.all()
        assert torch.equal(state.hard_N, GIVEN)
        assert not state.noisy_N.any()
        verdict = method.verdict(state, epoch)
        assert verdict.suggested_N is None
    wanted, _ = rrl.class_means(z, GIVEN, state.used_N, torch.zeros(C, D))
    torch.testing.assert_close(state.prototype_CD, wanted)
    torch.testing.assert_close(
        state.loss_N, F.cross_entropy(randn(N, C, seed=2), GIVEN, reduction="none")
    )


def test_the_default_of_the_keep_threshold():
    for classes, wanted in ((10, 0.1), (100, 0.02), (4, 0.25), (1000, 0.02)):
        given_labels = torch.arange(2000) % classes
        method = build(Settings(method="rrl"), given_labels, classes, False)
        assert method.options.keep_threshold == pytest.approx(wanted)
    assert method_of(keep_threshold=0.0).options.keep_threshold == 0


def test_the_search_of_a_huge_dataset_is_not_captured():
    method = method_of()
    assert method.scoring(W).fixed_shapes
    huge = rrl.RRL(method.detector, method.options, EPOCHS, W, metrics.CAPTURED + 1)
    assert not huge.scoring(W).fixed_shapes


# ------------------------------------------------------------------------------------------ views


def test_the_views():
    """A weak and an AugMix view, and each of them mixed with one view of the partner."""
    method = method_of()
    views = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
    images = torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8)
    batch = make_batch(INDEX, GIVEN, images, MIXES, draws=WEAK_DRAWS + AUGMIX_DRAWS + 1)
    shown = method.show(views, batch)[NET]
    assert not shown.no_grad
    weak, strong, first, second = shown.with_grad
    draws = batch.draws_BK
    torch.testing.assert_close(weak, views.weak(images, draws[:, :WEAK_DRAWS]))
    rest = draws[:, WEAK_DRAWS : WEAK_DRAWS + AUGMIX_DRAWS]
    torch.testing.assert_close(strong, augmix_view(views, images, rest))
    swapped = draws[:, WEAK_DRAWS + AUGMIX_DRAWS] < 0.5
    assert 0 < swapped.sum() < B
    for i in range(B):
        j, k = SWAP[i], OTHERS[i]
        other = strong[j] if swapped[j] else weak[j]
        torch.testing.assert_close(first[i], 0.7 * weak[i] + 0.3 * other)
        other = weak[k] if swapped[k] else strong[k]
        torch.testing.assert_close(second[i], 0.4 * strong[i] + 0.6 * other)
    released = method_of(as_released=True).show(views, batch)[NET].with_grad[1]
    torch.testing.assert_close(released, augmix_view(views, images, rest, one_chain=True))


# ------------------------------------------------------------------------------------------- laws


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), tau=st.floats(0.05, 10))
def test_views_of_an_image_that_agree_lower_the_contrast(seed, tau):
    weak, strong = unit(B, D, seed=seed), unit(B, D, seed=seed + 1)
    loss = rrl.instance_contrast(weak, strong, tau)
    assert rrl.instance_contrast(weak, weak, tau) <= loss + 1e-5
    # Where all are equal, each candidate has the same share.
    same = weak[:1].expand(B, D)
    torch.testing.assert_close(
        rrl.instance_contrast(same, same, tau), torch.tensor(math.log(2 * B - 1))
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, 60))
def test_votes_of_distributions_are_distributions(seed, k):
    z, soft = unit(N, D, seed=seed), randn(N, C, seed=seed + 1, scale=4).softmax(1)
    votes = torch.cat([votes for _, votes in metrics.neighbour_votes(z, soft, k, 0.3)])
    torch.testing.assert_close(votes.sum(1), torch.ones(N))
    assert (votes >= 0).all()
    if k >= N - 1:  # all others
        others = torch.ones(N, N) - torch.eye(N)
        weights = others * (z @ z.T / 0.3).exp()
        torch.testing.assert_close(votes, weights @ soft / weights.sum(1, keepdim=True))


def test_unused_images_have_no_gradient_but_that_of_the_contrast():
    method = method_of(instance_weight=0, reconstruction_weight=0)
    state = middle_of_a_run(method)
    batch = make_batch(INDEX, GIVEN, mixes=MIXES)
    found = outputs()
    method.loss(found, batch, state).backward()
    used = state.used_N[INDEX]
    for view, kind in ((0, 0), (2, 1), (3, 1)):
        gradient = found[NET].with_grad[view][kind].grad.abs().sum(1)
        assert torch.equal(gradient > 0, used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 300.0, 0.0])
@pytest.mark.parametrize("used", [True, False])
def test_gradients_are_finite_at_extreme_outputs(scale, dtype, used):
    method = method_of()
    state = middle_of_a_run(method)
    state.used_N.fill_(used)
    state.prototype_CD[1] = 0  # of a class that was never seen
    views = [
        tuple((randn(B, k, seed=i, scale=scale)).to(dtype).requires_grad_() for k in (C, D, 1))
        for i in range(4)
    ]
    loss = method.loss({NET: Outputs([], views)}, make_batch(INDEX, GIVEN, mixes=MIXES), state)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    for view in views:
        assert all(t.grad is None or t.grad.isfinite().all() for t in view)


@pytest.mark.parametrize("logits", [0.0, 1e4])
@pytest.mark.parametrize("z", ["equal", "zero"])
def test_cleaning_is_finite_whatever_the_network_says(logits, z):
    """A class without images, a network that has collapsed."""
    given_labels = GIVEN.clamp(max=2)
    method = method_of()
    state = method.start(given_labels, C)
    z_ND = torch.zeros(N, D) if z == "zero" else unit(1, D).expand(N, D).contiguous()
    logits_NC = logits * F.one_hot(torch.ones(N, dtype=torch.long), C).float()
    scorer = FakeScorer(given_labels, logits_NC, projections_ND=z_ND)
    for epoch in range(W + 2):
        method.begin_epoch(state, epoch)
        method.scoring(epoch).run(scorer, state)
        assert state.soft_NC.isfinite().all()
        assert state.prototype_CD.isfinite().all()
        assert state.stale_C[3]
        assert (state.prototype_CD[3] == 0).all()
        loss = method.loss(outputs(), make_batch(INDEX, given_labels, mixes=MIXES), state)
        assert loss.isfinite()


# ---------------------------------------------------------------------------- verdict and notices


def test_the_class_of_the_soft_label_is_suggested_and_trusted_by_its_share():
    method = method_of()
    state = middle_of_a_run(method)
    verdict = method.verdict(state, W)
    assert torch.equal(verdict.suggested_N, state.soft_NC.argmax(1))
    torch.testing.assert_close(verdict.trust_N, state.soft_NC.max(1).values)


def test_what_is_noticed():
    method = method_of()
    state = method.start(GIVEN, C)
    found = method.notices(state, W, [0.3], CLASSES)
    assert set(found.values()) == {None}
    state.stale_C[2] = True
    found = method.notices(state, W, [0.3], CLASSES)
    assert found["prototypes"].startswith("the class c has no image with a confident label and ")
    state.stale_C[1] = True
    found = method.notices(state, W, [0.3], CLASSES)
    assert found["prototypes"].startswith("2 of 4 classes have no image with a confident label")
    state.used_N[:] = False
    found = method.notices(state, W, [1.0], CLASSES)
    assert found["used"].startswith("only 0.0% of the images have a label that is confident enough")
    for share, epoch, said in ((0.0, W, True), (0.0, W - 1, False), (0.01, W, False)):
        found = method.notices(state, epoch, [0.3, share], CLASSES)["kept"]
        assert (found is not None) == said
    assert method.notices_at_start() == {"warm-up only": None}
    only = method_of(warmup=EPOCHS).notices_at_start()["warm-up only"]
    assert only.startswith("all epochs are warm-up, so RRL never corrects a label")


def test_options_are_those_of_the_settings():
    own = Settings(method="rrl").method_settings
    options = method_of().options
    for name in ("instance_weight", "prototype_weight", "reconstruction_weight", "use_threshold"):
        assert getattr(options, name) == getattr(own, name)
    assert options.temperature == own.contrast_temperature
    assert options.ramp_epochs == own.prototype_ramp
    assert options.dimensions == D
    assert not options.one_chain
