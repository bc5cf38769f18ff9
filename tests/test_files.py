import json

import pytest
import torch
from safetensors.torch import save

from pseudoloss.errors import InputError
from pseudoloss.files import (
    as_path,
    from_safetensors,
    to_json,
    to_safetensors,
    write_atomically,
    write_json,
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
    content = to_safetensors({"a": weight, "b": weight, "c": weight[0]}, {"epoch": 3})
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    tensors, record = from_safetensors(path)
    assert record == {"epoch": 3}
    for name, wanted in {"a": weight, "b": weight, "c": weight[0]}.items():
        assert torch.equal(tensors[name], wanted)
    assert to_safetensors({"a": weight, "b": weight, "c": weight[0]}, {"epoch": 3}) == content


def test_another_programs_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"a": torch.zeros(2)}))
    with pytest.raises(ValueError, match="not written by pseudoloss"):
        from_safetensors(path)


@pytest.mark.parametrize("value", [5, None, "a" * 300, "a\0b"])
def test_paths_that_are_none(value):
    with pytest.raises(InputError, match=r"--out .*: no usable path"):
        as_path(value, "--out")


def test_json_has_no_nan():
    text = to_json({"a": [float("nan"), 1.5], "b": (float("inf"),), "c": None})
    assert json.loads(text) == {"a": [None, 1.5], "b": [None], "c": None}
