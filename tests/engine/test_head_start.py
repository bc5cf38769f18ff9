"""A head start: the classifier is fitted to frozen features and audited labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import pseudoloss as pl
from conftest import make_images, make_trainer
from pseudoloss.config import Settings
from pseudoloss.data import corrupt
from pseudoloss.engine import checkpoint
from pseudoloss.engine.first_audit import FirstAudit
from pseudoloss.engine.head_start import corrected_labels, head_start, sample_of
from pseudoloss.engine.label_scores import label_scores
from pseudoloss.errors import InputError

START = {
    "network": "tf_efficientnet_lite0",
    "weights": "embedded",
    "head_start": True,
    "lr": 1e-4,
    "epochs": 2,
}


@pytest.fixture(scope="module")
def started():
    images, labels = make_images(64, size=32, channels=3)
    tests = make_images(32, size=32, channels=3, seed=1)
    data = pl.arrays(images, labels, test_images=tests[0], test_labels=tests[1])
    data = replace(data, train=corrupt(data.train, "symmetric-exact:0.25", 1))
    trainer = make_trainer(data, **START)
    before = trainer.validate()
    head_start(trainer)
    return trainer, before


def test_the_first_predictions_are_right_although_labels_are_wrong(started):
    trainer, before = started
    assert before < 50
    assert trainer.validate() > 80  # of the labels 75% are right


def test_its_audit_makes_the_label_table_if_it_knows_the_noise(started):
    trainer, _ = started
    audit, given_N = trainer.first_audit, trainer.given_N
    wrong_N = given_N != trainer.data.train.true_N
    assert ((audit.p_noisy_N > 0.5) == wrong_N).float().mean() > 0.8
    audit.noise.copy_(torch.tensor([0.25, 0.125, 0.5, 1.0]))
    table, noise = label_scores(trainer)
    np.testing.assert_allclose(table["p_noisy"], audit.p_noisy_N, atol=1e-6)
    names = np.array(trainer.data.train.classes)
    assert (table["candidate_label"] == names[audit.candidate_N.numpy()]).all()
    assert (noise["rate"], noise["low"], noise["high"]) == (0.25, 0.125, 0.5)
    assert noise["known"]
    assert not noise["reasons"]
    audit.noise[3] = 0  # it does not know
    table, _ = label_scores(trainer)
    assert not np.allclose(table["p_noisy"], audit.p_noisy_N, atol=1e-6)


def test_its_audit_is_in_every_checkpoint(started):
    trainer, _ = started
    saved = {n: t for n, t in checkpoint.checkpoint_tensors(trainer).items() if n[:6] == "audit."}
    assert len(saved) == 5
    assert saved["audit.p_noisy_N"] is trainer.first_audit.p_noisy_N


def test_a_resumed_run_has_the_same_table(tmp_path, monkeypatch):
    monkeypatch.setattr(FirstAudit, "known", True)
    images, labels = make_images(64, size=32, channels=3)
    tests = make_images(32, size=32, channels=3, seed=1)
    data = pl.arrays(images, labels, test_images=tests[0], test_labels=tests[1])
    settings = START | {"corrupt": "symmetric-exact:0.25", "batch_size": 16, "quiet": True}
    whole = pl.train(data, tmp_path / "whole", **settings)
    assert whole.labels["p_noisy"].max() > 0.5
    parts = pl.train(data, tmp_path / "parts", minutes=1e-6, **settings)
    assert not parts.finished
    resumed = pl.train(data, tmp_path / "parts", resume=True, quiet=True)
    assert resumed.labels.equals(whole.labels)
    assert resumed.summary["estimated_noise"] == whole.summary["estimated_noise"]


def test_batch_norms_keep_their_statistics_but_weights_are_trained(started):
    trainer, _ = started
    backbone = trainer.networks["net"].backbone
    statistics = {name: values.clone() for name, values in backbone.named_buffers()}
    weights = [parameter.detach().clone() for parameter in backbone.parameters()]
    trainer.train_epoch(0)
    assert all(torch.equal(values, statistics[name]) for name, values in backbone.named_buffers())
    pairs = zip(weights, backbone.parameters(), strict=True)
    assert not any(torch.equal(before, after) for before, after in pairs)


def test_corrected_labels_weight_the_given_label_and_the_candidate():
    class Scores:
        p_noisy_N = np.array([0.1, 0.9, 0.9])
        trust_N = np.array([0.05, 0.8, 0.1])
        candidate_N = np.array([1, 2, 0])

    found = corrected_labels(Scores, torch.tensor([0, 0, 1]), 3)
    expected = [[0.9, 0.05, 0], [0.1, 0, 0.8], [0.1, 0.1, 0]]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_peers_learn_from_other_samples_that_the_seed_decides():
    first, second, third = (sample_of(100, number, seed=1) for number in range(3))
    assert first.tolist() == list(range(100))
    assert 40 < len(set(second)) < 85  # with replacement: 63 are expected
    assert second.tolist() != third.tolist()
    assert second.tolist() == sample_of(100, 1, seed=1).tolist()


def test_without_weights_there_is_nothing_to_start_from():
    with pytest.raises(InputError, match="--head-start needs --weights"):
        Settings(head_start=True)
