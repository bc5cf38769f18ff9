"""CIFAR-10 and CIFAR-100, on small files with their layout."""

import hashlib
import pickle

import numpy as np
import pytest
import torch

import pseudoloss as pl
from pseudoloss.cli.inspection import inspect
from pseudoloss.data import ReadOptions, find_source, open_source
from pseudoloss.data.sources import cifar
from pseudoloss.errors import InputError


@pytest.fixture
def fake_cifar(tmp_path, monkeypatch):
    """The official layouts with a few random images, whose checksums replace the official ones."""
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


@pytest.mark.parametrize(("kind", "images", "per_class"), [("cifar10", 50, 2), ("cifar100", 20, 1)])
def test_training_images_alone(fake_cifar, kind, images, per_class):
    """Nothing of the test file is read: it may be missing. Held-out images have true labels."""
    root, _ = fake_cifar
    whole = open_source(f"{kind}:{root}")
    for name in ("cifar-10-batches-py/test_batch", "cifar-100-python/test"):
        (root / name).unlink()
    alone = open_source(f"{kind}-train:{root}")
    assert (len(alone.train), alone.test, alone.name) == (images, None, f"{kind}-train")
    assert torch.equal(alone.train.images_NCHW, whole.train.images_NCHW)
    assert alone.train.superclasses == whole.train.superclasses
    assert alone.normalisation() == whole.normalisation()
    first, other = (
        find_source(f"{kind}-train:{root}", ReadOptions(hold_out=0.2), seed) for seed in (11, 12)
    )
    for fold in (first, other):
        held = fold.test
        assert torch.bincount(held.given_N).tolist() == [per_class] * 5
        assert torch.equal(held.given_N, whole.train.given_N[held.positions_N])
        both = torch.cat([held.positions_N, fold.train.positions_N])
        assert sorted(both.tolist()) == list(range(images))
    assert not torch.equal(first.test.positions_N, other.test.positions_N)


def test_training_on_a_fold_needs_no_test_file(fake_cifar):
    root, _ = fake_cifar
    (root / "cifar-100-python" / "test").unlink()
    settings = {"network": "small-cnn", "epochs": 1, "batch_size": 4, "corrupt": "asymmetric:0.4"}
    run = pl.train(f"cifar100-train:{root}", hold_out=0.2, quiet=True, **settings)
    assert (run.summary["images"], run.summary["held_out"]) == (15, 5)
    assert run.summary["accuracy"]["on"] == "held-out images"


def test_a_fold_of_a_source_with_test_images_is_refused(fake_cifar):
    with pytest.raises(InputError, match="--hold-out: cifar100 has test images already"):
        find_source(f"cifar100:{fake_cifar[0]}", ReadOptions(hold_out=0.2))


def test_inspect_cifar(fake_cifar):
    found = inspect(f"cifar100:{fake_cifar[0]}")
    assert (found.train, found.test, len(found.classes)) == (20, 10, 5)
    assert found.plan.stored == (32, 32)
    assert (found.problems, found.plan.batch_size) == ([], 2)


def test_checksums_are_checked_before_unpickling(fake_cifar, monkeypatch):
    root, _ = fake_cifar

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran",))

    (root / "cifar-100-python" / "train").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match=r"train is not the official file .*MD5"):
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


def test_official_checksums():
    """As published with the files. A change here would accept other pickles."""
    assert cifar.CIFAR100_MD5["train"] == "16019d7e3df5f24257cddd939b257f8d"
    assert cifar.CIFAR100_MD5["test"] == "f0ef6b0ae62326f3e7ffdfab6717acfc"
    from torchvision.datasets import CIFAR10, CIFAR100

    for ours, theirs in ((cifar.CIFAR10_MD5, CIFAR10), (cifar.CIFAR100_MD5, CIFAR100)):
        wanted = dict([*theirs.train_list, *theirs.test_list])
        wanted[theirs.meta["filename"]] = theirs.meta["md5"]
        assert ours == wanted
