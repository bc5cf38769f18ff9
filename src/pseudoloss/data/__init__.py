"""Sources of images, their labels, and the noise that experiments add to them."""

from pseudoloss.data.corruption import corrupt
from pseudoloss.data.images import OUT, Data, ImageSet, arrays, to_pixels
from pseudoloss.data.sources import Source, absolute, open_source

__all__ = [
    "OUT",
    "Data",
    "ImageSet",
    "Source",
    "absolute",
    "arrays",
    "corrupt",
    "open_source",
    "to_pixels",
]
