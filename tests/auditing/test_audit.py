"""`pl.audit` on features whose wrong labels are known, and on images."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

import pseudoloss as pl
from audits import blobs
from conftest import make_images, save_images
from pseudoloss import runs
from pseudoloss.auditing import audit as audit_module
from pseudoloss.auditing.audit import METHODS
from pseudoloss.auditing.folder import AuditFolder, load_audit
from pseudoloss.cli import audit as command
from pseudoloss.labels.table import read_labels
from pseudoloss.runs import RunFolder, open_model

FILES = {
    "config.json",
    "labels.csv",
    "pred_probs.npy",
    "duplicates.csv",
    "examples.npz",
    "summary.json",
}


def test_swapped_labels_are_found(blob_audit):
    _, given, true = blobs()
    table = blob_audit.labels
    wrong = given != true
    issue = table["is_label_issue"].to_numpy()
    assert (issue & wrong).sum() >= 0.75 * wrong.sum()
    assert (issue & ~wrong).sum() <= 0.05 * len(given)
    relabel = (table["action"] == "relabel").to_numpy()
    right = table["suggested_label"].to_numpy() == true.astype(str)
    assert right[relabel].mean() > 0.9


def test_rows_are_in_the_order_of_the_labels(blob_audit):
    _, given, _ = blobs()
    assert blob_audit.labels["index"].tolist() == list(range(len(given)))
    assert blob_audit.labels["given_label"].tolist() == given.astype(str).tolist()
    assert blob_audit.pred_probs.shape == (len(given), 4)
    assert blob_audit.pred_probs.dtype == np.float32
    assert np.allclose(blob_audit.pred_probs.sum(1), 1, atol=1e-4)
    assert (blob_audit.labels["candidate_label"] != blob_audit.labels["given_label"]).all()


def test_the_summary_counts_the_table(blob_audit):
    summary, table = blob_audit.summary, blob_audit.labels
    assert summary["images"] == len(table)
    assert summary["actions"] == {
        action: int((table["action"] == action).sum()) for action in ("keep", "relabel", "review")
    }
    noise = summary["estimated_noise"]
    assert noise["low"] <= noise["rate"] <= noise["high"]
    assert noise["by_class"].keys() == {"0", "1", "2", "3"}
    assert sum(entry["images"] for entry in noise["by_class"].values()) == len(table)
    pairs = summary["confused_pairs"]
    assert sum(pair["images"] for pair in pairs) == table["is_label_issue"].sum()
    assert [p["images"] for p in pairs] == sorted((p["images"] for p in pairs), reverse=True)


def test_examples_are_confident_images_of_both_classes(blob_audit):
    table, examples = blob_audit.labels, blob_audit.examples
    assert examples["row_M"].tolist() == np.flatnonzero(table["is_label_issue"]).tolist()
    for name, column in (("given_MK", "given_label"), ("candidate_MK", "candidate_label")):
        for row, found in zip(examples["row_M"], examples[name], strict=True):
            near = table.iloc[found[found >= 0]]
            assert (near["given_label"] == table[column].iloc[row]).all()
            assert (near["p_noisy"] <= 0.1).all()
            assert not near["is_label_issue"].any()


def test_a_seed_decides_everything(blob_audit):
    features, given, _ = blobs()
    again = pl.audit(features=features, labels=given, quiet=True, device="cpu")
    pd.testing.assert_frame_equal(again.labels, blob_audit.labels)
    assert np.array_equal(again.pred_probs, blob_audit.pred_probs)


def test_kinds_of_features_and_labels(blob_audit):
    features, given, _ = blobs()
    names = np.array(["ant", "bee", "cat", "dog"])[given]
    tensor = torch.from_numpy(features)
    named = pl.audit(features=tensor, labels=names.tolist(), quiet=True, device="cpu")
    assert named.classes == ("ant", "bee", "cat", "dog")
    assert np.array_equal(named.labels["p_noisy"], blob_audit.labels["p_noisy"])
    assert named.labels["given_label"].tolist() == names.tolist()


def test_features_of_a_file(tmp_path, blob_audit):
    features, given, _ = blobs()
    np.save(tmp_path / "z.npy", features)
    found = pl.audit(features=tmp_path / "z.npy", labels=given, quiet=True, device="cpu")
    pd.testing.assert_frame_equal(found.labels, blob_audit.labels)


def test_two_mixtures():
    features, given, true = blobs()
    found = pl.audit(features=features, labels=given, method="two-mixtures", quiet=True)
    assert found.summary["method"] == "two-mixtures"
    assert found.labels["is_label_issue"][given != true].mean() > 0.8


def test_thresholds_decide_actions():
    features, given, _ = blobs()
    everything = pl.audit(features=features, labels=given, threshold=0, min_trust=1, quiet=True)
    assert set(everything.labels["action"]) == {"review"}


def test_duplicates_with_other_labels():
    features, given, _ = blobs()
    given = given.copy()
    features[5] = features[4]
    given[4:6] = (0, 1)
    features[9] = features[8]
    given[9] = given[8]
    found = pl.audit(features=features, labels=given, quiet=True)
    assert found.duplicates["index"].tolist() == [4, 5, 8, 9]
    assert found.duplicates["group"].tolist() == [0, 0, 1, 1]
    counts = found.summary["duplicates"]
    assert (counts["groups"], counts["images"], counts["contradicting"]) == (2, 4, 1)
    assert found.labels["duplicate_group"].dropna().tolist() == [0, 0, 1, 1]


def test_duplicates_across_splits():
    features, given, _ = blobs()
    features[100] = features[3]
    pixels = np.zeros((len(given), 8, 8), np.uint8)
    data = pl.arrays(pixels[:80], given[:80], test_images=pixels[80:], test_labels=given[80:])
    found = pl.audit(data, features=features, quiet=True)
    assert found.duplicates[["part", "index"]].values.tolist() == [["train", 3], ["test", 20]]
    assert found.summary["duplicates"]["across_parts"] == 1
    assert found.labels["part"].tolist() == ["train"] * 80 + ["test"] * 80


def test_small_and_similar_classes_are_named():
    features, given, _ = blobs()
    given = np.where(np.arange(len(given)) < 3, 9, given)
    twins = given == 1
    given[twins] = np.where(np.arange(twins.sum()) % 2, 1, 7)  # one cluster, two names
    summary = pl.audit(features=features, labels=given, quiet=True).summary
    assert summary["small_classes"] == {"9": 3}
    assert {"1", "7"} in [set(pair["classes"]) for pair in summary["similar_classes"]]


def test_cleanlab_accepts_the_predictions(blob_audit):
    filtering = pytest.importorskip("cleanlab.filter")
    codes = pd.Categorical(blob_audit.labels["given_label"], blob_audit.classes).codes
    found = filtering.find_label_issues(codes.astype(int), blob_audit.pred_probs)
    assert found.shape == (len(codes),)


# ------------------------------------------------------------------------------------- folders


def test_the_folder_holds_the_audit(blob_audit):
    found = {path.name for path in blob_audit.path.iterdir()}
    assert found >= FILES
    assert "skipped.csv" not in found
    loaded = load_audit(blob_audit.path)
    assert np.array_equal(loaded.pred_probs, blob_audit.pred_probs)
    assert loaded.classes == blob_audit.classes
    assert loaded.summary["actions"] == blob_audit.summary["actions"]
    assert loaded.examples.keys() == {"row_M", "given_MK", "candidate_MK"}
    for name in ("given_label", "suggested_label", "action", "is_label_issue", "part"):
        left, right = (audit.labels[name].fillna("").tolist() for audit in (loaded, blob_audit))
        assert left == right, name
    assert np.allclose(loaded.labels["p_noisy"], blob_audit.labels["p_noisy"], atol=1e-5)
    config = json.loads((blob_audit.path / "config.json").read_text())
    assert (config["kind"], config["classes"]) == ("audit", list(blob_audit.classes))


def test_a_taken_folder_is_refused(blob_audit, tmp_path):
    features, given, _ = blobs()
    before = (blob_audit.path / "labels.csv").read_bytes()
    with pytest.raises(pl.InputError, match="already contains results"):
        pl.audit(features=features, labels=given, out=blob_audit.path, quiet=True)
    assert (blob_audit.path / "labels.csv").read_bytes() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(pl.InputError, match="is a file"):
        pl.audit(features=features, labels=given, out=tmp_path / "file", quiet=True)
    with pytest.raises(pl.InputError, match="contains other files"):
        pl.audit(features=features, labels=given, out=tmp_path, quiet=True)


def test_a_training_run_is_refused(finished):
    features, given, _ = blobs()
    (finished / "summary.json").unlink()
    with pytest.raises(pl.InputError, match="contains another run"):
        pl.audit(features=features, labels=given, out=finished, quiet=True)


def test_an_unfinished_audit_is_continued(blob_audit, tmp_path):
    features, given, _ = blobs()
    folder = shutil.copytree(blob_audit.path, tmp_path / "again")
    (folder / "summary.json").unlink()
    (folder / "pred_probs.npy").unlink()
    (folder / ".labels.csv.draft").write_text("cut sho")
    with pytest.raises(pl.InputError, match="not finished"):
        load_audit(folder)
    with pytest.raises(pl.InputError, match="other settings"):
        pl.audit(features=features, labels=given, out=folder, seed=2, quiet=True)
    pl.audit(features=features, labels=given, out=folder, quiet=True, device="cpu")
    assert (folder / "labels.csv").read_bytes() == (blob_audit.path / "labels.csv").read_bytes()
    assert AuditFolder(folder).finished


def test_wrong_input_leaves_nothing_behind(tmp_path):
    features, given, _ = blobs()
    features[3, 1] = np.nan
    with pytest.raises(pl.InputError, match="row 3"):
        pl.audit(features=features, labels=given, out=tmp_path / "a" / "b", quiet=True)
    assert not (tmp_path / "a").exists()


def test_an_empty_folder_stays_as_it_was(tmp_path, monkeypatch):
    features, given, _ = blobs()
    features[3, 1] = np.nan
    with pytest.raises(pl.InputError, match="row 3"):
        pl.audit(features=features, labels=given, out=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(audit_module, "find_duplicates", interrupted)
    for out in (tmp_path, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            pl.audit(features=np.nan_to_num(features), labels=given, out=out, quiet=True)
        assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_kill_left_is_no_obstacle(tmp_path):
    features, given, _ = blobs()
    for name in ("audit", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    RunFolder(tmp_path / "run").refuse_if_taken()
    assert pl.audit(features=features, labels=given, out=tmp_path / "audit", quiet=True).path


def test_two_processes_do_not_share_a_folder(tmp_path):
    features, given, _ = blobs()
    folder = AuditFolder(tmp_path / "a")
    with folder.lock(), pytest.raises(pl.InputError, match="another process"):
        pl.audit(features=features, labels=given, out=folder.path, quiet=True)


def test_damaged_folders_are_refused(blob_audit, tmp_path):
    folder = shutil.copytree(blob_audit.path, tmp_path / "damaged")
    np.save(folder / "pred_probs.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(pl.InputError, match="damaged"):
        load_audit(folder)
    with pytest.raises(pl.InputError, match="not the folder of an audit"):
        load_audit(tmp_path)


def test_load_opens_runs_and_audits(blob_audit, tiny_run):
    assert pl.load(blob_audit.path).labels.shape == blob_audit.labels.shape
    assert pl.load(tiny_run.path).settings == tiny_run.settings


def test_an_audit_has_no_model(blob_audit):
    for opens in (runs.load, open_model):
        with pytest.raises(pl.InputError, match="is an audit, not a training run"):
            opens(blob_audit.path)


# -------------------------------------------------------------------------------------- images


def test_images_of_all_splits(photo_audit, photo_folder):
    table = read_labels(photo_audit)
    assert table["part"].value_counts().to_dict() == {"train": 36, "test": 12}
    for row in table.itertuples():
        assert (photo_folder / row.path).parent.name == row.given_label
        assert row.path.startswith(row.part)
    config = json.loads((photo_audit / "config.json").read_text())
    assert config["source"] == str(photo_folder)
    assert config["parts"] == {"train": 36, "test": 12}


def test_arrays_of_images():
    images, labels = make_images(24, 3, 32, 3)
    found = pl.audit(images, labels, quiet=True)
    pair = pl.audit((images, labels), quiet=True)
    pd.testing.assert_frame_equal(found.labels, pair.labels)
    assert found.summary["features"]["dimensions"] == 1280
    assert pair.summary["features"]["from_cache"]


def test_unreadable_files_are_skipped_or_refused(tmp_path, capsys):
    images, labels = make_images(12, 2, 16, 3)
    save_images(tmp_path / "p", images, labels)
    (tmp_path / "p" / "0" / "5.png").write_text("nonsense")
    with pytest.raises(pl.InputError, match=r"5\.png cannot be read"):
        pl.audit(tmp_path / "p", out=tmp_path / "a", strict=True, quiet=True)
    assert not (tmp_path / "a").exists()
    found = pl.audit(tmp_path / "p", out=tmp_path / "a")
    assert len(found.labels) == 12
    text = " ".join(capsys.readouterr().out.split())
    assert "13 image files, 2 classes" in text
    assert "), 12 images left; " in text
    assert pd.read_csv(tmp_path / "a" / "skipped.csv")["path"].tolist() == ["0/5.png"]
    assert found.summary["skipped"] == 1
    # Positions are those in the source, which has the broken file too.
    assert len(set(found.labels["index"])) == 12
    assert found.labels["index"].max() == 12


def test_an_audit_inside_its_source_is_refused(photo_folder):
    with pytest.raises(pl.InputError, match="is inside"):
        pl.audit(photo_folder, out=photo_folder / "audit", quiet=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "SOURCE is missing"),
        ({"features": np.zeros((4, 2))}, "labels are missing"),
        ({"features": "resnet18", "labels": [0, 1]}, "a network needs images"),
        ({"source": "digits", "labels": [1]}, "has its own labels"),
        ({"source": "digits", "method": "magic"}, "--method magic"),
        ({"source": "digits", "folds": 1}, "--folds"),
        ({"source": "digits", "seed": -1}, "--seed"),
        ({"source": "digits", "threshold": 2}, "--threshold must be from 0 to 1"),
        ({"source": "digits", "min_trust": None}, "--min-trust must be from 0 to 1"),
        ({"source": "digits", "corrupt": "nonsense:0.2"}, "no such noise"),
        ({"features": np.zeros((4, 2)), "labels": [0, 1, 0]}, "3 labels for 4"),
        ({"features": [[1.0], [1.0, 2.0]], "labels": [0, 1]}, "one row per image"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(pl.InputError, match=message):
        pl.audit(**arguments, quiet=True)


def test_unknown_arguments():
    with pytest.raises(TypeError, match="hold_out"):
        pl.audit("digits", hold_out=0.1)


def test_the_command_has_the_same_methods():
    assert command.METHODS == METHODS
