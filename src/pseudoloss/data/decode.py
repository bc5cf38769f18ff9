"""Image files: found, decoded and brought to one size.

Shapes: N images, C channels, H high, W wide.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from pseudoloss.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

Fit = Callable[[Image.Image], Image.Image]


def find_images(folder: Path) -> list[Path]:
    """The image files in a folder and in all folders inside it, in order."""
    found = [
        Path(inner) / name
        for inner, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    ]
    return sorted(found)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of classes, sorted: numbers by their value, then the others."""

    def key(name: str) -> tuple[bool, str, str]:
        is_number = name.isdecimal()
        return not is_number, name.zfill(20) if is_number else name, name

    return sorted(set(names), key=key)


def stretched(size: tuple[int, int]) -> Fit:
    """The whole image, in another size (height, width); bicubic."""
    height, width = size
    return lambda image: image.resize((width, height), Image.Resampling.BICUBIC)


def centre(side: int) -> Fit:
    """The shorter side brought to `side`, and the square in the centre; bilinear (row 21)."""

    def fit(image: Image.Image) -> Image.Image:
        shorter = min(image.size)
        width, height = (side * length // shorter for length in image.size)
        left, top = round((width - side) / 2), round((height - side) / 2)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        return image.crop((left, top, left + side, top + side))

    return fit


def decode(
    paths: Sequence[Path], fit: Fit, size: tuple[int, int], channels: int, where: str
) -> Tensor:
    """Image files as uint8 N,C,H,W; `fit` brings each to `size`."""

    def read(path: Path) -> Image.Image:
        try:
            with Image.open(path) as image:
                return image.convert(_mode(channels))
        except UnidentifiedImageError:
            raise InputError(f"{where}: {path} is no image, or a broken one") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise InputError(
                f"{where}: {path} cannot be read ({' '.join(reason.split())})"
            ) from None

    return _gather([partial(lambda path: fit(read(path)), path) for path in paths], size, channels)


def refit(pixels_NCHW: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """Pixels in another size and in other colours; the same where both fit already."""
    if pixels_NCHW.shape[1:] == (channels, *size):
        return pixels_NCHW
    arrays = pixels_NCHW.permute(0, 2, 3, 1).numpy()
    arrays = arrays[..., 0] if arrays.shape[3] == 1 else arrays
    fit = stretched(size)

    def change(array: np.ndarray) -> Image.Image:
        return fit(Image.fromarray(np.ascontiguousarray(array)).convert(_mode(channels)))

    return _gather([partial(change, array) for array in arrays], size, channels)


def _gather(
    readers: Sequence[Callable[[], Image.Image]], size: tuple[int, int], channels: int
) -> Tensor:
    """What the readers give, in one tensor. PIL lets other threads run while it works."""
    pixels_NCHW = np.empty((len(readers), channels, *size), np.uint8)

    def fill(i: int) -> None:
        pixels_NCHW[i] = np.asarray(readers[i]()).reshape(*size, channels).transpose(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            for _ in threads.map(fill, range(len(readers))):
                pass
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return torch.from_numpy(pixels_NCHW)


def _mode(channels: int) -> str:
    return "L" if channels == 1 else "RGB"
