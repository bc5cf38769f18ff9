"""Images inside data sets of others: bytes, images of PIL's or arrays, whatever an item holds."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from pseudoloss.data.decoding import UnreadableError, content_of
from pseudoloss.data.images import to_pixels
from pseudoloss.errors import InputError, reason


class Rows:
    """Items of a data set, one at a time: not every data set can be asked by several threads."""

    def __init__(self, ask: Callable[[int], Any], where: str) -> None:
        """`ask` gives the item at an index; `where` is what errors call the set."""
        self.ask, self.where, self.lock = ask, where, Lock()

    def item(self, i: int) -> Any:
        try:
            with self.lock:
                return self.ask(i)
        except InputError:
            raise
        except Exception as error:  # the set's own code raises whatever it likes
            raise UnreadableError(reason(error)) from None

    def content(self, i: int) -> bytes | Image.Image:
        """The image of the item at an index, where an item is an image."""
        return as_content(self.item(i), f"{self.where}[{i}]")


def as_content(value: Any, where: str) -> bytes | Image.Image:
    """The bytes of an image, or an image of PIL's, from what a data set calls an image."""
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:  # as Hugging Face stores it
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None:
        raise UnreadableError("no image")
    if isinstance(value, bytes | Image.Image):
        return value
    if isinstance(value, str | Path):
        return content_of(Path(value))
    if not isinstance(value, np.ndarray | Tensor | list):
        raise InputError(f"{where}: must be an image or an array, not {type(value).__name__}")
    array: Any = value
    if isinstance(value, list):  # numbers out of a table, where 8 bits are as good as 64
        array = np.asarray(value)
        if array.dtype.kind == "i" and array.size and 0 <= array.min() <= array.max() <= 255:
            array = array.astype(np.uint8)
    pixels_CHW = to_pixels(array[None], where)[0]
    pixels = pixels_CHW[0] if len(pixels_CHW) == 1 else pixels_CHW.permute(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(pixels.numpy()))
