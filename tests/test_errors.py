"""Helpers for error messages."""

import pytest

from pseudoloss.errors import cannot_write, did_you_mean, first_line, name_hint, reason

KNOWN = ("symmetric", "asymmetric", "pair")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "/a/b"), "No such file or directory"),
        (OSError("disk full"), "disk full"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(""), "ValueError"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_the_reason_of_an_error_is_one_line(error, text):
    assert reason(error) == text


def test_a_write_error_names_flag_and_path():
    error = cannot_write("--out", "run", PermissionError(13, "Permission denied"))
    assert str(error) == "--out run: cannot be written (Permission denied)"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "one"),
        ("\x1b[31mred\x1b[0m\nmore", "red"),
        ("it failed:\nTraceback\nOSError: no compiler", "it failed: OSError: no compiler"),
        ("", "RuntimeError"),
    ],
)
def test_the_first_line_of_a_long_error(text, line):
    assert first_line(RuntimeError(text)) == line


def test_similar_names_are_suggested():
    assert did_you_mean("symetric", KNOWN) == "; did you mean symmetric or asymmetric?"
    assert did_you_mean("pear", KNOWN) == "; did you mean pair?"
    assert did_you_mean("xyz", KNOWN) == ""
    assert did_you_mean("--epoch", ["--epochs", "--ramp-epochs"]) == "; did you mean --epochs?"


def test_all_names_are_listed_if_none_is_similar():
    assert name_hint("pear", iter(KNOWN)) == "; did you mean pair?"
    assert name_hint("xyz", iter(KNOWN)) == "; known: asymmetric, pair, symmetric"
