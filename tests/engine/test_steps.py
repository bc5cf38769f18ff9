"""One update of the networks."""

import copy
import dataclasses
import itertools

import pytest
import torch

import pseudoloss as pl
from conftest import make_trainer
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.engine import steps
from pseudoloss.engine.steps import forward, norms_of
from pseudoloss.methods import build_detector
from pseudoloss.methods.base import Phase, Step, ViewBatch
from pseudoloss.methods.ce import CrossEntropy
from pseudoloss.nn.networks import build
from pseudoloss.nn.views import WEAK_DRAWS
from pseudoloss.progress import SilentReporter


@pytest.fixture
def network():
    torch.manual_seed(0)
    return build("small-cnn", channels=1, size=(8, 8), classes=4, projection=4).train()


def test_views_without_gradients_come_first_and_have_none(network):
    a, b = torch.randn(2, 6, 1, 8, 8)
    outputs = forward(network, ViewBatch([a], [b]))
    (logits, projection), (other, _) = outputs.no_grad[0], outputs.with_grad[0]
    assert (logits.shape, projection.shape) == ((6, 4), (6, 4))
    assert not logits.requires_grad
    assert not projection.requires_grad
    assert other.requires_grad
    assert int(network.backbone.norms[0].num_batches_tracked) == 2


def test_views_without_gradients_can_be_seen_in_evaluation_mode(network):
    """Their batch statistics are neither used nor kept."""
    a, b = torch.randn(2, 6, 1, 8, 8)
    with torch.no_grad():
        wanted = network.eval()(a)[0]
    network.train()
    outputs = forward(network, ViewBatch([], [b], in_eval=[a]))
    torch.testing.assert_close(outputs.in_eval[0][0], wanted)
    assert not outputs.in_eval[0][0].requires_grad
    assert outputs.with_grad[0][0].requires_grad
    assert network.training
    assert int(network.backbone.norms[0].num_batches_tracked) == 1
    before = [statistics.clone() for statistics in norms_of(network)]
    outputs = forward(network, ViewBatch([], [], in_eval=[a, b]))
    assert [len(kind) for kind in outputs] == [0, 0, 2]
    assert all(torch.equal(x, y) for x, y in zip(norms_of(network), before, strict=True))


def test_each_kind_of_view_is_seen_in_its_own_mode(network):
    """Evaluation comes first, so its statistics are those of before the step."""
    a, b, c = torch.randn(3, 6, 1, 8, 8)
    other = copy.deepcopy(network)
    with torch.no_grad():
        in_eval = other.eval()(c)[0]
        no_grad = other.train()(a)[0]
    with_grad = other(b)[0]
    outputs = forward(network, ViewBatch([a], [b], [c]))
    for kind, wanted in zip(outputs, (no_grad, with_grad, in_eval), strict=True):
        torch.testing.assert_close(kind[0][0], wanted)
    assert [kind[0][0].requires_grad for kind in outputs] == [False, True, False]


def test_a_step_that_cannot_be_compiled_runs_by_plain_calls(monkeypatch):
    """One notice, and the same result."""
    said = []

    class Told(SilentReporter):
        def notice(self, text):
            said.append(text)

    def broken(function, whole=True):
        def call(*arguments):
            raise RuntimeError("no compiler here\nand a long story")

        return call

    plain, other = make_trainer(), make_trainer(reporter=Told())
    monkeypatch.setattr(steps, "compiled", broken)
    monkeypatch.setattr(steps, "capture", lambda call, on_failure: call)
    other.accelerate = "auto"
    other.networks["net"].fused = True  # as on a GPU; without a compiler it must not stay so
    step = other.phases[0].steps[0]
    other.steps[0][0] = other._make_prepared(step, other.phases[0])
    assert plain.train_epoch(0) == other.train_epoch(0)
    assert said == ["the step could not be compiled and runs slower (no compiler here)"]
    assert not other.networks["net"].fused


def test_a_step_that_cannot_be_captured_says_so(monkeypatch):
    said = []

    class Told(SilentReporter):
        def notice(self, text):
            said.append(text)

    def refuse(call, on_failure):
        on_failure("not here")
        return call

    trainer = make_trainer(reporter=Told())
    monkeypatch.setattr(steps, "capture", refuse)
    trainer.accelerate = "capture"
    trainer._make_prepared(trainer.phases[0].steps[0], trainer.phases[0])
    assert said == ["the step could not be captured and runs slower (not here)"]


# ------------------------------------------------------------------------------- accumulation


def test_a_step_in_parts_is_the_same_update():
    """Cross-entropy without batch statistics is a mean, so the parts add up to the whole."""
    found = []
    for parts in (1, 4):
        settings = {"method": "ce", "network": "resnet10t", "flip": False, "pad": 0}
        with make_trainer(**settings, accumulate=parts) as trainer:
            network = trainer.networks["net"]
            for norm in network.modules():
                if isinstance(norm, torch.nn.BatchNorm2d):  # always by running statistics
                    norm.eval()
                    norm.train = lambda mode: None
            trainer.train_epoch(0)
            found.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    assert torch.allclose(*found, atol=1e-5)


