"""Decode one image file of any format and mode to 8 bits per channel, grey or RGB, in a given size.

A copy of this file is part of every exported model (see inference/export.py), so it needs nothing
but NumPy, Pillow and `open_regular`, which the copy includes. Shapes: C channels, H×W pixels.

All commands read images here. Only regular files are read, within `Limits`, and the memory that
files and pixels take does not grow with the number of threads.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from pseudoloss.files import open_regular

Fit = Literal["crop", "stretch", "published-crop", "published-stretch"]
PUBLISHED = ("published-crop", "published-stretch")

# Formats are recognised by content, not by file name. PIL knows more formats, and starts other
# programs for some of them.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

# PIL's modes with more than 8 bits per pixel, and those with transparency.
HIGH_DEPTH = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
TRANSPARENT = ("RGBA", "LA", "PA", "La", "RGBa")
GREY = ("1", "L", "LA", "La", *HIGH_DEPTH)


# Larger files and images are not read, unless --max-megabytes and --max-megapixels say so.
MAX_MEGABYTES, MAX_MEGAPIXELS = 256, 178

# What all threads together may hold; one file or image may take it all.
BYTES_AT_ONCE, PIXELS_AT_ONCE = 512_000_000, 200_000_000
SMALL_SHARE = 0.002  # of it; less is not counted
SCALED_ROWS = 256  # rows of pixels that are scaled at a time


class UnreadableError(Exception):
    """A file that is not an image, or cannot be read. The message is the reason."""


class Limits(NamedTuple):
    """The size of the largest file and of the largest image that is read."""

    megabytes: float = MAX_MEGABYTES
    megapixels: float = MAX_MEGAPIXELS


USUAL = Limits()


_FREE = nullcontext()


class _Budget:
    """An amount that threads share. Whoever needs more than is left waits for the others."""

    def __init__(self, amount: int) -> None:
        self.amount = self.left = amount
        self.changed = Condition()

    def take(self, amount: int) -> AbstractContextManager[None]:
        return self._take(amount) if amount > SMALL_SHARE * self.amount else _FREE

    @contextmanager
    def _take(self, amount: int) -> Iterator[None]:
        amount = min(amount, self.amount)
        with self.changed:
            self.changed.wait_for(lambda: self.left >= amount)
            self.left -= amount
        try:
            yield
        finally:
            with self.changed:
                self.left += amount
                self.changed.notify_all()


_bytes, _pixels = _Budget(BYTES_AT_ONCE), _Budget(PIXELS_AT_ONCE)


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
        limits: of files and images. They decide no pixel, so they are no part of the repr.
    """

    channels: int
    size: tuple[int, int]
    fit: Fit = "crop"
    limits: Limits = field(default=USUAL, repr=False, compare=False)

    def read(self, entry: Entry | str) -> np.ndarray:
        """Read an image as uint8 C,H,W."""
        with content(Path(entry) if isinstance(entry, str) else entry, self.limits) as found:
            return self.decode(found)

    def decode(self, content: bytes | Image.Image) -> np.ndarray:
        """Decode the bytes of a file, or a PIL image, to uint8 C,H,W."""
        with _open(content, self.limits) as image:
            try:
                if image.format in ("JPEG", "MPO") and self.fit not in PUBLISHED:
                    # The JPEG decoder can reduce the size while it decodes.
                    image.draft(None, (self.size[1], self.size[0]))
                with _pixels.take(image.width * image.height):
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


def header(entry: Entry, limits: Limits = USUAL) -> Header:
    """The header of an image. Only the first bytes of a file are read."""
    if isinstance(entry, Item):
        if entry.header is not None:
            return entry.header
        if entry.stream is not None:
            return _header_in(entry.stream(), limits)
        found = entry.get()
        if isinstance(found, Image.Image):
            return header_of(found)
        with _open(found, limits) as image:
            return header_of(image)
    try:
        with open_regular(entry) as file:
            size = _checked_size(file.fileno(), limits)
            with _bytes.take(size), _checked(lambda: Image.open(file), limits) as image:
                return header_of(image)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def _header_in(stream: BinaryIO, limits: Limits) -> Header:
    """The header of an image in a larger file."""
    try:
        with stream, _checked(lambda: Image.open(stream), limits) as image:
            return header_of(image)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def header_of(image: Image.Image) -> Header:
    return Header(image.width, image.height, image.mode, image.format or "")


