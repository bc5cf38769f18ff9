"""The images of a label table, by the position of their row.

Images are found again in the source: no run folder holds a copy. A row position is all that a
caller passes, so nothing from outside is ever used as a path.
"""

import io
import os
import re
from pathlib import Path
from threading import BoundedSemaphore, Lock

import numpy as np
from PIL import Image
from torch import Tensor

from pseudoloss.data import Data
from pseudoloss.data.decoding import UnreadableError, content_of, full_pixels
from pseudoloss.data.scanning import LabelledFiles, limits_of
from pseudoloss.data.sources.lookup import (
    ARRAY_DATASETS,
    FILE_DATASETS,
    WITH_NOISE_RATIO,
    open_arrays,
    open_files,
)
from pseudoloss.data.sources.table import TABLE_SUFFIXES
from pseudoloss.errors import InputError
from pseudoloss.files import at_home
from pseudoloss.labels.opening import LabelSet
from pseudoloss.reading import recorded_options

FULL = 4096  # pixels: the longest side of an image in full size
AT_ONCE = 4  # images that threads may decode at the same time
SPLIT_OF = {"train": "train", "held-out": "train", "val": "val", "test": "test"}


class RunImages:
    """The images of a run or an audit. Safe to use from several threads."""

    def __init__(self, labels: LabelSet) -> None:
        self.labels = labels
        self._path_N = labels.table["path"].to_numpy()
        self._part_N = labels.table["part"].to_numpy()
        self._index_N = labels.table["index"].to_numpy()
        self.replaced_N = _replaced(labels)
        self._root = source_root(labels.source)
        self.limits = limits_of(recorded_options(labels.reading))
        self._opening = Lock()
        self._decoding = BoundedSemaphore(AT_ONCE)
        self._data: Data | None = None  # sources of arrays
        self._items: dict[str, LabelledFiles] | None = None  # of Hugging Face or of shards

    def __len__(self) -> int:
        return len(self._index_N)

    @property
    def available(self) -> bool:
        """Whether images can be found; not if the data were passed in Python."""
        return self.labels.source is not None

    @property
    def root(self) -> Path | None:
        """The folder that paths in the table are relative to; None if the images are not files."""
        return self._root

    def path(self, position: int) -> Path | None:
        """The file of a row; None if the image is not stored in a file of its own."""
        name = self._path_N[self._check(position)]
        if self._root is None or not isinstance(name, str):
            return None
        path = self._root / name
        if "\\x" in name and not os.path.lexists(path):  # not valid UTF-8: see `printable`
            raw = re.sub(
                rb"\\x([0-9a-f]{2})", lambda m: bytes.fromhex(m[1].decode()), name.encode()
            )
            path = self._root / os.fsdecode(raw)
        return path

    def content(self, position: int) -> bytes | Image.Image:
        """The bytes of an image, or the image itself; `UnreadableError` if it is not there."""
        position = self._check(position)
        if self.replaced_N[position]:
            raise UnreadableError("the image was replaced by one of --pool")
        path = self.path(position)
        if path is not None:
            return content_of(path, self.limits)
        if not self.available:
            raise UnreadableError("the images were passed in Python")
        self._open()
        split, index = SPLIT_OF[self._part_N[position]], int(self._index_N[position])
        if self._items is not None:
            files = self._items.get(split)
            if files is not None and 0 <= index < len(files):
                return content_of(files.paths[index], self.limits)
        elif self._data is not None:
            images = self._data.train if split == "train" else self._data.test
            pixels = images.images_NCHW if images is not None else None
            if isinstance(pixels, Tensor) and 0 <= index < len(pixels):
                array_HWC = pixels[index].permute(1, 2, 0).contiguous().numpy()
                return Image.fromarray(array_HWC.squeeze(2) if len(pixels[0]) == 1 else array_HWC)
        raise UnreadableError("the source has no such image any more")

    def thumbnail(self, position: int, size: int) -> bytes:
        """The image upright, as JPEG or PNG, no side longer than `size`. Small images keep their
        size."""
        with self._decoding:
            content = self.content(position)
            _, image = full_pixels(content, size, self.limits)
            small = max(image.size) <= 64  # as PNG, which is exact and just as short
            image.thumbnail((size, size), Image.Resampling.BICUBIC, reducing_gap=2.0)
            file = io.BytesIO()
            if small:
                image.save(file, "PNG")
            else:
                image.save(file, "JPEG", quality=88)
            return file.getvalue()

    def full(self, position: int) -> bytes:
        """The image upright, as JPEG or PNG, in its own size (at most 4,096 pixels)."""
        return self.thumbnail(position, FULL)

    def _check(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"row {position}: the table has {len(self)} rows")
        return int(position)

    def _open(self) -> None:
        """Open a source whose images are not files, once."""
        with self._opening:
            if self._data is not None or self._items is not None:
                return
            try:
                found = open_source_of(self.labels)
            except InputError as error:
                raise UnreadableError(str(error)) from None
            if isinstance(found, Data):
                self._data = found
            else:
                self._items = found


def open_source_of(labels: LabelSet) -> Data | dict[str, LabelledFiles]:
    """The source again: its images if they are arrays, otherwise its files, split by split."""
    source = labels.source or ""
    files = open_files(source, recorded_options(labels.reading))
    return open_arrays(source) if files is None else files.splits


def media_type(image: bytes) -> str:
    """The type of what `thumbnail` and `full` return."""
    return "image/png" if image.startswith(b"\x89PNG") else "image/jpeg"


def source_root(source: str | None) -> Path | None:
    """The folder that the paths in the table are relative to; None if they name no files."""
    if source is None or source == "digits":
        return None
    kind, colon, place = source.partition(":")
    if colon and (kind in ARRAY_DATASETS or kind in ("hf", "wds")):
        return None
    if colon and kind in FILE_DATASETS:
        return Path(place.rpartition(":")[0] if kind in WITH_NOISE_RATIO else place)
    path = at_home(source)
    if path.suffix.lower() in TABLE_SUFFIXES:
        return path.parent
    return None if path.suffix == ".npz" and not path.is_dir() else path


def _replaced(labels: LabelSet) -> np.ndarray:
    """Rows whose image is not that of the source, in an experiment with --pool."""
    settings = labels.config.get("settings")
    if isinstance(settings, dict) and settings.get("pool") and "truth" in labels.table:
        return (labels.table["truth"] == "out").to_numpy()
    return np.zeros(len(labels.table), dtype=bool)
