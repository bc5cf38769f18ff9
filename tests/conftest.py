"""Small datasets and trained runs that the tests share."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image
from safetensors.torch import load_file

import pseudoloss as pl
from audits import blobs
from processes import FLAGS, CommandServer
from pseudoloss.config import Settings
from pseudoloss.data import Reader, find_source
from pseudoloss.engine.trainer import Trainer
from pseudoloss.progress import SilentReporter
from review_runs import write_review

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

# A shell that starts the tests in the background may have signals ignored.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Continuous integration tries the same examples every time; elsewhere they are random.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

TINY = {"network": "small-cnn", "batch_size": 16, "epochs": 3, "warmup": 1, "lr": 0.05, "pad": 1}


def make_images(n=64, classes=4, size=8, channels=1, seed=0):
    """Images that show their class: a bright bar whose position depends on it."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    images = random.integers(0, 80, (n, size, size, channels), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, label * size // classes : (label + 1) * size // classes] += 150
    return images, labels


def make_source(n=64):
    """Grey images of 8×8 in 4 classes, with test images and true labels."""
    images, labels = make_images(n)
    test_images, test_labels = make_images(n=32, seed=1)
    return pl.arrays(
        images, labels, test_images=test_images, test_labels=test_labels, true_labels=labels
    )


def make_trainer(data=None, reporter=None, **settings):
    """A trainer on the CPU; `settings` replace those of TINY."""
    settings = Settings(**(TINY | {"device": "cpu"} | settings))
    return Trainer(make_source() if data is None else data, settings, reporter or SilentReporter())


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """No test reads or fills the user's cache of features."""
    os.environ["PSEUDOLOSS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tiny_source():
    return make_source()


@pytest.fixture
def tiny_settings():
    return dict(TINY)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A finished PLS run of three epochs, in a folder that no test may change."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    settings = TINY | {"corrupt": "symmetric-exact:0.25", "device": "cpu"}
    return pl.train(make_source(), out=out, quiet=True, **settings)


@pytest.fixture
def finished(tiny_run, tmp_path):
    """The folder of a copy of that run."""
    return shutil.copytree(tiny_run.path, tmp_path / "finished")


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    assert not pl.train(make_source(), out=out, minutes=1e-9, quiet=True, **TINY).finished
    return out


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """The folder of a run of three epochs that was stopped after the first."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def metrics_of(run: Path):
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_run(a: Path, b: Path):
    """Two run folders hold the same results, bit for bit."""
    for name in ("model.safetensors", "best.safetensors"):
        if (a / name).exists():
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert (a / "labels.csv").read_bytes() == (b / "labels.csv").read_bytes()
    final, other = (load_file(run / "checkpoint" / "last.safetensors") for run in (a, b))
    assert final.keys() == other.keys()
    for name, tensor in final.items():
        assert torch.equal(tensor, other[name]), name
    assert metrics_of(a) == metrics_of(b)
    summary, other_summary = (json.loads((run / "summary.json").read_text()) for run in (a, b))
    for key in ("accuracy", "detection", "pseudo_labels", "actions", "notices", "epochs"):
        assert summary[key] == other_summary[key], key


def train_epoch_by_epoch(source, out, **settings):
    """A run that stops after every epoch and is resumed; how often it was started."""
    starts = 0
    while not (out / "summary.json").exists():
        pl.train(source, out=out, minutes=1e-9, resume=True, quiet=True, **settings)
        starts += 1
    return starts


@pytest.fixture
def npz(tmp_path):
    """Writes an .npz source; keyword arguments replace its arrays (None omits one)."""

    def write(name="set.npz", **changes):
        images, labels = make_images()
        arrays = {"images": images, "labels": labels} | changes
        path = tmp_path / name
        np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        return path

    return write


def save_images(folder, images, labels, names=None):
    """Write image files into one folder per class, PNG and JPEG in turn; their paths."""
    paths = []
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        inside = folder / (str(label) if names is None else names[label])
        inside.mkdir(parents=True, exist_ok=True)
        paths.append(inside / f"{i}.{'jpg' if i % 2 else 'png'}")
        Image.fromarray(image.squeeze()).save(paths[-1], quality=95)
    return paths


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory):
    """Colour files of 20×28 in train/ and test/, three classes with odd names."""
    root = tmp_path_factory.mktemp("photos")
    names = ("a cat", 'dog, "wet"', "übel")
    for part, n in (("train", 36), ("test", 12)):
        images, labels = make_images(n, 3, 28, 3, seed=n)
        save_images(root / part, images[:, :20], labels, names)
    return root


@pytest.fixture(scope="session")
def photo_run(photo_folder, tmp_path_factory):
    """The folder of a run on those photos, stored as 20×20 pixels; the network sees 16×16."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = TINY | {"pad": 0, "epochs": 2, "batch_size": 9}
    data, _ = find_source(str(photo_folder)).read(Reader(3, (20, 20)), 16, "host", strict=True)
    pl.train(data, out, quiet=True, image_size=16, **settings)
    return out


@pytest.fixture(scope="session")
def photo_audit(photo_folder, tmp_path_factory):
    """The folder of an audit of those photos; no test may change it."""
    out = tmp_path_factory.mktemp("audits") / "audit"
    pl.audit(photo_folder, out=out, quiet=True, device="cpu")
    return out


@pytest.fixture(scope="session")
def blob_audit(tmp_path_factory):
    """An audit of features with wrong labels, in a folder that no test may change."""
    features, given, _ = blobs()
    out = tmp_path_factory.mktemp("blobs") / "audit"
    return pl.audit(features=features, labels=given, out=out, quiet=True, device="cpu")


@pytest.fixture
def photos(tmp_path):
    """Writes image files, each in a different colour, with these names (with or without suffix)
    into a folder."""

    def write(*names, root="photos", size=(12, 10)):
        folder = tmp_path / root
        folder.mkdir(exist_ok=True)
        for i, name in enumerate(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            colour = (i * 37 % 256, i * 91 % 256, i * 53 % 256)
            Image.new("RGB", size, colour).save(path, "PNG")
        return folder

    return write


@pytest.fixture
def review_audit(tmp_path):
    """The folder of an audit to review; see review_runs.py."""
    return write_review(tmp_path)


@pytest.fixture
def opened_review(review_audit):
    """The state of a review of that audit."""
    from pseudoloss.labels.opening import open_labels
    from pseudoloss.review.log import DecisionLog
    from pseudoloss.review.server import open_review

    log = DecisionLog(review_audit / "decisions.jsonl")
    yield open_review(open_labels(review_audit), log)
    log.close()


# -------------------------------------------------------------------------------- real processes


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    server = CommandServer(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """An .npz source with test images."""
    path = tmp_path_factory.mktemp("dataset") / "set.npz"
    images, labels = make_images(64)
    test_images, test_labels = make_images(32, seed=1)
    np.savez(path, images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    return path


@pytest.fixture(scope="session")
def whole_run(commands, dataset, tmp_path_factory):
    """The folder of a run that nothing has interrupted; no test may change it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert commands.run("train", dataset, "--out", out, *FLAGS)[0] == 0
    return out
