"""Settings that suit the data, and epochs that suit the time."""

import json

import numpy as np
import pytest
import torch

import pseudoloss as pl
from conftest import make_images, make_trainer, save_images
from pseudoloss import methods
from pseudoloss.cli import main
from pseudoloss.config import Settings
from pseudoloss.data import Reader, find_source
from pseudoloss.data.storage import FileImages
from pseudoloss.engine.fitting import (
    Pace,
    choose_settings,
    epochs_in,
    fit_to_data,
    measure_pace,
    with_epochs,
)
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter

NAMES = ("ant", "bee", "cat", "dog")
QUICK = {"network": "small-cnn", "batch_size": 16, "epochs": 2, "warmup": 1, "image_size": 8}


def write_images(folder, counts=(16, 16, 16, 16), size=10):
    images, labels = make_images(4 * max(counts), size=size, channels=3)
    keep = np.arange(len(labels)) // 4 < np.array(counts)[labels]
    save_images(folder, images[keep], labels[keep], NAMES)
    return folder


@pytest.fixture
def files(tmp_path):
    return write_images(tmp_path / "photos")


# ---------------------------------------------------------------------------- to suit the data


@pytest.mark.parametrize(("side", "preset"), [(64, "scratch"), (65, "finetune")])
def test_the_size_of_the_images_decides_the_preset(tmp_path, side, preset):
    scanned = find_source(str(write_images(tmp_path / "photos", (2, 2, 2, 2), size=side)))
    assert (scanned.preset, scanned.typical_side) == (preset, side)


@pytest.mark.parametrize(
    ("counts", "changes", "fitting"),
    [
        ((64,) * 4, {}, {"batch_size": 32}),
        ((512,) * 4, {}, {}),
        ((250, 250, 250, 100), {}, {"balance_prior": "given"}),
        ((3,) * 4, {}, {"batch_size": 2}),
        ((3,) * 4, {"accumulate": 4}, {"batch_size": 8}),
        ((3,) * 4, {"accumulate": 4, "batch_size": 40}, {"batch_size": 20}),
        ((3,) * 4, {"accumulate": 4, "batch_size": 20}, {}),
        ((30,) * 4, {"batch_size": 50}, {"batch_size": 25}),
    ],
)
def test_few_or_imbalanced_images(counts, changes, fitting):
    usual = Settings(**{"batch_size": 64} | changes)
    assert fit_to_data(dict(zip(NAMES, counts, strict=True)), usual) == fitting


def test_a_cpu_gets_a_small_network_unless_another_is_asked_for(files):
    scanned = find_source(str(files))
    chosen = choose_settings(scanned, request(None, None, {"device": "cpu"}))
    assert (chosen.settings.network, chosen.settings.epochs) == ("small-cnn", 30)
    asked = request(None, None, {"device": "cpu", "network": "preactresnet18"})
    settings = choose_settings(scanned, asked).settings
    assert (settings.network, settings.epochs) == ("preactresnet18", 100)


def test_photographs_on_a_cpu(tmp_path):
    scanned = find_source(str(write_images(tmp_path / "photos", (40,) * 4, size=80)))

    def settings(**asked):
        chosen = choose_settings(scanned, request(None, None, {"device": "cpu"} | asked)).settings
        return chosen.network, chosen.image_size, chosen.epochs, chosen.batch_size, chosen.lr

    network = "tf_efficientnet_lite0"
    assert settings() == (network, None, 3, 16, pytest.approx(0.0003))
    assert settings(image_size=64, epochs=5) == (network, 64, 5, 16, pytest.approx(0.0003))
    assert settings(batch_size=8, lr=0.5) == (network, None, 3, 8, 0.5)
    assert settings(network="resnet18") == ("resnet18", None, 30, 16, pytest.approx(0.0003))
    plain = {"head_start": False}
    assert settings(**plain) == (network, 128, 10, 16, pytest.approx(0.01))
    assert settings(image_size=64, **plain) == (network, 64, 10, 16, pytest.approx(0.01))


