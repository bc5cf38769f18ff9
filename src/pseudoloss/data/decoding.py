"""One image file: whatever its format and mode, 8 bits a channel, grey or RGB, in one size.

A copy of this file goes with every exported model (export.py): NumPy and Pillow are all it needs.
Shapes: C channels, H high, W wide.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Fit = Literal["crop", "stretch", "published-crop", "published-stretch"]
PUBLISHED = ("published-crop", "published-stretch")

# What is read, by its content and not by its name. PIL knows more formats, and runs other programs
# for some of them.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

# Modes that hold more than 8 bits a pixel, and those in which a pixel can be see-through.
DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
SEE_THROUGH = ("RGBA", "LA", "PA", "La", "RGBa")
GREY = ("1", "L", "LA", "La", *DEEP)


class UnreadableError(Exception):
    """A file that is no image, or not one that can be read. The message is the reason."""


class Header(NamedTuple):
    """What a file says of its image before it is decoded."""

    width: int
    height: int
    mode: str
    format: str

    @property
    def is_grey(self) -> bool:
        return self.mode in GREY


@dataclass(frozen=True)
class Item:
    """An image that is no file of its own. `get` gives its bytes, or the image itself."""

    get: Callable[[], bytes | Image.Image]
    header: Header | None = None  # where it is known already


Entry = Path | Item


@dataclass(frozen=True)
class Reader:
    """How image files become pixels. The same for training and for prediction.

    Attributes:
        channels: 1 or 3.
        size: height and width of the result.
        fit: "crop": the shorter side is brought to the size, and the centre kept; "stretch": all
            of the image, in another shape. "published-crop" and "published-stretch" are for the
            sets of the paper: what PIL decodes, neither made smaller on the way nor turned nor laid
            on white; bilinear where it is stretched.
    """

    channels: int
    size: tuple[int, int]
    fit: Fit = "crop"

    def read(self, entry: Entry | str) -> np.ndarray:
        """An image as uint8 C,H,W."""
        return self.decode(content_of(Path(entry) if isinstance(entry, str) else entry))

    def decode(self, content: bytes | Image.Image) -> np.ndarray:
        """The bytes of a file, or an image of PIL's, as uint8 C,H,W."""
        with _open(content) as image:
            try:
                if image.format in ("JPEG", "MPO") and self.fit not in PUBLISHED:
                    # Its decoder can make it smaller on the way.
                    image.draft(None, (self.size[1], self.size[0]))
                return self.pixels(image)
            except Exception as error:  # PIL's plugins raise whatever they like
                raise UnreadableError(_reason(error)) from None

    def pixels(self, image: Image.Image) -> np.ndarray:
        """An image of PIL's as uint8 C,H,W."""
        published = self.fit in PUBLISHED
        image = image.convert(_mode(self.channels)) if published else plain(image, self.channels)
        array = np.asarray(_fitted(image, self.size, self.fit))
        return np.ascontiguousarray(array.reshape(*self.size, self.channels).transpose(2, 0, 1))


def header(entry: Entry) -> Header:
    """What an image says of itself. Only the first bytes of a file are read."""
    if isinstance(entry, Item):
        if entry.header is not None:
            return entry.header
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
        with _known(Image.open(entry)) as image:
            return header_of(image)
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def header_of(image: Image.Image) -> Header:
    return Header(image.width, image.height, image.mode, image.format or "")


def content_of(entry: Entry) -> bytes | Image.Image:
    """The bytes of a file; of an item, its bytes or the image itself."""
    if isinstance(entry, Item):
        return entry.get()
    try:
        if entry.is_fifo():  # which would keep us waiting
            raise UnreadableError("a pipe, not a file")
        return entry.read_bytes()
    except (OSError, ValueError) as error:
        raise UnreadableError(_reason(error)) from None


def full_pixels(content: bytes | Image.Image) -> tuple[Header, Image.Image]:
    """An image as RGB in its own size, and what it said of itself."""
    with _open(content) as image:
        found = header_of(image)
        try:
            return found, plain(image, 3)
        except Exception as error:
            raise UnreadableError(_reason(error)) from None


def plain(image: Image.Image, channels: int) -> Image.Image:
    """An image upright, with 8 bits a channel, grey or RGB."""
    image.load()
    return _eight_bits(_upright(image)).convert(_mode(channels))


def _mode(channels: int) -> str:
    return "L" if channels == 1 else "RGB"


@contextmanager
def hushed() -> Iterator[None]:
    """Without PIL's warnings about odd files: what cannot be read is told otherwise.

    It goes around threads and not into them, as Python has one filter for all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(content: bytes | Image.Image) -> Image.Image:
    if isinstance(content, Image.Image):
        return content.copy()  # closing it, or turning it, leaves the owner's alone
    if not content:
        raise UnreadableError("empty file")
    try:
        return _known(Image.open(io.BytesIO(content)))
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(_reason(error)) from None


def _known(image: Image.Image) -> Image.Image:
    if image.format not in FORMATS:
        image.close()
        raise UnreadableError(f"{image.format} is no format that is read here")
    return image


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or a broken one"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "truncated" in str(error).lower():  # its plugins have many words for it
        return "truncated file"
    return " ".join(str(error).split()) or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its camera says."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block says nothing about the pixels
        return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """8 bits a channel, on white where it was see-through."""
    if image.mode in DEEP:
        return Image.fromarray(_scaled(np.asarray(image), image.mode))
    if image.mode in SEE_THROUGH or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _scaled(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey values of more than 8 bits, or fractions, as 0 to 255."""
    values = np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)
    most = values.max(initial=0)
    if mode == "F" and most <= 1:  # fractions
        scale = 255.0
    elif mode in ("I", "F") and most <= 255:
        scale = 1.0
    else:
        scale = 255 / max(most, 65535)
    return np.rint(values * scale).clip(0, 255).astype(np.uint8)


def _fitted(image: Image.Image, size: tuple[int, int], fit: Fit) -> Image.Image:
    height, width = size
    if image.size == (width, height):
        return image
    if fit == "stretch":
        return image.resize((width, height), Image.Resampling.BICUBIC)
    if fit == "published-stretch":  # what the released program does to a pool
        return image.resize((width, height), Image.Resampling.BILINEAR)
    if fit == "crop":
        return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    # As torchvision's Resize (bicubic) and CenterCrop: in whole pixels.
    wide, high = (max(size) * length // min(image.size) for length in image.size)
    left, top = round((wide - width) / 2), round((high - height) / 2)
    image = image.resize((wide, high), Image.Resampling.BICUBIC)
    return image.crop((left, top, left + width, top + height))


def shown(path: str | Path) -> str:
    """A path as it can be printed and written to a table, whatever bytes it is made of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
