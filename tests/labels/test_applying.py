import hashlib
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import pseudoloss as pl
from conftest import TINY, make_images, save_images
from label_folders import scored_table, write_audit
from pseudoloss.data import find_source
from pseudoloss.data.sources.folder import folder_splits
from pseudoloss.errors import InputError
from pseudoloss.labels.applying import apply, corrected
from pseudoloss.labels.opening import open_labels
from pseudoloss.labels.reviewed import NumberedDecision
from pseudoloss.labels.table import score_rows

QUICK = TINY | {"pad": 0, "epochs": 2, "warmup": 1, "batch_size": 9, "image_size": 16}


def audit_of(folder, source, parts=("train",), name="audit"):
    """An audit of a folder that suggests the next class for every third image of a class, and wants
    every fourth to be reviewed."""
    splits = folder_splits(source, "source")
    classes = sorted(set(splits["train"].labels))
    rows = []
    for part in parts:
        files = splits[part]
        given = np.array([classes.index(label) for label in files.labels])
        n = np.arange(len(files))
        rows.append(
            score_rows(
                part,
                classes,
                index=n,
                paths=files.names,
                given=given,
                predicted=given,
                candidate=(given + 1) % len(classes),
                label_score=n / len(n),
                p_noisy=((n % 3 == 0) | (n % 4 == 0)).astype(float),
                trust=(n % 3 == 0).astype(float),
            )
        )
    return write_audit(folder / name, pd.concat(rows, ignore_index=True), classes, source)


