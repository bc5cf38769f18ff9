import sys

import numpy as np
import pandas as pd
import pytest
import torch

from pseudoloss.audit.labels import (
    ACTIONS,
    estimated_noise,
    label_table,
    read_labels,
    write_labels,
)
from pseudoloss.data import OUT, arrays
from pseudoloss.methods.base import Verdict

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
    "trust",
    "action",
]


def verdict_of(noisy, p_noisy, loss, predicted, suggested=None, trust=None):
    return Verdict(
        noisy_N=torch.tensor(noisy, dtype=torch.bool),
        p_noisy_N=torch.tensor(p_noisy),
        loss_N=torch.tensor(loss),
        predicted_N=torch.tensor(predicted, dtype=torch.int32),
        suggested_N=None if suggested is None else torch.tensor(suggested),
        trust_N=None if trust is None else torch.tensor(trust),
    )


def nothing_flagged(images):
    """Every label is kept."""
    zero = torch.zeros(len(images))
    return Verdict(zero > 0, zero, zero, images.given_N, images.given_N, zero + 1)


@pytest.fixture
def judged():
    """Four images and a verdict: not flagged; flagged, and a suggestion is trusted; flagged, and
    none is; flagged, but a trusted suggestion confirms the label."""
    images = arrays(
        np.zeros((4, 8, 8), np.uint8),
        ["ant", "ant", "bee", "bee"],
        paths=["a.png", "b.png", "c.png", "d,.png"],
    ).train
    verdict = verdict_of(
        noisy=[False, True, True, True],
        p_noisy=[0.01, 0.99, 0.98, 0.97],
        loss=[0.0, 1.0, 2.0, 3.0],
        predicted=[0, 1, 0, 0],
        suggested=[1, 1, 0, 1],
        trust=[1.0, 0.9, 0.2, 0.8],
    )
    return images, verdict


def test_one_row_per_image(judged):
    table = label_table(*judged)
    assert table.columns.tolist() == COLUMNS
    assert table["index"].tolist() == [0, 1, 2, 3]
    assert table["path"].tolist() == ["a.png", "b.png", "c.png", "d,.png"]
    assert table["part"].tolist() == ["train"] * 4
    assert table["action"].tolist() == ["keep", "relabel", "review", "keep"]
    assert table["is_label_issue"].tolist() == [False, True, True, False]
    assert table["given_label"].tolist() == ["ant", "ant", "bee", "bee"]
    assert table["predicted_label"].tolist() == ["ant", "bee", "ant", "ant"]
    assert table["suggested_label"].fillna("–").tolist() == ["ant", "bee", "–", "bee"]
    np.testing.assert_allclose(table["label_score"], np.exp([0, -1, -2, -3]), rtol=1e-6)
    np.testing.assert_allclose(table["trust"], [1, 0.9, 0.2, 0.8])
    assert set(table["action"]) == set(ACTIONS)


def test_a_suggestion_is_trusted_from_one_half_on(judged):
    images, verdict = judged
    trust = torch.tensor([0.0, 0.5, 0.499, 0.5])
    table = label_table(images, verdict._replace(trust_N=trust))
    assert table["action"].tolist() == ["keep", "relabel", "review", "keep"]


def test_a_method_without_suggestions_has_labels_reviewed(judged):
    images, verdict = judged
    table = label_table(images, verdict._replace(suggested_N=None, trust_N=None))
    assert table["trust"].isna().all()
    assert table["action"].tolist() == ["keep", "review", "review", "review"]
    assert table["suggested_label"].isna().tolist() == [False, True, True, True]


def test_held_out_images_follow_the_others(judged):
    table = label_table(*judged, held_out=judged)
    assert table.columns.tolist() == COLUMNS
    assert table["index"].tolist() == [*range(4), *range(4)]  # positions in their own sources
    assert table["part"].tolist() == ["train"] * 4 + ["held-out"] * 4
    differ = ["index", "part"]
    pd.testing.assert_frame_equal(
        table[:4].drop(columns=differ), table[4:].drop(columns=differ).reset_index(drop=True)
    )


def test_known_true_labels_get_two_columns():
    images = arrays(np.zeros((3, 8, 8), np.uint8), ["ant", "bee", "bee"]).train
    known = images.with_labels(images.given_N, torch.tensor([0, 0, OUT]))
    table = label_table(known, nothing_flagged(images))
    assert table.columns.tolist() == [*COLUMNS, "true_label", "truth"]
    assert table["true_label"].fillna("–").tolist() == ["ant", "ant", "–"]
    assert table["truth"].tolist() == ["clean", "wrong", "out"]


def test_noise_is_estimated_on_the_images_that_were_trained_on(judged):
    images, _ = judged
    table = label_table(*judged, held_out=(images, nothing_flagged(images)))
    assert estimated_noise(table) == {"rate": 0.5, "by_class": {"ant": 0.5, "bee": 0.5}}


def test_a_table_that_was_written_and_read_is_the_same(judged, tmp_path):
    table = label_table(*judged)
    write_labels(table, tmp_path)
    read = read_labels(tmp_path)
    pd.testing.assert_frame_equal(read, table, check_dtype=False, rtol=1e-5)
    parquet = pd.read_parquet(tmp_path / "labels.parquet")
    assert parquet["action"].tolist() == table["action"].tolist()
    assert parquet.columns.tolist() == COLUMNS


def test_a_table_of_version_0_1_is_read(judged, tmp_path):
    """It called the action `look`."""
    table = label_table(*judged)
    write_labels(table.replace({"action": {"review": "look"}}), tmp_path)
    assert "look" in (tmp_path / "labels.csv").read_text()
    pd.testing.assert_frame_equal(read_labels(tmp_path), table, check_dtype=False, rtol=1e-5)


def test_class_names_that_look_like_numbers_or_missing_values(tmp_path):
    names = ["NA", "007", "null", "1e3"]
    images = arrays(np.zeros((8, 8, 8), np.uint8), names * 2).train
    write_labels(label_table(images, nothing_flagged(images)), tmp_path)
    assert read_labels(tmp_path)["given_label"].tolist() == names * 2


def test_parquet_is_left_out_without_pyarrow(judged, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_labels(label_table(*judged), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]
