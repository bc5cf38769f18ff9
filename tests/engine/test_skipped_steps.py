"""A step in which something is not finite changes nothing and is counted."""

import math

import pytest
import torch

import pseudoloss as pl
from conftest import TINY, make_source, make_trainer, metrics_of
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.engine import checkpoint, health, watch
from pseudoloss.engine.optimisers import ADAM_MEMORY
from pseudoloss.engine.steps import finite, norms_of
from pseudoloss.errors import TrainingError
from pseudoloss.methods.base import Outputs
from pseudoloss.methods.ce import CrossEntropy
from pseudoloss.nn.views import Views
from pseudoloss.runs import RunFolder


def spoil_views(monkeypatch, when, value):
    """The first weak view of some steps holds a number that is not finite: so do activations, batch
    statistics, outputs, loss and gradients."""
    weak, calls = Views.weak, []

    def spoiled(views, images_BCHW, draws_BK):
        calls.append(1)
        view = weak(views, images_BCHW, draws_BK)
        if when(len(calls)):
            view = view.clone()
            view[0, 0, 2, 2] = value
        return view

    monkeypatch.setattr(Views, "weak", spoiled)
    return calls


MAY_NOT_CHANGE = ("networks.", *(f"{name}." for name in ADAM_MEMORY.values()))


def everything(trainer):
    """All that a step may change, but for counters and what it says about the images."""
    return {
        name: tensor.clone()
        for name, tensor in checkpoint.checkpoint_tensors(trainer).items()
        if name.startswith(MAY_NOT_CHANGE) and "num_batches" not in name
    }


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("method", METHOD_SETTINGS)
@pytest.mark.parametrize("phase", [0, 1])
def test_a_step_that_is_not_finite_changes_nothing(monkeypatch, method, phase, value):
    check_that_a_step_changes_nothing(monkeypatch, make_trainer(method=method), phase, value)


@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_a_step_of_another_optimiser_that_is_not_finite_changes_nothing(monkeypatch, optimiser):
    trainer = make_trainer(method="ce", optimiser=optimiser, lr=0.01)
    check_that_a_step_changes_nothing(monkeypatch, trainer, 0, math.nan)


def check_that_a_step_changes_nothing(monkeypatch, trainer, phase, value):
    method = trainer.settings.method
    trainer.train_epoch(0)
    trainer.score(0)
    snapshots = [everything(trainer)]
    trainer.after_step = lambda: snapshots.append(everything(trainer))
    two_views = ("pls", "pls-plus", "divide-mix", "evidential-mix")
    views = 2 if phase and method in two_views else 1  # of a step
    views = 2 if method == "jo-src" else views
    spoil_views(monkeypatch, lambda call: call == 1 + views, value)  # of the second step
    loss = trainer.train_epoch(phase)
    assert math.isfinite(loss)
    assert trainer.skipped_steps() == 1
    before, first, second, third, *_ = snapshots
    assert same(first, second)
    assert not same(before, first)
    assert not same(second, third)
    for name, tensor in checkpoint.checkpoint_tensors(trainer).items():
        assert tensor.isfinite().all(), name


def test_the_loss_is_the_mean_of_the_steps_that_count(monkeypatch):
    trainer, losses = make_trainer(method="ce"), []
    whole = CrossEntropy.loss

    def loss(self, outputs, batch, state):
        found = whole(self, outputs, batch, state)
        losses.append(found.item())
        return found * (math.nan if len(losses) == 3 else 1)

    monkeypatch.setattr(CrossEntropy, "loss", loss)
    trainer = make_trainer(method="ce")  # which takes the loss of its class when it is built
    mean = trainer.train_epoch(0)
    assert mean == pytest.approx((losses[0] + losses[1] + losses[3]) / 3)
    assert trainer.skipped_steps() == 1


