"""Held-out images, whose labels may be wrong too: their rows in the label table."""

import dataclasses
import shutil

import pandas as pd
import pytest

import pseudoloss as pl
from conftest import TINY, make_images, save_images
from pseudoloss.data import corrupt
from pseudoloss.data.images import with_held_out
from pseudoloss.engine import loop
from pseudoloss.errors import InputError
from pseudoloss.labels.table import TRUTH
from pseudoloss.runs import RunFolder

N, M = 48, 16


def source(n=N + M, share=0.25, noise="symmetric-exact:0.25"):
    """Arrays with wrong labels, of which some images are held out."""
    images, labels = make_images(n)
    data = pl.arrays(images, labels, paths=[f"{i}.png" for i in range(n)])
    return with_held_out(dataclasses.replace(data, train=corrupt(data.train, noise, 1)), share, 1)


@pytest.fixture
def tiny_settings():
    return TINY | {"image_size": 8}  # files would be read as 32×32 otherwise


@pytest.fixture
def photos(tmp_path):
    images, labels = make_images(64, channels=3)
    save_images(tmp_path / "photos", images, labels)
    return tmp_path / "photos"


def held_out(run):
    return run.labels[run.labels["part"] == "held-out"]


def trained_on(run):
    return trained_on_table(run.labels)


def trained_on_table(table):
    return table[table["part"] == "train"]


# ------------------------------------------------------------------------------------- the rows


def test_every_image_of_a_folder_has_a_row(photos, tmp_path, tiny_settings, capsys):
    run = pl.train(photos, tmp_path / "run", hold_out=0.25, **tiny_settings)
    table = run.labels
    files = {str(path.relative_to(photos)) for path in photos.rglob("*.*")}
    assert len(table) == 64
    assert set(table["path"]) == files
    in_order = sorted(files)
    assert [in_order[i] for i in table["index"]] == table["path"].tolist()
    assert table["part"].tolist() == ["train"] * N + ["held-out"] * M
    assert (table["path"].str.split("/").str[0] == table["given_label"]).all()
    assert held_out(run)["label_score"].between(0, 1).all()
    summary = run.summary
    assert (summary["images"], summary["held_out"]) == (N, M)
    assert sum(summary["actions"].values()) == 64
    assert 0 <= summary["estimated_noise"]["rate"] <= 1
    assert summary["estimated_noise"]["by_class"].keys() == set(table["given_label"])
    assert "to review (16 held-out images too)" in capsys.readouterr().out
    loaded = pl.load(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.labels, table, check_dtype=False, rtol=1e-4)
    numbers = loaded.labels[["label_score", "p_noisy", "trust"]]
    assert set(map(str, numbers.dtypes)) == {"float64"}


def test_the_index_is_the_position_in_the_source(tiny_settings):
    """With and without held-out images, so that results can be put back into arrays."""
    images, labels = make_images(64)
    for share in (0.25, 0.0):
        table = pl.train((images, labels), quiet=True, hold_out=share, **tiny_settings).labels
        assert sorted(table["index"]) == list(range(64))
        assert (table["given_label"] == labels[table["index"]].astype(str)).all()


def test_skipped_files_keep_their_position(photos, tiny_settings):
    files = sorted(path for path in photos.rglob("*.*"))
    files[3].write_bytes(b"")
    table = pl.train(photos, quiet=True, hold_out=0.25, **tiny_settings).labels
    assert len(table) == 63
    assert [str(files[i].relative_to(photos)) for i in table["index"]] == table["path"].tolist()


