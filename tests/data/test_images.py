"""Sources, and what arrays may be."""

import hashlib
import pickle

import numpy as np
import pytest
import torch

from conftest import make_images
from pseudoloss.cli.inspection import inspect
from pseudoloss.data import OUT, arrays, open_source, to_pixels
from pseudoloss.data.images import channel_statistics, levels_of
from pseudoloss.data.sources import cifar
from pseudoloss.errors import InputError

# ------------------------------------------------------------------------------------ pixels


@pytest.mark.parametrize(
    ("shape", "as_tensor", "wanted"),
    [
        ((5, 9, 8), False, (5, 1, 9, 8)),
        ((5, 9, 8, 1), False, (5, 1, 9, 8)),
        ((5, 9, 8, 3), False, (5, 3, 9, 8)),
        ((5, 3, 9, 8), False, (5, 3, 9, 8)),
        ((5, 3, 9, 8), True, (5, 3, 9, 8)),
        ((5, 9, 8, 3), True, (5, 3, 9, 8)),
        ((5, 1, 9, 8), True, (5, 1, 9, 8)),
    ],
)
def test_layouts(shape, as_tensor, wanted):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    pixels = to_pixels(torch.from_numpy(images) if as_tensor else images, "x")
    assert pixels.shape == wanted
    channels_last = images.reshape(5, 9, 8, -1) if shape[1] == 9 else images.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(pixels.permute(0, 2, 3, 1), channels_last)


def test_floats_are_scaled_and_rounded():
    images = np.array([0, 0.5, 1, 1 / 255], dtype=np.float32).repeat(64).reshape(4, 8, 8)
    assert to_pixels(images, "x")[:, 0, 0, 0].tolist() == [0, 128, 255, 1]


def test_half_precision_tensors():
    images = torch.full((2, 1, 8, 8), 0.5)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert to_pixels(images.to(dtype), "x").unique().tolist() == [128]


def test_the_users_array_is_copied():
    images = np.zeros((2, 8, 8), dtype=np.uint8)
    pixels = to_pixels(images, "x")
    images[:] = 9
    assert pixels.max() == 0


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((5, 8), np.uint8), "N,H,W or N,H,W,C, not of shape 5,8"),
        (np.zeros((5, 8, 8, 2), np.uint8), "1 or 3 channels, not shape 5,8,8,2"),
        (np.zeros((5, 4, 8), np.uint8), "4×8 pixels are too small"),
        (np.zeros((5, 8, 8), np.int32), "uint8 .* not int32"),
        (np.zeros((5, 8, 8), bool), "not bool"),
        (np.full((5, 8, 8), 200.0), "0 to 1, not 200 to 200 .*divide by 255"),
        (np.full((5, 8, 8), -0.1), "0 to 1"),
        (
            np.where(np.arange(5)[:, None, None] == 3, np.nan, np.zeros((5, 8, 8))),
            "image 3 contains",
        ),
        ([np.zeros((8, 8)), np.zeros((9, 9))], "one array of numbers, all of the same size"),
        (np.array([["a"]]), "set: images must be"),
        (None, "one array of numbers"),
    ],
)
def test_bad_pixels(images, message):
    with pytest.raises(InputError, match=message):
        to_pixels(images, "set")


def test_statistics_are_those_of_numpy():
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 9, 8), dtype=np.uint8)
    mean, std = channel_statistics(levels_of(torch.from_numpy(images)))
    np.testing.assert_allclose(mean, (images / 255).mean((0, 2, 3)))
    np.testing.assert_allclose(std, (images / 255).std((0, 2, 3)))


def test_a_blank_channel_can_be_normalised():
    _, std = channel_statistics(levels_of(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)))
    assert std[0] > 0


# ------------------------------------------------------------------------------------ labels


