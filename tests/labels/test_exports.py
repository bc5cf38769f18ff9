"""Exports against the libraries that are installed, and against the documented layout of others."""

import io
import json
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from conftest import make_images
from label_folders import scored_table, write_audit
from pseudoloss.data import find_source
from pseudoloss.errors import InputError
from pseudoloss.labels.decisions import decide
from pseudoloss.labels.exports import (
    as_text,
    labeling_config,
    records,
    write_folder,
    write_table,
)
from pseudoloss.labels.opening import open_labels
from pseudoloss.spreadsheets import safe_for_spreadsheets

CLASSES = ("a & <b>", '"quoted"')
NAMES = ["x/=1.png", "x/b c,ü.png", "y/#?&.png", "y/d.png"]


@pytest.fixture
def labels(tmp_path, photos):
    """An audit of four files in two classes: two labels to keep, two to change."""
    table = scored_table(4, CLASSES, paths=NAMES)
    return open_labels(write_audit(tmp_path / "audit", table, CLASSES, photos(*NAMES)))


@pytest.fixture
def array_labels(tmp_path, npz):
    images, numbers = make_images(4, classes=2)
    source = npz(images=images, labels=numbers, classes=np.array(CLASSES))
    return open_labels(write_audit(tmp_path / "audit", scored_table(4, CLASSES), CLASSES, source))


# ---------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("form", ["csv", "parquet", "json", "jsonl"])
def test_all_table_formats_hold_the_same_rows(labels, tmp_path, form):
    table = decide(labels.table, 0.5, 0.9)
    assert set(table["action"]) == {"keep", "review", "relabel"}
    out = tmp_path / f"x.{form}"
    write_table(table, out, form)
    readers = {
        "csv": pd.read_csv,
        "parquet": pd.read_parquet,
        "json": lambda path: pd.DataFrame(json.loads(path.read_text())),
        "jsonl": lambda path: pd.read_json(path, lines=True),
    }
    found = readers[form](out)
    assert list(found) == list(table)
    assert [
        [None if pd.isna(value) else value for value in row] for row in found.to_numpy().tolist()
    ] == [
        [None if pd.isna(value) else pytest.approx(value) for value in row]
        for row in table.to_numpy().tolist()
    ]
    with pytest.raises(InputError, match="exists already"):
        write_table(table, out, form)