@pytest.mark.parametrize("key", ["index", "path"])
def test_a_table_of_labels_may_have_rows_of_held_out_images(key, photos, tmp_path, tiny_settings):
    """Such as an unchanged labels.csv: every training image gets its label from there."""
    options = {"hold_out": 0.25, "corrupt": "symmetric-exact:0.5"}
    pl.train(photos, tmp_path / "run", quiet=True, **options, **tiny_settings)
    table = pl.load(tmp_path / "run").labels
    names = {"index": ["path"], "path": ["index"]}[key]
    table.drop(columns=names).to_csv(tmp_path / "labels.csv", index=False)
    from_folder = table["path"].str.split("/").str[0]
    assert (table["given_label"] != from_folder).sum() == N / 2
    given = table.set_index("path")["given_label"]
    for changes in ({}, {"seed": 7}, {"hold_out": 0.0}):
        options = {"hold_out": 0.25, "corrupt": f"labels:{tmp_path / 'labels.csv'}"}
        again = pl.train(photos, quiet=True, **(tiny_settings | options | changes)).labels
        trained = trained_on_table(again).set_index("path")["given_label"]
        assert trained.to_dict() == given[trained.index].to_dict()
        rest = again[again["part"] == "held-out"]
        assert (rest["given_label"] == rest["path"].str.split("/").str[0]).all()
    assert len(trained) == N + M


def test_a_table_of_labels_needs_rows_of_all_training_images_and_no_unknown_ones(
    photos, tmp_path, tiny_settings
):
    table = pl.train(photos, quiet=True, hold_out=0.25, **tiny_settings).labels
    named = table[["index", "given_label"]].rename(columns={"given_label": "label"})
    options = {"hold_out": 0.25, "corrupt": f"labels:{tmp_path / 'labels.csv'}"}

    def train(rows):
        rows.to_csv(tmp_path / "labels.csv", index=False)
        return pl.train(photos, quiet=True, **options, **tiny_settings).labels

    assert train(named[:N])["given_label"].tolist() == table["given_label"].tolist()
    with pytest.raises(InputError, match="1 images have no row"):
        train(named[1:])
    with pytest.raises(InputError, match="row 64: no image that is trained on or held out"):
        train(pd.concat([named[:-1], named[-1:].assign(index=64)]))


def test_nothing_is_held_out_if_there_are_test_images(photos, tmp_path, tiny_settings):
    (tmp_path / "parts").mkdir()
    photos.rename(tmp_path / "parts" / "train")
    shutil.copytree(tmp_path / "parts" / "train", tmp_path / "parts" / "val")
    for source, options in (
        (tmp_path / "parts", {}),
        (tmp_path / "parts" / "train", {"test": tmp_path / "parts" / "val"}),
    ):
        with pytest.raises(InputError, match="--hold-out: there are test images already"):
            pl.train(source, quiet=True, hold_out=0.2, **options, **tiny_settings)


def test_wrong_labels_are_found_among_them(tiny_settings):
    data = source(n=400, noise="symmetric-exact:0.4")
    settings = tiny_settings | {"epochs": 10, "warmup": 3, "flip": False}
    settings |= {"batch_size": 32, "lr": 0.1}
    found = held_out(pl.train(data, quiet=True, **settings))
    right = [str(label) for label in data.test.true_N.tolist()]
    wrong = found["given_label"] != right
    assert 0.2 < wrong.mean() < 0.6
    assert (found["is_label_issue"] == wrong).mean() > 0.9
    relabelled = found["action"] == "relabel"
    assert relabelled.sum() > 20
    assert (found["suggested_label"] == right)[relabelled].mean() > 0.9


def test_a_run_that_stops_in_its_warm_up_has_their_rows_too(tiny_settings):
    settings = tiny_settings | {"warmup": 2}
    run = pl.train(source(), minutes=1e-9, quiet=True, **settings)
    assert run.summary["epochs"] == 1
    assert len(held_out(run)) == M
    assert run.labels["trust"].between(0, 1).all()


def test_test_images_with_correct_labels_have_no_row(photos, tmp_path, tiny_source, tiny_settings):
    save_images(tmp_path / "clean", *make_images(16, channels=3, seed=1))
    runs = [
        pl.train(photos, test=tmp_path / "clean", quiet=True, **tiny_settings),
        pl.train(photos, hold_out=0, quiet=True, **tiny_settings),
        pl.train(tiny_source, quiet=True, **tiny_settings),
    ]
    for run in runs:
        assert run.labels["part"].tolist() == ["train"] * 64
        assert run.summary["held_out"] == 0