def test_labels_become_places_among_the_sorted_values():
    images = np.zeros((6, 8, 8), np.uint8)
    data = arrays(images, ["cat", "ant", "cat", "bee", "ant", "bee"])
    assert data.train.classes == ("ant", "bee", "cat")
    assert data.train.given_N.tolist() == [2, 0, 2, 1, 0, 1]
    gaps = arrays(images, [7, 3, 7, 3, 90, 90])
    assert gaps.train.classes == ("3", "7", "90")
    assert gaps.train.given_N.tolist() == [1, 0, 1, 0, 2, 2]


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 1, 0, 1]), np.array([0.0, 1, 0, 1]), np.array([False, True] * 2)]
)
def test_kinds_of_labels(labels):
    assert arrays(np.zeros((4, 8, 8), np.uint8), labels).train.given_N.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [0, 1, 0]}, "labels: 3 labels for 4 images"),
        ({"labels": [[0, 1, 0, 1]]}, "one for each image, not an array of shape 1,4"),
        ({"labels": [0, 1, -1, 1]}, "-1 in row 2 is out of range"),
        ({"labels": [0, 1, 0.5, 1]}, "0.5 in row 2 is not a class"),
        ({"labels": [0, 1, np.nan, 1]}, "nan in row 2"),
        ({"labels": [0, 1, None, 1]}, "whole numbers or text"),
        (
            {"labels": [0, 1, 2, 1], "classes": ["a", "b"]},
            r"2 in row 2 is out of range \(classes: 0 to 1\)",
        ),
        ({"labels": ["a", "b", "a", "b"], "classes": ["a", "b"]}, "must be whole numbers"),
        ({"classes": ["a", "a"]}, "two classes have the same name"),
        ({"classes": []}, "classes must name at least two"),
        ({"labels": [[0], [1, 2]]}, "labels must be one for each image"),
        ({"true_labels": [0, 1, 5, 1]}, "true labels: 5 in row 2 is out of range"),
        ({"true_labels": [0, 1]}, "true labels: 2 labels for 4 images"),
        ({"paths": ["a.png"]}, "1 paths for 4 images"),
        ({"test_images": np.zeros((2, 8, 8), np.uint8)}, "needed together"),
        (
            {"test_images": np.zeros((1, 9, 8), np.uint8), "test_labels": [0]},
            r"test images are 1,9,8 \(channels,height,width\), training images 1,8,8",
        ),
        (
            {"test_images": np.zeros((1, 8, 8), np.uint8), "test_labels": [7]},
            "test labels: 7 in row 0",
        ),
        ({"test_images": np.zeros((0, 8, 8), np.uint8), "test_labels": []}, "no test images"),
        ({"images": np.zeros((0, 8, 8), np.uint8), "labels": []}, "the set is empty"),
    ],
)
def test_bad_labels_are_named(changes, message):
    given = {"images": np.zeros((4, 8, 8), np.uint8), "labels": [0, 1, 0, 1]} | changes
    with pytest.raises(InputError, match=message) as error:
        arrays(given.pop("images"), given.pop("labels"), **given)
    assert "\n" not in str(error.value)


def test_the_truth_may_be_that_no_class_is_right():
    for labels, truth in (
        ([7, 3, 7, 3], [7, -1, 3, -1]),
        ([1, 0, 1, 0], np.array([1, -1, 0, -1.0])),
    ):
        train = arrays(np.zeros((4, 8, 8), np.uint8), labels, true_labels=truth).train
        assert train.true_N.tolist() == [1, OUT, 0, OUT]
        assert train.noise == {"in": 0.25, "out": 0.5}


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([1, 1, 1, 1], None, r"all labels are of one class \(1\)"),
        ([0, 0, 0, 0], ["a", "b"], r"all labels are of one class \(a\)"),
        ([0, 0, 1, 2], None, "class 1 has one image"),
        ([0, 0, 1, 1], ["a", "b", "c"], "class c has no image"),
    ],
)
def test_labels_that_cannot_be_learnt_from(labels, classes, message):
    data = arrays(np.zeros((4, 8, 8), np.uint8), labels, classes=classes)
    with pytest.raises(InputError, match=message):
        open_source(data)


# ----------------------------------------------------------------------------------- sources


def test_digits():
    data = open_source("digits")
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images_NCHW.shape[1:] == (1, 8, 8)
    assert data.train.classes == tuple("0123456789")
    assert data.train.images_NCHW.max() == 255
    assert data.train.noise_rate == 0
    counts = torch.bincount(data.test.given_N)
    assert counts.min() > 20
    both = torch.cat([data.train.images_NCHW, data.test.images_NCHW]).flatten(1)
    assert len(both.unique(dim=0)) == len(both)  # no image is in both parts
    assert data.fingerprint() == open_source("digits").fingerprint()


def test_a_pair_of_arrays():
    data = open_source(make_images())
    assert (len(data.train), data.test, data.train.noise_rate) == (64, None, None)


def test_npz(npz):
    test_images, test_labels = make_images(20, seed=2)
    path = npz(
        test_images=test_images,
        test_labels=test_labels,
        classes=np.array(["a", "b", "c", "d"]),
        true_labels=np.roll(np.arange(64) % 4, 1),
    )
    data = open_source(path)
    assert data.train.classes == ("a", "b", "c", "d")
    assert len(data.test) == 20
    assert data.train.noise_rate == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "the array labels is missing"),
        ({"images": None}, "the array images is missing"),
        ({"lables": np.zeros(3)}, "unknown array lables; did you mean labels"),
        ({"labels": np.array([object()] * 64)}, "not a NumPy archive of plain arrays"),
        ({"labels": np.arange(63)}, "set.npz: labels: 63 labels for 64 images"),
        ({"classes": np.array("abcd")}, "classes must be a list of names"),
        ({"classes": np.array(4)}, "classes must be a list of names"),
    ],
)
def test_bad_npz(npz, changes, message):
    with pytest.raises(InputError, match=message):
        open_source(str(npz(**changes)))