def test_files_that_cannot_be_written(labels, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        write_table(labels.table, tmp_path / "missing" / "x.csv", "csv")


@given(st.lists(st.text(max_size=6), min_size=1, max_size=6))
def test_no_cell_of_a_safe_table_is_a_formula(names):
    table = pd.DataFrame({"path": names, "label_score": -1.0})
    table["path"] = table["path"].astype(object)
    safe = safe_for_spreadsheets(table)
    for before, after in zip(names, safe["path"], strict=True):
        assert not after.startswith(("=", "+", "-", "@", "\t", "\r"))
        assert after in (before, f"'{before}")
    assert safe["label_score"].tolist() == table["label_score"].tolist()


def test_missing_values_are_null(labels):
    row = records(decide(labels.table, 0.5, 1).iloc[2:3])[0]
    assert (row["action"], row["suggested_label"]) == ("review", None)
    assert json.loads(as_text(labels.table, "json"))[0]["index"] == 0


# -------------------------------------------------------------------------------- Label Studio


def check_label_studio(folder):
    """The documented form of tasks with pre-annotations, for the interface beside them."""
    tasks = json.loads((folder / "tasks.json").read_text())
    interface = ElementTree.fromstring((folder / "labeling.xml").read_text())
    control, shown = interface.find("Choices"), interface.find("Image")
    choices = [choice.get("value") for choice in control]
    assert control.get("toName") == shown.get("name")
    for task in tasks:
        assert shown.get("value").removeprefix("$") in task["data"]
        for prediction in task["predictions"]:
            assert isinstance(prediction["model_version"], str)
            assert 0 <= prediction["score"] <= 1
            for result in prediction["result"]:
                assert result["from_name"] == control.get("name")
                assert result["to_name"] == shown.get("name")
                assert result["type"] == "choices"
                assert set(result["value"]["choices"]) <= set(choices)
                assert len(result["value"]["choices"]) == 1
    return tasks, choices


def test_label_studio_tasks(labels, tmp_path):
    out = tmp_path / "tasks"
    notices = write_folder(labels, labels.decided(), out, "label-studio")
    tasks, choices = check_label_studio(out)
    assert tuple(choices) == CLASSES
    chosen = [task["predictions"][0]["result"][0]["value"]["choices"][0] for task in tasks]
    assert chosen == labels.decided()["suggested_label"].tolist()
    assert [task["predictions"][0]["score"] for task in tasks] == pytest.approx(
        [1, 2 / 3, 2 / 3, 1]
    )
    addresses = [urlsplit(task["data"]["image"]) for task in tasks]
    assert {address.path for address in addresses} == {"/data/local-files/"}
    found = [parse_qs(address.query)["d"] for address in addresses]
    assert found == [[f"photos/{name}"] for name in NAMES]
    assert f"DOCUMENT_ROOT={tmp_path}, " in notices[-1]
    assert notices[-1].endswith(f"local storage {labels.source}")


def test_label_studio_files_outside_of_the_source(tmp_path, photos):
    root = photos("in/a.png", "b.png")
    (root / "in" / "t.csv").touch()
    table = scored_table(2, paths=["a.png", str(root / "b.png")])
    labels = open_labels(write_audit(tmp_path / "audit", table, source=root / "in" / "t.csv"))
    notices = write_folder(labels, labels.decided(), tmp_path / "tasks", "label-studio")
    tasks, _ = check_label_studio(tmp_path / "tasks")
    found = [task["data"]["image"].partition("=")[2] for task in tasks]
    assert found == ["photos/in/a.png", "photos/b.png"]
    assert notices[-1].endswith(f"local storage {root}")


def test_label_studio_gets_images_of_arrays(array_labels, tmp_path):
    write_folder(array_labels, array_labels.decided(), tmp_path / "tasks", "label-studio")
    tasks, _ = check_label_studio(tmp_path / "tasks")
    for task, image in zip(tasks, make_images(4, classes=2)[0], strict=True):
        name = task["data"]["image"].partition("=")[2]
        found = np.asarray(Image.open(tmp_path / "tasks" / name).convert("L"))
        assert np.array_equal(found, image[:, :, 0])


def test_label_studio_cannot_show_control_characters():
    with pytest.raises(InputError, match="control character"):
        labeling_config(("ant", "be\x01e"))


# ------------------------------------------------------------------------------------ FiftyOne


@pytest.mark.parametrize("kind", ["labels", "array_labels"])
def test_fiftyone(request, tmp_path, kind):
    labels = request.getfixturevalue(kind)
    table, out = labels.decided(), tmp_path / "fo"
    assert write_folder(labels, table, out, "fiftyone") == []
    data, given_labels, candidates = (
        json.loads((out / f"{name}.json").read_text()) for name in ("data", "labels", "candidates")
    )
    assert list(data) == list(given_labels["labels"]) == list(candidates["labels"])
    assert all((out / path).is_file() for path in data.values())
    assert not any("." in key for key in data), "FiftyOne would remove what looks like an ending"
    assert tuple(given_labels["classes"]) == tuple(candidates["classes"]) == CLASSES
    for (_, row), label, candidate in zip(
        table.iterrows(),
        given_labels["labels"].values(),
        candidates["labels"].values(),
        strict=True,
    ):
        assert CLASSES[label["label"]] == row["given_label"]
        assert label["attributes"]["action"] == row["action"]
        assert label["attributes"]["p_noisy"] == pytest.approx(row["p_noisy"])
        assert CLASSES[candidate["label"]] == row["candidate_label"]
        assert candidate["confidence"] == pytest.approx(row["trust"])


# -------------------------------------------------------------------------------- Hugging Face


def test_huggingface(labels, tmp_path):
    datasets = pytest.importorskip("datasets")
    table = labels.decided()
    assert write_folder(labels, table, tmp_path / "hf", "hf") == []
    rows = datasets.load_from_disk(str(tmp_path / "hf"))
    names = rows.features["label"].names
    assert tuple(names) == CLASSES
    assert [names[label] for label in rows["label"]] == table["suggested_label"].tolist()
    assert [names[label] for label in rows["given_label"]] == table["given_label"].tolist()
    assert rows["path"][:] == NAMES
    for row, name in zip(rows, NAMES, strict=True):
        original = Image.open(f"{labels.source}/{name}")
        assert np.array_equal(np.asarray(row["image"]), np.asarray(original))
    assert [path.name for path in (tmp_path / "hf").iterdir() if path.is_dir()] == []


def test_a_huggingface_export_is_a_source(array_labels, tmp_path):
    pytest.importorskip("datasets")
    write_folder(array_labels, array_labels.decided(), tmp_path / "hf", "hf")
    scanned = find_source(f"hf:{tmp_path / 'hf'}")
    assert list(scanned.train.labels) == array_labels.decided()["suggested_label"].tolist()


def test_huggingface_splits(tmp_path, photos):
    datasets = pytest.importorskip("datasets")
    root = photos("train/x/1.png", "train/x/2.png", "test/x/3.png")
    train = scored_table(2, paths=["train/x/1.png", "train/x/2.png"])
    test = scored_table(1, paths=["test/x/3.png"], part="test")
    table = pd.concat([train, test], ignore_index=True)
    labels = open_labels(write_audit(tmp_path / "audit", table, source=root))
    write_folder(labels, labels.decided(), tmp_path / "hf", "hf")
    found = datasets.load_from_disk(str(tmp_path / "hf"))
    assert {split: rows["path"][:] for split, rows in found.items()} == {
        "train": ["train/x/1.png", "train/x/2.png"],
        "test": ["test/x/3.png"],
    }


# --------------------------------------------------------------------------------- what is refused


def test_an_image_that_is_gone_is_left_out_and_named(labels, tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "photos" / NAMES[0]).unlink()
    (notice,) = write_folder(labels, labels.decided(), tmp_path / "hf", "hf")
    assert notice == f"{NAMES[0]}: left out (No such file or directory)"


def test_folders_that_cannot_be_written(labels, tiny_run, tmp_path):
    with pytest.raises(InputError, match="no label is left"):
        write_folder(labels, labels.table.iloc[:0], tmp_path / "x", "hf")
    python = open_labels(tiny_run.path)
    with pytest.raises(InputError, match="passed in Python"):
        write_folder(python, python.table, tmp_path / "x", "fiftyone")
    (tmp_path / "y").mkdir()
    with pytest.raises(InputError, match="exists already"):
        write_folder(labels, labels.table, tmp_path / "y", "fiftyone")
    assert not (tmp_path / "x").exists()


def test_csv_has_one_line_per_row_whatever_the_names(labels):
    found = pd.read_csv(io.StringIO(as_text(labels.table)))
    assert found["path"].tolist() == NAMES
