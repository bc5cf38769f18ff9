import numpy as np
import pandas as pd
import pytest
import torch

from pseudoloss.audit.labels import estimated_noise, label_table, read_labels, write_labels
from pseudoloss.data import arrays
from pseudoloss.methods.memory import Memory

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


@pytest.fixture
def material():
    """Four images: clean; noisy with a trusted guess; noisy without; noisy, but confirmed."""
    images = arrays(
        np.zeros((4, 8, 8), np.uint8),
        ["ant", "ant", "bee", "bee"],
        paths=["a.png", "b.png", "c.png", "d,.png"],
    ).train
    memory = Memory.of(images.given_N, 2)
    memory.noisy_N.copy_(torch.tensor([False, True, True, True]))
    memory.p_noisy_N.copy_(torch.tensor([0.01, 0.99, 0.98, 0.97]))
    memory.trust_N.copy_(torch.tensor([1.0, 0.9, 0.2, 0.8]))
    guess = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9]])
    memory.remember_guesses(torch.arange(4), guess)
    memory.predicted_N.copy_(torch.tensor([0, 1, 0, 0]))
    memory.loss_N.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    return images, memory


def test_a_row_an_image(material):
    table = label_table(*material, judged=True)
    assert table.columns.tolist() == COLUMNS
    assert table["index"].tolist() == [0, 1, 2, 3]
    assert table["part"].tolist() == ["train"] * 4
    assert table["action"].tolist() == ["keep", "relabel", "look", "keep"]
    assert table["is_label_issue"].tolist() == [False, True, True, False]
    assert table["given_label"].tolist() == ["ant", "ant", "bee", "bee"]
    assert table["predicted_label"].tolist() == ["ant", "bee", "ant", "ant"]
    assert table["suggested_label"].fillna("–").tolist() == ["ant", "bee", "–", "bee"]
    np.testing.assert_allclose(table["label_score"], np.exp([0, -1, -2, -3]), rtol=1e-6)
    np.testing.assert_allclose(table["trust"], [1, 0.9, 0.2, 0.8])


def test_without_judged_guesses_nothing_is_suggested(material):
    table = label_table(*material, judged=False)
    assert table["trust"].isna().all()
    assert table["action"].tolist() == ["keep", "look", "look", "look"]
    assert table["suggested_label"].isna().tolist() == [False, True, True, True]


def test_held_out_images_come_behind_the_others(material):
    images, memory = material
    table = label_table(*material, judged=True, held_out=(images, memory.part(slice(None))))
    assert table.columns.tolist() == COLUMNS
    assert table["index"].tolist() == [*range(4), *range(4)]  # where each stands in its source
    assert table["part"].tolist() == ["train"] * 4 + ["held-out"] * 4
    apart = ["index", "part"]
    pd.testing.assert_frame_equal(
        table[:4].drop(columns=apart), table[4:].drop(columns=apart).reset_index(drop=True)
    )


def test_the_noise_is_estimated_over_images_that_were_trained_on(material):
    images, _ = material
    held = Memory.of(images.given_N, 2)  # nothing is noisy
    table = label_table(*material, judged=True, held_out=(images, held))
    assert estimated_noise(table) == {"rate": 0.5, "by_class": {"ant": 0.5, "bee": 0.5}}


def test_a_table_that_was_written_without_parts(material, tmp_path):
    table = label_table(*material, judged=True)
    write_labels(table.drop(columns="part"), tmp_path)
    pd.testing.assert_frame_equal(read_labels(tmp_path), table, check_dtype=False, rtol=1e-5)


def test_written_and_read_again(material, tmp_path):
    table = label_table(*material, judged=True)
    write_labels(table, tmp_path)
    read = read_labels(tmp_path)
    pd.testing.assert_frame_equal(read, table, check_dtype=False, rtol=1e-5)
    parquet = pd.read_parquet(tmp_path / "labels.parquet")
    assert parquet["action"].tolist() == table["action"].tolist()
    assert parquet.columns.tolist() == COLUMNS


def test_class_names_that_look_like_something_else(tmp_path):
    names = ["NA", "007", "null", "1e3"]
    images = arrays(np.zeros((8, 8, 8), np.uint8), names * 2).train
    table = label_table(images, Memory.of(images.given_N, 4), judged=True)
    write_labels(table, tmp_path)
    assert read_labels(tmp_path)["given_label"].tolist() == names * 2


def test_parquet_is_left_out_without_pyarrow(material, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_labels(label_table(*material, judged=True), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]
