"""Paths, and files that are written completely or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from pseudoloss.errors import InputError
from pseudoloss.files import (
    DTYPES,
    as_path,
    at_home,
    cache_folder,
    from_safetensors,
    new_folder,
    to_json,
    write_atomically,
    write_json,
    write_safetensors,
)


def test_importing_the_module_does_not_load_torch():
    program = "import sys, pseudoloss.files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


# --------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("value", [5, None, "a" * 300, "a\0b"])
def test_unusable_paths_are_refused(value):
    with pytest.raises(InputError, match=r"--out .*: no usable path"):
        as_path(value, "--out")


def test_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert at_home("~/a") == at_home(Path("~/a")) == Path("/home/me/a")
    assert at_home("a/~") == Path("a/~")
    assert at_home("~nobody-here/a") == Path("~nobody-here/a")


# ------------------------------------------------------------------------------------- writing


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def half(draft):
        draft.write_text("{half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, half)
    assert json.loads(path.read_text()) == {"old": 1}


def test_a_new_folder_is_complete_or_missing(tmp_path):
    path = tmp_path / "out"

    def fail(file):
        file.touch()
        raise OSError(28, "No space left on device")

    message = r"--out .*out: cannot be written \(No space left on device\)"
    with pytest.raises(InputError, match=message), new_folder(path) as draft:
        fail(draft / "a")
    assert list(tmp_path.iterdir()) == []
    with new_folder(path) as draft:
        (draft / "a").touch()
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["a"]
    with pytest.raises(InputError, match=r"--out .*out: exists already"), new_folder(path):
        pass


def test_json_has_no_nan():
    text = to_json({"a": [float("nan"), 1.5], "b": (float("inf"),), "c": None})
    assert json.loads(text) == {"a": [None, 1.5], "b": [None], "c": None}


# ------------------------------------------------------------------------------------- tensors


def test_tensors_of_any_layout_are_written(tmp_path):
    """Tied layers of some timm models share memory, and convolutions are channels-last."""
    weight = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": weight, "b": weight, "c": weight[0]}, {"epoch": 3})
    tensors, record = from_safetensors(path)
    assert record == {"epoch": 3}
    for name, expected in {"a": weight, "b": weight, "c": weight[0]}.items():
        assert torch.equal(tensors[name], expected)
    content = path.read_bytes()
    write_safetensors(path, {"c": weight[0], "b": weight, "a": weight}, {"epoch": 3})
    assert path.read_bytes() == content


def test_the_safetensors_library_reads_our_files(tmp_path):
    """Every dtype; no, one and many elements; any characters in names and records."""
    path = tmp_path / "x.safetensors"
    tensors = {
        f"{dtype} {name}": (torch.arange(6) % 3).to(getattr(torch, dtype))[:length].reshape(shape)
        for dtype in DTYPES
        for name, length, shape in (("λ", 6, (2, 3)), ('"one"', 1, ()), ("none", 0, (0, 4)))
    }
    write_safetensors(path, tensors, {"name": 'λ "quoted"\n'})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)
    assert from_safetensors(path)[1] == {"name": 'λ "quoted"\n'}
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    assert size % 8 == 0
    for name, tensor in tensors.items():  # readers that map the file need aligned numbers
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_files_of_other_programs_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"a": torch.zeros(2)}))
    with pytest.raises(ValueError, match="not written by pseudoloss"):
        from_safetensors(path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PSEUDOLOSS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/features"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/pseudoloss/features"),
        ({}, "/home/me/.cache/pseudoloss/features"),
    ],
)
def test_the_cache_folder(monkeypatch, variables, expected):
    for name in ("PSEUDOLOSS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("features").as_posix() == expected
