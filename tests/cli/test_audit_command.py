"""`pseudoloss audit` as users type it."""

import json

import numpy as np
import pandas as pd
import pytest

from audits import blobs
from pseudoloss.auditing import messages
from pseudoloss.cli import main
from pseudoloss.cli.audit import next_steps


def call(*arguments, capsys):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def embeddings(tmp_path):
    """A table with labels, and a file with features."""
    features, given, _ = blobs()
    np.save(tmp_path / "z.npy", features)
    table = pd.DataFrame({"text": [f"text {i}" for i in range(len(given))], "label": given})
    table.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv", tmp_path / "z.npy"


def test_embeddings_of_anything(embeddings, tmp_path, capsys):
    table, features = embeddings
    options = ["--features", features, "--path-column", "text", "--device", "cpu"]
    code, out, err = call("audit", table, "--out", tmp_path / "a", *options, capsys=capsys)
    assert (code, err) == (0, "")
    assert "160 rows, 4 classes" in out
    assert "of the labels" in out
    assert f"pseudoloss review {tmp_path / 'a'}" in out
    rows = pd.read_csv(tmp_path / "a" / "labels.csv")
    assert rows["path"].tolist() == [f"text {i}" for i in range(160)]
    code, _, err = call("audit", table, "--out", tmp_path / "a", *options, capsys=capsys)
    assert (code, "already contains results" in err) == (2, True)


def test_an_experiment(tmp_path, capsys, embeddings):
    table, features = embeddings
    code, out, _ = call(
        "audit", table, "--out", tmp_path / "a", "--features", features, "--path-column", "text",
        "--corrupt", "symmetric-exact:0.1", "--threshold", "0.6", "--min-trust", "0.7",
        capsys=capsys,
    )  # fmt: skip
    assert code == 0
    assert "10.0% of 160 labels are wrong" in out
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["threshold"], summary["min_trust"]) == (0.6, 0.7)
    assert summary["truth"]["wrong"] == 0.1
    rows = pd.read_csv(tmp_path / "a" / "labels.csv")
    assert (rows["truth"] == "wrong").sum() == 16
    assert ((rows["p_noisy"] >= 0.6) == rows["is_label_issue"]).all()


def test_quiet(embeddings, tmp_path, capsys):
    table, features = embeddings
    options = ["--features", features, "--path-column", "text", "--quiet"]
    assert call("audit", table, "--out", tmp_path / "a", *options, capsys=capsys) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE is missing"),
        (["digits"], "--out is missing"),
        (
            ["digits", "--out", "{}", "--method", "pls"],
            "--method pls: no such choice; known: latent, two-mixtures",
        ),
        (["digits", "--out", "{}", "--threshold", "2"], "--threshold must be from 0 to 1"),
        (["nothing/", "--out", "{}"], "source nothing/: no such file or folder"),
        (["digits", "--out", "{}", "--features", "x.npy"], "x.npy: no such file"),
        (["digits", "--out", "{}", "--strict"], "--strict is for folders and tables"),
        (["digits", "--out", "{}", "--hold-out", "0.1"], "--hold-out: no such option"),
    ],
)
def test_wrong_input(arguments, message, tmp_path, capsys):
    out = tmp_path / "out"
    given = [argument.format(out) for argument in arguments]
    code, _, err = call("audit", *given, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("photo", "source photo: no such file, folder or dataset; did you mean photos?"),
        ("./fotos/", "source ./fotos/: no such file or folder; did you mean ./photos?"),
        ("digit", "source digit: no such file, folder or dataset; did you mean digits?"),
    ],
)
def test_a_misspelt_source_gets_a_suggestion(source, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "audit"):
        (tmp_path / name).mkdir()
    assert message in call("audit", source, "--out", "out", capsys=capsys)[2]


def test_a_training_run_does_not_start_in_the_folder_of_an_audit(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"kind": "audit"}')
    code, _, err = call("train", "digits", "--out", tmp_path, capsys=capsys)
    assert (code, "already contains an audit: choose another folder" in err) == (2, True)


def test_an_interrupted_audit_says_how_to_continue(embeddings, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    table, features = embeddings
    command = ["audit", table, "--out", tmp_path / "a", "--features", features]
    command += ["--path-column", "text", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr("pseudoloss.auditing.audit.score_labels", interrupt)
        code, _, err = call(*command, capsys=capsys)
    assert code == 130
    assert "the same command continues" in err
    assert call(*command, capsys=capsys)[0] == 0


def test_names_with_spaces_are_quoted(tmp_path):
    text = next_steps(tmp_path / "my audit", "photos")
    assert f"pseudoloss review '{tmp_path / 'my audit'}'" in text
    assert text.endswith("--out fixed.csv")


def test_the_name_that_is_suggested_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, following in (("fixed.csv", "fixed-2.csv"), ("fixed-2.csv", "fixed-3.csv")):
        (tmp_path / name).touch()
        assert next_steps(tmp_path, "photos").endswith(f"--out {following}")


@pytest.mark.parametrize("source", ["hf:name", "wds:shards"])
def test_images_that_are_not_files_are_copied_to_a_folder(tmp_path, source):
    """`apply` cannot write a table of them."""
    assert next_steps(tmp_path, source).endswith("--out fixed --copy")


def test_what_is_not_known_is_said(photo_audit):
    summary = json.loads((photo_audit / "summary.json").read_text())
    summary["estimated_noise"] |= {"known": False, "reasons": ["Too few images."]}
    summary["small_classes"] = {"a": 1, "b": 2, "c": 3, "d": 4}
    summary["outliers"]["images"] = 1
    lines = messages.conclusion(summary, None)
    assert "noise       not known" in lines
    assert "Too few images." in lines
    assert "4 classes with too few images to judge: a (1), b (2), c (3), …" in lines
    assert "1 image seems to belong to no class" in lines
