"""Evaluation of a model on a source; scikit-learn is the oracle."""

import json
import os

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss

import pseudoloss as pl
from conftest import make_images, save_images
from pseudoloss.cli import main
from pseudoloss.errors import InputError
from pseudoloss.runs import open_model


@pytest.fixture
def model(photo_run):
    return open_model(photo_run)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "run"
    pl.train("digits", out, epochs=1, warmup=1, quiet=True)
    return out


def call(*arguments, capsys):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_scores_equal_scikit_learn(digits_run):
    run = pl.load(digits_run)
    found = run.model.evaluate("digits")
    test = pl.data.open_source("digits").test
    p = run.model.predict_proba(test.images_NCHW)
    label, predicted = test.given_N.numpy(), p.argmax(1)
    assert (found.part, len(found.predictions)) == ("test", 359)
    assert found.accuracy == pytest.approx(100 * accuracy_score(label, predicted))
    assert found.accuracy == pytest.approx(run.summary["accuracy"]["last"])
    np.testing.assert_array_equal(found.confusion, confusion_matrix(label, predicted))
    assert found.negative_log_likelihood == pytest.approx(log_loss(label, p))
    np.testing.assert_allclose(found.predictions["probability"], p.max(1))
    np.testing.assert_allclose(found.predictions["label_probability"], p[range(359), label])
    assert sum(part["images"] for part in found.calibration["bins"]) == 359


def test_files_and_their_pixels_give_the_same_result(model, photo_folder):
    from_files = model.evaluate(str(photo_folder))
    files = from_files.predictions["path"]
    images = np.stack([model.reader.read(photo_folder / file) for file in files])
    labels = from_files.predictions["label"].to_numpy(dtype=str)
    from_arrays = model.evaluate((images.transpose(0, 2, 3, 1), labels))
    assert (from_files.part, from_arrays.part) == ("test", "all")
    pd.testing.assert_frame_equal(from_files.confusion, from_arrays.confusion)
    np.testing.assert_allclose(
        from_files.predictions["probability"], from_arrays.predictions["probability"], atol=1e-6
    )


def test_evaluation_on_one_split(model, photo_folder):
    assert len(model.evaluate(str(photo_folder), "train").predictions) == 36
    assert len(model.evaluate(photo_folder / "train").predictions) == 36
    with pytest.raises(InputError, match=r"--part val: .* \(it has test, train\)"):
        model.evaluate(str(photo_folder), "val")


def test_table_with_test_images_only(model, photo_folder, tmp_path):
    files = sorted((photo_folder / "test").rglob("*.*"))
    rows = {"file": [str(f) for f in files], "is": [f.parent.name for f in files], "split": "val"}
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    options = ["--path-column", "file", "--label-column", "is"]
    out = tmp_path / "out"
    run = os.fspath(tmp_path / "model.safetensors")
    model.save(tmp_path / "model.safetensors")
    assert main(["evaluate", run, str(tmp_path / "t.csv"), "--out", str(out), *options]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["part"], found["images"]) == ("val", 12)
    with pytest.raises(InputError, match=r"t\.csv: .* only val"):
        pl.train(str(tmp_path / "t.csv"), path_column="file", label_column="is")


def test_source_without_images_is_refused(model, tmp_path):
    (tmp_path / "t.csv").write_text("path,label\n")
    with pytest.raises(InputError, match=r"t\.csv: has no rows"):
        model.evaluate(tmp_path / "t.csv")
    (tmp_path / "folder" / "a cat").mkdir(parents=True)
    with pytest.raises(InputError, match="folder: has no images"):
        model.evaluate(tmp_path / "folder")


def test_source_may_lack_classes_of_the_model(model, tmp_path):
    images, labels = make_images(9, 3, 28, 3)
    save_images(tmp_path, images[labels != 1], labels[labels != 1], model.classes)
    found = model.evaluate(tmp_path)
    row = found.classes.set_index("class").loc[model.classes[1]]
    assert (row["support"], np.isnan(row["accuracy"])) == (0, True)
    assert found.balanced_accuracy == pytest.approx(np.nanmean(found.classes["accuracy"]))
    assert found.summary()["by_class"][model.classes[1]]["support"] == 0


