"""From the name of a source to its images."""

import numpy as np
import pytest
import torch

from conftest import make_images
from pseudoloss.data import ReadOptions, absolute, find_source, open_source
from pseudoloss.errors import InputError


def test_pair_of_arrays():
    data = open_source(make_images())
    assert (len(data.train), data.test, data.train.noise_rate) == (64, None, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("digit", "source digit: no such file, folder or dataset; did you mean digits"),
        ("cifar100", "source cifar100: name the folder of its files, as in cifar100:DIR"),
        ("imagenet:x", "no such file, folder or dataset"),
        ("", "SOURCE is empty"),
        ("~nobody-here/photos", "no such file or folder"),
        ("x" * 5000, "no usable path"),
        ("no\0where", "no usable path"),
    ],
)
def test_unknown_names_are_refused(source, message):
    with pytest.raises(InputError, match=message):
        find_source(source)


@pytest.mark.parametrize(
    "source", [3, (1, 2, 3), [1, 2], {}, {"train": [1]}, np.zeros(3), torch.zeros(3), 3.5]
)
def test_other_objects_are_refused(source):
    with pytest.raises(InputError, match="source must be text"):
        find_source(source)


def test_files_must_be_scanned_first(photos):
    with pytest.raises(InputError, match="is a source of image files, which must be read first"):
        open_source(photos("a/0.png", "b/0.png"))


@pytest.mark.parametrize(
    ("name", "value"), [("strict", True), ("test", "x"), ("path_column", "x"), ("fit", "stretch")]
)
def test_options_of_image_files_are_refused_for_arrays(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is for folders"):
        find_source("digits", ReadOptions(**{name: value}))


def test_absolute_sources(photos, tmp_path, monkeypatch):
    folder = photos("cat/a.png")
    monkeypatch.chdir(tmp_path)
    assert absolute("photos") == str(folder)
    assert absolute("cnwl:a/b:0.4") == f"cnwl:{tmp_path}/a/b:0.4"
    assert absolute("web-car:a") == f"web-car:{tmp_path}/a"
    assert absolute("imagenet32:../x") == f"imagenet32:{tmp_path.parent}/x"
    assert absolute("digits") == "digits"
