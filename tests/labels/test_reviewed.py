import json

import pytest

from pseudoloss.errors import InputError
from pseudoloss.labels.reviewed import read_decisions


def line(index, decision, label=None, given="ant", part="train", **more):
    values = {"index": index, "part": part, "path": None, "decision": decision, "label": label}
    return json.dumps(values | {"given_label": given, "time": "", "by": None} | more)


def read(tmp_path, *lines):
    path = tmp_path / "decisions.jsonl"
    path.write_text("\n".join(lines))
    return read_decisions(path)


def test_the_last_line_about_an_image_counts(tmp_path):
    found, damaged = read(
        tmp_path,
        line(0, "relabel", "bee"),
        line(0, "keep"),
        line(0, "junk", part="test"),
        line(1, "relabel", "bee"),
        line(1, "undo"),
    )
    made = {key: (one.decision, one.label, one.line) for key, one in found.items()}
    assert made == {(0, "train"): ("keep", None, 2), (0, "test"): ("junk", None, 3)}
    assert damaged == 0


@pytest.mark.parametrize(
    "damage",
    [
        '{"index": 0, "part": "tr',
        "[]",
        "5",
        line("0", "keep"),
        line(True, "keep"),
        line(0, "delete"),
        line(0, "relabel"),
        line(0, "keep", given=None),
    ],
)
def test_damaged_lines_are_counted(tmp_path, damage):
    found, damaged = read(tmp_path, damage, "", line(1, "keep"), damage)
    assert (list(found), damaged) == ([(1, "train")], 2)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"--decisions .*: cannot be read"):
        read_decisions(tmp_path / "missing")