@contextmanager
def content(entry: Entry, limits: Limits = USUAL) -> Iterator[bytes | Image.Image]:
    """The bytes of a file or item, or the image of an item. Use them inside of the `with`: threads
    whose files need too much memory together wait for each other."""
    if isinstance(entry, Item):
        yield entry.get()
        return
    try:
        file = open_regular(entry)
    except (OSError, ValueError) as error:
        raise UnreadableError(_reason(error)) from None
    with file:
        size = _checked_size(file.fileno(), limits)
        with _bytes.take(size):
            try:
                found = file.read(size)
            except OSError as error:
                raise UnreadableError(_reason(error)) from None
            yield found


def content_of(entry: Entry, limits: Limits = USUAL) -> bytes | Image.Image:
    """As `content`, for code that reads one image at a time."""
    with content(entry, limits) as found:
        return found


def _checked_size(file: int, limits: Limits) -> int:
    """The size of an open file in bytes."""
    size = os.fstat(file).st_size
    if size == 0:
        raise UnreadableError("empty file")
    if size > limits.megabytes * 1e6:
        raise UnreadableError(
            f"too large ({size / 1e6:,.0f} MB; --max-megabytes allows {limits.megabytes:g})"
        )
    return size


def full_pixels(
    content: bytes | Image.Image, reduce_to: int | None = None, limits: Limits = USUAL
) -> tuple[Header, Image.Image]:
    """The header of an image, and the image as RGB in its own size. With `reduce_to`, a JPEG may be
    decoded to a smaller size, but no side becomes shorter than this number of pixels."""
    with _open(content, limits) as image:
        found = header_of(image)
        try:
            if reduce_to is not None and image.format in ("JPEG", "MPO"):
                image.draft(None, (reduce_to, reduce_to))
            with _pixels.take(image.width * image.height):
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


def _open(content: bytes | Image.Image, limits: Limits) -> Image.Image:
    if isinstance(content, Image.Image):
        return content.copy()  # so that the owner's image is not closed or rotated
    if not content:
        raise UnreadableError("empty file")
    try:
        return _checked(lambda: Image.open(io.BytesIO(content)), limits)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def _checked(open_image: Callable[[], Image.Image], limits: Limits) -> Image.Image:
    """An image of a known format, within the limits. No pixel has been decoded yet."""
    most = limits.megapixels * 1e6
    if limits.megapixels > MAX_MEGAPIXELS and Image.MAX_IMAGE_PIXELS is not None:
        # PIL refuses images of more than twice this number, which is one for the process.
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, int(most / 2) + 1)
    image = open_image()
    if image.format not in FORMATS:
        image.close()
        raise UnreadableError(f"the format {image.format} is not supported")
    if image.width * image.height > most:
        image.close()
        raise UnreadableError(
            f"too many pixels ({image.width:,}×{image.height:,}; --max-megapixels allows "
            f"{limits.megapixels:g} million)"
        )
    return image


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or a broken one"
    if isinstance(error, Image.DecompressionBombError):
        return f"too many pixels ({MAX_MEGAPIXELS} million; --max-megapixels raises the limit)"
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

    def rows(start: int) -> np.ndarray:
        some = values[start : start + SCALED_ROWS].astype(np.float64)
        return np.nan_to_num(some, posinf=0, neginf=0)

    starts = range(0, len(values), SCALED_ROWS)
    largest = max((rows(start).max(initial=0) for start in starts), default=0)
    if mode == "F" and largest <= 1:
        scale = 255.0
    elif mode in ("I", "F") and largest <= 255:
        scale = 1.0
    else:
        scale = 255 / max(largest, 65535)
    scaled = np.empty(values.shape, np.uint8)
    for start in starts:
        scaled[start : start + SCALED_ROWS] = np.rint(rows(start) * scale).clip(0, 255)
    return scaled


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
