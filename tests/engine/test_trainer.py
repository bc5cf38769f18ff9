"""Everything of a run that is on the device, and what happens to it in an epoch."""

import dataclasses
import gc
import math
import weakref

import numpy as np
import pytest
import torch

import pseudoloss as pl
from conftest import make_images, make_source, make_trainer
from pseudoloss.data import arrays, corrupt
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.methods import metrics
from pseudoloss.methods.detection import noise_metrics
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pls_metrics import of_pseudo_labels


def noisy_source():
    source = make_source()
    return dataclasses.replace(source, train=corrupt(source.train, "symmetric-exact:0.25", 1))


def test_phases_and_their_epochs():
    trainer = make_trainer(epochs=5, warmup=2)
    found = [trainer.phase_of(epoch) for epoch in range(5)]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [trainer.phase(epoch).name for epoch in (1, 2)] == ["warm-up", "pls"]
    with pytest.raises(IndexError):
        trainer.phase_of(5)
    assert trainer.steps_in(0) == trainer.steps_in(4) == 4


def test_a_batch_must_not_be_larger_than_the_dataset():
    with pytest.raises(InputError, match=r"--batch-size 65 is larger than the dataset \(64 images"):
        make_trainer(batch_size=65)


def test_weights_that_become_nan_in_the_last_step_are_noticed():
    """The loss of that step is computed with the weights before it."""
    trainer = make_trainer()
    step, feed, whole = trainer.steps[0][0]
    done = []

    def call():
        whole()
        done.append(1)
        if len(done) == trainer.steps_in(0):
            next(trainer.networks["net"].parameters()).data[0] = math.nan

    trainer.steps[0][0] = (step, feed, call)
    assert math.isnan(trainer.train_epoch(0))


def test_the_prior_of_an_imbalanced_dataset_is_that_of_its_labels():
    images, labels = make_images(n=64)
    keep = np.flatnonzero((labels == 0) | (np.arange(64) % 8 == 1))
    data = arrays(images[keep], labels[keep])
    with make_trainer(data, balance_prior="given", batch_size=4) as trainer:
        assert trainer.method.options.prior_C.tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("ensemble", [False, True])
def test_a_run_releases_its_trainer(monkeypatch, ensemble):
    """Otherwise captured calls would keep its images and graphs on the device for a while."""
    alive = []
    whole = Trainer.__init__

    def remember(self, *arguments):
        whole(self, *arguments)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(Trainer, "__init__", remember)
    settings = {"network": "small-cnn", "batch_size": 16, "epochs": 2}
    settings |= {"method": "co-teaching", "ensemble": True} if ensemble else {}
    gc.disable()
    try:
        run = pl.train(make_source(), quiet=True, **settings)
    finally:
        gc.enable()
    assert [reference() for reference in alive] == [None]
    assert not any(module.training for module in run.model.network.modules())


# ---------------------------------------------------------------------------- scoring all images


@pytest.mark.parametrize(
    ("noise_metric", "captured"), [("loss", True), ("capped-loss", True), ("js", False)]
)
def test_scoring_is_captured_if_its_shapes_are_fixed(monkeypatch, noise_metric, captured):
    seen = []
    monkeypatch.setattr(Trainer, "_captured", lambda _, call, what: seen.append(what) or call)
    trainer = make_trainer(noise_metric=noise_metric)
    trainer.score(0)
    assert ("scoring of all images" in seen) == captured


@pytest.mark.parametrize(
    "chosen",
    [
        *({"noise_metric": name} for name in ("loss", "capped-loss", "agreement", "disagreement")),
        *({"noise_metric": name} for name in ("js", "kl")),
        *({"trust_metric": name} for name in ("confidence", "entropy")),
        {"trust_metric": "threshold", "trust_threshold": 0.5},
    ],
    ids=lambda chosen: next(iter(chosen.values())),
)
def test_each_stage_can_use_another_metric(chosen):
    trainer = make_trainer(noisy_source(), epochs=2, protect_rare_classes=False, **chosen)
    for epoch in (0, 1):
        trainer.train_epoch(epoch)
        trainer.score(epoch)
    state, own = trainer.state, trainer.settings.method_settings
    values = noise_metrics([own.noise_metric], trainer.scorer(), state)[own.noise_metric]
    if own.noise_metric == "capped-loss":
        cap = math.log(4)
        assert (state.loss_N > cap).any()
        assert torch.equal(values, state.loss_N.clamp(max=cap))
    first = fit_two_modes(values)
    torch.testing.assert_close(state.p_noisy_N, 1 - first.low_N)
    assert torch.equal(state.noisy_N, 1 - first.low_N > own.threshold)
    if own.trust_metric == "threshold":
        pseudo_labels = state.pseudo_labels(slice(None))
        confident = pseudo_labels.amax(1) / pseudo_labels.sum(1) > 0.5
        assert torch.equal(state.trust_N == 1, ~state.noisy_N | confident)
        assert not bool(state.trust_fitted)
    else:
        by_name = {"confidence": metrics.confidence, "entropy": metrics.entropy}
        values = state.pseudo_loss_N
        if own.trust_metric in by_name:
            values = of_pseudo_labels(by_name[own.trust_metric], state)
        torch.testing.assert_close(state.trust_N, fit_two_modes(values, state.noisy_N).low_N)


