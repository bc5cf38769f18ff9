"""What a run uses where the settings leave it open: sizes, padding, normalisation."""

from dataclasses import replace

from pseudoloss.config import Settings
from pseudoloss.data import Data, Reader, ScannedSource
from pseudoloss.data.decoding import Fit
from pseudoloss.data.scanning import LARGE
from pseudoloss.errors import InputError
from pseudoloss.nn import networks

OWN_SIZE = 32  # side in pixels of what our own networks see of image files


def choose_reader(listing: ScannedSource, settings: Settings, fit: Fit) -> tuple[Reader, int]:
    """How image files are read, and the side in pixels of what the network sees.

    Photographs are stored an eighth larger than that, for random crops (row 21: 512 for 448); small
    images are padded instead. A published dataset is read as its recipe says.
    """
    if listing.recipe is not None:
        reader = replace(listing.recipe.reader, limits=listing.limits)
        return reader, choose_size(reader.size, settings)[0]
    wanted = networks.wanted_input(settings.network)
    seen = settings.image_size or (wanted.size if wanted else OWN_SIZE)
    stored = round(seen * 8 / 7) if seen > LARGE else seen
    grey = listing.is_grey and settings.weights is None
    return Reader(1 if grey else 3, (stored, stored), fit, listing.limits), seen


def choose_normalisation(
    data: Data, settings: Settings
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation: those that pretrained weights expect, else those of the data."""
    wanted = networks.wanted_input(settings.network) if settings.weights else None
    if wanted and data.train.channels == len(wanted.mean) and not data.mean:
        return wanted.mean, wanted.std
    return data.normalisation()


def choose_size(
    stored: tuple[int, int], settings: Settings, usual: int | None = None
) -> tuple[int, int]:
    """Height and width of what the network sees."""
    asked = settings.image_size or usual
    if asked is None:
        return stored
    if asked > min(stored):
        raise InputError(
            f"--image-size {asked} is larger than the images ({stored[0]}×{stored[1]} pixels)"
        )
    return asked, asked


def choose_padding(size: tuple[int, int], settings: Settings) -> int:
    if settings.pad is None:
        return round(min(size) / 8)  # 4 at 32 pixels (row 21)
    if settings.pad >= min(size):
        raise InputError(
            f"--pad {settings.pad} must be smaller than the images ({size[0]}×{size[1]} pixels)"
        )
    return settings.pad
