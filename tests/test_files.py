import json

import pytest

from pseudoloss.files import to_json, write_atomically, write_json


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def half(draft):
        draft.write_text("{half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, half)
    assert json.loads(path.read_text()) == {"old": 1}


def test_json_has_no_nan():
    text = to_json({"a": [float("nan"), 1.5], "b": (float("inf"),), "c": None})
    assert json.loads(text) == {"a": [None, 1.5], "b": [None], "c": None}
