"""From the name of a source to its images."""

import numpy as np
import pytest
import torch

from conftest import make_images
from pseudoloss.data import ReadOptions, absolute, find_source, open_source
from pseudoloss.errors import InputError


def test_a_pair_of_arrays():
    data = open_source(make_images())
    assert (len(data.train), data.test, data.train.noise_rate) == (64, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digit", "source digit: no such source; did you mean digits"),
        ("cifar100", "source cifar100: name the folder of its files, as in cifar100:DIR"),
        ("imagenet:x", "no such source"),
        ("", "SOURCE is empty"),
        (3, "source must be text"),
        ((1, 2, 3), "source must be text"),
    ],
)
def test_unknown_sources(words, message):
    with pytest.raises(InputError, match=message):
        open_source(words)


def test_sources_can_be_opened_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("cnwl:a/b:0.4") == f"cnwl:{tmp_path}/a/b:0.4"
    assert absolute("web-car:a") == f"web-car:{tmp_path}/a"
    assert absolute("imagenet32:../x") == f"imagenet32:{tmp_path.parent}/x"
    assert absolute("digits") == "digits"


@pytest.mark.parametrize("words", ["", "~nobody-here/photos", "x" * 5000, "no\0where"])
def test_words_that_are_no_folder(words):
    with pytest.raises(InputError, match=r"SOURCE is empty|no such (source|file)|no usable path"):
        find_source(words)


def test_a_source_is_found_again_from_elsewhere(photos, tmp_path, monkeypatch):
    folder = photos("cat/a.png")
    monkeypatch.chdir(tmp_path)
    assert absolute("photos") == str(folder)
    assert absolute("digits") == "digits"


def test_options_are_for_images_that_are_read():
    for name, value in (("strict", True), ("test", "x"), ("path_column", "x")):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is for folders"):
            find_source("digits", ReadOptions(**{name: value}))


@pytest.mark.parametrize("source", [[1, 2], {}, {"train": [1]}, np.zeros(3), torch.zeros(3), 3.5])
def test_what_is_no_source(source):
    with pytest.raises(InputError, match="source must be text"):
        find_source(source)
