"""The epochs of a run: when images are scored, what is noticed, what is kept."""

import math
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pseudoloss as pl
from conftest import make_images, train_epoch_by_epoch
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.engine import checkpoint, loop
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import TrainingError
from pseudoloss.methods.pls import PLS

# -------------------------------------------------------------------------------- when it happens


@pytest.mark.parametrize("initial_trust", [False, True])
def test_when_labels_are_flagged_and_when_there_is_trust(
    tiny_source, tiny_settings, monkeypatch, initial_trust
):
    """Row 11, with a warm-up of 2: labels are flagged after epoch 2 and there is trust after
    epoch 3; with initial_trust, both come after epoch 2."""
    stages = []
    for name in ("stage1", "stage2"):
        whole = getattr(PLS, name)

        def spy(*arguments, name=name, whole=whole):
            stages.append(name)
            return whole(*arguments)

        monkeypatch.setattr(PLS, name, spy)
    settings = tiny_settings | {"epochs": 5, "warmup": 2, "initial_trust": initial_trust}
    run = pl.train(tiny_source, quiet=True, corrupt="symmetric-exact:0.25", **settings)
    assert stages.count("stage1") == 4
    assert stages.count("stage2") == 3 + initial_trust
    assert run.metrics["noisy"].isna().tolist() == [True, False, False, False, False]
    assert run.metrics["pseudo_labels"].isna().tolist()[:2] == [True, not initial_trust]
    assert run.metrics["phase"].tolist() == ["warm-up"] * 2 + ["pls"] * 3


def test_a_run_of_warm_up_alone_flags_labels_and_says_so(tiny_source, tiny_settings):
    run = pl.train(tiny_source, quiet=True, **(tiny_settings | {"epochs": 1}))
    assert run.metrics["noisy"].notna().all()
    assert run.labels["trust"].between(0, 1).all()
    assert run.summary["notices"][0]["kind"] == "warm-up only"


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_a_run_stopped_in_the_warm_up_judges_its_labels(tiny_source, tiny_settings, method):
    settings = tiny_settings | {"method": method, "epochs": 9, "warmup": 5, "minutes": 1e-9}
    if method == "divide-mix":  # its warm-up has batches of twice the size
        settings["batch_size"] //= 2
    run = pl.train(tiny_source, quiet=True, **settings)
    assert run.summary["epochs"] == 1
    assert run.labels["label_score"].between(0, 0.999).all()
    assert run.labels["p_noisy"].nunique() > 10


def test_the_start_ends_with_the_first_step(tiny_run):
    assert 0 < tiny_run.summary["startup_seconds"] < tiny_run.summary["seconds"]


def test_checkpoints_may_be_rarer(tmp_path, tiny_source, tiny_settings, monkeypatch):
    saved = []
    whole = checkpoint.save

    def spy(path, tensors, record):
        saved.append(record["epochs"])
        whole(path, tensors, record)

    monkeypatch.setattr(checkpoint, "save", spy)
    settings = tiny_settings | {"epochs": 5, "checkpoint_every": 2}
    pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
    assert saved == [2, 4, 5]


def test_the_best_weights_are_those_of_the_best_epoch(tmp_path, tiny_source, tiny_settings):
    """The best epoch is the first one with the best accuracy."""
    settings = tiny_settings | {"epochs": 6}
    run = pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
    best_epoch = run.summary["accuracy"]["best_epoch"]
    first = int(run.metrics["accuracy"].to_numpy().argmax()) + 1
    assert best_epoch == first
    best = load_file(tmp_path / "run" / "best.safetensors")
    last = load_file(tmp_path / "run" / "model.safetensors")
    same = all(torch.equal(best[name], last[name]) for name in best)
    assert same == (best_epoch == 6)
    kept = [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()]
    assert sorted(kept) == sorted(["last.safetensors", f"best-{best_epoch}.safetensors"])


def test_training_prints_what_it_does(tiny_source, tiny_settings, capsys, tmp_path):
    pl.train(tiny_source, tmp_path / "run", corrupt="symmetric-exact:0.25", **tiny_settings)
    text = capsys.readouterr().out
    assert "pls on arrays, seed 1" in text
    assert "64 images of 8×8 grey, 4 classes, 25.0% of the labels wrong" in text
    assert "3 epochs, 1 of them warm-up; 4 steps of 16 images per epoch" in text
    assert [f"epoch {i}/3" in text for i in (1, 2, 3)] == [True] * 3
    assert "accuracy is measured on the test images (32)" in text
    assert "Done in 0:0" in text
    assert "  noise      not known: " in text
    assert "labels flagged in the last epoch: precision" in text
    assert "truth      25.0% of 64 labels are wrong; flagged labels: F1" in text
    assert f"written    {tmp_path}/run/: labels.csv, model.safetensors" in text


def test_a_stop_prints_how_to_resume(tiny_source, tiny_settings, capsys, tmp_path):
    out = tmp_path / "my run"
    pl.train(tiny_source, out, minutes=1e-9, **tiny_settings)
    text = capsys.readouterr().out
    assert "Stopped after epoch 1 because of --minutes" in text
    assert f"pseudoloss train --out '{out}' --resume" in text
    pl.train(tiny_source, out, resume=True)
    assert "resumed after epoch 1" in capsys.readouterr().out


