"""Algorithm 1: what a step of PLS computes, what happens after an epoch, and every switch."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, FakeScorer, make_batch
from torch import nn

from pseudoloss.config import Settings
from pseudoloss.engine.steps import forward
from pseudoloss.methods import build, pls
from pseudoloss.methods.base import NET, fold, no_mixing, uniform
from pseudoloss.methods.losses import cross_entropy
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pseudo_labels import PLSState
from pseudoloss.nn.networks import Network
from pseudoloss.nn.networks import build as build_network
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS, Views

N, B, C = 20, 6, 4
OTHERS = torch.tensor([1, 2, 0, 4, 5, 3])  # partners of a second mix
BOTH = ((SWAP, 0.7), (OTHERS, 0.4))


class Watched(nn.Module):
    """A network that records its inputs, its mode and its outputs."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = []

    def forward(self, x):
        logits, projection = self.inner(x)
        self.calls.append(
            SimpleNamespace(
                view=x.detach(),
                training=self.training,
                with_grad=torch.is_grad_enabled(),
                logits=logits,
                projection=projection,
            )
        )
        return logits, projection

    forward_views = Network.forward_views
    frozen = Network.frozen
    fused = False


@pytest.fixture
def run():
    """A small network, a batch and the state of half-noisy labels; `run.loss` makes one step."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8)
    given = torch.arange(N) % C
    network = Watched(
        build_network("small-cnn", channels=3, size=(8, 8), classes=C, projection=5)
    ).train()
    views = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
    state = PLSState.begin(given, C)
    state.noisy_N[::2] = True
    state.trust_N[::2] = torch.linspace(0.1, 0.9, N // 2)
    index = torch.tensor([4, 1, 10, 7, 18, 3])
    batch = make_batch(index, given, images[index], mixes=BOTH)

    def loss(**changes):
        """The loss of a step; the running statistics of the network are put back."""
        network.calls.clear()
        before = {name: value.clone() for name, value in network.state_dict().items()}
        (step,) = build(Settings(**changes), given, C, False).phases()[1].steps
        shown = step.show(views, batch)
        outputs = {role: forward(network, of) for role, of in shown.items()}
        value = step.loss(outputs, batch, state)
        network.load_state_dict(before)
        return value

    return SimpleNamespace(
        given=given,
        network=network,
        views=views,
        state=state,
        index=index,
        batch=batch,
        loss=loss,
        weak=views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS]),
    )


def pls_of(given, **changes):
    return build(Settings(**changes), given, C, False)


# ---------------------------------------------------------------------------------------- a step


def test_the_step_is_the_sum_of_the_terms_of_the_paper(run):
    """Lines 11 to 27, written out again around the outputs of the network."""
    loss = run.loss()
    first, second, mixed, strong = run.network.calls
    mix = run.batch.mixes[0]
    torch.testing.assert_close(first.view, run.weak)
    torch.testing.assert_close(mixed.view, mix.of(run.weak))
    for other in (second, strong):
        assert not torch.equal(first.view, other.view)

    pseudo = (first.logits.softmax(1) + second.logits.softmax(1)) ** 2
    pseudo = pseudo / pseudo.sum(1, keepdim=True)
    torch.testing.assert_close(run.state.pseudo_labels(run.index), pseudo)
    noisy, w = run.state.noisy_N[run.index], run.state.trust_N[run.index]
    target = torch.where(noisy[:, None], pseudo, F.one_hot(run.batch.given_B, C).float())
    label = pls.contrastive_label(pls.class_of_mixed(target, mix), w)
    wanted = (
        pls.classification_separate(mixed.logits, target, w, mix)
        + pls.class_balance(mixed.logits, torch.full((C,), 1 / C))
        + pls.contrastive_loss(
            pls.feature_similarity(mixed.projection, strong.projection, 0.2),
            pls.similarity_of_rows(label, mix),
        )
    )
    torch.testing.assert_close(loss, wanted)


def test_random_numbers_are_shared_out_between_the_views(run):
    """The second weak view and the strong one use what the first leaves."""
    run.loss()
    _, second, _, strong = run.network.calls
    draws, images = run.batch.draws_BK, run.batch.images_BCHW
    assert draws.shape[1] == 2 * WEAK_DRAWS + STRONG_DRAWS
    weak_draws = draws[:, WEAK_DRAWS : 2 * WEAK_DRAWS]
    torch.testing.assert_close(second.view, run.views.weak(images, weak_draws))
    torch.testing.assert_close(strong.view, run.views.strong(images, draws[:, 2 * WEAK_DRAWS :]))


def test_only_the_mixed_and_the_strong_view_have_gradients(run):
    run.loss()
    assert [call.with_grad for call in run.network.calls] == [False, False, True, True]


def test_pseudo_labels_are_made_in_training_mode_or_on_request_in_evaluation_mode(run):
    """Row 12."""
    run.loss()
    assert [call.training for call in run.network.calls] == [True] * 4
    run.loss(pseudo_label_mode="eval")
    assert [call.training for call in run.network.calls] == [False, False, True, True]
    assert run.network.training


@pytest.mark.parametrize(("mode", "counted"), [("train", 4), ("eval", 2)])
def test_running_statistics_follow_the_views_in_training_mode(run, mode, counted):
    (step,) = pls_of(run.given, pseudo_label_mode=mode).phases()[1].steps
    norm = run.network.inner.backbone.norms[0]
    before = norm.num_batches_tracked.item()
    forward(run.network, step.show(run.views, run.batch)[NET])
    assert norm.num_batches_tracked.item() == before + counted


def test_labels_that_are_not_flagged_are_trained_as_given(run):
    run.state.noisy_N.fill_(False)
    run.state.trust_N.fill_(1)
    loss = run.loss(contrast=False, balance=0)
    target = F.one_hot(run.batch.given_B, C).float()
    logits = run.network.calls[-1].logits
    wanted = cross_entropy(logits, run.batch.mixes[0].of(target)).mean()
    torch.testing.assert_close(loss, wanted)


# -------------------------------------------------------------------------------------- switches


def test_without_correction_no_pseudo_labels_are_made(run):
    before = run.state.pseudo_labels(slice(None)).clone()
    run.loss(correct=False)
    assert len(run.network.calls) == 2
    assert torch.equal(run.state.pseudo_labels(slice(None)), before)
    method = pls_of(run.given, correct=False)
    assert method.verdict(run.state, 199).trust_N is None
    assert method.scoring(199).run == method.stage1


def test_without_contrast_there_is_no_strong_view(run):
    run.loss(contrast=False)
    assert len(run.network.calls) == 3


def test_without_any_trust_the_loss_is_that_of_full_trust(run):
    off = run.loss(trust_in_classification=False, trust_in_contrast=False)
    run.state.trust_N.fill_(1)
    torch.testing.assert_close(off, run.loss())


@pytest.mark.parametrize(
    "switch",
    [
        {"contrast": False},
        {"trust_in_classification": False},
        {"trust_in_contrast": False},
        {"balance": 0},
        {"correct": False},
        {"gamma": 1.0},
        {"mu": 0.5},
        {"pseudo_label_norm": "max"},
        {"pseudo_label_mode": "eval"},
        {"weighting": "interpolated"},
        {"weighting": "first"},
        {"contrast_labels": "mixed"},
        {"contrast_mix": "separate"},
    ],
)
def test_every_switch_changes_the_loss(run, switch):
    assert run.loss().item() != pytest.approx(run.loss(**switch).item(), rel=1e-5)


def test_mixed_contrast_labels_are_y_mix_times_its_transpose(run):
    """Row 7: only the contrastive term differs, by L' = Y_mix Y_mixᵀ in NumPy."""
    rest = run.loss(contrast=False).item()
    loss = run.loss(contrast_labels="mixed").item()
    first, second, mixed, strong = run.network.calls
    mix = run.batch.mixes[0]
    pseudo = pls.make_pseudo_labels(first.logits, second.logits, 2.0)
    noisy, w = run.state.noisy_N[run.index], run.state.trust_N[run.index].numpy()
    target = torch.where(noisy[:, None], pseudo, F.one_hot(run.batch.given_B, C).float())
    classes = pls.class_of_mixed(target, mix).numpy()
    Y = [[*(w[i] * classes[i]), *((1 - w[i]) * (i == k) for k in range(B))] for i in range(B)]
    Y = torch.tensor(Y)
    Y_mix = 0.7 * Y + 0.3 * Y[SWAP]
    P = pls.feature_similarity(mixed.projection, strong.projection, 0.2)
    wanted = pls.contrastive_loss(P, Y_mix @ Y_mix.T).item()
    assert loss - rest == pytest.approx(wanted, rel=1e-4)