def test_npz_that_is_none(tmp_path):
    path = tmp_path / "broken.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"broken.npz: not a NumPy archive"):
        open_source(path)
    with path.open("wb") as file:
        np.save(file, np.zeros((4, 8, 8), np.uint8))  # one array, no archive
    with pytest.raises(InputError, match=r"broken.npz: not a NumPy archive"):
        open_source(path)
    with pytest.raises(InputError, match=r"nowhere.npz: no such file"):
        open_source(tmp_path / "nowhere.npz")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digit", "source digit: no such source; did you mean digits"),
        ("cifar100", "source cifar100: say where its files are, as cifar100:DIR"),
        ("imagenet:x", "no such source"),
        ("", "SOURCE is empty"),
        (3, "source must be words"),
        ((1, 2, 3), "source must be words"),
    ],
)
def test_unknown_sources(words, message):
    with pytest.raises(InputError, match=message):
        open_source(words)


# ------------------------------------------------------------------------------------- CIFAR


@pytest.fixture
def fake_cifar(tmp_path, monkeypatch):
    """The official layouts with a few random images; their sums stand in for the official ones."""
    random = np.random.default_rng(0)

    def batch(n, key, classes):
        return {
            b"data": random.integers(0, 256, (n, 3072), dtype=np.uint8),
            key: [i % classes for i in range(n)],
            b"filenames": [f"image_{i}.png".encode() for i in range(n)],
        }

    def write(folder, name, content, sums):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(content))
        monkeypatch.setitem(sums, name, hashlib.md5(path.read_bytes()).hexdigest())
        return content

    hundred = {}
    for name, n in (("train", 20), ("test", 10)):
        content = batch(n, b"fine_labels", 5)
        content[b"coarse_labels"] = [label % 2 for label in content[b"fine_labels"]]
        hundred[name] = write("cifar-100-python", name, content, cifar.CIFAR100_MD5)
    names = [f"class{i}".encode() for i in range(5)]
    write("cifar-100-python", "meta", {b"fine_label_names": names}, cifar.CIFAR100_MD5)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        write("cifar-10-batches-py", name, batch(10, b"labels", 5), cifar.CIFAR10_MD5)
    write("cifar-10-batches-py", "batches.meta", {b"label_names": names}, cifar.CIFAR10_MD5)
    return tmp_path, hundred


def test_cifar100(fake_cifar):
    root, content = fake_cifar
    for place in (root, root / "cifar-100-python"):
        data = open_source(f"cifar100:{place}")
        assert (len(data.train), len(data.test)) == (20, 10)
        wanted = content["train"][b"data"].reshape(-1, 3, 32, 32)
        np.testing.assert_array_equal(data.train.images_NCHW, wanted)
        assert data.train.given_N.tolist() == content["train"][b"fine_labels"]
        assert data.train.paths[3] == "image_3.png"
        assert data.train.classes[2] == "class2"
        assert data.train.superclasses == (0, 1, 0, 1, 0)
        assert data.normalisation()[0] == (0.5071, 0.4867, 0.4408)


def test_cifar10(fake_cifar):
    data = open_source(f"cifar10:{fake_cifar[0]}")
    assert (len(data.train), len(data.test), len(data.train.classes)) == (50, 10, 5)


def test_a_look_at_cifar(fake_cifar):
    found = inspect(f"cifar100:{fake_cifar[0]}")
    assert (found.train, found.test, len(found.classes)) == (20, 10, 5)
    assert found.plan.stored == (32, 32)
    assert (found.problems, found.plan.batch_size) == ([], 2)


def test_nothing_is_unpickled_before_its_sum_is_checked(fake_cifar, monkeypatch):
    root, _ = fake_cifar

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran",))

    (root / "cifar-100-python" / "train").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match=r"train is not the official file .*md5"):
        open_source(f"cifar100:{root}")


def test_missing_cifar_files(fake_cifar, tmp_path):
    root, _ = fake_cifar
    (root / "cifar-100-python" / "test").unlink()
    with pytest.raises(InputError, match=r"test missing in .*cifar-100-python; its"):
        open_source(f"cifar100:{root}")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"found neither cifar-100-python/ nor its files train"):
        open_source(f"cifar100:{empty}")
    (empty / "cifar-100-python.tar.gz").touch()
    with pytest.raises(InputError, match=r"unpack .*cifar-100-python.tar.gz first"):
        open_source(f"cifar100:{empty}")
    with pytest.raises(InputError, match=r"no such folder; it should hold cifar-10-batches-py"):
        open_source("cifar10:nowhere/at/all")
    with pytest.raises(InputError, match=r"owners publish it at https://www.cs.toronto.edu"):
        open_source("cifar10:nowhere/at/all")


def test_the_official_sums():
    """As published with the files; a change here would let other pickles in."""
    assert cifar.CIFAR100_MD5["train"] == "16019d7e3df5f24257cddd939b257f8d"
    assert cifar.CIFAR100_MD5["test"] == "f0ef6b0ae62326f3e7ffdfab6717acfc"
    from torchvision.datasets import CIFAR10, CIFAR100

    for ours, theirs in ((cifar.CIFAR10_MD5, CIFAR10), (cifar.CIFAR100_MD5, CIFAR100)):
        wanted = dict([*theirs.train_list, *theirs.test_list])
        wanted[theirs.meta["filename"]] = theirs.meta["md5"]
        assert ours == wanted