# ---------------------------------------------------------------------------------- what goes wrong


def test_a_loss_that_becomes_nan_stops_the_run(tmp_path, tiny_source, tiny_settings, monkeypatch):
    whole = Trainer.train_epoch

    def fail(self, epoch):
        return math.nan if epoch == 2 else whole(self, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", fail)
    with pytest.raises(TrainingError, match=r"became nan in epoch 3.*epoch 2 is kept.*lower --lr"):
        pl.train(tiny_source, out=tmp_path / "run", quiet=True, **tiny_settings)
    assert (tmp_path / "run" / "checkpoint" / "last.safetensors").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_really_diverges_is_noticed(tiny_source, tiny_settings):
    with pytest.raises(TrainingError, match=r"the loss became (nan|inf) in epoch"):
        pl.train(tiny_source, quiet=True, **(tiny_settings | {"lr": 100.0, "epochs": 30}))


def test_a_warm_up_at_chance_is_noticed(tiny_settings, capsys):
    """Random labels on random images: nothing can be learned, and the learning rate is tiny."""
    images = np.random.default_rng(0).integers(0, 256, (400, 8, 8), dtype=np.uint8)
    settings = tiny_settings | {"lr": 1e-6, "batch_size": 64, "epochs": 2}
    run = pl.train((images, np.arange(400) % 20), **settings)
    assert run.summary["notices"][0]["kind"] == "warm-up"
    assert "notice: the warm-up ended at chance" in capsys.readouterr().out


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_a_collapse_after_the_warm_up_is_noticed(method, monkeypatch, tiny_settings):
    """The weights are lost in the last epoch; during the warm-up all was well."""
    score = Trainer.score

    def lose(trainer, epoch):
        if epoch + 1 == trainer.settings.epochs:
            for network in trainer.networks.values():
                for weights in network.parameters():
                    weights.data.zero_()
        return score(trainer, epoch)

    source = make_images(200)
    settings = tiny_settings | {"method": method, "warmup": 2, "flip": False, "quiet": True}
    healthy = pl.train(source, **settings).summary["notices"]
    assert not {"warm-up", "end"} & {notice["kind"] for notice in healthy}
    monkeypatch.setattr(Trainer, "score", lose)
    found = pl.train(source, **settings).summary["notices"]
    (notice,) = (notice for notice in found if notice["kind"] == "end")
    assert notice["text"].startswith("the run ended at chance: its predictions agree with ")
    assert notice["epoch"] == 3


@pytest.mark.parametrize("method", ["pls", "ce"])
def test_flagged_shares_that_swing_are_noticed(
    method, tiny_source, tiny_settings, monkeypatch, tmp_path
):
    """Although the run is interrupted in between. Baselines do not learn from flagged labels."""
    score = Trainer.score

    def swing(trainer, epoch):
        score(trainer, epoch)
        noisy_N = trainer.state.noisy_N
        noisy_N.fill_(False)
        noisy_N[: len(noisy_N) * (9 if epoch % 2 else 1) // 10] = True

    monkeypatch.setattr(Trainer, "score", swing)
    settings = tiny_settings | {"method": method, "epochs": 6, "warmup": 1}
    out = tmp_path / "run"
    assert train_epoch_by_epoch(tiny_source, out, **settings) == 6
    found = {notice["kind"]: notice for notice in pl.load(out).summary["notices"]}
    assert ("swings" in found) == (method == "pls")
    if method == "pls":
        assert found["swings"]["epoch"] == 4
        assert "89% after the next" in found["swings"]["text"]


@pytest.mark.parametrize("method", ["ce", "mixup", "elr", "co-teaching"])
def test_methods_that_only_report_flags_get_no_notices_about_them(tiny_settings, method):
    """Losses that are all equal have no two modes; that matters to PLS alone."""
    images = np.zeros((64, 8, 8), np.uint8)
    settings = tiny_settings | {"method": method, "epochs": 4}
    run = pl.train((images, np.arange(64) % 4), quiet=True, **settings)
    assert {notice["kind"] for notice in run.summary["notices"]} <= {"warm-up", "end"}


def test_a_notice_is_given_once(tiny_settings, capsys):
    """Equal losses leave stage 1 without modes in every epoch."""
    images = np.zeros((64, 8, 8), np.uint8)
    run = pl.train((images, np.arange(64) % 4), **(tiny_settings | {"epochs": 4, "balance": 0}))
    kinds = [notice["kind"] for notice in run.summary["notices"]]
    assert len(kinds) == len(set(kinds)) > 0
    assert capsys.readouterr().out.count("notice: ") == len(kinds)


def test_the_time_of_a_run_includes_its_label_table(tiny_source, tiny_settings, monkeypatch):
    real, now, later = loop.label_scores, time.monotonic, [0.0]

    def slow(*arguments, **options):
        later[0] += 1000
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "label_scores", slow)
    monkeypatch.setattr(loop.time, "monotonic", lambda: now() + later[0])
    assert pl.train(tiny_source, quiet=True, **tiny_settings).summary["seconds"] > 1000
