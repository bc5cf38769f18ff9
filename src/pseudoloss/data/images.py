"""Image sets: pixels, given labels and, if known, true labels."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data.decoding import Entry, Fit, Reader
from pseudoloss.errors import InputError

SMALLEST = 8  # pixels: the networks halve an image up to three times
OUT = -1  # the true label of an image that belongs to no class

LabelType = Literal["text", "integer", "boolean"]


@dataclass(frozen=True)
class ImageFiles:
    """N images that stay in their files and are decoded when needed (see storage.py)."""

    paths: Sequence[Entry]
    reader: Reader
    levels_CV: Tensor  # the count of each of the 256 pixel values in each channel

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(self), self.reader.channels, *self.reader.size)

    @property
    def nbytes(self) -> int:
        N, C, H, W = self.shape
        return N * C * H * W


@dataclass(frozen=True)
class ImageSet:
    """N images with one label per image. The order of the images never changes.

    `true_N` are the true labels of an experiment, OUT if no class is right. Only evaluation reads
    them; they are never passed to training.
    """

    images_NCHW: Tensor | ImageFiles  # uint8, 1 or 3 channels
    given_N: Tensor  # int64, 0 to C-1; may be wrong
    classes: tuple[str, ...]
    true_N: Tensor | None = None
    paths: tuple[str, ...] | None = None
    superclasses: tuple[int, ...] | None = None  # one per class, if the source has them
    digest: str = ""  # of the files that the images were read from, if any
    positions_N: Tensor | None = None  # in the source; None: all of it, in order

    @property
    def in_source_N(self) -> Tensor:
        """The position of each image in the source, from 0."""
        return torch.arange(len(self)) if self.positions_N is None else self.positions_N

    def __len__(self) -> int:
        return len(self.images_NCHW)

    @property
    def channels(self) -> int:
        return self.images_NCHW.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.images_NCHW.shape[2:]
        return height, width

    @property
    def noise_rate(self) -> float | None:
        """The share of wrong given labels, if the true labels are known."""
        if self.true_N is None:
            return None
        return int((self.given_N != self.true_N).sum()) / len(self)

    @property
    def noise(self) -> dict[str, float | None]:
        """The share of images that belong to another class (in-distribution noise, "in"), and to
        none (out-of-distribution noise, "out")."""
        if self.true_N is None or self.noise_rate is None:
            return {"in": None, "out": None}
        out = int((self.true_N == OUT).sum())
        wrong = round(self.noise_rate * len(self))
        return {"in": (wrong - out) / len(self), "out": out / len(self)}

    def with_labels(self, given_N: Tensor, true_N: Tensor | None) -> "ImageSet":
        """The same images with other given labels and true labels."""
        return replace(self, given_N=given_N, true_N=true_N)


@dataclass(frozen=True)
class Data:
    """The images of a source: training images and, if there are any, test images."""

    name: str
    train: ImageSet
    test: ImageSet | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    preset: str = "default"  # used unless the user names one
    test_name: str = "the test images"  # what messages call them
    noisy_test: bool = False  # held out of the training images, so their labels may be wrong too
    image_size: int | None = None  # pixels that the network sees, if the source decides it
    fit: Fit = "stretch"  # how files of other shapes get the size of the images
    label_type: LabelType = "text"  # of the labels that became the names of the classes

    def fingerprint(self) -> str:
        """A hash that changes with any pixel, label or class name."""
        digest = hashlib.sha256(repr(self.train.classes).encode())
        for split in (self.train, self.test):
            if split is None:
                continue
            images = split.images_NCHW
            if split.digest or isinstance(images, ImageFiles):
                digest.update(f"{tuple(images.shape)} {split.digest}".encode())
            for tensor in (None if split.digest else images, split.given_N, split.true_N):
                if isinstance(tensor, Tensor):
                    digest.update(repr(tensor.shape).encode())
                    digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel: published, or computed from the images."""
        if self.mean:
            return self.mean, self.std
        images = self.train.images_NCHW
        if isinstance(images, ImageFiles):
            return channel_statistics(images.levels_CV)
        return channel_statistics(levels_of(images))


