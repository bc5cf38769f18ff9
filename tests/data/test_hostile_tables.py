"""Tables, arrays and settings files that are wrong on purpose: one line, and nothing hangs."""

import json
import os
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pseudoloss as pl
from conftest import make_images
from pseudoloss.auditing.features import load_features
from pseudoloss.data import find_source
from pseudoloss.data.sources.npz import npz as open_npz
from pseudoloss.errors import InputError
from pseudoloss.files import open_npy, parse_json, read_json, read_npz
from pseudoloss.labels.reviewed import parse_line, read_decisions
from pseudoloss.presets import read_config

few = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DEEP = 100_000


def refused(message, call, *arguments):
    with pytest.raises(InputError, match=message) as found:
        call(*arguments)
    assert len(str(found.value).splitlines()) == 1
    return str(found.value)


# ------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"path,label\na.png,cat\nb\0.png,dog\n", "row 2: path contains a NUL byte"),
        (b"path,label\na.png,cat\nb.png,caf\xe9\n", "line 3 is not UTF-8 .byte 0xe9.; save it as"),
        (b"\xff\xfep\0a\0", "is in UTF-16; save it as UTF-8"),
        (b"path,label,label\na.png,cat,dog\n", "has two columns label"),
        (b"path,label\na.png,cat,dog\n", "row 1 has 3 fields, but there are 2 columns"),
        (b"path,label\na.png\n", "row 1: label is empty"),
        (b'path,label\n"a.png,cat\n', "cannot be read .*EOF inside string"),
        (b"", "is empty"),
        (b"\0" * 1000, "has no column path"),
        (b"PAR1" * 100, "has no column path"),
    ],
)
def test_broken_tables(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    refused(message, find_source, path)


def test_broken_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    refused("cannot be read", find_source, tmp_path / "t.parquet")


def test_huge_fields(tmp_path):
    """Longer than the names that a system allows, and than what a terminal should show."""
    path = tmp_path / "t.csv"
    path.write_text(f"path,label\n{'a' * 10**6}.png,{'b' * 10**6}\n")
    refused("no images can be read .*File name too long", find_source, path)


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
@pytest.mark.parametrize("name", ["pipe.csv", "pipe.parquet", "pipe.npz"])
def test_pipes_are_not_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused("a pipe, not a file", find_source, tmp_path / name)


@few
@given(st.binary(max_size=300))
def test_any_bytes_as_a_table(tmp_path, content):
    for suffix in (".csv", ".tsv"):
        path = tmp_path / f"t{suffix}"
        path.write_bytes(b"path,label\n" + content)
        refused(None, find_source, path)  # no file of such a name exists


@few
@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=5))
def test_any_names_in_a_table(tmp_path, rows):
    import csv

    path = tmp_path / "t.csv"
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    refused(None, find_source, path)


# ------------------------------------------------------------------------------ JSON and TOML


def test_deeply_nested_json(tmp_path):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * DEEP)
    (tmp_path / "config.json").write_text('{"settings": ' + "[" * DEEP)
    refused("nested too deeply", read_config, tmp_path / "config.json")
    refused("nested too deeply", pl.load, tmp_path)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "config.json")
    assert parse_line(b"[" * DEEP) is None


def test_deeply_nested_toml(tmp_path):
    (tmp_path / "s.toml").write_text("epochs = " + "[" * DEEP)
    refused("nested too deeply|--config", read_config, tmp_path / "s.toml")


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_settings_and_decisions_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused("a pipe, not a file", read_config, tmp_path / "pipe")
    refused("a pipe, not a file", read_decisions, tmp_path / "pipe")


@few
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8")))
def test_any_bytes_as_settings(tmp_path, content):
    for name in ("s.toml", "s.json"):
        (tmp_path / name).write_bytes(content)
        with suppress(InputError):
            assert isinstance(read_config(tmp_path / name), dict)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
anything = st.recursive(values, lambda x: st.lists(x, max_size=3), max_leaves=5)


@few
@given(
    st.lists(
        st.binary(max_size=80)
        | st.fixed_dictionaries(
            {"index": anything, "part": anything, "decision": anything, "given_label": anything},
            optional={"label": anything, "time": anything, "by": anything, "path": anything},
        ).map(lambda value: json.dumps(value).encode()),
        max_size=5,
    )
)
def test_any_lines_as_decisions(tmp_path, lines):
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"\n".join(lines))
    found, damaged = read_decisions(path)
    assert damaged + len(found) <= path.read_bytes().count(b"\n") + 1
    for (index, part), decision in found.items():
        assert (type(index), type(part), type(decision.given_label)) == (int, str, str)


