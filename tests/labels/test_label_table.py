import sys

import numpy as np
import pandas as pd
import pytest
import torch

from pseudoloss.data import OUT, arrays
from pseudoloss.labels.decisions import decide
from pseudoloss.labels.table import (
    ACTIONS,
    LabelScores,
    label_table,
    read_labels,
    write_labels,
)

COLUMNS = [
    "index",
    "path",
    "part",
    "given_label",
    "predicted_label",
    "suggested_label",
    "is_label_issue",
    "label_score",
    "p_noisy",
    "candidate_label",
    "trust",
    "action",
]


def nothing_doubtful(images):
    """Every label is kept."""
    zero = np.zeros(len(images))
    given = images.given_N.numpy()
    return LabelScores(given, (given + 1) % len(images.classes), zero + 1, zero, zero)


@pytest.fixture
def scored():
    """Four images and their scores: a right label; a wrong one with a trusted candidate; a wrong
    one without; a right label that the network does not predict."""
    images = arrays(
        np.zeros((4, 8, 8), np.uint8),
        ["ant", "ant", "bee", "bee"],
        paths=["a.png", "b.png", "c.png", "d,.png"],
    ).train
    scores = LabelScores(
        predicted_N=np.array([0, 1, 0, 0]),
        candidate_N=np.array([1, 1, 0, 0]),
        label_score_N=np.array([0.9, 0.1, 0.2, 0.4]),
        p_noisy_N=np.array([0.01, 0.99, 0.5, 0.1]),
        trust_N=np.array([0.01, 0.5, 0.49, 0.09]),
    )
    return images, scores


def test_actions_are_those_that_the_file_gives(scored, tmp_path):
    """A score just below a threshold is rounded to it in the file."""
    images, scores = scored
    doubt = np.array([0.01, 0.99, 0.49999999, 0.5])
    trust = np.array([0.01, 0.39999999, 0.3, 0.51])
    table = label_table(images, scores._replace(p_noisy_N=doubt, trust_N=trust))
    write_labels(table, tmp_path)
    again = decide(read_labels(tmp_path))
    assert again["action"].tolist() == table["action"].tolist()
    assert table["action"].tolist() == ["keep", "relabel", "review", "relabel"]


def test_one_row_per_image(scored):
    table = label_table(*scored)
    assert table.columns.tolist() == COLUMNS
    assert table["index"].tolist() == [0, 1, 2, 3]
    assert table["path"].tolist() == ["a.png", "b.png", "c.png", "d,.png"]
    assert table["part"].tolist() == ["train"] * 4
    assert table["action"].tolist() == ["keep", "relabel", "review", "keep"]
    assert table["is_label_issue"].tolist() == [False, True, True, False]
    assert table["given_label"].tolist() == ["ant", "ant", "bee", "bee"]
    assert table["predicted_label"].tolist() == ["ant", "bee", "ant", "ant"]
    assert table["candidate_label"].tolist() == ["bee", "bee", "ant", "ant"]
    assert table["suggested_label"].fillna("–").tolist() == ["ant", "bee", "–", "bee"]
    np.testing.assert_allclose(table["label_score"], [0.9, 0.1, 0.2, 0.4])
    assert set(table["action"]) == set(ACTIONS)


def test_held_out_images_follow_the_others(scored):
    table = label_table(*scored, held_out=scored)
    assert table.columns.tolist() == COLUMNS
    assert table["index"].tolist() == [*range(4), *range(4)]  # positions in their own sources
    assert table["part"].tolist() == ["train"] * 4 + ["held-out"] * 4
    differ = ["index", "part"]
    pd.testing.assert_frame_equal(
        table[:4].drop(columns=differ), table[4:].drop(columns=differ).reset_index(drop=True)
    )


@pytest.mark.parametrize("known_part", ["train", "held-out", "both"])
def test_known_true_labels_get_two_columns(known_part):
    images = arrays(np.zeros((3, 8, 8), np.uint8), ["ant", "bee", "bee"]).train
    known = images.with_labels(images.given_N, torch.tensor([0, 0, OUT]))
    train = images if known_part == "held-out" else known
    rest = images if known_part == "train" else known
    scores = nothing_doubtful(images)
    table = label_table(train, scores, (rest, scores))
    assert table.columns.tolist() == [*COLUMNS, "true_label", "truth"]
    for part, with_truth in (("train", train is known), ("held-out", rest is known)):
        rows = table[table["part"] == part]
        wanted = ["ant", "ant", "–"] if with_truth else ["–"] * 3
        assert rows["true_label"].fillna("–").tolist() == wanted
        wanted = ["clean", "wrong", "out"] if with_truth else ["–"] * 3
        assert rows["truth"].fillna("–").tolist() == wanted


def test_a_table_that_was_written_and_read_is_the_same(scored, tmp_path):
    table = label_table(*scored)
    write_labels(table, tmp_path)
    read = read_labels(tmp_path)
    pd.testing.assert_frame_equal(read, table, check_dtype=False, rtol=1e-5)
    parquet = pd.read_parquet(tmp_path / "labels.parquet")
    assert parquet["action"].tolist() == table["action"].tolist()
    assert parquet.columns.tolist() == COLUMNS


def test_a_table_of_version_0_1_is_read(scored, tmp_path):
    """It called the action `look`."""
    table = label_table(*scored)
    write_labels(table.replace({"action": {"review": "look"}}), tmp_path)
    assert "look" in (tmp_path / "labels.csv").read_text()
    pd.testing.assert_frame_equal(read_labels(tmp_path), table, check_dtype=False, rtol=1e-5)


def test_class_names_that_look_like_numbers_or_missing_values(tmp_path):
    names = ["NA", "007", "null", "1e3"]
    images = arrays(np.zeros((8, 8, 8), np.uint8), names * 2).train
    write_labels(label_table(images, nothing_doubtful(images)), tmp_path)
    read = read_labels(tmp_path)
    assert read["given_label"].tolist() == names * 2
    assert set(read["candidate_label"]) == set(names)


def test_parquet_is_left_out_without_pyarrow(scored, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_labels(label_table(*scored), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_the_scores_of_training_are_flagged_from_one_half(scored):
    """They may not be calibrated; an audit takes a lower threshold for such scores."""
    images, scores = scored
    table = label_table(images, scores._replace(p_noisy_N=np.array([0.01, 0.6, 0.45, 0.45])))
    assert table["is_label_issue"].tolist() == [False, True, False, False]
    assert decide(table)["is_label_issue"].tolist() == [False, True, True, True]
