"""Whole runs, small: what is asked for, what is written, what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import pseudoloss as pl
from conftest import make_images
from pseudoloss.data import Data, arrays, corrupt
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.files import read_checked
from pseudoloss.labels.table import TRUTH

# --------------------------------------------------------------------------------- the run folder

ACCURACY = {"last", "best", "best_epoch", "on", "noisy_labels"}


def test_what_is_in_a_run_folder(tiny_run):
    out = tiny_run.path
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "summary.json", "labels.csv", "labels.parquet"),
        *("model.safetensors", "best.safetensors", "checkpoint", ".lock"),
    }
    summary = read_checked(out / "summary.json")
    assert len(summary.pop("metrics_checksum")) == 64
    assert summary == json.loads(json.dumps(tiny_run.summary))
    assert set(summary["accuracy"]) == ACCURACY
    recalls = {"recall", "recall_in", "recall_out"}
    assert set(summary["detection"]) == {"precision", "auc"} | recalls
    assert summary["noise"] == {"in": 0.25, "out": 0}
    assert set(summary["pseudo_labels"]) == {"accuracy", "auc"}
    assert (summary["epochs"], summary["images"], summary["classes"]) == (3, 64, 4)
    assert summary["noise_rate"] == 0.25
    assert summary["seconds"] > 0
    assert set(summary["actions"]) == {"keep", "relabel", "review"}
    assert sum(summary["actions"].values()) == 64

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["phase"] for line in lines] == ["warm-up", "pls", "pls"]
    assert lines[-1]["accuracy"] == summary["accuracy"]["last"]
    assert max(line["accuracy"] for line in lines) == summary["accuracy"]["best"]
    assert lines[-1]["pseudo_labels"] == summary["pseudo_labels"]
    assert set(lines[0]["seconds"]) == {"train", "score", "validate"}

    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["epochs"] == 3
    assert config["settings"]["gamma"] == 2  # settings of the method, too
    assert config["data"]["noise_rate"] == 0.25
    table = pd.read_csv(out / "labels.csv")
    assert len(table) == 64
    assert table["index"].tolist() == list(range(64))


def test_everything_can_stay_in_memory(tiny_source, tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = pl.train(tiny_source, quiet=True, **tiny_settings)
    assert run.path is None
    assert len(run.labels) == 64
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 19])
def test_grey_and_colour_images_of_any_size(channels, size, tiny_settings):
    source = make_images(channels=channels, size=size)
    run = pl.train(source, quiet=True, **(tiny_settings | {"epochs": 2}))
    assert run.summary["accuracy"] == dict.fromkeys(ACCURACY)
    assert run.summary["noise_rate"] is None
    assert set(run.summary["detection"].values()) == {None}


def test_larger_images_are_cropped_to_image_size(tiny_settings):
    run = pl.train(make_images(size=16), image_size=8, quiet=True, **tiny_settings)
    assert run.model.views.size == (8, 8)
    assert len(run.model.predict(make_images(size=16)[0])) == 64
    with pytest.raises(InputError, match=r"--image-size 20 is larger than the images \(16×16"):
        pl.train(make_images(size=16), image_size=20, quiet=True, **tiny_settings)


def test_images_of_448_pixels(tiny_settings):
    """As the paper's web images: stored larger, seen at 448."""
    source = make_images(n=4, size=460, channels=3, classes=2)
    settings = tiny_settings | {"image_size": 448, "batch_size": 2, "epochs": 2}
    settings |= {"network": "mobilenetv3_small_050"}
    run = pl.train(source, quiet=True, **settings)
    assert run.model.views.size == (448, 448)
    assert run.metrics["loss"].map(math.isfinite).all()


SWITCHES = [
    {"correct": False},
    {"contrast": False},
    {"trust_in_classification": False},
    {"trust_in_contrast": False},
    {"balance": 0},
    {"mixup": False},
    {"threshold_on": "clean"},
    {"pseudo_label_norm": "max"},
    {"pseudo_label_mode": "eval"},
    {"weighting": "interpolated"},
    {"weighting": "first"},
    {"contrast_class": "own"},
    {"balance_prior": "given"},
    {"protect_rare_classes": False},
    {"contrast_labels": "mixed"},
    {"contrast_mix": "separate"},
    {"mixup_lambda": "uniform"},
    {"initial_trust": True},
    # the paper's own choices together
    {"contrast_labels": "mixed", "contrast_mix": "separate", "mixup_lambda": "uniform"}
    | {"initial_trust": True, "weighting": "interpolated", "protect_rare_classes": False},
    {"precision": "bf16"},
]


def weights_of(run):
    return torch.cat([p.detach().flatten() for p in run.model.network.parameters()])


@pytest.fixture(scope="module")
def without_a_switch():
    return _train_with({})