def levels_of(images_NCHW: Tensor) -> Tensor:
    """The count of each of the 256 pixel values in each channel."""
    channels = images_NCHW.unbind(1)
    return torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in channels])


def channel_statistics(levels_CV: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1, from exact counts."""
    mean, std = [], []
    for counts in levels_CV.double():
        pixels = counts.sum().item()
        levels = torch.arange(256, dtype=torch.float64) / 255
        centre = (counts @ levels).item() / pixels
        spread = (counts @ (levels - centre) ** 2).item() / pixels
        mean.append(centre)
        std.append(max(spread, 1e-4) ** 0.5)  # a constant channel has no spread to divide by
    return tuple(mean), tuple(std)


def arrays(
    images: Any,
    labels: Any,
    *,
    test_images: Any = None,
    test_labels: Any = None,
    classes: Sequence[str] | None = None,
    true_labels: Any = None,
    paths: Sequence[str] | None = None,
    name: str = "arrays",
) -> Data:
    """A source made of arrays, checked.

    Args:
        images: uint8, or floats from 0 to 1; N,H,W or N,H,W,C or N,C,H,W (see `to_pixels`).
        labels: one label per image. With `classes`, whole numbers from 0 to C-1; without, any
            whole numbers or text, and each distinct value becomes a class, in sorted order.
        test_images: images of the same size, to measure accuracy on.
        test_labels: the true labels of the test images.
        classes: names of the classes.
        true_labels: the true labels of `images`, if an experiment knows them; -1 for an image that
            belongs to no class.
        paths: one name per image, for the label table.
        name: the name of the source in errors and outputs.
    """
    pixels = to_pixels(images, name)
    if len(pixels) == 0:
        raise InputError(f"{name}: no images (the dataset is empty)")
    given = _label_array(labels, len(pixels), f"{name}: labels")
    if classes is not None and len(classes) == 0:
        raise InputError(f"{name}: classes must contain at least two names")
    values = np.unique(given) if classes is None else np.arange(len(classes))
    names = tuple(str(value) for value in (values.tolist() if classes is None else classes))
    if len(set(names)) < len(names):
        raise InputError(f"{name}: two classes have the same name")

    def index(array: np.ndarray, what: str) -> Tensor:
        return _to_index(array, values, f"{name}: {what}")

    true_N = None
    if true_labels is not None:
        true, is_out = _without_out(true_labels, given)
        true_N = index(_label_array(true, len(pixels), f"{name}: true labels"), "true labels")
        true_N[torch.from_numpy(is_out)] = OUT
    if paths is not None and len(paths) != len(pixels):
        raise InputError(f"{name}: {len(paths)} paths for {len(pixels)} images")
    train = ImageSet(
        pixels, index(given, "labels"), names, true_N, None if paths is None else tuple(paths)
    )
    if (test_images is None) != (test_labels is None):
        raise InputError(f"{name}: test images and test labels must be given together")
    kind: LabelType = "text"
    if classes is None and values.dtype.kind != "U":
        kind = "boolean" if values.dtype.kind == "b" else "integer"
    if test_images is None:
        return Data(name, train, label_type=kind)
    test_pixels = to_pixels(test_images, f"{name}: test images")
    if len(test_pixels) == 0:
        raise InputError(f"{name}: no test images (the test split is empty)")
    if test_pixels.shape[1:] != pixels.shape[1:]:
        raise InputError(
            f"{name}: test images have the shape {_shape(test_pixels[0])} (channels, height, "
            f"width), training images {_shape(pixels[0])}"
        )
    test_true = _label_array(test_labels, len(test_pixels), f"{name}: test labels")
    test = ImageSet(test_pixels, index(test_true, "test labels"), names)
    return Data(name, train, test, label_type=kind)


def typed_labels(classes: Sequence[str], kind: LabelType) -> np.ndarray:
    """The label of each class, of the type that the labels had."""
    if kind == "text":
        return np.array(classes, dtype=object)
    return np.array([int(name) if kind == "integer" else name == "True" for name in classes])


def with_held_out(data: Data, share: float, seed: int) -> Data:
    """Hold out a share of each class as test images."""
    images = data.train
    labels = [images.classes[label] for label in images.given_N.tolist()]
    out_N = torch.from_numpy(held_out(labels, share, seed))
    if not out_N.any():
        return data
    train, test = (_select(images, chosen_N) for chosen_N in (~out_N, out_N))
    return replace(data, train=train, test=test, test_name="held-out images", noisy_test=True)


def held_out(labels: Sequence[str], share: float, seed: int) -> np.ndarray:
    """A mask of the images to hold out: the share of each class, but two images of it must stay."""
    random = np.random.default_rng([seed, 0x40])
    names = in_order(labels)
    number = {name: i for i, name in enumerate(names)}
    label_N = np.array([number[label] for label in labels], dtype=np.int64)
    out = np.zeros(len(label_N), dtype=bool)
    by_label = np.split(
        np.argsort(label_N, kind="stable"),
        np.bincount(label_N, minlength=len(names)).cumsum()[:-1],
    )
    for members in by_label[: len(names)]:
        count = min(int(share * len(members) + 0.5), max(len(members) - 2, 0))
        out[random.permutation(members)[:count]] = True
    return out


def in_order(names: Iterable[str]) -> list[str]:
    """Class names, sorted: numbers by value, then the others."""
    return sorted(set(names), key=lambda name: (not name.isdecimal(), *_by_value(name), name))


def _by_value(name: str) -> tuple[int, str]:
    """Sort key for whole numbers of any length: the number of digits, then the digits."""
    digits = name.lstrip("0") if name.isdecimal() else ""
    return len(digits), digits


def _select(images: ImageSet, chosen_N: Tensor) -> ImageSet:
    assert isinstance(images.images_NCHW, Tensor)
    paths = images.paths
    return replace(
        images,
        images_NCHW=images.images_NCHW[chosen_N],
        given_N=images.given_N[chosen_N],
        true_N=None if images.true_N is None else images.true_N[chosen_N],
        paths=None if paths is None else tuple(paths[i] for i in chosen_N.nonzero()[:, 0].tolist()),
        positions_N=images.in_source_N[chosen_N],
    )


def check_trainable(images: ImageSet, where: str) -> None:
    """Refuse labels that a classifier cannot be trained on."""
    counts = torch.bincount(images.given_N, minlength=len(images.classes)).tolist()
    check_counts(dict(zip(images.classes, counts, strict=True)), where)


def check_counts(counts: dict[str, int], where: str) -> None:
    """Refuse a dataset with fewer than two classes, or with fewer than two images of a class."""
    if sum(count > 0 for count in counts.values()) < 2:
        only = max(counts, key=counts.__getitem__)
        raise InputError(
            f"{where}: all labels are of one class ({only}); at least 2 classes are needed"
        )
    for name, count in counts.items():
        if count < 2:
            number = "one image" if count else "no image"
            raise InputError(f"{where}: class {name} has {number}; every class needs at least 2")


def to_pixels(images: Any, where: str) -> Tensor:
    """Images as uint8 N,C,H,W.

    Accepts NumPy arrays, torch tensors and whatever NumPy can convert: N,H,W for grey images,
    N,H,W,C or N,C,H,W with 1 or 3 channels; uint8, or floats from 0 to 1. If both layouts fit, the
    channels of a NumPy array come last and those of a torch tensor first.
    """
    channels_first = isinstance(images, Tensor)
    if isinstance(images, Tensor):
        images = images.detach().cpu()
        images = images.float() if images.is_floating_point() else images  # NumPy has no bfloat16
    array = _as_array(images, where)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4:
        first, last = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
        if not first and not last:
            raise InputError(
                f"{where}: images must have 1 or 3 channels, not shape {_shape(array)}"
            )
        if last and not (first and channels_first):
            array = array.transpose(0, 3, 1, 2)
    else:
        raise InputError(
            f"{where}: images must be an array of N,H,W or N,H,W,C, not of shape {_shape(array)}"
        )
    if len(array) and min(array.shape[2:]) < SMALLEST:
        raise InputError(
            f"{where}: images of {array.shape[2]}×{array.shape[3]} pixels are too small; "
            f"at least {SMALLEST}×{SMALLEST} are needed"
        )
    if array.dtype == np.uint8:
        pixels = array
    elif array.dtype.kind == "f":
        pixels = _from_floats(array, where)
    else:
        raise InputError(
            f"{where}: pixels must be uint8 (0 to 255) or floats (0 to 1), not {array.dtype}"
        )
    return torch.from_numpy(np.array(pixels, order="C"))  # a copy of the user's array


def _from_floats(array: np.ndarray, where: str) -> np.ndarray:
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=(1, 2, 3)))[0])
        raise InputError(f"{where}: image {row} contains NaN or infinity")
    low, high = (array.min(), array.max()) if array.size else (0, 0)
    if low < 0 or high > 1:
        raise InputError(
            f"{where}: float pixels must be between 0 and 1, not {low:g} to {high:g} "
            "(divide by 255, or pass uint8)"
        )
    return np.asarray(np.rint(array * 255), dtype=np.uint8)


def refuse_masked(array: Any, where: str) -> None:
    """Refuse masked values, which NumPy would unmask without a word."""
    if np.ma.is_masked(array):
        raise InputError(f"{where}: has masked values; fill them or leave these rows out")


def _as_array(images: Any, where: str) -> np.ndarray:
    refuse_masked(images, where)
    try:
        array = np.asarray(images)
    except (ValueError, TypeError):  # for example images of different shapes
        array = np.array(None, dtype=object)
    if array.dtype.kind == "O":
        raise InputError(f"{where}: images must be one array of numbers, all of the same size")
    return array


def _label_array(labels: Any, images: int, where: str) -> np.ndarray:
    refuse_masked(labels, where)
    try:
        array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    except (TypeError, ValueError):  # for example lists of different lengths
        raise InputError(f"{where} must be one array with one label per image") from None
    if array.ndim != 1:
        raise InputError(f"{where} must be one per image, not an array of shape {_shape(array)}")
    if len(array) != images:
        raise InputError(f"{where}: {len(array)} labels for {images} images")
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array):
        array = array.astype(str)
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.floor(array))
        if not whole.all():
            row = int(np.flatnonzero(~whole)[0])
            raise InputError(f"{where}: {array[row]:g} in row {row} is not a class")
        array = array.astype(np.int64)
    if array.dtype.kind not in "iubU":
        raise InputError(f"{where} must be whole numbers or text, not {array.dtype}")
    if array.dtype.kind == "i" and (array < 0).any():
        row = int(np.flatnonzero(array < 0)[0])
        raise InputError(f"{where}: {array[row]} in row {row} is out of range (below 0)")
    return array


def _without_out(true_labels: Any, given: np.ndarray) -> tuple[Any, np.ndarray]:
    """True labels in which OUT is replaced by some class, and a mask of where it was."""
    if np.ma.is_masked(true_labels):
        return true_labels, np.zeros(len(given), dtype=bool)
    try:
        true = np.asarray(true_labels)
    except (TypeError, ValueError):  # `_label_array` says what is wrong
        return true_labels, np.zeros(len(given), dtype=bool)
    if true.shape != given.shape or true.dtype.kind not in "if" or given.dtype.kind == "U":
        return true_labels, np.zeros(len(given), dtype=bool)
    return np.where(true == OUT, given, true), true == OUT


def _to_index(labels: np.ndarray, values: np.ndarray, where: str) -> Tensor:
    """Labels as 0 to C-1: their positions in the sorted `values`."""
    if (labels.dtype.kind == "U") != (values.dtype.kind == "U"):
        kind = "text" if values.dtype.kind == "U" else "whole numbers"
        raise InputError(f"{where} must be {kind}, not {labels.dtype}")
    index = np.searchsorted(values, labels).clip(max=len(values) - 1)
    wrong = values[index] != labels
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{where}: {labels[row]} in row {row} is out of range (classes: {_span(values)})"
        )
    return torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))


def _span(values: np.ndarray) -> str:
    whole = values.dtype.kind != "U" and len(values) == int(values[-1]) - int(values[0]) + 1
    if whole:
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


def _shape(array: np.ndarray | Tensor) -> str:
    return ",".join(map(str, array.shape))
