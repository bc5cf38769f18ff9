"""The images of an audit: all splits, nothing held out."""

import numpy as np
import pytest

import pseudoloss as pl
from conftest import make_images, save_images
from pseudoloss.auditing.images import (
    PARTS,
    UNKNOWN,
    labelled_rows,
    open_images,
    with_noise,
)
from pseudoloss.data import corrupt
from pseudoloss.data.sources import open_arrays
from pseudoloss.errors import InputError
from pseudoloss.reading import ReadOptions


def test_all_splits_of_a_folder(photo_folder):
    found = open_images(str(photo_folder), ReadOptions())
    assert found.parts == {"train": 36, "test": 12}
    assert found.classes == ("a cat", 'dog, "wet"', "übel")
    files = {path for path in photo_folder.rglob("*") if path.is_file()}
    assert set(found.entries) == files
    for entry, path, label, part in zip(
        found.entries, found.paths, found.given_N, found.part_N, strict=True
    ):
        assert entry == photo_folder / path
        assert entry.parent.name == found.classes[label]
        assert path.startswith(f"{PARTS[part]}/")
    assert found.index_N.tolist() == [*range(36), *range(12)]


def test_splits_of_a_table(photos, tmp_path):
    photos("a.png", "b.png", "c.png", "d.png")
    table = tmp_path / "photos" / "t.csv"
    rows = ["a.png,x,test", "b.png,y,train", "c.png,x,val", "d.png,z,train"]
    table.write_text("\n".join(["path,label,split", *rows]) + "\n")
    found = open_images(str(table), ReadOptions())
    assert found.paths == ("b.png", "d.png", "c.png", "a.png")
    assert [PARTS[part] for part in found.part_N] == ["train", "train", "val", "test"]
    assert [found.classes[label] for label in found.given_N] == ["y", "z", "x", "x"]
    assert found.index_N.tolist() == [0, 1, 0, 0]


def test_files_without_a_class_are_skipped(tmp_path):
    images, labels = make_images(4, 2)
    save_images(tmp_path, images, labels)
    (tmp_path / "notes.txt").write_text("x")
    found = open_images(tmp_path, ReadOptions())
    assert [(entry.path, entry.reason) for entry in found.skipped] == [
        ("notes.txt", "is not in a class folder")
    ]


def test_arrays_with_test_images(tiny_source):
    found = open_images(tiny_source, ReadOptions())
    assert found.parts == {"train": 64, "test": 32}
    assert found.images_NCHW.shape == (96, 1, 8, 8)
    assert (found.true_N[:64] == found.given_N[:64]).all()
    assert (found.true_N[64:] == UNKNOWN).all()


def test_a_selection_keeps_rows_together(photo_folder):
    found = open_images(str(photo_folder), ReadOptions())
    kept = np.arange(len(found)) % 3 == 1
    chosen = found.select(kept)
    assert chosen.paths == tuple(np.array(found.paths, dtype=object)[kept])
    assert np.array_equal(chosen.given_N, found.given_N[kept])
    assert chosen.classes == found.classes


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a"] * 4, "all labels are of one class"),
        (["a", "b", "a"], "3 labels for 4"),
        ([0.5, 1, 1, 0], "0.5 in row 0 is not a class"),
        ([[0], [1], [0], [1]], "one per image"),
    ],
)
def test_wrong_labels_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        labelled_rows(4, labels)


def test_options_for_tables_are_refused_elsewhere(photo_folder):
    with pytest.raises(InputError, match="--label-column is for tables"):
        open_images(str(photo_folder), ReadOptions(label_column="species"))
    with pytest.raises(InputError, match="--strict is for folders and tables"):
        open_images("digits", ReadOptions(strict=True))


def test_noise_is_that_of_train():
    """The same seed gives the same wrong labels as --corrupt of train."""
    data = open_arrays("digits")
    found = with_noise(open_images("digits", ReadOptions()), "symmetric:0.3", seed=7)
    wanted = corrupt(data.train, "symmetric:0.3", 7)
    train = len(data.train)
    assert np.array_equal(found.given_N[:train], wanted.given_N.numpy())
    assert np.array_equal(found.true_N[:train], wanted.true_N.numpy())
    assert np.array_equal(found.given_N[train:], data.test.given_N.numpy())


def test_noise_on_files(photo_folder):
    clean = open_images(str(photo_folder), ReadOptions())
    noisy = with_noise(clean, "symmetric-exact:0.25", seed=1)
    assert np.array_equal(noisy.true_N[:36], clean.given_N[:36])
    assert (noisy.given_N != clean.given_N).sum() == 9
    assert (noisy.true_N[36:] == UNKNOWN).all()


def test_images_are_not_replaced():
    images, labels = make_images()
    with pytest.raises(InputError, match="can only change labels"):
        with_noise(open_images(pl.arrays(images, labels), ReadOptions()), "out:0.2", seed=1)
