"""Images of no class: drawn from a pool, to take the place of images of the set.

A pool is a folder of images (Places365, say, with its folders of classes), a `.npy` file, or a
folder with batch files of ImageNet32.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data.decode import decode, find_images, refit, stretched
from pseudoloss.data.imagenet32 import SIZE, batch_files, read_batch
from pseudoloss.data.images import to_pixels
from pseudoloss.errors import InputError

Reader = Callable[[np.ndarray], Tensor]  # from places in the pool to pixels


def draw(
    pool: str, count: int, size: tuple[int, int], channels: int, random: np.random.Generator
) -> Tensor:
    """`count` different images of the pool in random order, as uint8 N,C,H,W."""
    total, read = _open(pool, size, channels)
    if total < count:
        raise InputError(f"--pool {pool}: has {total:,} images, and {count:,} are needed")
    return refit(read(random.choice(total, size=count, replace=False)), size, channels)


def _open(pool: str, size: tuple[int, int], channels: int) -> tuple[int, Reader]:
    """How many images there are, and how some of them are read."""
    path, where = Path(pool).expanduser(), f"--pool {pool}"
    if not path.exists():
        raise InputError(f"{where}: no such file or folder")
    if path.is_file():
        return _array(path, where)
    batches = batch_files(path)
    if batches:
        return _batches(batches, where)
    files = find_images(path)
    if not files:
        raise InputError(f"{where}: holds neither images nor batch files of ImageNet32")
    fit = stretched(size)
    return len(files), lambda places: decode([files[i] for i in places], fit, size, channels, where)


def _array(path: Path, where: str) -> tuple[int, Reader]:
    try:
        images = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(images, np.ndarray):
            raise ValueError("an archive of several")
    except Exception as error:  # a damaged file raises whatever it likes
        reason = str(error).partition("\n")[0]
        raise InputError(f"{where}: not a .npy file of one plain array ({reason})") from None
    to_pixels(images[:1], where)  # its shape and type are checked before anything is drawn
    return len(images), lambda places: to_pixels(images[places], where)


def _batches(files: list[Path], where: str) -> tuple[int, Reader]:
    """Batch files, one at a time in memory: all of them together are 4 GB."""
    ends = np.cumsum([len(read_batch(path, where)[1]) for path in files])

    def read(places: np.ndarray) -> Tensor:
        pixels = np.empty((len(places), 3, SIZE, SIZE), np.uint8)
        home = np.searchsorted(ends, places, side="right")
        for i, path in enumerate(files):
            if (home == i).any():
                images, labels = read_batch(path, where)
                first = ends[i] - len(labels)
                pixels[home == i] = images[places[home == i] - first]
        return torch.from_numpy(pixels)

    return int(ends[-1]), read
