"""torch datasets, and other objects whose items are pairs (image, label)."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import ToTensor

import pseudoloss as pl
from conftest import TINY, make_images
from pseudoloss.data import Reader, ReadOptions, find_source
from pseudoloss.errors import InputError

ALL = ReadOptions(hold_out=0)
READER = Reader(3, (8, 8))


class Pairs:
    """A dataset of the given items that counts how often each is loaded."""

    def __init__(self, items, **attributes):
        self.items, self.loaded = items, [0] * len(items)
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.loaded[i] += 1
        if isinstance(self.items[i], Exception):
            raise self.items[i]
        return self.items[i]


def image(red=0):
    return Image.new("RGB", (9, 9), (red, 0, 0))


def read(source, options=ALL):
    return find_source(source, options).read(READER, 8, "auto", False)


def test_pil_images():
    source = Pairs([(image(i), i % 2) for i in range(6)])
    data, skipped = read(source)
    assert data.train.images_NCHW[:, 0, 0, 0].tolist() == list(range(6))
    assert data.train.classes == ("0", "1")
    assert data.train.paths[2] == "Pairs[2]"
    assert skipped == ()
    assert source.loaded == [2] * 6  # once for label and size, once for pixels


def test_targets_are_used_as_labels():
    source = Pairs(
        [(image(i), "wrong") for i in range(4)], targets=[0, 1, 1, 0], classes=["x", "y"]
    )
    assert find_source(source, ALL).train.labels == ("x", "y", "y", "x")
    assert source.loaded == [1] * 4
    source.targets = torch.tensor([0, 0, 1, 1])
    assert find_source(source, ALL).train.labels == ("x", "x", "y", "y")
    source.target_transform = str  # then `targets` are not the labels
    assert find_source(source, ALL).train.labels == ("wrong",) * 4


@pytest.mark.parametrize(
    "value",
    [
        np.full((8, 8, 3), 51, np.uint8),
        np.full((3, 8, 8), 51, np.uint8),
        torch.full((3, 8, 8), 51, dtype=torch.uint8),
        torch.full((3, 8, 8), 0.2),
        np.full((8, 8, 3), 0.2, np.float32),
        torch.full((1, 8, 8), 0.2),
        np.full((8, 8), 51, np.uint8),
    ],
)
def test_arrays_and_tensors(value):
    data, _ = read(Pairs([(value, label) for label in "abab"]))
    assert data.train.images_NCHW.unique().tolist() == [51]


@pytest.mark.parametrize("label", [1, np.int64(1), torch.tensor(1), np.array(1), 1.0, True])
def test_label_types(label):
    assert find_source(Pairs([(image(), label), (image(), 0)]), ALL).classes == ("0", "1")


def test_items_that_cannot_be_loaded_are_skipped():
    items = [(image(i), i % 2) for i in range(6)]
    items[1] = RuntimeError("broken\nrecord")
    items[2] = (None, 0)
    items[3] = (b"no image", 1)
    for targets in ({}, {"targets": [0, 1] * 3}):
        data, skipped = read(Pairs(list(items), **targets))
        assert data.train.images_NCHW[:, 0, 0, 0].tolist() == [0, 4, 5]
        assert {entry.path: entry.reason for entry in skipped} == {
            "Pairs[1]": "broken record",
            "Pairs[2]": "no image",
            "Pairs[3]": "not an image, or a broken one",
        }


def test_torchvision_and_subsets(photos):
    folder = ImageFolder(photos("cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"))
    found = find_source(folder, ALL)
    assert found.train.labels == ("cat", "cat", "dog", "dog")
    assert found.train.names[0].endswith("photos/cat/0.png")
    part = find_source(Subset(folder, [3, 0]), ALL)
    assert part.train.labels == ("dog", "cat")
    assert part.train.names[0].endswith("photos/dog/1.png")
    fake = find_source(FakeData(6, (3, 8, 8), 2, transform=ToTensor()), ALL)
    assert len(fake.train) == 6


def test_tensor_dataset_and_dict_of_splits():
    images, labels = make_images(32, size=8)
    rows = TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))
    found = find_source({"train": rows, "test": Subset(rows, range(8))})
    with pytest.raises(
        InputError, match="data: unknown split tset; the splits are train, val and test"
    ):
        find_source({"train": rows, "tset": Subset(rows, range(8))})
    assert (len(found.train), len(found.test), found.test_name) == (32, 8, "the test images")
    data, _ = found.read(Reader(1, (8, 8)), 8, "auto", False)
    np.testing.assert_array_equal(data.train.images_NCHW.permute(0, 2, 3, 1), images)


def test_training(tmp_path):
    images, labels = make_images(64)
    source = Pairs(list(zip(images, labels, strict=True)), classes=list("abcd"))
    run = pl.train(source, tmp_path / "run", quiet=True, image_size=8, **TINY)
    assert set(run.labels.given_label) == set("abcd")
    again = pl.train(source, tmp_path / "run", resume=True, quiet=True)
    assert again.summary["images"] + again.summary["held_out"] == len(run.labels)


@pytest.mark.parametrize(
    ("items", "attributes", "message"),
    [
        ([image(), image()], {}, r"Pairs\[0\]: must be a pair of an image and its label"),
        ([{"image": 1, "label": 2}], {}, r"Pairs\[0\]: must be a pair"),
        ([(object(), 1)], {}, r"Pairs\[0\]: must be an image or an array, not object"),
        ([(image(), 0.5)], {}, r"Pairs\[0\]: its label must be a whole number or text"),
        ([(image(), None)], {}, r"Pairs\[0\]: its label must be a whole number or text"),
        (
            [(image(), 2)],
            {"classes": ["a", "b"]},
            r"the label 2 is out of range \(there are 2 classes\)",
        ),
        ([(image(), 0)], {"classes": ["a", "a", "b"]}, "Pairs: two classes have the same name"),
        (
            [(torch.full((3, 8, 8), -2.0), 0)],
            {},
            r"Pairs\[0\]: float pixels must be between 0 and 1",
        ),
        ([(np.zeros((8, 8, 2), np.uint8), 0)], {}, r"Pairs\[0\]: images must have 1 or 3"),
        ([], {}, "no images can be read"),
    ],
)
def test_invalid_items_are_refused(items, attributes, message):
    with pytest.raises(InputError, match=message):
        find_source(Pairs(items, **attributes))
