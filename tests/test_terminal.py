"""What reaches a terminal. Names of files and classes cannot control it."""

import ast
import io
import json
import os
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import pseudoloss
from pseudoloss.cli import main
from pseudoloss.cli.labels import run as labels_command
from pseudoloss.errors import InputError
from pseudoloss.progress import TerminalReporter
from pseudoloss.terminal import VisibleOutput, one_line, show, visible

TITLE = "\x1b]0;owned\x07"  # sets the title of the window
EVIL = f"a{TITLE}\x9b31m\u202eexe.gpj"
SHOWN = r"a\u001b]0;owned\u0007\u009b31m\u202eexe.gpj"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text())
def test_no_control_character_is_left(text):
    shown = visible(text)
    kinds = {unicodedata.category(c) for c in shown if c not in "\n\t"}
    assert not kinds & {"Cc", "Zl", "Zp"}
    assert not any(unicodedata.bidirectional(c) in ("LRO", "RLO", "LRE", "RLE") for c in shown)
    if text.isprintable():
        assert shown == text
    assert visible(shown) == shown
    assert "\n" not in one_line(text)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_keeps_its_meaning(value):
    assert json.loads(visible(json.dumps(value, ensure_ascii=False))) == value


def test_names_in_any_language_are_unchanged():
    for name in ("übel", "猫/犬", "فارسی", "👩‍🔬", "a\tb"):
        assert visible(name) == name


def test_rows_are_exact_in_files_only(tmp_path):
    for file, wanted in ((Terminal(), SHOWN), (io.StringIO(), EVIL)):
        VisibleOutput(file).write(EVIL)
        assert file.getvalue() == wanted
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8") as file:
        VisibleOutput(file).write(EVIL)
    assert path.read_text(encoding="utf-8") == EVIL
    reading, writing = os.pipe()  # `| head` leads to a terminal
    with os.fdopen(writing, "w", encoding="utf-8") as file:
        VisibleOutput(file).write(EVIL)
    with os.fdopen(reading, encoding="utf-8") as file:
        assert file.read() == SHOWN


def test_show_prints(capsys):
    show("a", EVIL, end="!\n")
    show(EVIL, file=sys.stderr)
    assert capsys.readouterr() == (f"a {SHOWN}!\n", f"{SHOWN}\n")


def test_progress_and_notices():
    file = io.StringIO()
    with TerminalReporter(
        Console(file=file, force_terminal=True, width=500, highlight=False)
    ) as reporter:
        reporter.progress(EVIL, 1, 2)
        reporter.begin_epoch(EVIL, 3)
        reporter.say(EVIL)
        reporter.notice(f"{EVIL}\nforged")
    text = file.getvalue()
    assert TITLE not in text
    assert "\x9b" not in text
    assert "\u202e" not in text
    assert text.count(SHOWN) >= 2
    assert f"{SHOWN} forged" in text


def test_nothing_else_prints():
    """Every line goes through `show`; rich prints what is escaped before."""
    root = Path(pseudoloss.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}: use show"


# --------------------------------------------------------------------------------- commands


def test_errors_name_files_safely(capsys):
    assert main(["train", EVIL, "--out", "x"]) == 2
    err = capsys.readouterr().err
    assert TITLE not in err
    assert r"\u001b]0;owned" in err


@pytest.fixture
def evil_folder(photos):
    names = [f"{label}/{i}{EVIL}.png" for label in ("cat", f"dog{TITLE}") for i in range(3)]
    folder = photos(*names, size=(16, 16))
    (folder / "cat" / f"broken{TITLE}.png").write_text("text")
    return folder


def test_inspect_is_safe(evil_folder, capsys):
    assert main(["inspect", str(evil_folder), "--no-timing"]) == 0
    out, err = capsys.readouterr()
    assert TITLE not in out + err
    assert main(["inspect", str(evil_folder), "--no-timing", "--json"]) == 0
    out, err = capsys.readouterr()
    assert TITLE not in out + err
    assert f"dog{TITLE}" in json.loads(out)["classes"]  # the real name


def test_predict_is_safe_in_a_terminal_and_exact_in_files(
    photo_run, evil_folder, tmp_path, capsys, monkeypatch
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["predict", str(photo_run), str(evil_folder)]) == 0
    assert TITLE not in terminal.getvalue() + capsys.readouterr().err
    monkeypatch.undo()
    out = tmp_path / "p.csv"
    assert main(["predict", str(photo_run), str(evil_folder), "--out", str(out)]) == 0
    assert EVIL in out.read_text(encoding="utf-8")
    assert TITLE not in capsys.readouterr().err


def test_labels_are_safe_in_a_terminal(evil_folder, tmp_path, monkeypatch):
    from pseudoloss.auditing.audit import audit

    audit(str(evil_folder), out=tmp_path / "audit", quiet=True, folds=2)
    for options in ([], ["--format", "csv"], ["--format", "jsonl"]):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        labels_command([str(tmp_path / "audit"), *options])
        assert TITLE not in terminal.getvalue()
    with pytest.raises(InputError):
        labels_command(["nothing"])


# ------------------------------------------------------------------------------- spreadsheets


def test_safe_csv_of_predict_and_evaluate(photo_run, photo_folder, tmp_path, photos, capsys):
    name = '=HYPERLINK("x").png'
    folder = photos(name)
    arguments = ["predict", str(photo_run), str(folder)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith('"=HYPERLINK')
    assert main([*arguments, "--safe-csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("\"'=HYPERLINK")
    assert main([*arguments, "--safe-csv", "--format", "jsonl"]) == 2
    assert "--safe-csv is for csv, not jsonl" in capsys.readouterr().err
    source = photos(f"übel/{name}", root="labelled")
    out = tmp_path / "evaluation"
    assert main(["evaluate", str(photo_run), str(source), "--out", str(out), "--safe-csv"]) == 0
    assert "übel/=HYPERLINK" in (out / "predictions.csv").read_text(encoding="utf-8")