@pytest.mark.parametrize("noise_metric", ["loss", "js", "kl"])
def test_the_table_is_the_same_wherever_images_are_kept(photos, noise_metric, tiny_settings):
    settings = tiny_settings | {"noise_metric": noise_metric, "hold_out": 0.25, "quiet": True}
    tables = [
        pl.train(photos, images=where, **settings).labels for where in ("device", "host", "files")
    ]
    assert len(tables[0]) == 64
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


# -------------------------------------------------------------------------- how they are judged


def test_the_noise_rate_is_that_of_the_held_out_images(tiny_settings):
    data = source(n=400, noise="symmetric-exact:0.4")
    settings = tiny_settings | {"epochs": 6, "batch_size": 32, "flip": False, "method": "ce"}
    run = pl.train(data, quiet=True, **settings)
    noise = run.summary["estimated_noise"]
    assert noise["low"] <= 0.4 <= noise["high"]
    assert trained_on(run)["p_noisy"].mean() == pytest.approx(noise["rate"], abs=1e-3)
    wrong = trained_on(run)["truth"] == "wrong"
    assert (trained_on(run)["is_label_issue"] == wrong).mean() > 0.85


@pytest.mark.parametrize("noise_metric", ["loss", "js", "kl"])
def test_the_number_of_chunks_makes_no_difference(tiny_settings, monkeypatch, noise_metric):
    settings = tiny_settings | {"noise_metric": noise_metric, "quiet": True}
    tables = []
    for at_once in (2**21, 7 * 64):
        monkeypatch.setattr("pseudoloss.inference.passes.PIXELS_AT_ONCE", at_once)
        tables.append(pl.train(source(), **settings).labels)
    pd.testing.assert_frame_equal(*tables, rtol=1e-3)


def test_their_true_labels_are_not_used(tiny_settings):
    data = source()
    test = dataclasses.replace(data.test, true_N=None)
    tables = [
        pl.train(each, quiet=True, **tiny_settings).labels
        for each in (data, dataclasses.replace(data, test=test))
    ]
    known, unknown = (table.drop(columns=list(TRUTH)) for table in tables)
    assert known.equals(unknown)


# ----------------------------------------------------------------------- interrupted, loaded


@pytest.mark.parametrize("noise_metric", ["loss", "kl"])
@pytest.mark.parametrize("moment", ["write_final_table", "write_checked"])
def test_interrupted_while_the_results_are_written(
    tmp_path, tiny_settings, monkeypatch, noise_metric, moment
):
    data = source()
    settings = tiny_settings | {"noise_metric": noise_metric, "quiet": True}
    pl.train(data, tmp_path / "whole", **settings)

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop if moment == "write_checked" else RunFolder, moment, crash)
        with pytest.raises(KeyboardInterrupt):
            pl.train(data, tmp_path / "broken", **settings)
    pl.train(data, tmp_path / "broken", resume=True, **settings)
    one, other = ((tmp_path / name / "labels.csv").read_text() for name in ("whole", "broken"))
    assert one == other
    assert one.count("held-out") == M


def test_missing_rows_are_noticed(tmp_path, tiny_settings):
    out = tmp_path / "run"
    pl.train(source(), out, quiet=True, **tiny_settings)
    lines = (out / "labels.csv").read_text().splitlines()
    (out / "labels.csv").write_text("\n".join(lines[: 1 + N]) + "\n")
    with pytest.raises(InputError, match=r"labels.csv has 48 rows, not 64"):
        pl.load(out)


def test_held_out_labels_say_nothing_about_noise_that_was_added_to_the_others(tiny_settings):
    images, labels = make_images(120)
    noise = {"hold_out": 0.25, "corrupt": "symmetric-exact:0.5"}
    run = pl.train((images, labels), quiet=True, **noise, **tiny_settings)
    found = run.summary["estimated_noise"]
    assert not found["known"]
    assert "--corrupt" in found["reasons"][0]