def test_photographs_with_a_network_of_ours_need_no_weights(tmp_path):
    scanned = find_source(str(write_images(tmp_path / "photos", (2, 2, 2, 2), size=80)))
    settings = choose_settings(scanned, request(None, None, {"network": "small-cnn"})).settings
    assert (scanned.preset, settings.weights) == ("finetune", None)
    asked = request(None, None, {"network": "small-cnn", "weights": "pretrained"})
    assert choose_settings(scanned, asked).settings.weights == "pretrained"  # and is refused later


@pytest.mark.parametrize("method", ["ce", "elr", "co-teaching"])
def test_imbalanced_classes_change_no_setting_that_a_method_does_not_have(tmp_path, method):
    scanned = find_source(str(write_images(tmp_path / "photos", (16, 4, 4, 4))))
    chosen = choose_settings(scanned, request(None, None, {"method": method, "device": "cpu"}))
    assert chosen.settings.method == method
    assert "balance_prior" not in chosen.fitting


def test_arrays_get_settings_that_fit_too():
    images, labels = make_images(n=40)
    run = pl.train((images, labels), quiet=True, network="small-cnn", epochs=2, hold_out=0.2)
    assert run.settings.batch_size == 4
    assert run.summary["images"] == 32
    assert run.summary["accuracy"]["on"] == "held-out images"
    assert run.summary["accuracy"]["noisy_labels"] is True


def test_few_images_train_with_all_that_fits(tmp_path):
    folder = write_images(tmp_path / "photos", counts=(40, 5, 3, 3))
    run = pl.train(folder, preset="scratch", quiet=True, network="small-cnn", epochs=2)
    assert run.settings.method_settings.balance_prior == "given"
    assert run.settings.batch_size == 4
    assert run.settings.lr == pytest.approx(0.05 * 4 / 128)


# ---------------------------------------------------------------------------- to suit the time


def method_for(settings):
    return methods.build(settings, torch.arange(8) % 4, 4, weak_is_plain=False)


@pytest.mark.parametrize("warmup", [None, 6])
@pytest.mark.parametrize("seconds", [1, 50, 500, 12345])
def test_epochs_fit_into_the_time(warmup, seconds):
    pace = Pace({"warm-up": 1, "pls": 3}, score=0.5, validate=0.25, startup=0)
    settings = Settings(epochs=40, warmup=warmup)

    def needed(epochs):
        return pace.of(method_for(with_epochs(settings, epochs)), epochs)

    epochs = epochs_in(pace, settings, method_for, seconds)
    assert epochs == 2 or needed(epochs) <= seconds
    assert needed(epochs + 1) > seconds
    if epochs > 10:  # the warm-up keeps its share
        mean = 0.15 * 1 + 0.85 * 3.5 + 0.25
        assert needed(epochs) == pytest.approx(epochs * mean, rel=0.05)


@pytest.mark.parametrize(
    ("method", "warmup", "epochs", "wanted"),
    [
        *(("pls", 30, 20, 3), ("pls", 30, 400, 60), ("pls", 1, 20, 1), ("pls", 199, 20, 19)),
        *(("pls", 200, 2, 1), ("ce", None, 20, None), ("elr", 0, 20, 0), ("ce", 0, 400, 0)),
    ],
)
def test_a_warm_up_that_was_named_is_scaled(method, warmup, epochs, wanted):
    """None stays a share of the epochs, and a run without warm-up stays without one."""
    settings = with_epochs(Settings(method=method, epochs=200, warmup=warmup), epochs)
    assert (settings.epochs, settings.warmup) == (epochs, wanted)


