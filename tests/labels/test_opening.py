import json

import numpy as np
import pandas as pd
import pytest

from label_folders import scored_table, write_audit
from pseudoloss.errors import InputError
from pseudoloss.labels.opening import open_labels
from pseudoloss.labels.table import read_labels


def test_a_run(tiny_run):
    opened = open_labels(tiny_run.path)
    assert (opened.kind, opened.finished, opened.epoch) == ("train", True, 3)
    assert opened.classes == ("0", "1", "2", "3")
    assert opened.source is None, "its data were passed in Python"
    assert opened.state == ""
    assert len(opened.table) == 64
    assert "candidate_label" in opened.table


def test_an_audit(tmp_path):
    opened = open_labels(write_audit(tmp_path / "audit", scored_table()))
    assert (opened.kind, opened.finished, opened.epoch) == ("audit", True, None)
    assert opened.source == "digits"
    assert opened.decided()["action"].tolist() == 3 * ["keep"] + 3 * ["relabel"]
    assert opened.decided(0.9)["action"].tolist() == 5 * ["keep"] + ["relabel"]
    assert opened.decided(0.7, 0.9)["action"].tolist() == 4 * ["keep"] + ["review", "relabel"]


def test_an_audit_keeps_its_thresholds(tmp_path):
    settings = {"threshold": 0.7, "min_trust": 0.9}
    opened = open_labels(write_audit(tmp_path / "audit", scored_table(), settings=settings))
    assert opened.decided()["action"].tolist() == 4 * ["keep"] + ["review", "relabel"]
    assert opened.decided(min_trust=0)["action"].tolist() == 4 * ["keep"] + 2 * ["relabel"]


def old_table(**columns):
    """The table of version 0.1 with four rows; `columns` replace some."""
    return pd.DataFrame(
        {
            "index": range(4),
            "path": np.nan,
            "part": "train",
            "given_label": ["ant", "ant", "bee", "bee"],
            "predicted_label": ["ant", "bee", "ant", "ant"],
            "suggested_label": ["ant", "bee", np.nan, "bee"],
            "is_label_issue": [False, True, True, False],
            "label_score": [0.9, 0.1, 0.2, 0.6],
            "p_noisy": [0.1, 0.99, 0.99, 0.7],
            "trust": [1, 0.8, 0.2, 1],
            "action": ["keep", "relabel", "look", "keep"],
        }
        | columns
    )


@pytest.fixture
def old_run(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    config = {"source": "digits", "settings": {}, "data": {"classes": ["ant", "bee"]}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps({"epochs": 7}))
    old_table().to_csv(folder / "labels.csv", index=False)
    return folder


def test_an_old_run_keeps_its_actions(old_run):
    opened = open_labels(old_run)
    assert not opened.calibrated
    assert opened.epoch == 7
    candidates = opened.table["candidate_label"].tolist()
    assert pd.isna(candidates[0])
    assert candidates[1:] == ["bee", "ant", "ant"]
    assert opened.decided()["action"].tolist() == ["keep", "relabel", "review", "keep"]


def test_an_old_run_can_be_decided_again(old_run):
    opened = open_labels(old_run)
    by_trust = opened.decided(min_trust=0.9)
    assert by_trust["action"].tolist() == ["keep", "review", "review", "keep"]
    assert by_trust["p_noisy"].tolist() == opened.table["p_noisy"].tolist()
    assert opened.decided(0.5)["action"].tolist() == ["keep", "relabel", "review", "relabel"]


def test_labels_that_look_like_missing_values_stay_text(tmp_path):
    table = scored_table(classes=("NA", "001"))
    folder = write_audit(tmp_path / "audit", table, classes=("NA", "001"))
    assert set(read_labels(folder)["candidate_label"]) == {"NA", "001"}
    assert open_labels(folder).table["given_label"].tolist() == table["given_label"].tolist()


def test_an_unfinished_run(finished):
    (finished / "summary.json").unlink()
    (finished / "labels.json").write_text('{"epoch": 2}')
    opened = open_labels(finished)
    assert (opened.finished, opened.epoch) == (False, 2)
    assert opened.state.endswith("not finished; the labels are as of epoch 2")


def test_folders_without_a_table(tmp_path, finished):
    (finished / "labels.csv").unlink()
    for path, message in (
        (tmp_path / "missing", "no such run"),
        (tmp_path, "neither a run folder nor an audit"),
        (finished, "has no label table yet; continue it with pseudoloss train --resume"),
    ):
        with pytest.raises(InputError, match=message):
            open_labels(path)


def test_damaged_folders(tmp_path):
    folder = write_audit(tmp_path / "audit", scored_table())
    (folder / "labels.csv").write_text("index,path\n0,a\n")
    with pytest.raises(InputError, match="label table cannot be read"):
        open_labels(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        open_labels(folder)
