"""Small things to train on, shared by the tests."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

import pseudoloss as pl
from pseudoloss.data import Reader, find_source

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

TINY = {"network": "small-cnn", "batch_size": 16, "epochs": 3, "warmup": 1, "lr": 0.05, "pad": 1}


def make_images(n=64, classes=4, size=8, channels=1, seed=0):
    """Images that show their class: a bright bar at a place that depends on it."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    images = random.integers(0, 80, (n, size, size, channels), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, label * size // classes : (label + 1) * size // classes] += 150
    return images, labels


@pytest.fixture
def tiny_source():
    """64 grey images of 8×8, 4 classes, and a test set."""
    images, labels = make_images()
    test_images, test_labels = make_images(n=32, seed=1)
    return pl.arrays(
        images, labels, test_images=test_images, test_labels=test_labels, true_labels=labels
    )


@pytest.fixture
def tiny_settings():
    return dict(TINY)


@pytest.fixture
def npz(tmp_path):
    """Writes an .npz source; keyword arguments replace its arrays (None leaves one out)."""

    def write(name="set.npz", **changes):
        images, labels = make_images()
        arrays = {"images": images, "labels": labels} | changes
        path = tmp_path / name
        np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        return path

    return write


def save_images(folder, images, labels, names=None):
    """Image files in a folder for each class, PNG and JPEG in turn; their paths."""
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
    """The folder of a run on them: stored as 20×20 pixels, of which the network sees 16×16."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = TINY | {"pad": 0, "epochs": 2, "batch_size": 9}
    data, _ = find_source(str(photo_folder)).read(Reader(3, (20, 20)), 16, "host", strict=True)
    pl.train(data, out, quiet=True, image_size=16, **settings)
    return out


@pytest.fixture
def photos(tmp_path):
    """Writes image files, each of a colour of its own: names inside a folder, with or without
    suffixes."""

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