def test_a_gradient_that_is_not_finite_is_noticed_though_the_loss_is(monkeypatch):
    whole, calls = CrossEntropy.loss, []

    def loss(self, outputs, batch, state):
        calls.append(1)
        ((logits_BC, _),) = outputs["net"].with_grad
        zero = (logits_BC - logits_BC.detach()).abs().sqrt().sum()  # with an infinite slope
        return whole(self, outputs, batch, state) + (zero if len(calls) == 2 else 0)

    monkeypatch.setattr(CrossEntropy, "loss", loss)
    trainer = make_trainer(method="ce")
    assert math.isfinite(trainer.train_epoch(0))
    assert trainer.skipped_steps() == 1


def test_one_part_of_a_step_is_enough(monkeypatch):
    trainer = make_trainer(method="ce", accumulate=4)
    spoil_views(monkeypatch, lambda call: call == 3, math.nan)
    assert math.isfinite(trainer.train_epoch(0))
    assert trainer.skipped_steps() == 1


def test_outputs_that_are_finite_stay_as_they_are():
    pair = (torch.randn(3, 4), torch.tensor([[math.nan, 1.0], [-math.inf, 2.0]]))
    ((same_BC, mended_BD),) = finite(Outputs([], [pair])).with_grad
    assert torch.equal(same_BC, pair[0])
    assert mended_BD.tolist() == [[0, 1], [0, 2]]


def test_the_statistics_of_all_norms_are_found():
    network = make_trainer().networks["net"]
    names = [name for name, _ in network.named_buffers() if "running" in name]
    assert len(norms_of(network)) == len(names) == 8


# ------------------------------------------------------------------------------------ whole runs


def test_a_run_goes_on_and_says_so(tmp_path, monkeypatch):
    spoil_views(monkeypatch, lambda call: call == 6, math.nan)
    settings = TINY | {"method": "ce"}
    run = pl.train(make_source(), out=tmp_path / "run", quiet=True, **settings)
    assert run.finished
    (said,) = (entry for entry in run.summary["notices"] if entry["kind"] == "skipped steps")
    assert said["epoch"] == 2
    assert said["text"].startswith("1 step was skipped (of 4 in this epoch), because the loss")
    assert [line.get("skipped_steps") for line in metrics_of(tmp_path / "run")] == [None, 1, None]


def test_a_run_of_many_skipped_steps_ends_with_advice(tmp_path, monkeypatch):
    """At the end of the epoch, or before it in a long one."""
    calls = spoil_views(monkeypatch, lambda call: call > 4 and call % 4, math.nan)
    monkeypatch.setattr(watch, "MOST_SKIPPED", 1)
    settings = TINY | {"method": "ce", "epochs": 4}
    with pytest.raises(TrainingError, match=r"3 of 4 steps of epoch 2 .*epoch 1 is kept.*--lr"):
        pl.train(make_source(), out=tmp_path / "a", quiet=True, **settings)
    assert RunFolder(tmp_path / "a").checkpoint.exists()
    calls.clear()
    monkeypatch.setattr(watch, "CHECK_SECONDS", -1.0)
    with pytest.raises(TrainingError, match=r"2 of 2 steps of epoch 2"):
        pl.train(make_source(), out=tmp_path / "b", quiet=True, **settings)


def test_an_epoch_without_any_usable_step_ends_the_run(monkeypatch):
    spoil_views(monkeypatch, lambda call: call > 4, math.nan)
    with pytest.raises(TrainingError, match="the loss became nan in epoch 2"):
        pl.train(make_source(), quiet=True, **(TINY | {"method": "ce"}))


def test_a_loss_that_explodes_is_noticed(tmp_path, monkeypatch):
    whole = CrossEntropy.loss
    monkeypatch.setattr(CrossEntropy, "loss", lambda *given: 1000 * whole(*given) / 1000 + 500)
    run = pl.train(make_source(), quiet=True, **(TINY | {"method": "ce"}))
    (said,) = (entry for entry in run.summary["notices"] if entry["kind"] == "loss")
    assert "random predictions would have about 4.2" in said["text"]


@pytest.mark.parametrize(("loss", "noticed"), [(-60.0, False), (40.0, False), (42.0, True)])
def test_when_a_loss_has_exploded(loss, noticed):
    """log 4 + log 16 = 4.16; the loss of ELR can be far below zero."""
    assert (health.exploded_loss(loss, 4, 16) is not None) == noticed
