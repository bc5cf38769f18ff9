"""Sources of images, labels, and label noise for experiments."""

from pseudoloss.data.corruption import corrupt
from pseudoloss.data.decoding import Reader
from pseudoloss.data.images import OUT, Data, ImageFiles, ImageSet, arrays, to_pixels
from pseudoloss.data.scanning import ReadOptions, ScannedSource, Skipped
from pseudoloss.data.sources import Source, absolute, find_source, open_source

__all__ = [
    "OUT",
    "Data",
    "ImageFiles",
    "ImageSet",
    "ReadOptions",
    "Reader",
    "ScannedSource",
    "Skipped",
    "Source",
    "absolute",
    "arrays",
    "corrupt",
    "find_source",
    "open_source",
    "to_pixels",
]
