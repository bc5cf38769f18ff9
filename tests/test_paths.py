from pathlib import Path

import pytest

from pseudoloss.errors import InputError
from pseudoloss.paths import as_path, at_home


@pytest.mark.parametrize("value", [5, None, "a" * 300, "a\0b"])
def test_paths_that_are_none(value):
    with pytest.raises(InputError, match=r"--out .*: no usable path"):
        as_path(value, "--out")


def test_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert at_home("~/a") == at_home(Path("~/a")) == Path("/home/me/a")
    assert at_home("a/~") == Path("a/~")
    assert at_home("~nobody-here/a") == Path("~nobody-here/a")
