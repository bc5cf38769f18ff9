"""`pseudoloss labels` and `pseudoloss apply` as users type them."""

import io
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest

from label_folders import scored_table, write_audit
from pseudoloss.cli import main
from pseudoloss.labels.table import read_labels


@pytest.fixture
def audit(tmp_path, photos):
    names = [f"{label}/={i}.png" for i in range(5) for label in ("ant", "bee")]
    return write_audit(tmp_path / "audit", scored_table(10, paths=names), source=photos(*names))


def call(*arguments, capsys):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def listed(*arguments, capsys):
    code, out, err = call("labels", *arguments, capsys=capsys)
    assert (code, err) == (0, "")
    return pd.read_csv(io.StringIO(out))


def test_a_pipe_gets_the_label_table(audit, capsys):
    pd.testing.assert_frame_equal(listed(audit, capsys=capsys), pd.read_csv(audit / "labels.csv"))


def test_actions_are_decided_again(audit, capsys):
    found = listed(audit, "--threshold", "0.3", "--min-trust", "0.8", capsys=capsys)
    rising = np.linspace(0, 1, 10)
    wanted = np.select([rising < 0.3, rising >= 0.8], ["keep", "relabel"], "review")
    assert found["action"].tolist() == wanted.tolist()
    assert read_labels(audit)["action"].tolist() != wanted.tolist(), "the audit is not changed"


def test_filters_and_order(audit, capsys):
    found = listed(audit, "--class", "bee", "--action", "relabel", "--top", "2", capsys=capsys)
    assert found["index"].tolist() == [9, 7]
    actions = ["--action", "keep", "review", "--action", "relabel"]
    assert len(listed(audit, *actions, capsys=capsys)) == 10
    assert listed(audit, "--top", "99", capsys=capsys)["label_score"].is_monotonic_increasing


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "parquet"])
def test_files(audit, tmp_path, capsys, form):
    out = tmp_path / f"x.{form}"
    code, printed, err = call("labels", audit, "--top", "3", "--out", out, capsys=capsys)
    assert (code, printed, err) == (0, "", f"{out}: 3 labels\n")
    assert out.exists()
    code, _, err = call("labels", audit, "--out", out, capsys=capsys)
    assert (code, "exists already" in err) == (2, True)


@pytest.mark.parametrize("form", ["label-studio", "fiftyone", "hf"])
def test_folders(audit, tmp_path, capsys, form):
    if form == "hf":
        pytest.importorskip("datasets")
    options = ["--action", "relabel", "--format", form, "--out", tmp_path / "x"]
    code, _, err = call("labels", audit, *options, capsys=capsys)
    assert (code, err.splitlines()[-1]) == (0, f"{tmp_path / 'x'}: 5 labels, as {form}")


def test_json_on_standard_output(audit, capsys):
    _, out, _ = call("labels", audit, "--format", "jsonl", "--top", "1", capsys=capsys)
    assert json.loads(out)["index"] == 9


def test_safe_csv(audit, tmp_path, capsys):
    folder = write_audit(
        tmp_path / "formulas", scored_table(2, ("=ant", "@bee"), paths=["+a", "-b"]), ("=ant",)
    )
    plain, safe = listed(folder, capsys=capsys), listed(folder, "--safe-csv", capsys=capsys)
    assert plain["path"].tolist() == ["+a", "-b"]
    assert safe["path"].tolist() == ["'+a", "'-b"]
    assert safe["given_label"].tolist() == ["'=ant", "'@bee"]
    assert safe["label_score"].tolist() == plain["label_score"].tolist()


def test_a_terminal_gets_a_short_table(audit, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = call("labels", audit, "--threshold", "0.3", "--min-trust", "0.8", capsys=capsys)
    assert code == 0
    lines = re.sub(r"\x1b\[\d*m", "", out).splitlines()
    assert lines[0].split() == ["image", "given", "suggested", "p_noisy", "trust", "action"]
    assert lines[1].split() == ["bee/=4.png", "bee", "ant", "1.00", "1.00", "relabel"]
    assert "10 labels: 3 keep, 2 relabel, 5 review." in out


def test_hostile_names_in_a_terminal(tmp_path, capsys, monkeypatch):
    table = scored_table(2, ("[red]a", "\x1b[2J"), paths=["[bold]x", "\x1b]0;y\x07"])
    folder = write_audit(tmp_path / "audit", table, ("[red]a", "\x1b[2J"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = call("labels", folder, capsys=capsys)
    assert "[red]a" in out
    assert "[bold]x" in out
    assert "\x1b[2J" not in out
    assert "\x07" not in out


def test_an_unfinished_run_says_its_epoch(finished, capsys):
    (finished / "summary.json").unlink()
    (finished / "labels.json").write_text('{"epoch": 2}')
    code, out, err = call("labels", finished, capsys=capsys)
    assert code == 0
    assert len(out.splitlines()) == 65
    assert err == f"{finished}: not finished; the labels are as of epoch 2\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--class", "be"], "--class be: no such class; did you mean bee?"),
        (["--action", "look"], "--action look: no such choice; known: keep, relabel, review"),
        (["--top", "0"], "--top must be 1 or more, not 0"),
        (["--threshold", "7"], "--threshold must be from 0 to 1, not 7"),
        (["--format", "hf"], "--format hf: needs --out, the folder to write"),
        (["--format", "parquet"], "--format parquet: needs --out, the file to write"),
        (["--out", "x.txt"], "--out x.txt: name the format with --format"),
        (["--safe-csv", "--format", "json"], "--safe-csv is for csv, not json"),
    ],
)
def test_wrong_input_is_one_line(audit, arguments, message, capsys):
    code, out, err = call("labels", audit, *arguments, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_apply(audit, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decision = {"index": 9, "part": "train", "decision": "junk", "given_label": "bee"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(decision) + "\n")
    out = tmp_path / "fixed.csv"
    options = ["--decisions", tmp_path / "mine.jsonl", "--min-trust", "0.8", "--out", out]
    code, printed, err = call("apply", audit, *options, capsys=capsys)
    assert (code, err) == (0, "")
    assert printed.splitlines() == [
        f"{out}: 9 images, 1 label changed (1 by score, 0 by people)",
        "      1  ant → bee",
        "left for review, with the given label: 3",
        f"left out: 1 × junk; listed in {tmp_path / 'fixed.left-out.csv'}",
        f"Next: pseudoloss train {out} --out run",
    ]
    assert pd.read_csv(out)["changed"].sum() == 1


def test_apply_needs_an_output(audit, capsys):
    code, _, err = call("apply", audit, capsys=capsys)
    assert (code, "--out is missing" in err) == (2, True)
