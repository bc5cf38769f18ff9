"""Predictions for image files."""

import csv
import io
import json
import threading

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import pseudoloss as pl
from pseudoloss.cli import main
from pseudoloss.data import Reader
from pseudoloss.errors import InputError
from pseudoloss.inference import predictions
from pseudoloss.runs import open_model


@pytest.fixture
def model(photo_run):
    return open_model(photo_run)


@pytest.fixture
def broken(tmp_path, photo_folder):
    """A folder with two images, an empty file, a truncated image and a text file."""
    folder = tmp_path / "some" / "images"
    folder.mkdir(parents=True)
    source = next((photo_folder / "test" / "übel").glob("*.jpg")).read_bytes()
    (folder / "good").write_bytes(source)
    (folder / "also good.JPG").write_bytes(source)
    (folder / "empty.png").write_bytes(b"")
    (folder / "half.jpg").write_bytes(source[: len(source) // 3])
    (folder / "text.jpg").write_text("no image")
    return tmp_path / "some"


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def call(*arguments, capsys):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -------------------------------------------------------------------------------------- python


@pytest.mark.parametrize("size", [1, 5, 256])
def test_batches_do_not_change_predictions(model, photo_folder, monkeypatch, size):
    monkeypatch.setattr(predictions, "AT_ONCE", size)
    paths = sorted(path for path in (photo_folder / "test").rglob("*") if path.is_file())
    table = model.predict_files(photo_folder / "test", probabilities=True)
    names = [str(path.relative_to(photo_folder / "test")) for path in paths]
    assert table["path"].tolist() == names
    wanted = np.concatenate([model.predict_proba(model.reader.read(p)[None]) for p in paths])
    found = table[[f"p_{name}" for name in model.classes]].to_numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert table["label"].tolist() == [model.classes[c] for c in wanted.argmax(1)]
    np.testing.assert_allclose(table["probability"], wanted.max(1), atol=1e-6)


def test_values_that_are_not_paths_are_refused(model):
    for images in (5, [5]):
        with pytest.raises(InputError, match=r"images (must be paths, not int|5: no usable path)"):
            model.predict_files(images)


def test_most_likely_classes_are_sorted(model, photo_folder):
    table = model.predict_files([photo_folder / "test"], top=3)
    p = table[["probability", "probability_2", "probability_3"]].to_numpy()
    assert (np.diff(p, axis=1) <= 0).all()
    np.testing.assert_allclose(p.sum(1), 1)
    for row in table[["label", "label_2", "label_3"]].to_numpy():
        assert set(row) == set(model.classes)


def test_few_batches_are_in_memory_at_once(monkeypatch, tmp_path):
    began, lock = [], threading.Lock()

    def read(self, path):
        with lock:
            began.append(path)
        return np.zeros((1, 8, 8), np.uint8)

    monkeypatch.setattr(Reader, "read", read)
    paths = [tmp_path / str(i) for i in range(40)]
    done = 0
    for results in predictions._read_ahead(Reader(1, (8, 8)), paths, 4):
        done += len(results)
        assert len(began) <= done + 4 * (predictions.AHEAD - 1)
    assert (done, set(began)) == (40, set(paths))


def test_unreadable_files_are_skipped_with_a_warning(model, broken):
    with pytest.warns(UserWarning, match=r"3 of 5 files cannot be read .*empty.png, empty file"):
        table = model.predict_files(broken)
    assert [path.rsplit("/", 1)[1] for path in table["path"]] == ["also good.JPG", "good"]


def test_files_of_any_mode_fit_a_colour_model(model, tmp_path):
    for mode in ("L", "RGBA", "P", "I;16", "1"):
        Image.new(mode, (33, 21)).save(tmp_path / f"{mode.replace(';', '')}.png")
    assert len(model.predict_files(tmp_path)) == 5


def test_loaded_run_has_a_model(photo_run, photo_folder):
    run = pl.load(photo_run)
    table = run.model.predict_files(next((photo_folder / "test").rglob("*.png")))
    assert list(table) == ["path", "label", "probability"]


def test_names_join_with_the_label_table(model, photo_folder, photo_run):
    labels = pl.load(photo_run).labels
    joined = labels.merge(model.predict_files(photo_folder), on="path", validate="one_to_one")
    assert len(joined) == len(labels)
    assert joined["label"].tolist() == joined["predicted_label"].tolist()


def test_names_of_several_arguments_are_as_typed(model, photo_folder, monkeypatch):
    monkeypatch.chdir(photo_folder.parent)
    name = photo_folder.name
    several = model.predict_files([f"{name}/train", f"{name}/test"])["path"]
    assert several.is_unique
    assert all((photo_folder.parent / path).is_file() for path in several)
    one = next((photo_folder / "test").rglob("*.png")).relative_to(photo_folder.parent)
    assert model.predict_files(one)["path"].tolist() == [str(one)]


def test_names_of_a_table_are_relative_to_it(model, photo_folder, tmp_path):
    (tmp_path / "in").mkdir()
    source = next((photo_folder / "test").rglob("*.png"))
    (tmp_path / "in" / "a.png").write_bytes(source.read_bytes())
    (tmp_path / "t.csv").write_text(f"path\nin/a.png\n{source}\n")
    found = model.predict_files(tmp_path / "t.csv")["path"].tolist()
    assert found == ["in/a.png", str(source)]


# -------------------------------------------------------------------------------- command line


def test_csv_on_standard_output(photo_run, photo_folder, model, capsys):
    code, out, err = call("predict", photo_run, photo_folder / "test", capsys=capsys)
    assert (code, err) == (0, "")
    rows = rows_of(out)
    assert list(rows[0]) == ["path", "label", "probability"]
    table = model.predict_files(photo_folder / "test")
    assert [row["path"] for row in rows] == table["path"].tolist()
    assert [row["label"] for row in rows] == table["label"].tolist()
    np.testing.assert_allclose(
        [float(row["probability"]) for row in rows], table["probability"], rtol=1e-5
    )


def test_probabilities_add_one_column_per_class(photo_run, photo_folder, model, capsys):
    options = ["--probabilities", "--top", "2"]
    _, out, _ = call("predict", photo_run, photo_folder / "test", *options, capsys=capsys)
    rows = rows_of(out)
    more = ["label_2", "probability_2", *(f"p_{name}" for name in model.classes)]
    assert list(rows[0]) == ["path", "label", "probability", *more]
    for row in rows:
        assert sum(float(row[f"p_{name}"]) for name in model.classes) == pytest.approx(1, abs=1e-5)
        assert row[f"p_{row['label_2']}"] == row["probability_2"]


def test_jsonl_output(photo_run, photo_folder, model, tmp_path, capsys):
    options = ["--probabilities", "--top", "2", "--out", tmp_path / "x.jsonl"]
    code, out, err = call("predict", photo_run, photo_folder / "test", *options, capsys=capsys)
    assert (code, out) == (0, "")
    assert f"{tmp_path / 'x.jsonl'}: 12 predictions" in err.replace("\n", "")
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    for line in lines:
        assert list(line) == ["path", "label", "probability", "top", "probabilities"]
        assert line["probabilities"][line["label"]] == line["probability"]
        assert line["top"][0] == {"label": line["label"], "probability": line["probability"]}
        assert tuple(line["probabilities"]) == model.classes


def test_unreadable_files_are_reported(photo_run, broken, capsys):
    code, out, err = call("predict", photo_run, broken, capsys=capsys)
    assert code == 0
    assert len(rows_of(out)) == 2
    assert "empty.png: skipped (empty file)" in err
    assert err.endswith("notice: 3 of 5 files cannot be read and are skipped\n")
    assert err.count("\n") == 4
    code, _, err = call("predict", photo_run, broken, "--quiet", capsys=capsys)
    assert (code, err) == (0, "")


def test_no_readable_file_is_an_error(photo_run, broken, tmp_path, capsys):
    arguments = [broken / "images" / "text.jpg", "--out", tmp_path / "x.csv", "--quiet"]
    code, out, err = call("predict", photo_run, *arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert "no image can be read (the first of 1 files: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["some"]


def test_file_is_overwritten_only_with_force(photo_run, photo_folder, tmp_path, capsys):
    out = tmp_path / "x.csv"
    out.write_text("mine")
    arguments = ["predict", photo_run, photo_folder / "test", "--out", out]
    code, _, err = call(*arguments, capsys=capsys)
    assert code == 2
    assert f"--out {out}: exists already; add --force to overwrite it" in err
    assert out.read_text() == "mine"
    code, printed, err = call(*arguments, "--force", capsys=capsys)
    assert (code, printed) == (0, "")
    assert f"{out}: 12 predictions" in err.replace("\n", "")
    assert len(pd.read_csv(out)) == 12
    assert list(tmp_path.iterdir()) == [out]


def test_interrupt_leaves_no_file(photo_run, photo_folder, tmp_path, capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(predictions, "as_table", interrupted)
    arguments = ["predict", photo_run, photo_folder / "test", "--out", tmp_path / "x.csv"]
    assert call(*arguments, capsys=capsys)[0] == 130
    assert list(tmp_path.iterdir()) == []


def test_table_of_files(photo_run, photo_folder, tmp_path, capsys):
    files = sorted((photo_folder / "test" / "a cat").iterdir())
    pd.DataFrame({"path": [str(file) for file in files]}).to_csv(tmp_path / "t.csv")
    _, out, _ = call("predict", photo_run, tmp_path / "t.csv", capsys=capsys)
    assert [row["path"] for row in rows_of(out)] == [str(file) for file in files]
    (tmp_path / "u.csv").write_text("file\nx.png\n")
    code, _, err = call("predict", photo_run, tmp_path / "u.csv", capsys=capsys)
    assert (code, "u.csv: has no column path" in err) == (2, True)


def test_best_model_and_model_files(photo_run, photo_folder, capsys):
    texts = {}
    for arguments in (
        (photo_run,),
        (photo_run, "--best"),
        (photo_run / "best.safetensors",),
        (photo_run / "model.safetensors",),
    ):
        code, texts[arguments], _ = call(
            "predict", *arguments, photo_folder / "test", capsys=capsys
        )
        assert code == 0
    last, best, best_file, last_file = texts.values()
    assert (last, best) == (last_file, best_file)


BAD = {
    "no images": (["RUN"], "IMAGES"),
    "missing image": (["RUN", "no.jpg"], "no.jpg: no such file or folder"),
    "empty folder": (["RUN", "empty"], "empty: contains no files"),
    "no run": (["nowhere", "PHOTOS"], "nowhere: no such run"),
    "not a run": (["PHOTOS", "PHOTOS"], "neither a run folder nor one with a model.safetensors"),
    "not a model": (["text.txt", "PHOTOS"], "text.txt: not a model of pseudoloss"),
    "top": (["RUN", "PHOTOS", "--top", "9"], "--top 9: must be 1 to 3, the number of classes"),
    "no top": (["RUN", "PHOTOS", "--top", "0"], "--top 0: must be 1 to 3"),
    "device": (["RUN", "PHOTOS", "--device", "abacus"], "--device abacus"),
    "out is a folder": (["RUN", "PHOTOS", "--out", "empty", "--force"], "--out empty: is a folder"),
    "out is nowhere": (["RUN", "PHOTOS", "--out", "no/x.csv"], "no such folder: no"),
    "format": (["RUN", "PHOTOS", "--format", "xml"], "--format"),
    "best of a file": (
        ["RUN/model.safetensors", "PHOTOS", "--best"],
        "model.safetensors is not a run folder",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_one_line(name, photo_run, photo_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x" * 20)
    given, message = BAD[name]
    filled = [w.replace("RUN", str(photo_run)).replace("PHOTOS", str(photo_folder)) for w in given]
    code, out, err = call("predict", *filled, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text.txt"]


def test_model_of_a_run_without_best_epoch_or_unfinished(npz, tmp_path, tiny_settings):
    pl.train(str(npz()), tmp_path / "run", quiet=True, **tiny_settings)
    with pytest.raises(InputError, match=r"--best: "):
        open_model(tmp_path / "run", best=True)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.warns(UserWarning, match="not finished; this is the model of epoch 3 of 3"):
        open_model(tmp_path / "run")
