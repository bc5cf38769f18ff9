from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from pseudoloss.data.storage import DeviceImages
from pseudoloss.engine import tracking
from pseudoloss.engine.tracking import (
    NOISE_METRICS,
    diverge,
    guess,
    images_at_once,
    judge,
    look,
    noise_metrics,
    of_guesses,
    predict,
    project,
)
from pseudoloss.methods import metrics
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pls import guess_labels, high_loss, not_low_loss, trust_confident
from pseudoloss.nn.networks import build
from pseudoloss.nn.views import WEAK_DRAWS, Views

N, C = 50, 4


def setting():
    torch.manual_seed(0)
    network = build("small-cnn", channels=1, size=(8, 8), classes=C, projection=4)
    views = Views(torch.tensor([0.5]), torch.tensor([0.3]), (8, 8), 0, False)
    images = torch.randint(0, 256, (N, 1, 8, 8), dtype=torch.uint8)
    given = torch.arange(N) % C
    memory = Memory.of(given, C)
    memory.remember_guesses(torch.arange(N), torch.rand(N, C).softmax(1))
    return network, views, DeviceImages(images, torch.device("cpu")), given, memory


def run(judge_guesses=True, rule=high_loss, threshold=0.5, **options):
    network, views, pixels, given, memory = setting()
    look(network, views, pixels, given, memory)
    is_noisy = partial(rule, threshold=threshold)
    stages = judge(memory, is_noisy=is_noisy, judge_guesses=judge_guesses, **options)
    logits = torch.cat(list(predict(network, views, pixels)))
    return stages, memory, given, logits


def test_losses_are_of_the_plain_view_in_eval_mode():
    _, memory, given, logits = run()
    torch.testing.assert_close(memory.loss_N, F.cross_entropy(logits, given, reduction="none"))
    log = logits.log_softmax(1)
    torch.testing.assert_close(memory.pseudo_loss_N, -(memory.guesses(slice(None)) * log).sum(1))
    assert torch.equal(memory.predicted_N.long(), logits.argmax(1))


def test_stage_1_then_stage_2_over_its_noisy_images():
    stages, memory, *_ = run()
    first = fit_two_modes(memory.loss_N)
    torch.testing.assert_close(memory.p_noisy_N, 1 - first.low_N)
    assert torch.equal(memory.noisy_N, 1 - first.low_N > 0.5)
    assert 0 < int(memory.noisy_N.sum()) < N
    second = fit_two_modes(memory.pseudo_loss_N[memory.noisy_N])
    torch.testing.assert_close(memory.trust_N[memory.noisy_N], second.low_N)
    assert (memory.trust_N[~memory.noisy_N] == 1).all()
    assert stages.pseudo_loss is not None


def test_trust_waits_for_guesses():
    """Row 11: the first mask comes a whole epoch before the first trust."""
    stages, memory, *_ = run(judge_guesses=False)
    assert stages.pseudo_loss is None
    assert memory.noisy_N.any()
    assert (memory.trust_N == 1).all()


