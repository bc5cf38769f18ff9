"""Pools of out-of-distribution images, which replace images of a dataset.

A pool is a folder of images (such as Places365, with its class folders), a `.npy` file, or a folder
with the batch files of ImageNet32.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data.decoding import Entry, Item, Reader
from pseudoloss.data.images import to_pixels
from pseudoloss.data.items import as_content
from pseudoloss.data.loops import for_each, no_progress
from pseudoloss.data.sources.folder import images_below
from pseudoloss.data.sources.imagenet32 import HOME, SIZE, batch_files, read_batch
from pseudoloss.errors import InputError, reason
from pseudoloss.files import at_home, open_npy

POOL = (
    "a pool is a folder of images (such as Places365, which its owners publish at "
    "http://places2.csail.mit.edu), a .npy file, or a folder with the batch files of ImageNet32 "
    f"({HOME})"
)

Select = Callable[[np.ndarray], Sequence[Entry]]  # from indices in the pool to images


def draw(
    pool: str,
    count: int,
    size: tuple[int, int],
    channels: int,
    random: np.random.Generator,
    tell: Callable[[str], object] = warnings.warn,
) -> Tensor:
    """`count` different images of the pool in random order, as uint8 N,C,H,W. Images that cannot be
    read are replaced by others."""
    where = f"--pool {pool}"
    total, select = _open(_path(pool), where)
    if total < count:
        raise InputError(f"{where}: has {total:,} images, but {count:,} are needed")
    reader = Reader(channels, size, "published-stretch")
    pixels_NCHW = np.empty((count, channels, *size), np.uint8)
    missing, untried = np.arange(count), np.arange(total)
    broken: list[str] = []
    while len(missing):
        if len(untried) < len(missing):
            raise InputError(
                f"{where}: {count:,} images are needed, but {len(broken):,} of {total:,} cannot be "
                f"read (the first: {broken[0]})"
            )
        chosen = random.choice(untried, size=len(missing), replace=False)
        untried = np.setdiff1d(untried, chosen)
        entries = select(chosen)

        def read(i: int, entries: Sequence[Entry] = entries, rows: np.ndarray = missing) -> None:
            pixels_NCHW[rows[i]] = reader.read(entries[i])

        found = for_each(range(len(entries)), read, "reading the pool", no_progress)
        failed = [i for i, error in enumerate(found) if error is not None]
        broken += [f"{entries[i]}, {found[i]}" for i in failed]
        missing = missing[failed]
    if broken:
        tell(
            f"{where}: {len(broken):,} of its images cannot be read (the first: {broken[0]}); "
            "others are used instead"
        )
    return torch.from_numpy(pixels_NCHW)


def check_exists(pool: str) -> None:
    """Refuse a pool that does not exist. No image is read."""
    path, where = _path(pool), f"--pool {pool}"
    if path.is_dir():
        _inside(path, where)
    else:
        _open(path, where)


def _path(pool: str) -> Path:
    if not pool:
        raise InputError("--pool is empty")
    return at_home(pool)


def _open(path: Path, where: str) -> tuple[int, Select]:
    """The number of images, and a function that selects some of them."""
    if not path.exists():
        raise InputError(f"{where}: no such file or folder; {POOL}")
    if path.is_file():
        return _array(path, where)
    batches, files = _inside(path, where)
    if batches:
        return _batches(batches, where)
    return len(files), lambda index: [files[i] for i in index]


def _inside(folder: Path, where: str) -> tuple[list[Path], list[Path]]:
    """The batch files of ImageNet32 in a folder or, if there are none, its images."""
    batches = batch_files(folder, where)
    files = [] if batches else images_below(folder)
    if not batches and not files:
        raise InputError(f"{where}: holds neither images nor batch files of ImageNet32; {POOL}")
    return batches, files


def _array(path: Path, where: str) -> tuple[int, Select]:
    try:
        images = open_npy(path)
    except (OSError, ValueError) as error:
        # NumPy's message about pickled data suggests to load them unsafely: do not pass it on.
        why = "" if "pickle" in str(error) else f" ({reason(error)})"
        raise InputError(f"{where}: not a .npy file of one plain array{why}") from None
    if images.ndim not in (3, 4):
        shape = ",".join(map(str, images.shape))
        raise InputError(f"{where}: must be an array of N,H,W or N,H,W,C, not of shape {shape}")
    to_pixels(images[:1], where)  # checks shape and type
    return len(images), lambda index: _items(to_pixels(images[index], where), where)


def _batches(files: list[Path], where: str) -> tuple[int, Select]:
    """Batch files, of which one at a time is in memory: all of them are 4 GB."""
    ends = np.cumsum([len(read_batch(path, where)[1]) for path in files])

    def select(index: np.ndarray) -> Sequence[Entry]:
        pixels = np.empty((len(index), 3, SIZE, SIZE), np.uint8)
        batch = np.searchsorted(ends, index, side="right")
        for i, path in enumerate(files):
            if (batch == i).any():
                images, labels = read_batch(path, where)
                first = ends[i] - len(labels)
                pixels[batch == i] = images[index[batch == i] - first]
        return _items(torch.from_numpy(pixels), where)

    return int(ends[-1]), select


def _items(pixels_NCHW: Tensor, where: str) -> list[Item]:
    return [Item(partial(as_content, pixels_CHW, where)) for pixels_CHW in pixels_NCHW]
