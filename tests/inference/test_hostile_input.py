"""Predictions with input that is wrong on purpose: models, files and outputs."""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.cli import main
from pseudoloss.errors import InputError
from pseudoloss.files import write_safetensors
from pseudoloss.inference.header import FIELDS, checked_fields
from pseudoloss.inference.model import Description, load_model
from pseudoloss.runs import open_model


@pytest.fixture
def model(photo_run):
    return open_model(photo_run)


def call(*arguments, capsys):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------------------------------ models


@pytest.fixture(params=[np.nan, np.inf])
def broken(request, model, tmp_path):
    """A model whose outputs are not finite."""
    weights = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    weights["classifier.bias"][0] = request.param
    model.save(tmp_path / "broken.safetensors", weights)
    return tmp_path / "broken.safetensors"


def test_predict_refuses_nan(broken, photo_folder, tmp_path, capsys):
    image = next((photo_folder / "test").rglob("*.jpg"))
    code, out, err = call("predict", broken, image, capsys=capsys)
    assert (code, out) == (2, "")
    assert f"{image}: the model gives NaN or infinity" in err
    code, _, _ = call("predict", broken, image, "--out", tmp_path / "p.csv", capsys=capsys)
    assert code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["broken.safetensors"]


def test_evaluate_refuses_nan(broken, photo_folder, capsys):
    code, out, err = call("evaluate", broken, photo_folder, capsys=capsys)
    assert (code, out) == (2, "")
    assert "the model gives NaN or infinity" in err
    model = load_model(broken)
    images = np.zeros((3, *model.description.stored, 3), np.uint8)
    with pytest.raises(InputError, match="image 0: the model gives NaN"):
        model.evaluate((images, np.array([model.classes[0]] * 3)))
    with pytest.raises(InputError, match="images: row 0: the model gives NaN"):
        model.predict_proba(images)