def test_guesses_come_from_two_weak_views_and_change_nothing_else(monkeypatch):
    network, views, pixels, _, memory = setting()
    views = replace(views, pad=2)
    draws = torch.rand(N, 2 * WEAK_DRAWS, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        first, second = (
            network.eval()(views.weak(pixels.images_NCHW, part))[0]
            for part in (draws[:, :WEAK_DRAWS], draws[:, WEAK_DRAWS:])
        )
    guess_of = partial(guess_labels, gamma=2)
    for at_once in (2**21, 7 * 64):
        network.train()
        monkeypatch.setattr(tracking, "PIXELS_AT_ONCE", at_once)
        guess(network, views, pixels, memory, draws, guess_of)
        torch.testing.assert_close(memory.guesses(slice(None)), guess_of(first, second))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_papers_side_of_the_threshold():
    """Row 2."""
    threshold = 1 - 1e-5
    released, paper = (run(threshold=threshold, rule=rule)[1] for rule in (high_loss, not_low_loss))
    assert torch.equal(released.noisy_N, released.p_noisy_N > threshold)
    assert torch.equal(paper.noisy_N, ~(1 - paper.p_noisy_N > threshold))
    assert not torch.equal(paper.noisy_N, released.noisy_N)


def test_parts_make_no_difference(monkeypatch):
    whole = run()[1]
    monkeypatch.setattr(tracking, "PIXELS_AT_ONCE", 7 * 64)
    parts = run()[1]
    torch.testing.assert_close(whole.loss_N, parts.loss_N)
    assert torch.equal(whole.noisy_N, parts.noisy_N)


def test_large_images_go_in_smaller_parts():
    def at_once(size):
        return images_at_once(Views(torch.zeros(3), torch.ones(3), (size, size), 0, False))

    assert at_once(32) == 2048
    assert at_once(448) == 10
    assert at_once(4096) == 1


# --------------------------------------------------------------------------------- other metrics


def test_the_contrastive_space_is_that_of_the_plain_views(monkeypatch):
    network, views, pixels, *_ = setting()
    whole = project(network, views, pixels)
    with torch.no_grad():
        wanted = F.normalize(network.eval()(views.plain(pixels.images_NCHW))[1])
    torch.testing.assert_close(whole, wanted)
    monkeypatch.setattr(tracking, "PIXELS_AT_ONCE", 7 * 64)
    torch.testing.assert_close(project(network, views, pixels), wanted)


def test_views_diverge_only_where_they_can(monkeypatch):
    network, views, pixels, *_ = setting()
    draws = torch.rand(N, WEAK_DRAWS, generator=torch.Generator().manual_seed(0))
    assert diverge(network, views, pixels, draws).isnan().all()
    padded = replace(views, pad=2)
    found = diverge(network, padded, pixels, draws)
    assert (found > 0).any()
    with torch.no_grad():
        plain, weak = (
            network.eval()(view)[0]
            for view in (
                padded.plain(pixels.images_NCHW),
                padded.weak(pixels.images_NCHW, draws),
            )
        )
    torch.testing.assert_close(found, metrics.view_divergence(plain, weak))
    monkeypatch.setattr(tracking, "PIXELS_AT_ONCE", 7 * 64)
    torch.testing.assert_close(diverge(network, padded, pixels, draws), found)


def test_metrics_of_guesses_come_part_by_part(monkeypatch):
    *_, memory = setting()
    whole = of_guesses(metrics.entropy, memory)
    torch.testing.assert_close(whole, metrics.entropy(memory.guesses(slice(None))))
    monkeypatch.setattr(tracking, "SHARES_AT_ONCE", 7 * C)
    torch.testing.assert_close(of_guesses(metrics.entropy, memory), whole)


def test_only_the_metrics_that_are_asked_for():
    network, views, pixels, given, memory = setting()
    draws = torch.rand(N, WEAK_DRAWS)
    found = noise_metrics(NOISE_METRICS, network, views, pixels, given, memory, draws)
    assert tuple(found) == NOISE_METRICS
    for name in NOISE_METRICS[:3]:
        alone = noise_metrics([name], network, views, pixels, given, memory, draws)
        assert list(alone) == [name]
        torch.testing.assert_close(alone[name], found[name])


def test_the_stages_look_at_what_they_are_given():
    other = torch.rand(N, generator=torch.Generator().manual_seed(1))
    stages, memory, *_ = run(
        noise_metric=lambda memory: other,
        trust=lambda memory: (trust_confident(other, memory.noisy_N, 0.2), None),
    )
    first = fit_two_modes(other)
    assert torch.equal(memory.noisy_N, 1 - first.low_N > 0.5)
    assert torch.equal(memory.trust_N == 1, ~memory.noisy_N | (other < 0.8))
    assert set(memory.trust_N.tolist()) == {0.0, 1.0}
    assert stages.pseudo_loss is None
