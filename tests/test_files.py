import json

import pytest
import torch
from safetensors.torch import load_file, save

from pseudoloss.files import (
    DTYPES,
    from_safetensors,
    to_json,
    write_atomically,
    write_json,
    write_safetensors,
)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def half(draft):
        draft.write_text("{half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, half)
    assert json.loads(path.read_text()) == {"old": 1}


def test_tensors_that_share_memory_or_lie_across_are_written(tmp_path):
    """As tied layers of some timm models do, and as channels-last weights lie."""
    weight = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": weight, "b": weight, "c": weight[0]}, {"epoch": 3})
    tensors, record = from_safetensors(path)
    assert record == {"epoch": 3}
    for name, wanted in {"a": weight, "b": weight, "c": weight[0]}.items():
        assert torch.equal(tensors[name], wanted)
    content = path.read_bytes()
    write_safetensors(path, {"c": weight[0], "b": weight, "a": weight}, {"epoch": 3})
    assert path.read_bytes() == content


def test_the_library_reads_what_we_write(tmp_path):
    """Every kind of tensor, of no, one and many numbers, with names and records of any letters."""
    path = tmp_path / "x.safetensors"
    tensors = {
        f"{kind} {name}": (torch.arange(6) % 3).to(kind)[:length].reshape(shape)
        for kind in DTYPES
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
    for name, tensor in tensors.items():  # readers that map the file want numbers aligned
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_another_programs_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"a": torch.zeros(2)}))
    with pytest.raises(ValueError, match="not written by pseudoloss"):
        from_safetensors(path)


def test_json_has_no_nan():
    text = to_json({"a": [float("nan"), 1.5], "b": (float("inf"),), "c": None})
    assert json.loads(text) == {"a": [None, 1.5], "b": [None], "c": None}