def test_a_separate_contrastive_mix_has_partners_and_a_lambda_of_its_own(run):
    """Row 6: a third view with gradients, mixed by the second mix of the batch."""
    rest = run.loss(contrast=False).item()
    loss = run.loss(contrast_mix="separate").item()
    first, second, mixed, strong, own = run.network.calls
    assert [call.with_grad for call in run.network.calls] == [False, False, True, True, True]
    torch.testing.assert_close(mixed.view, 0.7 * run.weak + 0.3 * run.weak[SWAP])
    torch.testing.assert_close(own.view, 0.4 * run.weak + 0.6 * run.weak[OTHERS])
    mix = run.batch.mixes[1]
    pseudo = pls.make_pseudo_labels(first.logits, second.logits, 2.0)
    noisy, w = run.state.noisy_N[run.index], run.state.trust_N[run.index]
    target = torch.where(noisy[:, None], pseudo, F.one_hot(run.batch.given_B, C).float())
    label = pls.contrastive_label(pls.class_of_mixed(target, mix), w)
    P = pls.feature_similarity(own.projection, strong.projection, 0.2)
    wanted = pls.contrastive_loss(P, pls.similarity_of_rows(label, mix)).item()
    assert loss - rest == pytest.approx(wanted, rel=1e-4)


def test_the_step_asks_for_as_many_mixes_as_it_uses(run):
    def step(**changes):
        return pls_of(run.given, **changes).phases()[1].steps[0]

    assert step().lambdas == (fold,)
    assert step(contrast_mix="separate").lambdas == (fold, fold)
    assert step(contrast_mix="separate").cost == step().cost + 3
    assert step(correct=False, contrast=False).cost == 3


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({}, fold), ({"mixup_lambda": "uniform"}, uniform), ({"mixup": False}, no_mixing)],
)
def test_lambda_follows_its_setting_in_both_phases(run, changes, rule):
    """Row 5."""
    for contrast_mix in ("shared", "separate"):
        phases = pls_of(run.given, contrast_mix=contrast_mix, **changes).phases()
        assert {rule for phase in phases for rule in phase.steps[0].lambdas} == {rule}


# -------------------------------------------------------------------------------- after an epoch

W = 3  # warm-up epochs


def scored(seed=0, n=60, **changes):
    """A method, a state with pseudo-labels, and a scorer. A third of the labels are wrong."""
    random = torch.Generator().manual_seed(seed)
    given = torch.arange(n) % C
    true = torch.where(torch.arange(n) % 3 == 0, (given + 1) % C, given)
    plain, first, second = (
        4 * F.one_hot(true, C) + torch.randn(n, C, generator=random) for _ in range(3)
    )
    scorer = FakeScorer(given, plain, weak=[first, second])
    method = build(Settings(epochs=9, warmup=W, threshold=0.5, **changes), given, C, False)
    state = method.start(given, C)
    state.store(torch.arange(n), torch.randn(n, C, generator=random).softmax(1))
    return method, state, scorer


def test_losses_and_pseudo_losses_are_those_of_the_plain_view():
    method, state, scorer = scored()
    method.scoring(W).run(scorer, state)
    plain, given = scorer.plain_NC, scorer.given_N
    torch.testing.assert_close(state.loss_N, F.cross_entropy(plain, given, reduction="none"))
    wanted = cross_entropy(plain, state.pseudo_labels(slice(None)))
    torch.testing.assert_close(state.pseudo_loss_N, wanted)
    assert torch.equal(state.predicted_N.long(), plain.argmax(1))
    assert scorer.asked == [(True, 0, None)]  # one pass over all images


def test_stage_2_is_fitted_to_the_images_that_stage_1_flags():
    method, state, scorer = scored()
    method.scoring(W).run(scorer, state)
    first = fit_two_modes(state.loss_N)
    torch.testing.assert_close(state.p_noisy_N, 1 - first.low_N)
    assert torch.equal(state.noisy_N, 1 - first.low_N > 0.5)
    assert 0 < int(state.noisy_N.sum()) < len(state.noisy_N)
    second = fit_two_modes(state.pseudo_loss_N[state.noisy_N])
    torch.testing.assert_close(state.trust_N[state.noisy_N], second.low_N)
    assert (state.trust_N[~state.noisy_N] == 1).all()
    assert bool(state.fitted)
    assert bool(state.trust_fitted)


def test_trust_waits_for_pseudo_labels():
    """Row 11: labels are flagged one epoch before the first trust."""
    method, state, scorer = scored()
    assert [method.scores_after(epoch) for epoch in range(W + 1)] == [False, False, True, True]
    method.scoring(W - 1).run(scorer, state)
    assert state.noisy_N.any()
    assert (state.trust_N == 1).all()
    assert not bool(state.trust_fitted)
    verdict = method.verdict(state, W - 1)
    assert (verdict.suggested_N, verdict.trust_N) == (None, None)
    method.scoring(W).run(scorer, state)
    verdict = method.verdict(state, W)
    assert torch.equal(verdict.suggested_N, state.pseudo_class_N)
    assert verdict.trust_N is state.trust_N
    assert verdict.noisy_N is state.noisy_N
    assert method.scoring(W).fixed_shapes
    assert method.scoring(W).weak_views == 0


def test_initial_trust_comes_before_the_first_epoch_after_the_warm_up():
    """Row 11, Algorithm 1: pseudo-labels of all images in evaluation mode, then both stages."""
    method, state, scorer = scored(initial_trust=True)
    assert method.scoring(W - 2).run == method.stage1
    scoring = method.scoring(W - 1)
    assert (scoring.weak_views, scoring.fixed_shapes) == (2, False)
    before = state.pseudo_labels(slice(None)).clone()
    scoring.run(scorer, state)
    assert scorer.asked == [(False, 2, None), (True, 0, None)]
    pseudo = pls.make_pseudo_labels(*scorer.weak, 2.0)
    torch.testing.assert_close(state.pseudo_labels(slice(None)), pseudo)
    assert not torch.equal(pseudo, before)
    torch.testing.assert_close(state.pseudo_loss_N, cross_entropy(scorer.plain_NC, pseudo))
    second = fit_two_modes(state.pseudo_loss_N, state.noisy_N)
    torch.testing.assert_close(state.trust_N, second.low_N)
    assert (state.trust_N[state.noisy_N] < 1).any()
    assert method.verdict(state, W - 1).trust_N is state.trust_N
    assert method.verdict(state, W - 2).trust_N is None
    assert method.scoring(W).run == method.both_stages  # as without it from here on


def test_initial_trust_needs_correction():
    method, state, scorer = scored(initial_trust=True, correct=False)
    method.scoring(W - 1).run(scorer, state)
    assert (state.trust_N == 1).all()


@pytest.mark.parametrize("metric", ["confidence", "entropy"])
def test_trust_by_another_metric_of_the_pseudo_labels(metric):
    method, state, scorer = scored(trust_metric=metric)
    method.scoring(W).run(scorer, state)
    p = state.pseudo_labels(slice(None))
    value = {"confidence": 1 - p.amax(1), "entropy": -(p * p.log()).sum(1)}[metric]
    wanted = fit_two_modes(value, state.noisy_N).low_N
    torch.testing.assert_close(state.trust_N, wanted, atol=1e-4, rtol=1e-4)


def test_trust_by_a_threshold_is_zero_or_one():
    method, state, scorer = scored(trust_metric="threshold", trust_threshold=0.4)
    method.scoring(W).run(scorer, state)
    sure = state.pseudo_labels(slice(None)).amax(1) > 0.4
    assert torch.equal(state.trust_N, (~state.noisy_N | sure).float())
    assert set(state.trust_N.tolist()) == {0.0, 1.0}
    assert "stage 2" not in method.notices(state, W, [0.3], [])


def test_comparing_metrics_adds_those_of_pseudo_labels_once_there_are_any():
    method, state, scorer = scored()
    method.scoring(W).run(scorer, state)
    scorer.projections_ND = F.normalize(scorer.plain_NC)
    true = torch.where(torch.arange(60) % 3 == 0, (scorer.given_N + 1) % C, scorer.given_N)
    early = method.compare(scorer, state, true, W - 1)
    assert early["metrics"]["pseudo_labels"] is None
    assert "bias" not in early
    found = method.compare(scorer, state, true, W)
    assert list(found["metrics"]["noise"]) == ["loss", "agreement", "disagreement", "js", "kl"]
    assert found["metrics"]["noise"]["loss"] > 0.9
    assert list(found["metrics"]["pseudo_labels"]) == ["pseudo-loss", "confidence", "entropy"]
    assert found["bias"].keys() == {"learned", "fitted"}
    assert found["pseudo_loss"] is not None
    every = pls_of(scorer.given_N, trust_in_classification=False)
    unweighted = every.compare(scorer, state, true, 199)["bias"]["learned"]
    wrong = (state.pseudo_class_N != true) & state.noisy_N
    assert unweighted == pytest.approx(int(wrong.sum()) / int(state.noisy_N.sum()))