HEADERS = [
    ({"network": 3}, "network in its header must be the name of a network"),
    ({"network": "hf-hub:somebody/model"}, "network in its header must be the name"),
    ({"classes": "abc"}, "classes in its header must be a list of at least two different names"),
    ({"classes": [1, 2]}, "classes in its header"),
    ({"classes": ["a", "a"]}, "classes in its header"),
    ({"channels": True}, "channels in its header must be 1 or 3"),
    ({"stored": [10**9, 10**9]}, "stored in its header must be two whole numbers"),
    ({"size": [8]}, "size in its header"),
    ({"size": [4096, 4096]}, "size in its header must not be larger than stored"),
    ({"mean": [float("nan")] * 3}, "mean in its header must be a list of finite numbers"),
    ({"mean": [0.5]}, "mean in its header must have one number per channel"),
    ({"std": [1, 0, 1]}, "std in its header must be a list of numbers above 0"),
    ({"std": [1, -1, 1]}, "std in its header"),
    ({"projection": 10**12}, "projection in its header must be a whole number from 1 to"),
    ({"members": 10**6}, "members in its header"),
    ({"fit": ["crop"]}, "fit in its header must be one of crop"),
    ({"label_type": "pickle"}, "label_type in its header must be one of text"),
    ({"other": 1}, "its header has an unknown field other"),
    ({"std": None}, "std in its header"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_headers_are_checked(model, tmp_path, capsys, change, message):
    record = json.loads(json.dumps(vars(model.description))) | change
    weights = model.network.state_dict()
    write_safetensors(tmp_path / "m.safetensors", weights, record)
    code, _, err = call("predict", tmp_path / "m.safetensors", tmp_path, capsys=capsys)
    assert code == 2
    assert len(err.splitlines()) == 1
    if "nan" not in str(change):  # JSON has no NaN: it becomes null, which is refused too
        assert message in err


def test_a_header_without_a_field(model, tmp_path):
    record = {k: v for k, v in vars(model.description).items() if k != "std"}
    write_safetensors(tmp_path / "m.safetensors", model.network.state_dict(), record)
    with pytest.raises(InputError, match="its header has no std"):
        load_model(tmp_path / "m.safetensors")
    write_safetensors(tmp_path / "m.safetensors", {"a": torch.zeros(1)}, [1])
    with pytest.raises(InputError, match="its header is not an object"):
        load_model(tmp_path / "m.safetensors")


# ------------------------------------------------------------------------------------ images


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_predict_and_evaluate_read_no_device(photo_run, tmp_path, photos, capsys):
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    code, _, err = call("predict", photo_run, tmp_path / "zero.png", capsys=capsys)
    assert (code, "a device, not a file" in err) == (2, True)
    folder = photos("übel/a.png", "übel/b.png")
    (folder / "übel" / "c.png").symlink_to("/dev/zero")
    code, out, _ = call("evaluate", photo_run, folder, "--follow-links", "--json", capsys=capsys)
    assert (code, json.loads(out)["skipped"]) == (0, 1)


def test_predict_reads_no_huge_file(photo_run, tmp_path, photos, capsys):
    folder = photos("a.png", "b.png")
    os.truncate(folder / "b.png", 200 * 2**30)
    code, out, err = call("predict", photo_run, folder, capsys=capsys)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "b.png: skipped (too large (214,748 MB; --max-megabytes allows 256))" in err
    code, _, err = call("predict", photo_run, folder, "--max-megapixels", "0.0001", capsys=capsys)
    assert (code, "--max-megapixels allows 0.0001 million" in err) == (2, True)


def test_predict_follows_links_on_request(photo_run, tmp_path, photos, capsys):
    folder, other = photos("a.png", root="some"), photos("b.png", root="other")
    (folder / "link").symlink_to(other)
    code, out, err = call("predict", photo_run, folder, capsys=capsys)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "link: skipped (a link out of its folder; --follow-links follows it)" in err
    assert "1 of 2 files cannot be read" in err
    code, out, err = call("predict", photo_run, folder, "--follow-links", capsys=capsys)
    assert (code, len(out.splitlines()), "skipped" in err) == (0, 3, False)


# ------------------------------------------------------------------------------------ outputs


def special_files(folder):
    (folder / "file").write_text("mine")
    (folder / "link").symlink_to("file")
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    return {"link": "a link", "broken": "a link", "pipe": "a pipe", "folder": "a folder"}


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_force_replaces_nothing_but_files(photo_run, photo_folder, tmp_path, capsys):
    image = next((photo_folder / "test").rglob("*.jpg"))
    kinds = special_files(tmp_path) | {"/dev/null": "a device"}
    before = {name: os.lstat(tmp_path / name) for name in kinds}
    for name, kind in kinds.items():
        out = tmp_path / name
        code, _, err = call("predict", photo_run, image, "--out", out, "--force", capsys=capsys)
        assert (code, f"--out {out}: is {kind}" in err) == (2, True)
        code, _, err = call("report", photo_run, "--out", out, capsys=capsys)
        assert (code, f"--out {out}: is {kind}" in err) == (2, True)
    after = {name: os.lstat(tmp_path / name) for name in kinds}
    assert [s.st_ino for s in before.values()] == [s.st_ino for s in after.values()]
    assert (tmp_path / "file").read_text() == "mine"
    options = ("--out", tmp_path / "file", "--force")
    assert call("predict", photo_run, image, *options, capsys=capsys)[0] == 0


def test_experiments_replace_nothing_but_files(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link.csv").symlink_to("mine")
    options = ("--out", tmp_path, "--file", tmp_path / "link.csv", "--force")
    code, _, err = call("experiments", "table", "selection", *options, capsys=capsys)
    assert (code, "link.csv: is a link" in err) == (2, True)


# ------------------------------------------------------------------------------ any header

values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    values, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2)
)
RIGHT = {
    "network": "small-cnn",
    "classes": ["a", "b"],
    "channels": 1,
    "stored": [8, 8],
    "size": [8, 8],
    "mean": [0.5],
    "std": [0.5],
    "projection": 4,
}


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "other"]), anything, max_size=3))
def test_any_header(changes):
    """A header is refused in one line, or builds a network."""
    fields = {}
    with suppress(ValueError):
        fields = checked_fields(RIGHT | changes)
    if not fields:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            checked_fields(RIGHT | changes)
        assert changes
        return
    found = Description(**fields)
    assert len(found.mean) == len(found.std) == found.channels
    assert all(std > 0 for std in found.std)
    assert len(set(found.classes)) == len(found.classes) > 1


def test_fields_are_those_of_a_description():
    required = {f.name for f in dataclasses.fields(Description) if f.default is dataclasses.MISSING}
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Description)}
    assert {name for name, field in FIELDS.items() if field.required} == required
