"""Hugging Face datasets: objects, saved folders, and the hub."""

import io
import sys

import datasets
import numpy as np
import pytest
from PIL import Image

import pseudoloss as pl
from conftest import TINY
from pseudoloss.cli import main
from pseudoloss.data import Reader, ReadOptions, absolute, find_source
from pseudoloss.errors import InputError

ALL = ReadOptions(hold_out=0)
READER = Reader(3, (8, 8))


def png(colour):
    content = io.BytesIO()
    Image.new("RGB", (9, 9), colour).save(content, "PNG")
    return content.getvalue()


def make(n=8, names=("cat", "dog"), paths=None, image="image", label="label", **more):
    """A dataset in which the red value of an image is its row."""
    rows = {
        image: [{"bytes": png((i, 0, 0)), "path": paths and paths[i]} for i in range(n)],
        label: [i % 2 for i in range(n)],
        **more,
    }
    kind = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
    features = {image: datasets.Image(), label: kind} | {
        name: datasets.Value("int64") for name in more
    }
    return datasets.Dataset.from_dict(rows, datasets.Features(features))


def reds(data):
    return data.images_NCHW[:, 0, 0, 0].tolist()


def test_dataset_object():
    found = find_source(make(), ALL)
    assert found.train.labels == ("cat", "dog") * 4
    assert found.train.names[:2] == ("Dataset[0]", "Dataset[1]")
    data, skipped = found.read(READER, 8, "auto", False)
    assert (reds(data.train), skipped) == (list(range(8)), ())
    assert data.train.classes == ("cat", "dog")


def test_selected_shuffled_and_formatted_rows():
    chosen = make(20).shuffle(seed=3).select(range(6)).with_format("torch")
    data, _ = find_source(chosen, ALL).read(READER, 8, "auto", False)
    assert reds(data.train) == [int(image[0, 0, 0]) for image in chosen["image"]]


def test_dataset_dict_has_splits():
    source = datasets.DatasetDict(train=make(), validation=make(4), test=make(2), extra=make(2))
    found = find_source(source)
    assert (len(found.train), len(found.test), found.test_name) == (8, 4, "the val images")
    assert found.train.names[3] == "data[train][3]"


def test_unique_file_names_are_used():
    found = find_source(make(paths=[f"{i}.png" for i in range(8)]), ALL)
    assert found.train.names[:2] == ("0.png", "1.png")
    found = find_source(make(paths=["same.png"] * 8), ALL)
    assert found.train.names[1] == "Dataset[1]"


def test_columns_are_found_by_type_then_by_name():
    assert find_source(make(image="photo", label="kind"), ALL).classes == ("cat", "dog")
    assert find_source(make(names=None, label="labels"), ALL).classes == ("0", "1")
    texts = make().cast_column("label", datasets.Value("string"))
    assert find_source(texts, ALL).classes == ("0", "1")
    other = make(other=[7, 8] * 4)
    assert find_source(other, ReadOptions(label_column="other", hold_out=0)).classes == ("7", "8")


