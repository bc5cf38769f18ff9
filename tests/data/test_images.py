"""Image sets from arrays: pixels, labels and classes."""

import numpy as np
import pytest
import torch

from pseudoloss.data import OUT, arrays, open_source, to_pixels
from pseudoloss.data.images import channel_statistics, in_order, levels_of
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


def test_arrays_are_copied():
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
        (np.full((5, 8, 8), 200.0), "between 0 and 1, not 200 to 200 .*divide by 255"),
        (np.full((5, 8, 8), -0.1), "between 0 and 1"),
        (
            np.where(np.arange(5)[:, None, None] == 3, np.nan, np.zeros((5, 8, 8))),
            "image 3 contains",
        ),
        ([np.zeros((8, 8)), np.zeros((9, 9))], "one array of numbers, all of the same size"),
        (np.array([["a"]]), "set: images must be"),
        (None, "one array of numbers"),
    ],
)
def test_invalid_pixels_are_refused(images, message):
    with pytest.raises(InputError, match=message):
        to_pixels(images, "set")


def test_channel_statistics_equal_numpy():
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 9, 8), dtype=np.uint8)
    mean, std = channel_statistics(levels_of(torch.from_numpy(images)))
    np.testing.assert_allclose(mean, (images / 255).mean((0, 2, 3)))
    np.testing.assert_allclose(std, (images / 255).std((0, 2, 3)))


def test_constant_channels_can_be_normalised():
    _, std = channel_statistics(levels_of(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)))
    assert std[0] > 0


# ------------------------------------------------------------------------------------ labels


def test_labels_become_indices_of_the_sorted_values():
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
def test_label_types(labels):
    assert arrays(np.zeros((4, 8, 8), np.uint8), labels).train.given_N.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [0, 1, 0]}, "labels: 3 labels for 4 images"),
        ({"labels": [[0, 1, 0, 1]]}, "one per image, not an array of shape 1,4"),
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
        ({"classes": []}, "classes must contain at least two names"),
        ({"labels": [[0], [1, 2]]}, "labels must be one array with one label per image"),
        ({"true_labels": [0, 1, 5, 1]}, "true labels: 5 in row 2 is out of range"),
        ({"true_labels": [0, 1]}, "true labels: 2 labels for 4 images"),
        ({"paths": ["a.png"]}, "1 paths for 4 images"),
        ({"test_images": np.zeros((2, 8, 8), np.uint8)}, "must be given together"),
        (
            {"test_images": np.zeros((1, 9, 8), np.uint8), "test_labels": [0]},
            r"have the shape 1,9,8 \(channels, height, width\), training images 1,8,8",
        ),
        (
            {"test_images": np.zeros((1, 8, 8), np.uint8), "test_labels": [7]},
            "test labels: 7 in row 0",
        ),
        ({"test_images": np.zeros((0, 8, 8), np.uint8), "test_labels": []}, "no test images"),
        ({"images": np.zeros((0, 8, 8), np.uint8), "labels": []}, "the dataset is empty"),
    ],
)
def test_invalid_labels_are_refused(changes, message):
    given = {"images": np.zeros((4, 8, 8), np.uint8), "labels": [0, 1, 0, 1]} | changes
    with pytest.raises(InputError, match=message) as error:
        arrays(given.pop("images"), given.pop("labels"), **given)
    assert "\n" not in str(error.value)


def test_true_label_can_be_no_class():
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
def test_too_few_classes_or_images_are_refused(labels, classes, message):
    data = arrays(np.zeros((4, 8, 8), np.uint8), labels, classes=classes)
    with pytest.raises(InputError, match=message):
        open_source(data)


def test_class_names_that_are_numbers_are_sorted_by_value():
    assert in_order(["10", "9", "b", "a", "10"]) == ["9", "10", "a", "b"]