def decide(audit, row, decision, label=None, changes=()):
    """Append a decision about a row of an audit."""
    table = open_labels(audit).table
    values = {name: table[name].tolist()[row] for name in ("index", "part", "given_label")}
    line = values | {"decision": decision, "label": label} | dict(changes)
    with (audit / "decisions.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def digest(folder):
    """A hash of all files below a folder, with their times."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path} {path.lstat().st_mtime_ns}".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


# ------------------------------------------------------------------------- what labels become

DECISIONS = st.sampled_from(["none", "keep", "relabel", "junk", "skip"])


@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "relabel", "review"]), DECISIONS),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
)
def test_people_win_over_scores(rows, drop_review, reviewed_only):
    classes = ("ant", "bee", "cat")
    n = len(rows)
    table = scored_table(n, classes[:1], paths=None).assign(
        action=[action for action, _ in rows],
        suggested_label=[
            {"keep": "ant", "relabel": "bee", "review": np.nan}[action] for action, _ in rows
        ],
    )
    made = {
        (i, "train"): NumberedDecision(
            i, "train", None, decision, "cat" if decision == "relabel" else None, "ant", "", line=i
        )
        for i, (_, decision) in enumerate(rows)
        if decision != "none"
    }
    found = corrected(table, made, classes, drop_review, reviewed_only)
    for (action, decision), row in zip(rows, found.to_dict("records"), strict=True):
        wanted = {"relabel": "cat", "keep": "ant", "junk": "ant", "skip": "ant"}.get(decision)
        if wanted is None:
            wanted = "bee" if action == "relabel" and not reviewed_only else "ant"
        assert row["label"] == wanted
        assert row["changed"] == (wanted != "ant")
        open_question = decision == "skip" or (
            decision == "none" and (action == "review" or (reviewed_only and action == "relabel"))
        )
        assert row["for_review"] == open_question
        out = "junk" if decision == "junk" else "review" if open_question and drop_review else ""
        assert row["left_out"] == out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 99}, "line 1: the label table has no image 99 of train"),
        ({"given_label": "other"}, "line 1: is about the label other"),
        ({"decision": "relabel", "label": "cat"}, "no such class: cat; did you mean a cat"),
    ],
)
def test_decisions_about_something_else_are_refused(tmp_path, photo_folder, changes, message):
    audit = audit_of(tmp_path, photo_folder)
    decide(audit, 0, "keep", changes=changes)
    with pytest.raises(InputError, match=message):
        apply(audit, tmp_path / "fixed.csv")
    assert not (tmp_path / "fixed.csv").exists()


# --------------------------------------------------------------------------------------- tables


def test_a_table_that_can_be_trained_on(tmp_path, photo_folder):
    audit = audit_of(tmp_path, photo_folder)
    classes = open_labels(audit).classes
    decide(audit, 0, "keep")  # the scores say relabel
    decide(audit, 1, "relabel", classes[2])  # the scores say keep
    decide(audit, 2, "junk")
    before = digest(photo_folder)
    found = apply(audit, tmp_path / "fixed.csv")
    table = pd.read_csv(tmp_path / "fixed.csv", keep_default_na=False)
    assert list(table) == ["path", "label", "split", "given_label", "changed", "decided_by"]
    train = table[table["split"] == "train"].reset_index(drop=True)
    assert (len(table), len(train), found.images) == (47, 35, 47)
    assert train.loc[:1, "label"].tolist() == [classes[0], classes[2]]
    assert train.loc[:1, "decided_by"].tolist() == ["person", "person"]
    relabelled = [n for n in range(3, 36) if n % 3 == 0]
    assert (found.changed, found.by_score, found.by_person) == (12, len(relabelled), 1)
    assert sum(count for _, _, count in found.pairs) == 12
    assert found.for_review == sum(n % 4 == 0 and n % 3 != 0 for n in range(3, 36))
    assert (table["label"] != table["given_label"]).tolist() == table["changed"].tolist()
    assert found.left_out["reason"].tolist() == ["junk"]
    listed = pd.read_csv(tmp_path / "fixed.left-out.csv")
    assert listed["path"].tolist() == found.left_out["path"].tolist()
    assert digest(photo_folder) == before

    scanned = find_source(str(tmp_path / "fixed.csv"))
    assert (len(scanned.train), len(scanned.test)) == (35, 12)
    assert scanned.skipped == ()
    run = pl.train(tmp_path / "fixed.csv", out=tmp_path / "run", quiet=True, **QUICK)
    assert run.labels["given_label"].tolist() == train["label"].tolist()
    assert apply(run.path, tmp_path / "again.csv").images == 47


def test_all_splits_of_an_audit_are_corrected(tmp_path, photo_folder):
    audit = audit_of(tmp_path, photo_folder, ("train", "test"))
    apply(audit, tmp_path / "fixed.parquet", min_trust=1)
    table = pd.read_parquet(tmp_path / "fixed.parquet")
    assert table.groupby("split")["changed"].sum().to_dict() == {"train": 12, "test": 4}


@pytest.mark.parametrize("known", [True, False])
def test_an_audit_that_does_not_know_the_noise_advises_a_review(tmp_path, photo_folder, known):
    audit = audit_of(tmp_path, photo_folder)
    (audit / "summary.json").write_text(json.dumps({"estimated_noise": {"known": known}}))
    found = apply(audit, tmp_path / "fixed.csv")
    advice = [notice for notice in found.notices if f"pseudoloss review {audit}" in notice]
    assert found.by_score > 0
    assert len(advice) == (not known)
    decide(audit, 0, "keep")
    assert apply(audit, tmp_path / "mine.csv", reviewed_only=True).notices == ()


def test_paths_are_valid_wherever_the_table_is(tmp_path, photos, monkeypatch):
    names = ["ant/=a.png", "ant/b,\n'.png", "bee/~c.png", "bee/ d .png", 'bee/"e.png', "ant/-.png"]
    root = photos(*names)
    audit = audit_of(tmp_path, root)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    apply(audit, "fixed.csv", threshold=1, min_trust=1)
    scanned = find_source("fixed.csv", pl.data.ReadOptions(hold_out=0))
    assert {str(path) for path in scanned.train.paths} == {str(root / name) for name in names}


def test_the_source_may_be_a_table(tmp_path, photos):
    root = photos("1.png", "2.png", "3.png", "4.png")
    labels = ["a/b", "a/b", "..", ".."]
    rows = pd.DataFrame({"path": [f"{i}.png" for i in range(1, 5)], "label": labels})
    rows.to_csv(root / "table.csv", index=False)
    table = scored_table(4, ("a/b", ".."), paths=rows["path"].tolist())
    table = table.assign(given_label=labels)
    audit = write_audit(tmp_path / "audit", table, ("a/b", ".."), root / "table.csv")
    apply(audit, root / "fixed.csv", threshold=1, min_trust=1)
    fixed = pd.read_csv(root / "fixed.csv")
    assert fixed["path"].tolist() == [str(root / f"{i}.png") for i in range(1, 5)]
    with pytest.raises(InputError, match="cannot be the name of a folder"):
        apply(audit, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


# -------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("copy", [False, True])
def test_a_folder_that_can_be_trained_on(tmp_path, photo_folder, copy):
    audit = audit_of(tmp_path, photo_folder)
    decide(audit, 1, "junk")
    before = digest(photo_folder)
    found = apply(audit, tmp_path / "fixed", copy=copy)
    files = [path for path in (tmp_path / "fixed").rglob("*") if path.is_file()]
    assert len(files) == found.images == 47
    assert all(path.is_symlink() != copy for path in files)
    assert found.links != copy
    splits = folder_splits(tmp_path / "fixed", "fixed", follow=found.links)
    table = open_labels(audit).decided()
    wanted = table["suggested_label"].fillna(table["given_label"]).drop(1)
    assert sorted(splits["train"].labels) == sorted(wanted)
    assert sorted(splits["test"].labels) == sorted(folder_splits(photo_folder, "")["test"].labels)
    assert digest(photo_folder) == before


def test_files_of_one_name_are_told_apart(tmp_path):
    images, labels = make_images(8, 2, 8)
    save_images(tmp_path / "photos", images, labels, ("ant", "bee"))
    for folder in ("ant", "bee"):
        inside = sorted((tmp_path / "photos" / folder).iterdir())
        for i, path in enumerate(inside):
            path.rename(path.with_name(f"{i}.png"))
    audit = audit_of(tmp_path, tmp_path / "photos")
    found = apply(audit, tmp_path / "fixed")
    targets = {path.readlink() for path in (tmp_path / "fixed").rglob("*.png")}
    assert len(targets) == found.images == 8


def test_classes_called_like_splits(tmp_path, photos):
    root = photos("train/train/1.png", "train/train/2.png", "train/test/3.png", "train/test/4.png")
    audit = audit_of(tmp_path, root)
    apply(audit, tmp_path / "fixed", threshold=1, min_trust=1)
    assert set(folder_splits(tmp_path / "fixed", "")) == {"train"}


# --------------------------------------------------------------------------------------- arrays


def test_arrays_that_can_be_trained_on(whole_run, dataset, tmp_path):
    table = open_labels(whole_run).decided(0.5, 0.65)  # every class keeps some images
    found = apply(whole_run, tmp_path / "fixed.npz", threshold=0.5, min_trust=0.65)
    source = find_source(str(tmp_path / "fixed.npz"))
    original = find_source(str(dataset))
    assert np.array_equal(source.train.images_NCHW, original.train.images_NCHW)
    assert np.array_equal(source.test.images_NCHW, original.test.images_NCHW)
    assert np.array_equal(source.test.given_N, original.test.given_N)
    names = np.array(source.train.classes)
    wanted = table["suggested_label"].fillna(table["given_label"])
    assert names[source.train.given_N].tolist() == wanted.tolist()
    assert np.array_equal(source.train.true_N, original.train.given_N), "the run was an experiment"
    assert found.changed == (wanted != table["given_label"]).sum()
    run = pl.train(tmp_path / "fixed.npz", quiet=True, **(TINY | {"epochs": 2, "warmup": 1}))
    assert len(run.labels) == 64


def test_arrays_without_junk_and_without_a_class(npz, tmp_path):
    images, labels = make_images(9, 3)
    source = npz(images=images, labels=labels, classes=np.array(["ant", "bee", "cat"]))
    table = scored_table(9, ("ant", "bee", "cat")).assign(p_noisy=0.0)
    audit = write_audit(tmp_path / "audit", table, ("ant", "bee", "cat"), source)
    for row in (1, 4):
        decide(audit, row, "junk")
    decide(audit, 7, "relabel", "cat")
    found = apply(audit, tmp_path / "fixed.npz")
    data = find_source(str(tmp_path / "fixed.npz"))
    assert data.train.classes == ("ant", "cat")
    assert data.train.given_N.tolist() == [0, 1, 0, 1, 0, 1, 1]
    kept = np.delete(images, [1, 4], axis=0).transpose(0, 3, 1, 2)
    assert np.array_equal(data.train.images_NCHW, kept)
    assert found.notices == ("fewer than 2 images are left of: bee",)


def test_arrays_that_have_changed_are_refused(npz, tmp_path):
    images, labels = make_images(8, 2)
    source = npz(images=images, labels=labels, classes=np.array(["ant", "bee"]))
    audit = write_audit(tmp_path / "audit", scored_table(8), source=source)
    apply(audit, tmp_path / "1.npz")
    npz(images=images, labels=1 - labels, classes=np.array(["ant", "bee"]))
    with pytest.raises(InputError, match="its labels are not those of"):
        apply(audit, tmp_path / "2.npz")


def test_a_huggingface_dataset_becomes_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    images, labels = make_images(8, 2, channels=3)
    rows = {
        "image": [Image.fromarray(image) for image in images],
        "label": [("ant", "bee")[label] for label in labels],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    table = scored_table(8).assign(p_noisy=0.0)
    audit = write_audit(tmp_path / "audit", table, source=f"hf:{tmp_path / 'rows'}")
    for out, copy in ((tmp_path / "fixed.csv", False), (tmp_path / "fixed", False)):
        with pytest.raises(InputError, match="are not files"):
            apply(audit, out, copy=copy)
    apply(audit, tmp_path / "fixed", copy=True)
    for i, image in enumerate(images):
        path = tmp_path / "fixed" / ("ant", "bee")[labels[i]] / f"{i:07}.png"
        assert np.array_equal(np.asarray(Image.open(path)), image)


# ------------------------------------------------------------------------------- what is refused


def test_outputs_that_exist_are_not_touched(tmp_path, photo_folder):
    audit = audit_of(tmp_path, photo_folder)
    for name in ("fixed.csv", "fixed.left-out.csv"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name}: exists already"):
            apply(audit, tmp_path / "fixed.csv")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("x.npz", {}, "must be a .csv or .parquet file, or a folder"),
        ("x.json", {}, "must be a .csv or .parquet file, or a folder"),
        ("x.csv", {"copy": True}, "--copy is for folders"),
        ("x.csv", {"drop": ["keep"]}, "--drop keep: must be junk or review"),
        ("x.csv", {"reviewed_only": True}, "has no decisions.jsonl"),
        ("x.csv", {"decisions": "missing"}, "--decisions missing: cannot be read"),
        ("x.csv", {"min_trust": 2}, "--min-trust must be from 0 to 1"),
        ("missing/x.csv", {}, "no such folder"),
    ],
)
def test_wrong_input(tmp_path, photo_folder, out, options, message):
    with pytest.raises(InputError, match=message):
        apply(audit_of(tmp_path, photo_folder), tmp_path / out, **options)


def test_nothing_is_written_into_the_source(tmp_path, photos):
    root = photos("ant/a.png", "ant/b.png", "bee/c.png", "bee/d.png")
    audit = audit_of(tmp_path, root)
    for out in (root / "fixed", root / "ant" / "fixed.csv"):
        with pytest.raises(InputError, match="is inside"):
            apply(audit, out)


def test_data_from_python_and_images_of_a_pool(tiny_run, npz, tmp_path):
    with pytest.raises(InputError, match="passed in Python"):
        apply(tiny_run.path, tmp_path / "x.csv")
    table = scored_table(2).assign(true_label=["ant", np.nan], truth=["clean", "out"])
    run = write_audit(tmp_path / "run", table, source=npz(), settings={"pool": "noise"})
    with pytest.raises(InputError, match="--pool"):
        apply(run, tmp_path / "x.npz")


def test_arrays_need_an_archive(npz, tmp_path):
    audit = write_audit(tmp_path / "audit", scored_table(4), source=npz())
    with pytest.raises(InputError, match=r"holds arrays; write a file\.npz"):
        apply(audit, tmp_path / "x.csv")


def test_files_that_are_gone_are_left_out(tmp_path, photos):
    root = photos("ant/a.png", "ant/b.png", "bee/c.png", "bee/d.png")
    audit = audit_of(tmp_path, root)
    (root / "bee" / "d.png").unlink()
    found = apply(audit, tmp_path / "fixed.csv")
    assert found.left_out[["path", "reason"]].to_numpy().tolist() == [
        ["bee/d.png", "no such file any more"]
    ]
    assert len(pd.read_csv(tmp_path / "fixed.csv")) == 3


def test_an_unfinished_run_says_its_epoch(whole_run, tmp_path):

    run = shutil.copytree(whole_run, tmp_path / "run")
    (run / "summary.json").unlink()
    (run / "labels.json").write_text('{"epoch": 4}')
    found = apply(run, tmp_path / "fixed.npz")
    assert found.notices[0].endswith("not finished; the labels are as of epoch 4")


def test_only_what_people_decided(tmp_path, photo_folder):
    audit = audit_of(tmp_path, photo_folder)
    decide(audit, 3, "relabel", open_labels(audit).classes[2])
    found = apply(audit, tmp_path / "fixed.csv", reviewed_only=True)
    assert (found.changed, found.by_score, found.by_person) == (1, 0, 1)


def test_a_file_without_decisions_is_refused(tmp_path, photo_folder):
    audit = audit_of(tmp_path, photo_folder)
    path = tmp_path / "notes.txt"
    path.write_text("keep them all\n")
    with pytest.raises(InputError, match=r"--decisions .*notes\.txt: holds no decision"):
        apply(audit, tmp_path / "fixed.csv", decisions=path)
    assert not (tmp_path / "fixed.csv").exists()


def test_a_mistyped_ending_is_no_folder(tmp_path, photo_folder):
    with pytest.raises(
        InputError, match=r"fixed\.cvs: must be a \.csv or \.parquet file, or a folder"
    ):
        apply(audit_of(tmp_path, photo_folder), tmp_path / "fixed.cvs")
    assert not (tmp_path / "fixed.cvs").exists()
