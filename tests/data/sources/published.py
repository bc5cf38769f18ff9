"""Small copies of published datasets, shared by their tests."""

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode

from pseudoloss.data import find_source
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.errors import InputError
from pseudoloss.presets import request

BICUBIC = InterpolationMode.BICUBIC
QUICK = {"network": "small-cnn", "epochs": 3, "warmup": 1, "device": "cpu", "quiet": True}


def save(path, colour, size=(84, 84)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def save_odd(folder):
    """Images in whose pixels ways of reading differ: large, turned, see-through, of any shape."""
    random = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for i, size in enumerate([(1300, 900), (84, 84), (33, 90)]):
        small = Image.fromarray(random.integers(0, 256, (9, 9, 4), dtype=np.uint8))
        image = small.resize(size, Image.Resampling.BILINEAR)
        image.convert("RGB").save(folder / f"n{i}.jpg", exif=turned)
        image.save(folder / f"n{i}.png")
        image.convert("CMYK").save(folder / f"n{i}c.jpg")
        image.convert("RGB").quantize(40).save(folder / f"n{i}.gif", transparency=3)


def read(words, where="auto"):
    """A source as training reads it, and what is left out."""
    listing = find_source(words)
    settings = choose_settings(listing, request(None, None, {})).settings
    return listing.read(*choose_reader(listing, settings, "crop"), where, False)


def refused(words, message):
    with pytest.raises(InputError, match=message) as error:
        find_source(words)
    assert "\n" not in str(error.value)


def cut(path):
    """A download that stopped half-way."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