# ------------------------------------------------------------------------------------- arrays


def test_masked_arrays_are_refused():
    images, labels = make_images(16, 2)
    masked = np.ma.masked_array(images, mask=np.zeros(images.shape, bool))
    assert len(pl.arrays(masked, labels).train) == 16  # nothing is masked
    masked[3] = np.ma.masked
    refused("arrays: has masked values", pl.arrays, masked, labels)
    given_labels = np.ma.masked_array(labels, mask=np.arange(16) == 2)
    refused("labels: has masked values", pl.arrays, images, given_labels)
    with pytest.raises(InputError, match="true labels: has masked values"):
        pl.arrays(images, labels, true_labels=given_labels)
    features = np.ma.masked_array(np.ones((16, 4), np.float32), mask=np.eye(16, 4, dtype=bool))
    with pytest.raises(InputError, match="features: has masked values"):
        pl.audit(features=features, labels=labels, quiet=True)


def test_object_arrays_are_refused():
    images, labels = make_images(16, 2)
    refused("images must be one array of numbers", pl.arrays, images.astype(object), labels)
    mixed = np.array([None, *labels[1:]], dtype=object)
    refused("labels must be whole numbers or text", pl.arrays, images, mixed)


def test_arrays_of_any_memory_layout(tmp_path):
    images, labels = make_images(16, 2, channels=3)
    wanted = pl.arrays(images, labels).train
    np.save(tmp_path / "images.npy", images)
    read_only = images.copy()
    read_only.flags.writeable = False
    floats = (images / 255).astype(">f8")
    for same in (
        images[::-1].copy()[::-1],  # negative strides
        np.asfortranarray(images),
        np.load(tmp_path / "images.npy", mmap_mode="r"),
        read_only,
        floats,
    ):
        for given_labels in (labels.astype(">i8"), labels[::-1].copy()[::-1], labels.astype("u1")):
            found = pl.arrays(same, given_labels).train
            np.testing.assert_array_equal(found.images_NCHW, wanted.images_NCHW)
            np.testing.assert_array_equal(found.given_N, wanted.given_N)


def test_features_of_any_memory_layout():
    features = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    labels = np.arange(60) % 2
    options = {"labels": labels, "quiet": True, "folds": 2}
    wanted = pl.audit(features=features, **options).labels
    read_only = features.copy()
    read_only.flags.writeable = False
    for same in (features[::-1].copy()[::-1], np.asfortranarray(features), read_only):
        assert pl.audit(features=same, **options).labels.equals(wanted)
    assert pl.audit(features=features.astype(">f4"), **options).labels.equals(wanted)


def test_archives_that_need_too_much_memory(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((10**4, 1000), np.uint8))
    with pytest.raises(ValueError, match=r"its arrays need 0.0 GiB"):
        read_npz(tmp_path / "a.npz", most=10**6)
    assert read_npz(tmp_path / "a.npz", most=10**8)["images"].shape == (10**4, 1000)


def header_of(shape, descr="'|u1'"):
    """A .npy file that claims this shape and holds ten bytes."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text + b"\n" + bytes(10)


HEADERS = {
    "huge": header_of("(1000000000000, 100000000000)"),
    "negative": header_of("(-5, 3)"),
    "nested": header_of("(" * 3000),
    "objects": header_of("(1,)", "'|O'"),
    "code": header_of("(__import__('os').abort(),)"),
    "cut": header_of("(3, 3)")[:20],
    "unfinished text": header_of("('''"),
    "text": b"no array",
    "empty": b"",
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_broken_array_files(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        open_npy(tmp_path / "a.npy")
    refused("--features .*a.npy: not a .npy file", load_features, tmp_path / "a.npy", 3)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", content)
    refused("not a NumPy archive of plain arrays", open_npz, str(tmp_path / "a.npz"))


@few
@given(st.binary(max_size=200))
def test_any_bytes_as_an_array_file(tmp_path, content):
    for name, start in (("a.npy", b"\x93NUMPY\x01\x00"), ("a.npz", b"PK\x03\x04")):
        (tmp_path / name).write_bytes(start + content)
    refused("not a .npy file", load_features, tmp_path / "a.npy", 3)
    refused("not a NumPy archive", open_npz, str(tmp_path / "a.npz"))
