"""Untrusted pickles: arrays are read, and no code is run."""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pseudoloss.data.pickles import read_arrays
from pseudoloss.errors import InputError

KINDS = ["u1", "<i8", ">i4", "b1", "<f4", ">f8"]


@settings(max_examples=60, deadline=None)
@given(
    array=st.sampled_from(KINDS).flatmap(
        lambda kind: arrays(kind, array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4))
    ),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
    fortran=st.booleans(),
)
def test_arrays_are_read_unchanged(tmp_path_factory, array, protocol, fortran):
    array = np.asfortranarray(array) if fortran else array
    path = tmp_path_factory.mktemp("pickles") / "file"
    path.write_bytes(pickle.dumps({"a": array, "b": [1, 2], "c": np.int64(7)}, protocol))
    found = read_arrays(path, "x", "they publish it")
    np.testing.assert_array_equal(found["a"], array)
    assert found["a"].dtype == array.dtype
    assert (found["b"], found["c"]) == ([1, 2], 7)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(tmp_path, zipped):
    labels = np.arange(1000) % 7
    path = tmp_path / "CIFAR-100_human.pt"
    content = {"clean_label": labels, "noisy_label": labels[::-1].copy()}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(path) == zipped
    found = read_arrays(path, "x", "they publish it")
    assert found.keys() == content.keys()
    for name, array in content.items():
        np.testing.assert_array_equal(found[name], array)


def test_npz(tmp_path):
    np.savez(tmp_path / "a.npz", data=np.arange(3))
    assert read_arrays(tmp_path / "a.npz", "x", "they publish it")["data"].tolist() == [0, 1, 2]


class Touch:
    """An object that creates a file when it is unpickled in the usual way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Evaluate:
    def __reduce__(self):
        return eval, ("pytest.fail('the pickle ran')",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_run_no_code(tmp_path, protocol):
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    for content in ({"data": Touch(sprung)}, [Touch(sprung)], {"data": Evaluate()}):
        trap.write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(InputError, match=r"trap holds more than NumPy arrays \(it asks for"):
            read_arrays(trap, "x", "they publish it")
    for zipped in (True, False):
        torch.save({"clean_label": Touch(sprung)}, trap, _use_new_zipfile_serialization=zipped)
        with pytest.raises(InputError, match=r"trap holds more than NumPy arrays"):
            read_arrays(trap, "x", "they publish it")
    assert not sprung.exists()
    trap.write_bytes(pickle.dumps(Touch(sprung)))
    pickle.loads(trap.read_bytes())
    assert sprung.exists()  # the trap works with the usual unpickler


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (OrderedDict(a=1), "it asks for collections.OrderedDict"),
        ({"a": np.array([object()])}, "an array of O8|it asks for"),
        ({"a": np.array(["text"])}, "an array of U4"),
        ([1, 2], "must hold named arrays"),
    ],
)
def test_other_objects_are_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match=message):
        read_arrays(tmp_path / "file", "x", "they publish it")


def test_tensors_are_refused(tmp_path):
    torch.save({"a": torch.arange(3)}, tmp_path / "file")
    with pytest.raises(InputError, match="it asks for torch"):
        read_arrays(tmp_path / "file", "x", "they publish it")


def test_other_encodings_than_latin1_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.")
    with pytest.raises(InputError, match="text in rot13"):
        read_arrays(tmp_path / "file", "x", "they publish it")


def test_damaged_files(tmp_path):
    whole = pickle.dumps({"a": np.arange(100)})
    path = tmp_path / "file"
    for length in (0, 1, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(
            InputError, match=r"x: .*file (is damaged \(.*\); they|holds more)"
        ) as error:
            read_arrays(path, "x", "they publish it")
        assert "\n" not in str(error.value)
    short = pickle.dumps({"a": np.arange(100, dtype=np.uint8)}).replace(b"Kd\x85", b"Kc\x85")
    path.write_bytes(short)  # 99 values are announced, and 100 are there
    with pytest.raises(InputError, match="is damaged"):
        read_arrays(path, "x", "they publish it")
    with pytest.raises(InputError, match="cannot be read"):
        read_arrays(tmp_path / "nowhere", "x", "they publish it")


@pytest.mark.parametrize("form", ["torch", "npz"])
def test_incomplete_archives_are_damaged_not_unsafe(tmp_path, form):
    """Read as a pickle, the first bytes would refer to another file, which looks like an attack."""
    path = tmp_path / "file.npz"
    content = {"a": np.arange(100)}
    torch.save(content, path) if form == "torch" else np.savez(path, **content)
    whole = path.read_bytes()
    assert zipfile.is_zipfile(path)
    for length in (4, 100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        with pytest.raises(
            InputError, match=r"is damaged \(it ends too early.*\); they publish it"
        ):
            read_arrays(path, "x", "they publish it")


def test_a_place_in_the_memo_takes_no_memory(tmp_path):
    """The unpickler in C allocates 2³² places for it, which is 32 GiB."""
    content = b"\x80\x02}r\xfe\xff\xff\x7fX\x01\x00\x00\x00aK\x03s."
    path = tmp_path / "batch"
    path.write_bytes(content)
    assert read_arrays(path, "test", "nobody") == {"a": 3}


def test_an_array_without_its_content(tmp_path):
    """It begins one and never says what is in it."""
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}X\x01\x00\x00\x00acnumpy\nndarray\n)\x81s.")
    with pytest.raises(InputError, match="is damaged"):
        read_arrays(path, "test", "nobody")