def test_unknown_class_is_named_in_the_error(model, tmp_path):
    images, labels = make_images(6, 3, 28, 3)
    save_images(tmp_path, images, labels, ("a cat", "a cats", "übel"))
    with pytest.raises(InputError, match=r"a cats/1.jpg has the class a cats, .*did you mean a ca"):
        model.evaluate(tmp_path)


def test_unreadable_files_are_skipped(model, tmp_path, photo_run, capsys):
    images, labels = make_images(6, 3, 28, 3)
    paths = save_images(tmp_path, images, labels, model.classes)
    paths[0].write_bytes(b"no image")
    found = model.evaluate(tmp_path)
    assert (len(found.predictions), len(found.skipped)) == (5, 1)
    assert paths[0].name not in " ".join(found.predictions["path"])
    assert found.predictions["index"].nunique() == 5
    _, out, _ = call("evaluate", photo_run, tmp_path, capsys=capsys)
    assert "skipped      1 file that cannot be read" in out
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(InputError, match="no image can be read"):
        model.evaluate(tmp_path)


def test_images_of_another_kind_are_refused(model, tiny_source):
    with pytest.raises(InputError, match="image 0 has the class 0, which the model does not have"):
        model.evaluate(tiny_source)
    images, _ = make_images(6, 3, 28, 3)
    with pytest.raises(InputError, match="3 channels, 28×28 pixels: the model was trained on"):
        model.evaluate((images, ["a cat", "übel"] * 3))
    with pytest.raises(InputError, match="source must be text, a path or a pair"):
        model.evaluate([1, 2, 3])


# -------------------------------------------------------------------------------- command line


def test_report_and_output_folder(digits_run, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    code, text, err = call("evaluate", digits_run, "digits", "--out", out, capsys=capsys)
    assert (code, err) == (0, "")
    assert "digits, test: 359 images, 10 classes\n" in text
    for title in ("accuracy ", "calibration ", "worst classes", "most frequent confusions"):
        assert title in text
    found = json.loads((out / "evaluation.json").read_text())
    assert f"{found['accuracy']:.2f}%" in text
    assert {path.name for path in out.iterdir()} == {
        "evaluation.json",
        "classes.csv",
        "confusion.csv",
        "predictions.csv",
    }
    confusion = pd.read_csv(out / "confusion.csv", index_col="label")
    assert confusion.to_numpy().sum() == found["images"] == 359
    assert np.diag(confusion).sum() / 3.59 == pytest.approx(found["accuracy"])
    most = found["confusions"][0]
    assert confusion.loc[int(most["label"]), most["predicted_label"]] == most["images"]
    predictions = pd.read_csv(out / "predictions.csv")
    right = predictions["label"] == predictions["predicted_label"]
    assert 100 * right.mean() == pytest.approx(found["accuracy"])
    classes = pd.read_csv(out / "classes.csv", dtype={"class": str}).set_index("class")
    assert found["by_class"]["3"]["recall"] == pytest.approx(classes.loc["3", "recall"], rel=1e-5)
    code, _, err = call("evaluate", digits_run, "digits", "--out", out, capsys=capsys)
    assert (code, f"--out {out}: exists already" in err) == (2, True)


def test_json_output(photo_run, photo_folder, capsys):
    code, text, err = call("evaluate", photo_run, photo_folder, "--json", "--best", capsys=capsys)
    assert (code, err) == (0, "")
    assert json.loads(text)["images"] == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["RUN"], "SOURCE"),
        (["RUN", "digitz"], "source digitz: no such file, folder or dataset; did you mean digits?"),
        (["RUN", "digits"], "has the class 6, which the model does not have"),
        (["RUN", "PHOTOS", "--part", "dev"], "--part"),
        (["nowhere", "PHOTOS"], "nowhere: no such run"),
    ],
)
def test_wrong_input_is_one_line(
    given, message, photo_run, photo_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    filled = [w.replace("RUN", str(photo_run)).replace("PHOTOS", str(photo_folder)) for w in given]
    code, out, err = call("evaluate", *filled, "--out", "x", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []
