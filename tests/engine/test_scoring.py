"""What methods can ask about all images, and what detection and PLS make of the answers."""

import pytest
import torch
import torch.nn.functional as F

from pseudoloss import methods
from pseudoloss.config import Settings
from pseudoloss.data.storage import DeviceImages
from pseudoloss.engine.history import History
from pseudoloss.engine.scoring import ImageScorer
from pseudoloss.inference import passes
from pseudoloss.inference.ensemble import Ensemble
from pseudoloss.inference.passes import images_at_once
from pseudoloss.methods import metrics, pls_metrics
from pseudoloss.methods.detection import COMPARED, noise_metrics
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pls_metrics import of_pseudo_labels
from pseudoloss.nn.networks import build
from pseudoloss.nn.views import WEAK_DRAWS, Views

N, C = 50, 4
GIVEN = torch.arange(N) % C
IN_PARTS = 7 * 64  # pixels: seven images at a time


def small_network(seed):
    torch.manual_seed(seed)
    network = build("small-cnn", channels=1, size=(8, 8), classes=C, projection=4)
    network.classifier.weight.data.mul_(20)  # so that images differ in their losses
    return network


def make_scorer(pad=2):
    """Of random images; the network with the role "other" is another one than predicts."""
    network, other = small_network(0), small_network(1)
    views = Views(torch.tensor([0.5]), torch.tensor([0.3]), (8, 8), pad, False)
    torch.manual_seed(2)
    images = torch.randint(0, 256, (N, 1, 8, 8), dtype=torch.uint8)
    draws = torch.rand(N, 2 * WEAK_DRAWS)
    return ImageScorer(
        network,
        {"net": network, "other": other},
        views,
        DeviceImages(images, torch.device("cpu")),
        GIVEN,
        C,
        views.weak_is_plain((8, 8)),
        lambda K: draws[:, :K],
    )


def make_method(**settings):
    settings = Settings(**({"threshold": 0.5, "protect_rare_classes": False} | settings))
    return methods.build(settings, GIVEN, C, weak_is_plain=False)


def make_state(method):
    state = method.start(GIVEN, C)
    random = torch.Generator().manual_seed(3)
    state.store(torch.arange(N), torch.rand(N, C, generator=random).softmax(1))
    return state


def logits_of(scorer, **asked):
    """All chunks together: one tensor per view."""
    chunks = [found for _, found in scorer.logits(**asked)]
    return [torch.cat(views) for views in zip(*chunks, strict=True)]


# ------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("at_once", [2**21, IN_PARTS])
def test_logits_of_plain_and_weak_views_in_evaluation_mode(monkeypatch, at_once):
    """In any number of chunks; nothing in the network changes."""
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", at_once)
    scorer = make_scorer()
    network, views, images = scorer.predictor, scorer.views, scorer.images.images_NCHW
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    draws = scorer.draws(2 * WEAK_DRAWS)
    with torch.no_grad():
        network.eval()
        plain = network(views.plain(images))[0]
        first = network(views.weak(images, draws[:, :WEAK_DRAWS]))[0]
        second = network(views.weak(images, draws[:, WEAK_DRAWS:]))[0]
    network.train()
    torch.testing.assert_close(logits_of(scorer), [plain])
    torch.testing.assert_close(logits_of(scorer, weak=1), [plain, first])
    torch.testing.assert_close(logits_of(scorer, plain=False, weak=2), [first, second])
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_every_chunk_comes_with_its_rows(monkeypatch):
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", IN_PARTS)
    for asked in ({}, {"weak": 1}):
        rows = [rows for rows, _ in make_scorer().logits(**asked)]
        assert [(r.start, r.stop) for r in rows[:2]] == [(0, 7), (7, 14)]
        assert (len(rows), rows[-1].stop) == (8, N)


@pytest.mark.parametrize("asked", [{}, {"weak": 1}], ids=str)
def test_any_network_can_be_asked_by_its_role(asked):
    scorer = make_scorer()
    other = scorer.networks["other"]
    with torch.no_grad():
        wanted = other.eval()(scorer.views.plain(scorer.images.images_NCHW))[0]
    torch.testing.assert_close(logits_of(scorer, role="other", **asked)[0], wanted)
    assert not torch.equal(logits_of(scorer, **asked)[0], wanted)


@pytest.mark.parametrize("at_once", [2**21, IN_PARTS])
def test_each_network_of_an_ensemble_in_one_pass(monkeypatch, at_once):
    """What is stored is what the ensemble predicts."""
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", at_once)
    scorer = make_scorer()
    scorer.predictor = Ensemble(list(scorer.networks.values()))
    scorer.history = History(N, C, torch.device("cpu"))
    logits_of(scorer)
    wanted = scorer.history.latest_NC.clone()
    scorer.history.latest_NC.zero_()
    each = [torch.cat(found) for found in zip(*(v for _, v in scorer.members()), strict=True)]
    for role, found in zip(scorer.networks, each, strict=True):
        torch.testing.assert_close(found, logits_of(scorer, role=role)[0])
    assert torch.equal(scorer.history.latest_NC, wanted)


def test_projections_are_those_of_the_plain_views(monkeypatch):
    scorer = make_scorer()
    whole = scorer.projections()
    with torch.no_grad():
        outputs = scorer.predictor.eval()(scorer.views.plain(scorer.images.images_NCHW))
    torch.testing.assert_close(whole, F.normalize(outputs[1]))
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", IN_PARTS)
    torch.testing.assert_close(scorer.projections(), whole)


def test_large_images_are_shown_in_smaller_chunks():
    def at_once(size):
        return images_at_once(Views(torch.zeros(3), torch.ones(3), (size, size), 0, False))

    assert at_once(32) == 2048
    assert at_once(448) == 10
    assert at_once(4096) == 1


# ------------------------------------------------------------------------- both stages of PLS


def both_stages(**settings):
    scorer, method = make_scorer(), make_method(**settings)
    state = make_state(method)
    method.both_stages(scorer, state)
    return state, logits_of(scorer)[0]


def test_losses_and_predictions_are_of_the_plain_view():
    state, logits = both_stages()
    torch.testing.assert_close(state.loss_N, F.cross_entropy(logits, GIVEN, reduction="none"))
    pseudo_loss = -(state.pseudo_labels(slice(None)) * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(state.pseudo_loss_N, pseudo_loss)
    assert torch.equal(state.predicted_N.long(), logits.argmax(1))


def test_stage_2_is_fitted_to_the_images_that_stage_1_flags():
    state, _ = both_stages()
    first = fit_two_modes(state.loss_N)
    torch.testing.assert_close(state.p_noisy_N, 1 - first.low_N)
    assert torch.equal(state.noisy_N, 1 - first.low_N > 0.5)
    assert 0 < int(state.noisy_N.sum()) < N
    second = fit_two_modes(state.pseudo_loss_N[state.noisy_N])
    torch.testing.assert_close(state.trust_N[state.noisy_N], second.low_N)
    assert (state.trust_N[~state.noisy_N] == 1).all()
    assert bool(state.fitted)
    assert bool(state.trust_fitted)


def test_stage_1_alone_leaves_trust_as_it_is():
    """Row 11: labels are flagged one epoch before there is trust."""
    scorer, method = make_scorer(), make_method()
    state = make_state(method)
    method.stage1(scorer, state)
    assert state.noisy_N.any()
    assert (state.trust_N == 1).all()
    assert not bool(state.trust_fitted)


def test_the_two_rules_of_the_threshold():
    """Row 2: the released one and the paper's."""
    threshold = 1 - 1e-5
    released, paper = (
        both_stages(threshold=threshold, threshold_on=on)[0] for on in ("noisy", "clean")
    )
    assert torch.equal(released.noisy_N, released.p_noisy_N > threshold)
    assert torch.equal(paper.noisy_N, ~(1 - paper.p_noisy_N > threshold))
    assert not torch.equal(paper.noisy_N, released.noisy_N)


def test_chunks_make_no_difference(monkeypatch):
    whole, _ = both_stages()
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", IN_PARTS)
    in_parts, _ = both_stages()
    torch.testing.assert_close(whole.loss_N, in_parts.loss_N)
    assert torch.equal(whole.noisy_N, in_parts.noisy_N)


def test_trust_can_come_from_a_threshold():
    state, _ = both_stages(trust_metric="threshold", trust_threshold=0.3)
    confidence = state.pseudo_labels(slice(None)).amax(1)
    assert torch.equal(state.trust_N == 1, ~state.noisy_N | (confidence > 0.3))
    assert set(state.trust_N.tolist()) == {0.0, 1.0}
    assert not bool(state.trust_fitted)  # no mixture was fitted


@pytest.mark.parametrize("at_once", [2**21, IN_PARTS])
def test_pseudo_labels_of_all_images_come_from_two_weak_views(monkeypatch, at_once):
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", at_once)
    scorer, method = make_scorer(), make_method(gamma=2)
    state = make_state(method)
    losses = state.loss_N.clone()
    method.update_pseudo_labels(scorer, state)
    first, second = logits_of(scorer, plain=False, weak=2)
    squared = ((first.softmax(1) + second.softmax(1)) / 2) ** 2
    wanted = squared / squared.sum(1, keepdim=True)
    torch.testing.assert_close(state.pseudo_labels(slice(None)), wanted)
    assert torch.equal(state.loss_N, losses)


# --------------------------------------------------------------------------------- other metrics


def test_views_diverge_only_where_they_can_differ(monkeypatch):
    scorer = make_scorer()
    state = make_method().start(GIVEN, C)
    found = noise_metrics(["kl"], scorer, state)["kl"]
    assert (found > 0).any()
    torch.testing.assert_close(found, metrics.view_divergence(*logits_of(scorer, weak=1)))
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", IN_PARTS)
    torch.testing.assert_close(noise_metrics(["kl"], scorer, state)["kl"], found)
    same = make_scorer(pad=0)
    assert same.weak_is_plain
    assert noise_metrics(["kl"], same, state)["kl"].isnan().all()


def test_only_the_metrics_that_are_asked_for_are_computed():
    scorer, method = make_scorer(), make_method()
    state = make_state(method)
    method.stage1(scorer, state)
    found = noise_metrics(COMPARED, scorer, state)
    assert set(found) == set(COMPARED)
    for name in COMPARED:
        alone = noise_metrics([name], scorer, state)
        assert list(alone) == [name]
        torch.testing.assert_close(alone[name], found[name])


def test_stage_1_uses_the_metric_of_the_settings():
    scorer, method = make_scorer(), make_method(noise_metric="js")
    state = make_state(method)
    method.stage1(scorer, state)
    values = metrics.label_divergence(logits_of(scorer)[0], GIVEN)
    assert torch.equal(state.noisy_N, 1 - fit_two_modes(values).low_N > 0.5)


def test_metrics_of_pseudo_labels_are_computed_in_chunks(monkeypatch):
    state = make_state(make_method())
    whole = of_pseudo_labels(metrics.entropy, state)
    torch.testing.assert_close(whole, metrics.entropy(state.pseudo_labels(slice(None))))
    monkeypatch.setattr(pls_metrics, "SHARES_AT_ONCE", 7 * C)
    torch.testing.assert_close(of_pseudo_labels(metrics.entropy, state), whole)


def test_the_detector_asks_for_what_its_metric_needs():
    """Weak views only for kl; fixed shapes, so that it can be captured, only for the losses."""
    for name in ("loss", "capped-loss", "agreement", "disagreement", "js", "kl"):
        detector = make_method(noise_metric=name).detector
        assert detector.weak_views == (name == "kl")
        assert detector.fixed_shapes == (name in ("loss", "capped-loss"))
