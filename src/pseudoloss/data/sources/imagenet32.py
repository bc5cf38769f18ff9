"""ImageNet32 (ImageNet at 32 pixels) from its batch files, pickles or `.npz`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from pseudoloss.data.images import Data, ImageSet
from pseudoloss.data.pickles import read_arrays
from pseudoloss.errors import InputError
from pseudoloss.files import at_home

BATCHES = 10
TRAINING = tuple(f"train_data_batch_{i}" for i in range(1, BATCHES + 1))
SIZE = 32
HOME = "https://image-net.org/download-images"
OWNERS = f"its owners publish it at {HOME}"


def imagenet32(folder: str) -> Data:
    """ImageNet32: 1,281,167 training and 50,000 test images of 1,000 classes."""
    spec = f"imagenet32:{folder}"
    root = at_home(folder)
    if not folder or not root.is_dir():
        raise InputError(
            f"{spec}: no such folder; it should hold train_data_batch_1 to _{BATCHES} and "
            f"val_data; {OWNERS}"
        )
    files = _all_there({name: _file(root, name) for name in (*TRAINING, "val_data")}, root, spec)
    batches = [read_batch(path, spec) for path in files.values()]
    values = np.unique(np.concatenate([labels for _, labels in batches[:-1]]))
    classes = tuple(str(value) for value in values.tolist())
    for name, (_, labels) in zip(files, batches, strict=True):
        unknown = ~np.isin(labels, values)
        if unknown.any():
            row = int(np.flatnonzero(unknown)[0])
            raise InputError(f"{spec}: {name}: no training image has the class {labels[row]}")

    def image_set(chosen: list[tuple[np.ndarray, np.ndarray]]) -> ImageSet:
        images = np.concatenate([pixels for pixels, _ in chosen])
        labels = np.searchsorted(values, np.concatenate([labels for _, labels in chosen]))
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes)

    train, test = image_set(batches[:-1]), image_set(batches[-1:])
    return Data("imagenet32", train.with_labels(train.given_N, train.given_N), test)


def batch_files(folder: Path, where: str) -> list[Path]:
    """The training batches in a folder, in order; an empty list if there are none. Some batches
    without the others are an error: an incomplete download."""
    found = {name: _file(folder, name) for name in TRAINING}
    if not any(found.values()):
        return []
    return list(_all_there(found, folder, where).values())


def read_batch(path: Path, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N,3,32,32) and labels of a batch file."""
    content = read_arrays(path, where, OWNERS)
    try:
        rows, labels = np.asarray(content["data"]), np.asarray(content["labels"])
        if rows.dtype != np.uint8 or labels.dtype.kind not in "iu" or len(rows) != len(labels):
            raise ValueError
        return rows.reshape(len(rows), 3, SIZE, SIZE), labels
    except (KeyError, ValueError, TypeError):
        raise InputError(
            f"{where}: {path} must hold data (uint8, {3 * SIZE * SIZE} values per image) and "
            f"labels; {OWNERS}"
        ) from None


def _all_there(files: Mapping[str, Path | None], folder: Path, where: str) -> dict[str, Path]:
    missing = [name for name, path in files.items() if path is None]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} missing in {folder}; {OWNERS}")
    return {name: path for name, path in files.items() if path is not None}


def _file(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / f"{name}.npz")
    return next((path for path in candidates if path.is_file()), None)
