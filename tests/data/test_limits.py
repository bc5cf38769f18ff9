"""Which files are read at all: regular files of a limited size, images of a limited size, and a
limited number of pixels at the same time."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from PIL import Image

from pseudoloss.data import Reader, ReadOptions, decoding, find_source
from pseudoloss.data.decoding import Limits, UnreadableError, content_of, header
from pseudoloss.data.scanning import limits_of
from pseudoloss.reading import READ_OPTIONS

READERS = {"header": header, "read": Reader(3, (8, 8)).read, "content": content_of}
every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@pytest.fixture
def sparse(tmp_path):
    """A file of 200 GiB that begins like a PNG and takes no space on the disk."""
    path = tmp_path / "sparse.png"
    Image.new("RGB", (16, 16)).save(path)
    os.truncate(path, 200 * 2**30)
    return path


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
@every_reader
def test_devices_are_not_read(tmp_path, read):
    link = tmp_path / "zero.png"
    link.symlink_to("/dev/zero")
    with pytest.raises(UnreadableError, match="a device, not a file"):
        read(link)


@every_reader
def test_files_that_are_too_large_are_not_read(sparse, read):
    with pytest.raises(UnreadableError, match=r"too large \(214,748 MB; --max-megabytes allows"):
        read(sparse)


def test_the_limits_are_options(photos, sparse):
    folder = photos("cat/a.png", "cat/b.png", "cat/c.png", "dog/a.png", "dog/b.png")
    Image.new("RGB", (300, 200)).save(folder / "cat" / "wide.png")
    sparse.rename(folder / "cat" / "sparse.png")
    found = find_source(folder, ReadOptions(hold_out=0, max_megapixels=0.05))
    assert {entry.path: entry.reason for entry in found.skipped} == {
        "cat/sparse.png": "too large (214,748 MB; --max-megabytes allows 256)",
        "cat/wide.png": "too many pixels (300×200; --max-megapixels allows 0.05 million)",
    }
    found = find_source(folder, ReadOptions(hold_out=0, max_megabytes=1e6))
    assert not found.skipped  # the header of the sparse file is fine


def test_images_above_the_limit_of_pil_can_be_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_MEGAPIXELS", 0.002)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    path = tmp_path / "a.png"
    Image.new("RGB", (100, 50)).save(path)
    with pytest.raises(UnreadableError, match="too many pixels"):
        header(path, Limits(256, 0.002))
    assert header(path, Limits(256, 0.005))[:2] == (100, 50)


def test_the_help_names_the_defaults():
    assert f"(default: {decoding.MAX_MEGABYTES})" in READ_OPTIONS["max_megabytes"].help
    assert f"(default: {decoding.MAX_MEGAPIXELS})" in READ_OPTIONS["max_megapixels"].help
    assert limits_of(ReadOptions()) == Limits() == (decoding.MAX_MEGABYTES, decoding.MAX_MEGAPIXELS)
    assert limits_of(ReadOptions(max_megabytes=3, max_megapixels=2)) == (3, 2)


def test_limits_are_no_part_of_what_a_reader_does():
    """Its repr decides fingerprints and cached features."""
    reader = Reader(3, (8, 8))
    other = replace(reader, limits=Limits(1, 1))
    assert (repr(other), other) == (repr(reader), reader)


def test_threads_share_a_budget():
    """Whatever the number of threads, no more is held than the budget, or one thing that is larger
    than it."""
    budget, lock = decoding._Budget(100), Lock()
    held, most = 0, 0

    def use(amount):
        nonlocal held, most
        with budget.take(amount):
            with lock:
                held += min(amount, 100)
                most = max(most, held)
            time.sleep(0.001)
            with lock:
                held -= min(amount, 100)

    amounts = [30, 40, 50, 100, 250, 1, 0, 99] * 8
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(use, amounts))
    assert 40 < most <= 100
    assert (held, budget.left) == (0, 100)


def test_large_images_are_decoded_one_after_another(tmp_path, monkeypatch):
    budget = decoding._Budget(15_000)
    taken = []
    take = budget.take

    def recorded(amount):
        taken.append(amount)
        return take(amount)

    monkeypatch.setattr(budget, "take", recorded)
    monkeypatch.setattr(decoding, "_pixels", budget)
    path = tmp_path / "a.png"
    Image.new("RGB", (100, 100)).save(path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(Reader(3, (8, 8)).read, [path] * 8))
    assert taken == [10_000] * 8
    assert all((image == found[0]).all() for image in found)


def test_scaling_in_chunks_changes_no_pixel():
    values = np.random.default_rng(0).integers(0, 200_000, (700, 5)).astype(np.int32)
    whole = np.rint(values * (255 / values.max())).clip(0, 255).astype(np.uint8)
    np.testing.assert_array_equal(decoding._scale(values, "I"), whole)
    assert decoding._scale(values[:0], "I").shape == (0, 5)