def _train_with(switch):
    images, labels = make_images()
    source = pl.arrays(images, labels, true_labels=labels)
    settings = {"network": "small-cnn", "batch_size": 16, "epochs": 3, "warmup": 1, "lr": 0.05}
    return pl.train(source, quiet=True, corrupt="symmetric:0.3", **settings, pad=1, **switch)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_trains_and_changes_what_is_learned(switch, without_a_switch):
    run = _train_with(switch)
    assert run.metrics["loss"].map(math.isfinite).all()
    flags_only = {"threshold_on", "protect_rare_classes"}  # these may flag the same labels
    if not switch.keys() <= flags_only:
        assert not torch.equal(weights_of(run), weights_of(without_a_switch))


# ------------------------------------------------------------------------------- what is learned


def test_pls_learns_despite_the_noise(tiny_settings):
    images, labels = make_images(240)
    test_images, test_labels = make_images(100, seed=9)
    source = arrays(images, labels, test_images=test_images, test_labels=test_labels)
    run = pl.train(
        source,
        corrupt="symmetric-exact:0.4",
        quiet=True,
        flip=False,
        **(tiny_settings | {"epochs": 10, "warmup": 3, "batch_size": 32, "lr": 0.1}),
    )
    assert run.summary["accuracy"]["last"] > 95
    assert run.summary["detection"]["auc"] > 0.95
    assert run.summary["pseudo_labels"]["accuracy"] > 90
    relabelled = run.labels[run.labels["action"] == "relabel"]
    assert len(relabelled) > 50
    right = np.array([str(label) for label in labels])[relabelled["index"]]
    assert (relabelled["suggested_label"] == right).mean() > 0.9


@pytest.mark.parametrize("method", ["pls", "elr", "co-teaching"])
def test_training_never_sees_the_true_labels(tiny_settings, method):
    """Other true labels beside the same given labels change metrics, and no bit of the network."""
    images, labels = make_images()
    given = corrupt(arrays(images, labels).train, "symmetric:0.4", 1).given_N
    other = np.roll(labels, 1)
    settings = tiny_settings | {"method": method, "quiet": True}
    runs = [
        pl.train(arrays(images, given, true_labels=truth), **settings)
        for truth in (labels, other, None)
    ]
    states = [run.model.network.state_dict() for run in runs]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
        assert torch.equal(tensor, states[2][name])
    assert runs[0].summary["detection"] != runs[1].summary["detection"]
    pd.testing.assert_frame_equal(runs[0].labels.drop(columns=list(TRUTH)), runs[2].labels)


def test_out_of_distribution_images(tiny_source, tiny_settings, tmp_path, capsys):
    """They are counted separately, and training knows nothing of them."""
    pool = tmp_path / "pool.npy"
    np.save(pool, np.random.default_rng(0).integers(0, 256, (40, 9, 9), dtype=np.uint8))
    settings = tiny_settings | {"epochs": 4}
    run = pl.train(
        tiny_source, tmp_path / "run", corrupt="pair:0.25+out:0.25", pool=str(pool), **settings
    )
    summary = run.summary
    assert summary["noise"]["out"] == 0.25
    assert summary["noise_rate"] == pytest.approx(sum(summary["noise"].values()))
    assert "25.0% of the images out-of-distribution" in capsys.readouterr().out
    assert {"recall_in", "recall_out"} <= summary["detection"].keys()
    noisy = corrupt(tiny_source.train, "pair:0.25+out:0.25", 1, str(pool))
    blind = Data("blind", noisy.with_labels(noisy.given_N, None), tiny_source.test)
    other = pl.train(blind, quiet=True, **settings)
    assert other.summary["noise"] == {"in": None, "out": None}
    for name, tensor in run.model.network.state_dict().items():
        assert torch.equal(tensor, other.model.network.state_dict()[name])
    pd.testing.assert_frame_equal(run.labels.drop(columns=list(TRUTH)), other.labels)
    shares = run.labels["truth"].value_counts(normalize=True)
    assert (shares["wrong"], shares["out"]) == tuple(summary["noise"].values())
    names = np.array(noisy.classes)[noisy.true_N]
    assert (run.labels["true_label"].dropna() == names[noisy.true_N >= 0]).all()
    assert (run.labels["true_label"].isna() == (run.labels["truth"] == "out")).all()
    again = pl.load(tmp_path / "run").labels
    kept, told = (labels[list(TRUTH)].fillna("–").to_numpy() for labels in (again, run.labels))
    assert kept.tolist() == told.tolist()


