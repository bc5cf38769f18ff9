"""Thumbnails inside the HTML file, within a limit of its size."""

import base64
import io
from dataclasses import dataclass

from markupsafe import Markup
from PIL import Image

from pseudoloss.data.decoding import UnreadableError
from pseudoloss.labels.images import RunImages, media_type

SMALL = 64  # pixels: longest side of the similar images beside a flagged one
PIXELS = 48  # images up to this size are enlarged without smoothing


class TooLargeError(Exception):
    """The thumbnails do not fit."""


@dataclass(frozen=True)
class Thumbnail:
    """An image for the `src` of an <img>, with its size in pixels."""

    uri: Markup
    width: int
    height: int

    @property
    def pixels(self) -> bool:
        return max(self.width, self.height) <= PIXELS


class Thumbnails:
    """Thumbnails by row of the label table, until `limit` characters are used up.

    Attributes:
        missing: images that cannot be read, by row, with the reason.
        shown: number of thumbnails.
        left_out: images that did not fit.
    """

    def __init__(self, images: RunImages, size: int, limit: int, strict: bool = False) -> None:
        """With `strict`, `TooLargeError` is raised when the limit is reached."""
        self.images, self.size, self.limit, self.strict = images, size, limit, strict
        self.missing: dict[int, str] = {}
        self.shown = self.left_out = self.used = 0
        self.cache: dict[tuple[int, int], Thumbnail] = {}

    def again(self) -> "Thumbnails":
        """The same thumbnails from the start, for another page with the same images."""
        other = Thumbnails(self.images, self.size, self.limit)
        other.missing, other.cache = self.missing, self.cache
        return other

    def large(self, row: int) -> Thumbnail | None:
        return self._thumbnail(row, self.size)

    def small(self, row: int) -> Thumbnail | None:
        return self._thumbnail(row, min(SMALL, self.size))

    def _thumbnail(self, row: int, size: int) -> Thumbnail | None:
        if row in self.missing:
            return None
        found = self.cache.get((row, size))
        if found is None:
            try:
                found = self.cache[row, size] = _encode(self.images.thumbnail(row, size))
            except UnreadableError as error:
                self.missing[row] = str(error)
                return None
        if self.used + len(found.uri) > self.limit:
            if self.strict:
                raise TooLargeError
            self.left_out += 1
            return None
        self.used += len(found.uri)
        self.shown += 1
        return found


def _encode(content: bytes) -> Thumbnail:
    uri = f"data:{media_type(content)};base64,{base64.b64encode(content).decode()}"
    with Image.open(io.BytesIO(content)) as image:
        return Thumbnail(Markup(uri), image.width, image.height)  # noqa: S704