class Looks(CrossEntropy):
    """Every epoch ends with a pass over all images that trains nothing."""

    def phases(self):
        step = Step(self.show, self.loss, WEAK_DRAWS)
        look = Step(self.show_plain, self.remember, draws=0, trains=(), moves_norms=("net",))
        return (Phase("all", self.epochs, (step, look)),)

    def show_plain(self, views, batch):
        return {"net": ViewBatch([views.plain(batch.images_BCHW)], [])}

    def remember(self, outputs, batch, state):
        ((logits_BC, _),) = outputs["net"].no_grad
        state.p_noisy_N[batch.index_B] += 1
        return logits_BC.mean() + 1e6  # not counted


def test_a_step_may_train_nothing(monkeypatch):
    """It sees every image once, moves the statistics of norms, and changes nothing else."""
    monkeypatch.setattr(
        "pseudoloss.methods.build",
        lambda settings, *_: Looks(build_detector(settings.method_settings), settings.epochs, 1),
    )
    trainer = make_trainer(method="ce")
    network, optimiser = trainer.networks["net"], trainer.optimisers["net"]

    def everything():
        memory = [v["momentum_buffer"].clone() for v in optimiser.state.values()]
        return [p.detach().clone() for p in network.parameters()] + memory

    snapshots, norms, losses = [], [], []

    def after_step():
        snapshots.append(everything())
        norms.append(torch.cat(norms_of(network)))
        losses.append(trainer.tally.loss_sum.item())

    trainer.after_step = after_step
    mean = trainer.train_epoch(0)
    assert len(snapshots) == trainer.steps_in(0) == 8
    for before, after in itertools.pairwise(snapshots[3:]):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(snapshots[2][0], snapshots[3][0])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(norms))
    assert (trainer.state.p_noisy_N == 1).all()
    assert losses[3:] == [losses[3]] * 5
    assert mean == pytest.approx(losses[3] / 4)
    assert trainer.skipped_steps() == 0


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_every_method_trains_in_parts(tiny_source, tiny_settings, method):
    settings = tiny_settings | {"method": method, "accumulate": 2, "epochs": 2}
    assert pl.train(tiny_source, quiet=True, **settings).finished


def test_later_views_depend_on_outputs_and_the_loss_gets_those_of_both():
    """The loss of one step, and its update, are those of a forward pass by hand."""
    trainer = make_trainer(method="ce")
    other = copy.deepcopy(trainer.networks["net"])
    phase, seen = trainer.phases[0], []

    def show(views, batch):
        return {"net": ViewBatch([views.plain(batch.images_BCHW)], [])}

    def scaled(view, logits_BC):
        return view * logits_BC.softmax(1).amax(1)[:, None, None, None]

    def show_next(views, batch, outputs, state):
        ((logits_BC, _),) = outputs["net"].no_grad
        return {"net": ViewBatch([], [scaled(views.plain(batch.images_BCHW), logits_BC)])}

    def loss(outputs, batch, state):
        ((first_BC, _),), ((logits_BC, _),) = outputs["net"].no_grad, outputs["net"].with_grad
        seen.append((batch.images_BCHW.clone(), batch.given_B.clone(), first_BC, logits_BC))
        return torch.nn.functional.cross_entropy(logits_BC, batch.given_B)

    step = dataclasses.replace(phase.steps[0], show=show, show_next=show_next, loss=loss)
    prepared = trainer._make_prepared(step, phase)
    next(iter(trainer.run_steps(prepared, torch.Generator().manual_seed(0), 1)))
    ((images_BCHW, given_B, first_BC, logits_BC),) = seen
    view = trainer.views.plain(images_BCHW)
    with torch.no_grad():
        wanted_BC = other(view)[0]
    torch.testing.assert_close(first_BC, wanted_BC)
    again_BC = other(scaled(view, wanted_BC))[0]
    torch.testing.assert_close(logits_BC, again_BC)
    loss = torch.nn.functional.cross_entropy(again_BC, given_B)
    assert trainer.tally.loss_sum.item() == pytest.approx(loss.item())
    loss.backward()
    settings, lr = trainer.settings, float(trainer.lr)
    for new, old in zip(trainer.networks["net"].parameters(), other.parameters(), strict=True):
        if old.grad is not None:
            moved = old - lr * (old.grad + settings.weight_decay * old)
            torch.testing.assert_close(new, moved)
    for new, old in zip(norms_of(trainer.networks["net"]), norms_of(other), strict=True):
        torch.testing.assert_close(new, old)
