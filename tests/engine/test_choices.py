"""What a run uses where the user leaves it open."""

import pytest
import torch
from PIL import Image

import pseudoloss as pl
from conftest import make_images, save_images
from pseudoloss.config import Settings
from pseudoloss.data import find_source
from pseudoloss.engine.choices import (
    choose_normalisation,
    choose_padding,
    choose_reader,
    choose_size,
)
from pseudoloss.errors import InputError
from pseudoloss.nn.devices import choose_device, choose_precision


def test_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(InputError, match="--device cuda:97: there is no such device"):
        choose_device("cuda:97")
    with pytest.raises(InputError, match="--device tpu: must be auto, cpu, cuda"):
        choose_device("tpu")
    with pytest.raises(InputError, match="--device meta: there is no such device"):
        choose_device("meta")


def test_precision():
    assert choose_precision("auto", torch.device("cpu")) == torch.float32
    assert choose_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_sizes():
    assert choose_size((40, 30), Settings()) == (40, 30)
    assert choose_size((40, 30), Settings(image_size=24)) == (24, 24)
    assert choose_size((40, 30), Settings(), usual=20) == (20, 20)
    with pytest.raises(InputError, match=r"--image-size 31 is larger than the images \(40×30"):
        choose_size((40, 30), Settings(image_size=31))


def test_padding_is_an_eighth_of_the_size():
    assert choose_padding((32, 32), Settings()) == 4
    assert choose_padding((40, 32), Settings(pad=0)) == 0
    with pytest.raises(InputError, match=r"--pad 8 must be smaller than the images \(8×8"):
        choose_padding((8, 8), Settings(pad=8))


@pytest.fixture
def files(tmp_path):
    """Colour files of 10×10."""
    save_images(tmp_path / "photos", *make_images(16, size=10, channels=3))
    return tmp_path / "photos"


def test_photographs_are_stored_larger_than_they_are_seen(files):
    scanned = find_source(str(files))
    reader, seen = choose_reader(scanned, Settings(network="resnet50"), "crop")
    assert (reader.size, reader.channels, seen) == ((256, 256), 3, 224)
    reader, seen = choose_reader(scanned, Settings(network="resnet50", image_size=448), "crop")
    assert (reader.size, seen) == ((512, 512), 448)  # row 21
    reader, seen = choose_reader(scanned, Settings(), "stretch")
    assert (reader.size, reader.fit, seen) == ((32, 32), "stretch", 32)


def test_grey_images_stay_grey_unless_the_weights_need_colours(files):
    for path in files.rglob("*.*"):
        Image.open(path).convert("L").save(path)
    scanned = find_source(str(files))
    assert choose_reader(scanned, Settings(), "crop")[0].channels == 1
    published = Settings(network="resnet10t", weights="pretrained")
    assert choose_reader(scanned, published, "crop")[0].channels == 3


def test_normalisation_comes_with_the_weights(tiny_source):
    colour = pl.arrays(*make_images(channels=3))
    published = Settings(network="resnet50", weights="pretrained")
    assert choose_normalisation(colour, published)[0] == (0.485, 0.456, 0.406)
    assert choose_normalisation(colour, Settings(network="resnet50")) == colour.normalisation()
    assert choose_normalisation(tiny_source, published) == tiny_source.normalisation()


def test_normalisation_is_measured_where_none_is_published(tiny_source):
    mean, std = choose_normalisation(tiny_source, Settings())
    assert len(mean) == len(std) == 1
    assert 0 < mean[0] < 1