def test_accuracy_is_that_of_the_model_on_the_test_images():
    trainer = make_trainer()
    trainer.train_epoch(0)
    test = trainer.data.test
    right = trainer.model.predict(test.images_NCHW.numpy()) == test.given_N.numpy()
    assert trainer.validate() == pytest.approx(100 * right.mean())
    assert make_trainer(arrays(*make_images())).validate() is None


# --------------------------------------------------------------------- metrics that are compared


def test_what_the_figures_need_is_recorded(tmp_path, tiny_source, tiny_settings):
    """And recording it changes nothing in what is learned."""
    settings = tiny_settings | {"corrupt": "symmetric-exact:0.25", "quiet": True}
    plain = pl.train(tiny_source, **settings)
    run = pl.train(tiny_source, compare_metrics=True, **settings)
    for ours, theirs in zip(
        run.model.network.parameters(), plain.model.network.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    first, last = run.metrics.iloc[0], run.metrics.iloc[-1]
    assert set(first["metrics"]["noise"]) == {"loss", "agreement", "disagreement", "js", "kl"}
    assert first["metrics"]["pseudo_labels"] is first["bias"] is first["pseudo_loss"] is None
    assert last["metrics"]["noise"]["loss"] == last["detection"]["auc"]
    assert set(last["metrics"]["pseudo_labels"]) == {"pseudo-loss", "confidence", "entropy"}
    assert set(last["bias"]) == {"learned", "fitted"}
    counts = last["pseudo_loss"]["histogram"]
    assert sum(counts["right"]) + sum(counts["wrong"]) == round(last["noisy"] * 64)
    assert 0 <= last["knn_accuracy"] <= 100
    assert run.summary["knn_accuracy"] == last["knn_accuracy"]
    assert plain.summary["knn_accuracy"] is None
    assert not {"metrics", "bias", "pseudo_loss", "knn_accuracy"} & set(plain.metrics)


@pytest.mark.parametrize("method", ["pls", "ce", "elr", "co-teaching"])
def test_metrics_are_compared_from_the_first_epoch_on(tiny_source, tiny_settings, method):
    """Also in warm-up epochs, after which images are not scored."""
    settings = tiny_settings | {"corrupt": "symmetric-exact:0.25", "quiet": True}
    settings |= {"method": method, "epochs": 4, "warmup": 3, "compare_metrics": True}
    found = pl.train(tiny_source, **settings).metrics["metrics"]
    for epoch in range(4):
        assert all(0 <= found[epoch]["noise"][name] <= 1 for name in ("loss", "js", "kl"))
    assert len({found[epoch]["noise"]["loss"] for epoch in range(4)}) > 1


def test_without_selection_every_wrong_pseudo_label_is_learned(tiny_source, tiny_settings):
    settings = tiny_settings | {"corrupt": "symmetric-exact:0.25", "quiet": True}
    settings |= {"epochs": 2, "compare_metrics": True, "trust_in_classification": False}
    last = pl.train(tiny_source, **settings).metrics.iloc[-1]
    wrong = 1 - last["pseudo_labels"]["accuracy"] / 100
    assert wrong > 0
    assert last["bias"]["learned"] == pytest.approx(wrong)


def test_without_true_labels_and_test_images_those_metrics_are_null(tiny_settings):
    run = pl.train(make_images(), quiet=True, compare_metrics=True, **tiny_settings)
    assert run.metrics[["metrics", "bias", "pseudo_loss", "knn_accuracy"]].isna().all(axis=None)


def test_views_that_are_the_same_cannot_be_compared(tiny_source, tiny_settings):
    settings = tiny_settings | {"pad": 0, "flip": False, "quiet": True}
    with pytest.raises(InputError, match="--noise-metric kl compares the plain view"):
        pl.train(tiny_source, noise_metric="kl", **settings)
    run = pl.train(tiny_source, compare_metrics=True, **settings)
    assert run.metrics["metrics"].iloc[-1]["noise"]["kl"] is None
