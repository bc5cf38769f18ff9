"""Scanning sources: held-out images, headers, decoding and skipped files."""

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pseudoloss.data import ImageFiles, Reader, ReadOptions, find_source, scanning
from pseudoloss.data.decoding import Item
from pseudoloss.data.images import held_out
from pseudoloss.data.scanning import FileSource, LabelledFiles, ScannedSource, scan
from pseudoloss.errors import InputError

READER = Reader(3, (8, 8))
ALL = ReadOptions(hold_out=0)
TWELVE = [f"{k}/{i}.png" for k in "ab" for i in range(6)]

# ------------------------------------------------------------------------------------ held out


@given(
    labels=st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=60)
def test_held_out(labels, share, seed):
    out = held_out(labels, share, seed)
    np.testing.assert_array_equal(out, held_out(labels, share, seed))
    inside = Counter(label for label, is_out in zip(labels, out, strict=True) if not is_out)
    for label, count in Counter(labels).items():
        assert inside[label] >= min(count, 2)  # enough to be trained on
        assert abs(count - inside[label] - share * count) <= 0.5 or inside[label] <= 2


def test_another_seed_holds_out_other_images():
    labels = ["a"] * 200 + ["b"] * 100
    first, second = (held_out(labels, 0.1, seed) for seed in (1, 2))
    assert first.sum() == second.sum() == 30
    assert first[:200].sum() == 20
    assert (first != second).any()


def test_held_out_images_depend_only_on_names_and_seed(photos):
    folder = photos(*TWELVE)
    found = [find_source(folder, ReadOptions(hold_out=0.4), seed) for seed in (1, 1, 2)]
    assert found[0].test.names == found[1].test.names
    assert found[0].test.names != found[2].test.names
    assert (len(found[0].train), len(found[0].test)) == (8, 4)
    assert len(found[0].headers) == 8


def test_two_images_of_each_class_stay_in_training(photos):
    found = find_source(
        photos("a/0.png", "a/1.png", "b/0.png", "b/1.png"), ReadOptions(hold_out=0.9)
    )
    assert (found.test, found.test_name, found.noisy_test) == (None, "", False)


# ----------------------------------------------------------------------------------- headers


def scan_images(tmp_path, sizes, mode="RGB"):
    for i, size in enumerate(sizes):
        path = tmp_path / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new(mode, size).save(path)
    return find_source(tmp_path, ALL)


def test_preset_depends_on_image_size(tmp_path):
    small = scan_images(tmp_path, [(32, 40), (28, 28), (500, 64), (30, 90)])
    assert (small.typical_side, small.preset) == (31, "scratch")
    large = scan_images(tmp_path, [(640, 480), (65, 65), (640, 480), (65, 65)])
    assert large.preset == "finetune"
    assert not large.is_grey


def test_source_is_grey_if_all_images_are(tmp_path):
    assert scan_images(tmp_path, [(9, 9)] * 4, "L").is_grey
    Image.new("RGB", (9, 9)).save(tmp_path / "a" / "colour.png")
    assert not find_source(tmp_path, ALL).is_grey


# ------------------------------------------------------------------------------------- reading


def test_broken_images_are_skipped(photos):
    folder = photos(*TWELVE, size=(8, 8))
    whole, _ = find_source(folder, ALL).read(READER, 8, "host", False)
    for name in ("a/0.png", "b/2.png", "b/5.png"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) - 25])
    data, skipped = find_source(folder, ALL).read(READER, 8, "host", False)
    assert [entry.path for entry in skipped] == ["a/0.png", "b/2.png", "b/5.png"]
    kept = [i for i, name in enumerate(whole.train.paths) if name in data.train.paths]
    assert len(kept) == 9
    assert torch.equal(data.train.images_NCHW, whole.train.images_NCHW[kept])
    assert torch.equal(data.train.given_N, whole.train.given_N[kept])