def test_arrays_and_bytes_in_plain_columns():
    arrays = np.arange(4 * 64 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    for images in (arrays.tolist(), [png((i, 0, 0)) for i in range(4)]):
        rows = datasets.Dataset.from_dict({"img": images, "label": ["a", "b"] * 2})
        data, skipped = find_source(rows, ALL).read(READER, 8, "auto", False)
        assert (len(data.train), skipped) == (4, ())
    rows = datasets.Dataset.from_dict({"img": arrays.tolist(), "label": ["a", "b"] * 2})
    data, _ = find_source(rows, ALL).read(READER, 8, "auto", False)
    np.testing.assert_array_equal(data.train.images_NCHW.permute(0, 2, 3, 1), arrays)


def test_broken_images_are_skipped(tmp_path):
    rows = make()
    broken = rows.cast_column("image", datasets.Image(decode=False)).to_dict()
    broken["image"][2] = {"bytes": b"no image", "path": None}
    broken["image"][3] = {"bytes": png((3, 0, 0))[:50], "path": None}
    broken["image"][4] = {"bytes": None, "path": str(tmp_path / "gone.png")}
    broken["image"][5] = {"bytes": b"", "path": None}
    rows = datasets.Dataset.from_dict(broken, rows.features)
    found = find_source(rows, ALL)
    data, skipped = found.read(READER, 8, "auto", False)
    assert reds(data.train) == [0, 1, 6, 7]
    assert {entry.path for entry in skipped} == {f"Dataset[{i}]" for i in (2, 3, 4, 5)}
    assert {entry.reason for entry in skipped} >= {"No such file or directory", "empty file"}
    with pytest.raises(InputError, match="without --strict"):
        find_source(rows, ReadOptions(strict=True))


def test_test_split_without_labels_is_ignored():
    test = make(4)
    hidden = datasets.Dataset.from_dict(
        test.cast_column("image", datasets.Image(decode=False)).to_dict() | {"label": [-1] * 4},
        test.features,
    )
    found = find_source(datasets.DatasetDict(train=make(), test=hidden))
    assert found.test_name != "the test images"


# -------------------------------------------------------------------------------- the hub


def test_saved_folder(tmp_path, monkeypatch):
    datasets.DatasetDict(train=make(), test=make(4)).save_to_disk(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    found = find_source("hf:saved")
    assert (len(found.train), len(found.test)) == (8, 4)
    assert found.train.names[0] == "hf:saved[train][0]"
    assert absolute("hf:saved") == f"hf:{tmp_path / 'saved'}"
    assert absolute("hf:owner/name:config") == "hf:owner/name:config"
    again = find_source("hf:saved", ReadOptions(test="hf:saved"))
    assert len(again.test) == 4


def test_training_on_a_folder_and_on_an_object(tmp_path, capsys):
    source = datasets.DatasetDict(train=make(32), test=make(4))
    source.save_to_disk(tmp_path / "saved")
    capsys.readouterr()
    flags = ["--network", "small-cnn", "--epochs", "1", "--batch-size", "8", "--image-size", "8"]
    code = main(["train", f"hf:{tmp_path / 'saved'}", "--out", str(tmp_path / "run"), *flags])
    assert (code, capsys.readouterr().err.count("Traceback")) == (0, 0)
    table = pl.load(tmp_path / "run").labels
    assert table.path[1] == f"hf:{tmp_path / 'saved'}[train][1]"
    run = pl.train(source, quiet=True, image_size=8, **TINY)
    assert len(run.labels) == 32


def test_run_on_a_relative_folder_can_be_resumed(tmp_path, monkeypatch):
    make(32).save_to_disk(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    first = pl.train("hf:saved", "run", quiet=True, minutes=1e-4, image_size=8, **TINY)
    assert not first.finished
    assert main(["train", "--out", "run", "--resume", "--quiet"]) == 0
    assert pl.load("run").finished


def test_unreachable_hub(monkeypatch):
    def unreachable(name, config):
        assert (name, config) == ("owner/name", "small")
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InputError, match=r"Couldn't reach the hub and more.*save_to_disk") as error:
        find_source("hf:owner/name:small")
    assert "\n" not in str(error.value)


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'pseudoloss\[hf\]'"):
        find_source("hf:beans")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda d: d.remove_columns("label"), {}, "has no column of labels, only image; choose"),
        (lambda d: d.remove_columns("image"), {}, "has no column of images, only label; choose"),
        (lambda d: d, {"label_column": "lable"}, "no column lable .*did you mean label"),
        (lambda d: d, {"path_column": "x"}, r"no column x \(see --path-column\)"),
        (
            lambda d: (
                d.rename_column("label", "a")
                .add_column("b", [0] * 8)
                .cast_column("b", datasets.ClassLabel(names=["x"]))
            ),
            {},
            r"several columns of labels \(a, b\)",
        ),
        (lambda d: d.select([]), {}, "no images can be read"),
        (lambda d: d.to_iterable_dataset(), {}, "must be a Dataset, not IterableDataset"),
        (lambda d: datasets.DatasetDict(all=d), {}, "has no split called train, only all"),
        (lambda d: datasets.DatasetDict(test=d), {}, "no images to train on, only test"),
        (lambda d: datasets.DatasetDict(val=d, valid=d), {}, "val and valid mean the same split"),
        (
            lambda d: d.remove_columns("label").add_column("label", [0.5] * 8),
            {},
            "row 0: label must be a whole number or text, not float",
        ),
        (
            lambda d: d.remove_columns("label").add_column("label", [1, None] * 4),
            {},
            "row 1 has no label in label",
        ),
    ],
)
def test_invalid_datasets_are_refused(change, options, message):
    with pytest.raises(InputError, match=message) as error:
        find_source(change(make()), ReadOptions(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:", "name a dataset, as in hf:NAME"),
        ("hf:./nowhere", "hf:./nowhere: no such folder"),
        ("hf:nowhere/", "hf:nowhere/: no such folder"),
        ("hf:.", "not a folder written by save_to_disk"),
    ],
)
def test_invalid_names_are_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        find_source(name)