def test_a_pool_may_move_but_not_change(tiny_source, tiny_settings, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    pool, moved, changed = (str(tmp_path / name) for name in ("a.npy", "b.npy", "c.npy"))
    np.save(pool, images)
    settings = tiny_settings | {"corrupt": "out:0.25", "quiet": True}
    pl.train(tiny_source, tmp_path / "run", pool=pool, minutes=1e-9, **settings)
    Path(pool).rename(moved)
    np.save(changed, images + 1)
    with pytest.raises(InputError, match="are not those the run began with"):
        pl.train(tiny_source, tmp_path / "run", resume=True, pool=changed, **settings)
    run = pl.train(tiny_source, tmp_path / "run", resume=True, pool=moved, **settings)
    assert run.finished


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 65}, r"--batch-size 65 is larger than the dataset \(64 images"),
        ({"network": "resnot"}, "--network resnot: no such network"),
        ({"corrupt": "salt:0.1"}, "--corrupt salt:0.1: no such noise"),
        ({"preset": "nothing"}, "--preset nothing: no such preset"),
        ({"learning_rate": 1}, "--learning-rate: no such setting"),
        ({"method": "ce", "gamma": 1}, "gamma: a setting of --method pls and pls-plus, not of ce"),
        ({"elr_beta": 0.7}, "--elr-beta: a setting of --method elr and elr-plus, not of pls"),
        (
            {"method": "magic"},
            "--method magic: must be one of pls, pls-plus, ce, mixup, elr",
        ),
        ({"schedule": "poly"}, "--schedule poly: must be cosine, linear, constant or"),
        ({"device": "cuda:55"}, "--device cuda:55"),
        ({"minutes": 0}, "--minutes must be a number above 0, not 0"),
        ({"minutes": "1"}, "--minutes must be a number above 0, not '1'"),
        ({"hold_out": "0.1"}, "--hold-out must be a number from 0 to below 1, not '0.1'"),
        ({"strict": "no"}, "--strict must be True or False, not 'no'"),
        ({"weights": "pretrained"}, "--weights pretrained"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be 1 or more"),
        ({"time_budget": 0}, "--time must be a number above 0, not 0"),
        ({"time_budget": 1}, "--time chooses the epochs, and --epochs contradicts it"),
        ({"hold_out": 0.2}, "--hold-out: arrays has test images already"),
        ({"strict": True}, "--strict is for folders and tables"),
        ({"fit": "squash"}, "--fit must be crop or stretch, not squash"),
        ({"config": "nowhere.toml"}, "--config nowhere.toml"),
        ({"config": 5}, "--config 5: "),
        ({"preset": 5}, "--preset 5: no such preset"),
        ({"preset": ["digits"]}, "no such preset"),
        ({"pad": 8}, r"--pad 8 must be smaller than the images \(8×8 pixels\)"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, tiny_source, tiny_settings, changes, message):
    with pytest.raises(InputError, match=message) as error:
        pl.train(tiny_source, out=tmp_path / "run", quiet=True, **(tiny_settings | changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [{}, {"resume": True}])
def test_cifar_itself_has_no_labels_given_by_people(tmp_path, more):
    """A preset of CIFAR-N asks for them before anything is read."""
    message = r"--preset cifar100n: add --corrupt human:FILE, .*noisylabels"
    with pytest.raises(InputError, match=message):
        pl.train("cifar100:DIR", out=tmp_path / "run", preset="cifar100n", quiet=True, **more)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"cifar100:DIR.* no such folder|DIR.* is missing"):
        pl.train("cifar100:DIR", preset="cifar100n", corrupt=None, quiet=True)


@pytest.mark.parametrize(("named", "noise"), [({"corrupt": "pair:1"}, 1), ({}, 0)])
def test_presets_of_cifar_n_also_work_for_other_sources(
    tmp_path, tiny_source, tiny_settings, named, noise
):
    """To resume, the noise need not be named again."""
    options = {"out": tmp_path / "run", "preset": "cifar10n", "quiet": True}
    settings = tiny_settings | {"epochs": 2}
    run = pl.train(tiny_source, minutes=1e-9, **named, **options, **settings)
    assert (run.finished, run.summary["noise"]["in"]) == (False, noise)
    run = pl.train(tiny_source, resume=True, **options, **settings)
    assert (run.finished, run.summary["noise"]["in"]) == (True, noise)


def test_a_source_is_needed(tmp_path):
    with pytest.raises(InputError, match="SOURCE is missing"):
        pl.train(out=tmp_path / "run")
    with pytest.raises(InputError, match=r"there is no run in .*/run; name SOURCE to start one"):
        pl.train(out=tmp_path / "run", resume=True)


def test_a_device_without_enough_memory_is_one_line(tiny_source, tiny_settings, monkeypatch):
    def step(self, epoch):
        raise torch.OutOfMemoryError("a long story\nof blocks")

    monkeypatch.setattr(Trainer, "train_epoch", step)
    with pytest.raises(TrainingError, match=r"^the GPU ran out of memory.*--batch-size \(now 16\)"):
        pl.train(tiny_source, quiet=True, **tiny_settings)