def test_strict_refuses_files_that_fail_to_decode(photos):
    folder = photos(*TWELVE)
    content = (folder / "a/3.png").read_bytes()
    (folder / "a/3.png").write_bytes(content[:-25])
    found = find_source(folder, ReadOptions(strict=True))
    with pytest.raises(InputError, match=r"a/3.png cannot be read .*without --strict"):
        found.read(READER, 8, "host", True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda whole: whole[:-25], r"b/0.png: truncated file.*"),  # after the header
        (lambda whole: whole[:9], "b/0.png: not an image, or a broken one"),
        (lambda whole: None, "its folder is empty"),
    ],
)
def test_class_without_readable_images_is_refused(photos, content, reason):
    folder = photos("a/0.png", "a/1.png", "b/0.png")
    left = content((folder / "b/0.png").read_bytes())
    (folder / "b/0.png").unlink()
    if left is not None:
        (folder / "b/0.png").write_bytes(left)
    found = find_source(folder, ALL)
    assert found.classes == ("a", "b")  # so that a report can name it
    with pytest.raises(
        InputError, match=rf"no image of the class b can be read \({reason}\); fix its files"
    ):
        found.read(READER, 8, "host", False)


def test_class_with_readable_test_images_only_is_refused(photos):
    folder = photos(
        "train/a/0.png", "train/a/1.png", "train/b/0.png", "test/a/0.png", "test/b/0.png"
    )
    (folder / "train/b/0.png").write_text("no image")
    with pytest.raises(InputError, match="no image of the class b can be read"):
        find_source(folder).read(READER, 8, "host", False)


def test_images_stay_in_files_if_memory_is_short(photos, monkeypatch):
    found = find_source(photos(*TWELVE), ALL)
    assert found.needs(READER) == 12 * 3 * 64
    assert found.keeps(READER, "auto")
    monkeypatch.setattr(scanning, "free_memory", lambda: 2 * found.needs(READER) - 1)
    assert not found.keeps(READER, "auto")
    assert found.keeps(READER, "host")
    data, _ = found.read(READER, 8, "auto", False)
    assert isinstance(data.train.images_NCHW, ImageFiles)
    in_memory, _ = found.read(READER, 8, "host", False)
    assert data.fingerprint() == in_memory.fingerprint()
    images = [torch.from_numpy(READER.read(path)) for path in data.train.images_NCHW.paths]
    assert torch.equal(torch.stack(images), in_memory.train.images_NCHW)


def test_fingerprint_depends_on_content_labels_and_size(photos):
    folder = photos(*TWELVE)

    def fingerprint(reader=READER):
        return find_source(folder, ALL).read(reader, 8, "host", False)[0].fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    assert fingerprint(Reader(3, (9, 9))) != before
    assert fingerprint(Reader(3, (8, 8), "stretch")) != before
    (folder / "a" / "0.png").rename(folder / "a" / "00.png")  # the order stays
    assert fingerprint() == before
    (folder / "a" / "00.png").rename(folder / "b" / "0.jpg")
    assert fingerprint() != before
    Image.new("RGB", (12, 10), (1, 1, 1)).save(folder / "a" / "0.png")
    assert fingerprint() != before


def test_items_are_read_into_memory(monkeypatch):
    item = Item(lambda: Image.new("RGB", (9, 9), (1, 2, 3)))
    files = LabelledFiles((item,) * 4, tuple("wxyz"), ("a", "a", "b", "b"))
    found = scan(FileSource("set", {"train": files}), ALL, 1)
    data, _ = found.read(READER, 8, "auto", False)
    assert data.train.images_NCHW[0, :, 0, 0].tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="--images files: the images of set are not"):
        found.read(READER, 8, "files", False)
    monkeypatch.setattr(scanning, "free_memory", lambda: 10)
    with pytest.raises(InputError, match=r"set: its images take .* GiB and do not fit into memory"):
        found.read(READER, 8, "auto", False)


def test_progress_is_reported(photos):
    calls = []
    found = find_source(photos(*TWELVE), ALL, progress=lambda *call: calls.append(call))
    found.read(READER, 8, "host", False, progress=lambda *call: calls.append(call))
    assert calls == [("headers", 12, 12), ("reading images", 12, 12)]


def test_unusual_files_give_no_warnings(photos):
    folder = photos(*TWELVE)
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff"
    Image.new("RGB", (9, 9)).save(folder / "a" / "odd.jpg", exif=exif)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        for _ in range(5):
            find_source(folder, ALL).read(READER, 8, "host", False)
        assert warnings.filters == before
    assert heard == []


def test_sources_without_training_images_are_refused():
    none = LabelledFiles((), (), ())
    with pytest.raises(InputError, match="x: no images can be read"):
        scan(FileSource("x", {"train": none}), ALL, 1)
    with pytest.raises(InputError, match="x: has no images to train on, only val and test"):
        scan(FileSource("x", {"val": none, "test": none}), ALL, 1)
    assert ScannedSource("x", none, None).counts == {}
