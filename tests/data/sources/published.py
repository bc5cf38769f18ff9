"""Helpers for tests of published datasets, which use small folders with the same layout."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from pseudoloss.data import find_source
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.errors import InputError
from pseudoloss.presets import request

QUICK = {"network": "small-cnn", "epochs": 3, "warmup": 1, "device": "cpu", "quiet": True}


def save(path, colour, size=(84, 84)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def save_unusual(folder, largest):
    """Save images that can be read in several ways: large, rotated, transparent, of any shape."""
    random = np.random.default_rng(0)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    for i, size in enumerate([largest, (84, 84), (33, 90)]):
        small = Image.fromarray(random.integers(0, 256, (9, 9, 4), dtype=np.uint8))
        image = small.resize(size, Image.Resampling.BILINEAR)
        image.convert("RGB").save(folder / f"n{i}.jpg", exif=rotated)
        image.save(folder / f"n{i}.png")
        image.convert("CMYK").save(folder / f"n{i}c.jpg")
        image.convert("RGB").quantize(40).save(folder / f"n{i}.gif", transparency=3)


def truncate(path):
    """Make the file an incomplete download."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def read(source, where="auto"):
    """The data as training reads them, and the skipped files."""
    scanned = find_source(source)
    settings = choose_settings(scanned, request(None, None, {})).settings
    return scanned.read(*choose_reader(scanned, settings, "crop"), where, False)


def assert_torchvision_pixels(images, root, size):
    """The pixels are those of torchvision's Resize (bicubic) and CenterCrop, bit by bit."""
    transform = Compose([Resize(size, InterpolationMode.BICUBIC), CenterCrop(size)])
    stored = images.images_NCHW
    for i, name in enumerate(images.paths):
        with Image.open(root / name) as image:
            expected = np.asarray(transform(image.convert("RGB"))).transpose(2, 0, 1)
        in_memory = isinstance(stored, torch.Tensor)
        found = stored[i] if in_memory else stored.reader.read(stored.paths[i])
        np.testing.assert_array_equal(found, expected)


def assert_refused(source, message):
    with pytest.raises(InputError, match=message) as error:
        find_source(source)
    assert "\n" not in str(error.value)
