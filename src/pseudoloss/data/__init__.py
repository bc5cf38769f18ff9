"""Sources of images, their labels, and the noise that experiments add to them."""

from pseudoloss.data.corruption import corrupt
from pseudoloss.data.decoding import Reader
from pseudoloss.data.images import OUT, Data, FileImages, ImageSet, arrays, to_pixels
from pseudoloss.data.scanning import Listing, Options, Skipped
from pseudoloss.data.sources import Source, absolute, find_source, open_source

__all__ = [
    "OUT",
    "Data",
    "FileImages",
    "ImageSet",
    "Listing",
    "Options",
    "Reader",
    "Skipped",
    "Source",
    "absolute",
    "arrays",
    "corrupt",
    "find_source",
    "open_source",
    "to_pixels",
]
