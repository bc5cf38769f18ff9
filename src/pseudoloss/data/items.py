"""Images in dataset objects: bytes, paths, PIL images or arrays."""

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
    """The items of a dataset, loaded one at a time: not every dataset is thread-safe."""

    def __init__(self, load: Callable[[int], Any], where: str) -> None:
        """`load` returns the item at an index; `where` is the name of the dataset in errors."""
        self.load, self.where, self.lock = load, where, Lock()

    def item(self, i: int) -> Any:
        try:
            with self.lock:
                return self.load(i)
        except InputError:
            raise
        except Exception as error:  # the code of the dataset can raise anything
            raise UnreadableError(reason(error)) from None

    def content(self, i: int) -> bytes | Image.Image:
        """The image at an index, for datasets whose items are images."""
        return as_content(self.item(i), f"{self.where}[{i}]")


def as_content(value: Any, where: str) -> bytes | Image.Image:
    """The bytes of an image, or a PIL image, from an image in any form."""
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
    if isinstance(value, list):  # numbers from a table, where uint8 has become int64
        array = np.asarray(value)
        if array.dtype.kind == "i" and array.size and 0 <= array.min() <= array.max() <= 255:
            array = array.astype(np.uint8)
    pixels_CHW = to_pixels(array[None], where)[0]
    pixels = pixels_CHW[0] if len(pixels_CHW) == 1 else pixels_CHW.permute(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(pixels.numpy()))
