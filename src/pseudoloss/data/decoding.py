"""Decode one image file of any format and mode to 8 bits per channel, grey or RGB, in a given size.

A copy of this file is part of every exported model (see inference/export.py), so it needs nothing
but NumPy and Pillow. Shapes: C channels, H×W pixels.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Fit = Literal["crop", "stretch", "published-crop", "published-stretch"]
PUBLISHED = ("published-crop", "published-stretch")

# Formats are recognised by content, not by file name. PIL knows more formats, and starts other
# programs for some of them.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

# PIL's modes with more than 8 bits per pixel, and those with transparency.
HIGH_DEPTH = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
TRANSPARENT = ("RGBA", "LA", "PA", "La", "RGBa")
GREY = ("1", "L", "LA", "La", *HIGH_DEPTH)


class UnreadableError(Exception):
    """A file that is not an image, or cannot be read. The message is the reason."""


class Header(NamedTuple):
    """The header of an image file."""

    width: int
    height: int
    mode: str
    format: str

    @property
    def is_grey(self) -> bool:
        return self.mode in GREY


@dataclass(frozen=True)
class Item:
    """An image that is not a file. `get` returns its bytes or the image itself."""

    get: Callable[[], bytes | Image.Image]
    header: Header | None = None  # if it is known already
    stream: Callable[[], BinaryIO] | None = None  # if it stays on disk, to be read at any time
    name: str = "an image"

    def __str__(self) -> str:
        return self.name


Entry = Path | Item


@dataclass(frozen=True)
class Reader:
    """How image files become pixels, in training and in prediction.

    Attributes:
        channels: 1 or 3.
        size: height and width of the result.
        fit: "crop" resizes the shorter side to the size and keeps the centre. "stretch" resizes the
            whole image. "published-crop" and "published-stretch" are for the paper's datasets: they
            take the image as PIL decodes it, without reduced decoding, rotation and white
            background; "published-stretch" is bilinear.
    """

    channels: int
    size: tuple[int, int]
    fit: Fit = "crop"

    def read(self, entry: Entry | str) -> np.ndarray:
        """Read an image as uint8 C,H,W."""
        return self.decode(content_of(Path(entry) if isinstance(entry, str) else entry))

    def decode(self, content: bytes | Image.Image) -> np.ndarray:
        """Decode the bytes of a file, or a PIL image, to uint8 C,H,W."""
        with _open(content) as image:
            try:
                if image.format in ("JPEG", "MPO") and self.fit not in PUBLISHED:
                    # The JPEG decoder can reduce the size while it decodes.
                    image.draft(None, (self.size[1], self.size[0]))
                return self.pixels(image)
            except Exception as error:  # PIL's plugins can raise anything
                raise UnreadableError(_reason(error)) from None

    def pixels(self, image: Image.Image) -> np.ndarray:
        """A PIL image as uint8 C,H,W."""
        if self.fit in PUBLISHED:
            image = image.convert(_mode(self.channels))
        else:
            image = standardise(image, self.channels)
        array = np.asarray(_fit(image, self.size, self.fit))
        return np.ascontiguousarray(array.reshape(*self.size, self.channels).transpose(2, 0, 1))


def header(entry: Entry) -> Header:
    """The header of an image. Only the first bytes of a file are read."""
    if isinstance(entry, Item):
        if entry.header is not None:
            return entry.header
        if entry.stream is not None:
            return _header_in(entry.stream())
        content = entry.get()
        if isinstance(content, Image.Image):
            return header_of(content)
        with _open(content) as image:
            return header_of(image)
    try:
        if entry.is_fifo():
            raise UnreadableError("a pipe, not a file")
        if entry.stat().st_size == 0:
            raise UnreadableError("empty file")
        with _check_format(Image.open(entry)) as image:
            return header_of(image)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def _header_in(stream: BinaryIO) -> Header:
    """The header of an image in a larger file."""
    try:
        with stream, _check_format(Image.open(stream)) as image:
            return header_of(image)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def header_of(image: Image.Image) -> Header:
    return Header(image.width, image.height, image.mode, image.format or "")


def content_of(entry: Entry) -> bytes | Image.Image:
    """The bytes of a file or item, or the image of an item."""
    if isinstance(entry, Item):
        return entry.get()
    try:
        if entry.is_fifo():  # reading it would block
            raise UnreadableError("a pipe, not a file")
        return entry.read_bytes()
    except (OSError, ValueError) as error:
        raise UnreadableError(_reason(error)) from None


def full_pixels(
    content: bytes | Image.Image, reduce_to: int | None = None
) -> tuple[Header, Image.Image]:
    """The header of an image, and the image as RGB in its own size. With `reduce_to`, a JPEG may be
    decoded to a smaller size, but no side becomes shorter than this number of pixels."""
    with _open(content) as image:
        found = header_of(image)
        try:
            if reduce_to is not None and image.format in ("JPEG", "MPO"):
                image.draft(None, (reduce_to, reduce_to))
            return found, standardise(image, 3)
        except Exception as error:
            raise UnreadableError(_reason(error)) from None


def standardise(image: Image.Image, channels: int) -> Image.Image:
    """The image upright, with 8 bits per channel, grey or RGB."""
    image.load()
    return _to_eight_bits(_upright(image)).convert(_mode(channels))


def _mode(channels: int) -> str:
    return "L" if channels == 1 else "RGB"


@contextmanager
def no_warnings() -> Iterator[None]:
    """Hide PIL's warnings about unusual files; files that cannot be read are reported elsewhere.

    Use it around a thread pool, not inside the threads: Python has one warning filter for all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(content: bytes | Image.Image) -> Image.Image:
    if isinstance(content, Image.Image):
        return content.copy()  # so that the owner's image is not closed or rotated
    if not content:
        raise UnreadableError("empty file")
    try:
        return _check_format(Image.open(io.BytesIO(content)))
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def _check_format(image: Image.Image) -> Image.Image:
    if image.format not in FORMATS:
        image.close()
        raise UnreadableError(f"the format {image.format} is not supported")
    return image


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or a broken one"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "truncated" in str(error).lower():  # PIL's plugins word this differently
        return "truncated file"
    return " ".join(str(error).split()) or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    """The image, rotated as its EXIF data say."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the pixels can be fine even if the EXIF data are broken
        return image


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """The image with 8 bits per channel; transparent pixels on a white background."""
    if image.mode in HIGH_DEPTH:
        return Image.fromarray(_scale(np.asarray(image), image.mode))
    if image.mode in TRANSPARENT or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _scale(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey values with more than 8 bits, or from 0 to 1, scaled to 0 to 255."""
    values = np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)
    largest = values.max(initial=0)
    if mode == "F" and largest <= 1:
        scale = 255.0
    elif mode in ("I", "F") and largest <= 255:
        scale = 1.0
    else:
        scale = 255 / max(largest, 65535)
    return np.rint(values * scale).clip(0, 255).astype(np.uint8)


def _fit(image: Image.Image, size: tuple[int, int], fit: Fit) -> Image.Image:
    height, width = size
    if image.size == (width, height):
        return image
    if fit == "stretch":
        return image.resize((width, height), Image.Resampling.BICUBIC)
    if fit == "published-stretch":  # as the authors' released code does with a pool
        return image.resize((width, height), Image.Resampling.BILINEAR)
    if fit == "crop":
        return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    # Same as torchvision's Resize (bicubic) and CenterCrop.
    wide, high = (max(size) * length // min(image.size) for length in image.size)
    left, top = round((wide - width) / 2), round((high - height) / 2)
    image = image.resize((wide, high), Image.Resampling.BICUBIC)
    return image.crop((left, top, left + width, top + height))


def printable(path: str | Path) -> str:
    """The path as text for terminals and tables, even if it is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