def test_the_pace_counts_the_time_that_images_need(files, monkeypatch):
    """By a clock that only decoding moves: one second per batch."""
    clock = [0.0]

    def slowly(images):
        for batch in whole(images):
            clock[0] += 1
            yield batch

    whole = FileImages._decoded
    monkeypatch.setattr(FileImages, "_decoded", slowly)
    monkeypatch.setattr("pseudoloss.engine.fitting.time.monotonic", lambda: clock[0])
    data, _ = find_source(str(files)).read(Reader(3, (8, 8)), 8, "files", strict=False)
    settings = request(None, None, QUICK).settings("default")
    with Trainer(data, settings, SilentReporter()) as trainer:
        pace = measure_pace(trainer)
    assert pace.train == {"warm-up": 3, "pls": 3}  # 56 images: three batches, or one chunk
    assert (pace.score, pace.validate, pace.startup) == pytest.approx((1, 8 / 56, 0))


@pytest.mark.parametrize("method", ["ce", "elr", "co-teaching", "divide-mix", "evidential-mix"])
def test_the_pace_of_other_methods_is_by_phase_too(method):
    with make_trainer(method=method) as trainer:
        pace, built = measure_pace(trainer), trainer.method
    assert {"warm-up", method} <= set(pace.train)
    assert pace.of(built, 3) > sum(pace.train.values())


def test_epochs_that_the_time_chooses_are_not_printed_before(files, capsys):
    pl.train(files, device="cpu", minutes=1e-9, image_size=8)
    assert "--network small-cnn --epochs 30" in capsys.readouterr().out
    pl.train(files, device="cpu", time_budget=1e-6, image_size=8)
    text = capsys.readouterr().out
    assert "--network small-cnn\n" in text
    assert "--epochs" not in text.partition("Done")[0].partition("notice")[0]


def test_a_time_that_is_too_short_is_in_the_summary(tiny_source):
    settings = {"network": "small-cnn", "batch_size": 16}
    run = pl.train(tiny_source, quiet=True, device="cpu", time_budget=1e-6, **settings)
    (notice,) = (notice for notice in run.summary["notices"] if notice["kind"] == "time")
    assert "is too short: 2 epochs, the fewest, take about" in notice["text"]


@pytest.mark.parametrize("method", ["pls", "co-teaching"])
def test_a_budget_of_time_chooses_the_epochs(tiny_source, tmp_path, method):
    run = pl.train(
        *(tiny_source, tmp_path / "run"),
        time_budget=0.03,
        method=method,
        network="small-cnn",
        batch_size=16,
        quiet=True,
    )
    assert run.finished
    assert run.settings.epochs == run.summary["epochs"] >= 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["epochs"] == run.settings.epochs


@pytest.mark.parametrize(
    ("text", "minutes"), [("30m", 30), ("2h", 120), ("90s", 1.5), ("5", 5), ("0.5h", 30)]
)
def test_times_with_units(text, minutes, monkeypatch, tmp_path):
    asked = []

    def train(*arguments, time_budget, **settings):
        asked.append(time_budget)
        raise InputError("enough")

    monkeypatch.setattr("pseudoloss.engine.training.train", train)
    assert main(["train", "digits", "--out", str(tmp_path / "run"), "--time", text]) == 2
    assert asked == [pytest.approx(minutes)]


@pytest.mark.parametrize("text", ["soon", "0", "", "h", "1e9h", "nan"])
def test_other_times_are_refused(text, capsys):
    assert main(["train", "digits", "--out", "x", "--time", text]) == 2
    assert "--time: must be a time" in capsys.readouterr().err


def test_steps_of_the_learning_rate_are_scaled_with_the_epochs():
    usual = Settings(method="elr", epochs=150, warmup=0, schedule="steps:80,120:0.01")
    scaled = with_epochs(usual, 15)
    assert (scaled.schedule, scaled.warmup) == ("steps:8,12:0.01", 0)
    assert with_epochs(usual, 150) == usual
    assert with_epochs(Settings(), 10).schedule == "cosine"
