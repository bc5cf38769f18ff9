"""Training on folders and tables of image files, from the command to the label table."""

import os
import shutil
import signal
import unicodedata

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import pseudoloss as pl
from conftest import make_images
from pseudoloss.cli import main
from pseudoloss.data import ImageFiles, Reader, find_source
from pseudoloss.data.storage import FileImages
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.presets import request

NAMES = ("ant", "bee", "cat", "dog")
QUICK = {"network": "small-cnn", "batch_size": 16, "epochs": 3, "warmup": 1, "image_size": 8}


def write_images(folder, counts=(16, 16, 16, 16), size=10, seed=0):
    """Class folders of images that show their class."""
    images, labels = make_images(n=4 * max(counts), size=size, channels=3, seed=seed)
    for label, (name, count) in enumerate(zip(NAMES, counts, strict=True)):
        (folder / name).mkdir(parents=True)
        for i, image in enumerate(images[labels == label][:count]):
            Image.fromarray(image).save(folder / name / f"{i:03}.png")
    return folder


@pytest.fixture
def photos(tmp_path):
    return write_images(tmp_path / "photos")


def test_a_folder_becomes_a_label_table(photos, tmp_path):
    (photos / "ant" / "notes.txt").write_text("not an image")
    (photos / "bee" / "empty.jpg").touch()
    run = pl.train(photos, out=tmp_path / "run", quiet=True, **QUICK)
    assert run.finished
    counts = run.labels["part"].value_counts()
    assert counts.to_dict() == {"train": 4 * 14, "held-out": 4 * 2}  # a tenth of sixteen: two
    assert set(run.labels["given_label"]) == set(NAMES)
    assert all((photos / path).is_file() for path in run.labels["path"])
    skipped = pd.read_csv(tmp_path / "run" / "skipped.csv")
    assert skipped["path"].tolist() == ["ant/notes.txt", "bee/empty.jpg"]
    assert skipped["reason"].tolist() == ["not an image, or a broken one", "empty file"]
    accuracy = run.summary["accuracy"]
    assert accuracy["on"] == "held-out images"
    assert accuracy["noisy_labels"] is True
    noise = run.summary["estimated_noise"]
    assert noise["by_class"].keys() == set(NAMES)
    trained_on = run.labels[run.labels["part"] == "train"]
    assert noise["rate"] == pytest.approx(trained_on["p_noisy"].mean(), abs=1e-3)


def test_the_command_prints_what_it_skips_and_how_accuracy_is_measured(photos, tmp_path, capsys):
    (photos / "ant" / "broken.png").write_bytes(b"\x89PNG")
    arguments = ["train", photos, "--out", tmp_path / "run", "--network", "small-cnn"]
    arguments += ["--epochs", "2", "--image-size", "8", "--fit", "stretch"]
    assert main([str(argument) for argument in arguments]) == 0
    text = capsys.readouterr().out
    assert "1 file is skipped (the first: ant/broken.png" in text
    assert "Settings: --preset scratch and, to fit the images, --batch-size 4" in text
    assert "on held-out images" in text
    assert ", whose labels may be wrong too" in text
    assert "their labels may be wrong too: the true accuracy can differ" in text
    assert "  noise      not known: " in text


def skipped_notice(run):
    (notice,) = (notice for notice in run.summary["notices"] if notice["kind"] == "skipped")
    return notice


def test_skipped_files_are_reported_with_and_without_a_run_folder(photos, tmp_path, capsys):
    (photos / "ant" / "broken.png").write_bytes(b"\x89PNG")
    notice = skipped_notice(pl.train(photos, **QUICK))
    assert notice["epoch"] == 1
    assert notice["text"].startswith("1 file is skipped (the first: ant/broken.png, ")
    assert "lists all" not in notice["text"]
    assert f"notice: {notice['text']}\n" in capsys.readouterr().out
    notice = skipped_notice(pl.train(photos, tmp_path / "run", quiet=True, **QUICK))
    assert notice["text"].endswith(f"; {tmp_path}/run/skipped.csv lists all")


def test_files_that_a_resumed_run_skips_are_listed(photos, tmp_path):
    """For example a table that was saved into the folder of images while the run was stopped."""
    out = tmp_path / "run"
    pl.train(photos, out, quiet=True, minutes=1e-9, **QUICK)
    assert not (out / "skipped.csv").exists()
    (photos / "corrected.csv").write_text("path,label\n")
    run = pl.train(out=out, resume=True, quiet=True)
    assert run.finished
    assert "corrected.csv" in skipped_notice(run)["text"]
    assert pd.read_csv(out / "skipped.csv")["path"].tolist() == ["corrected.csv"]


def test_other_files_may_be_skipped_after_a_resume(photos, tmp_path):
    out = tmp_path / "run"
    (photos / "a.txt").write_text("no image")
    pl.train(photos, out, quiet=True, minutes=1e-9, **QUICK)
    (photos / "a.txt").rename(photos / "b.txt")
    run = pl.train(out=out, resume=True, quiet=True, minutes=1e-9)
    assert "b.txt" in skipped_notice(run)["text"]
    assert pd.read_csv(out / "skipped.csv")["path"].tolist() == ["b.txt"]
    (photos / "b.txt").unlink()
    run = pl.train(out=out, resume=True, quiet=True)
    assert (run.finished, (out / "skipped.csv").exists()) == (True, False)
    assert "skipped" not in {notice["kind"] for notice in run.summary["notices"]}


def test_a_run_inside_the_test_images_is_refused(photos, tmp_path):
    checked = tmp_path / "checked"
    shutil.copytree(photos, checked)
    with pytest.raises(
        InputError, match=r"checked/run: is inside .*checked, whose folders are cla"
    ):
        pl.train(photos, checked / "run", test=str(checked), quiet=True, **QUICK)
    assert not (checked / "run").exists()


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_class_is_the_same_in_both_unicode_forms(photos, tmp_path, form):
    name = unicodedata.normalize(form, "äpfel")
    (photos / "ant").rename(photos / name)
    run = pl.train(photos, tmp_path / "run", quiet=True, **QUICK)
    assert name in run.model.classes
    before = run.model.evaluate(photos)
    other = unicodedata.normalize("NFD" if form == "NFC" else "NFC", name)
    (photos / name).rename(photos / other)
    after = run.model.evaluate(photos)
    pd.testing.assert_frame_equal(after.confusion, before.confusion)


def test_columns_are_for_tables(photos, tmp_path):
    message = "--label-column is for tables"
    with pytest.raises(InputError, match=message):
        pl.train(photos, label_column="kind", quiet=True, **QUICK)
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.glob("*/*.*"))]
    (tmp_path / "checked.csv").write_text("\n".join(["path,kind", *rows]))
    test = str(tmp_path / "checked.csv")
    pl.train(photos, quiet=True, label_column="kind", test=test, **QUICK)  # the test set is one


def test_strict_refuses_and_writes_nothing(photos, tmp_path):
    (photos / "ant" / "broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"ant/broken.png cannot be read .*--strict"):
        pl.train(photos, out=tmp_path / "run", strict=True, quiet=True, **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_truncated_after_its_header_is_skipped(photos, tmp_path):
    whole = (photos / "ant" / "000.png").read_bytes()
    (photos / "ant" / "half.png").write_bytes(whole[: len(whole) // 2])
    run = pl.train(photos, out=tmp_path / "run", hold_out=0, quiet=True, **QUICK)
    assert "ant/half.png" not in set(run.labels["path"])
    assert pd.read_csv(tmp_path / "run" / "skipped.csv")["path"].tolist() == ["ant/half.png"]
    with pytest.raises(InputError, match=r"ant/half.png cannot be read"):
        pl.train(photos, strict=True, quiet=True, **QUICK)


def test_splits_of_a_folder_and_a_separate_test_set(tmp_path):
    root = tmp_path / "set"
    write_images(root / "train")
    write_images(root / "val", counts=(4, 4, 4, 4), seed=1)
    clean = write_images(tmp_path / "clean", counts=(3, 3, 3, 3), seed=2)
    run = pl.train(root, quiet=True, **QUICK)
    assert (run.summary["images"], run.summary["accuracy"]["on"]) == (64, "the val images")
    assert run.summary["accuracy"]["noisy_labels"] is False
    run = pl.train(root / "train", test=str(clean), quiet=True, **QUICK)
    assert run.summary["images"] == 64
    assert run.summary["accuracy"]["on"] == "the images of clean"
    run = pl.train(root / "train", hold_out=0, quiet=True, **QUICK)
    assert run.summary["accuracy"]["last"] is None


def test_a_table_and_the_folder_that_it_describes_give_the_same_run(photos, tmp_path):
    rows = [
        (path.relative_to(tmp_path), path.parent.name) for path in sorted(photos.rglob("*.png"))
    ]
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(tmp_path / "set.csv", index=False)
    one = pl.train(photos, quiet=True, **QUICK)
    other = pl.train(tmp_path / "set.csv", quiet=True, **QUICK)
    assert one.labels["label_score"].equals(other.labels["label_score"])


def test_normalisation_is_the_same_wherever_images_are_kept(photos):
    scanned = find_source(str(photos))
    found = [
        scanned.read(Reader(3, (8, 8)), 8, where, strict=False)[0] for where in ("host", "files")
    ]
    assert found[0].normalisation() == found[1].normalisation()
    assert found[0].fingerprint() == found[1].fingerprint()


def test_a_killed_worker_is_one_line(photos, monkeypatch):
    whole = Trainer.train_epoch

    def kill(trainer, epoch):
        if epoch == 1:
            os.kill(trainer.images.loader._iterator._workers[0].pid, signal.SIGKILL)
        return whole(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", kill)
    with pytest.raises(TrainingError, match=r"decoding images failed \(.*\); .*--resume"):
        pl.train(photos, quiet=True, images="files", **QUICK)


def test_the_same_command_resumes_from_another_folder(photos, tmp_path, monkeypatch):
    write_images(tmp_path / "clean", counts=(3, 3, 3, 3), seed=2)
    monkeypatch.chdir(tmp_path)
    settings = {"out": tmp_path / "run", "quiet": True, **QUICK}
    pl.train("photos", test="clean", minutes=1e-9, **settings)
    pl.train("photos", test="clean", minutes=1e-9, resume=True, **settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pl.train(out=tmp_path / "run", resume=True, quiet=True).finished


def no_network(*args, **options):
    raise OSError("no connection")


def test_photographs_are_trained_without_a_connection(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.create_connection", no_network)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    folder = write_images(tmp_path / "large", counts=(4, 4, 4, 4), size=80)
    settings = {"epochs": 1, "image_size": 32, "hold_out": 0, "device": "cpu"}
    run = pl.train(folder, quiet=True, **settings)
    assert (run.settings.network, run.settings.weights) == ("tf_efficientnet_lite0", "embedded")
    assert run.model.description.mean == (0.5, 0.5, 0.5)


def test_photographs_are_not_shrunk_silently(tmp_path):
    folder = write_images(tmp_path / "large", counts=(4, 4, 4, 4), size=80)
    settings = {"network": "small-cnn", "epochs": 1, "hold_out": 0, "quiet": True}
    for asked, kinds in (({}, ["shrunk"]), ({"image_size": 32}, [])):
        run = pl.train(folder, **settings, **asked)
        assert [n["kind"] for n in run.summary["notices"] if n["kind"] == "shrunk"] == kinds
        assert run.model.description.size == (32, 32)


def test_weights_are_found_again_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert request(None, None, {"weights": "w.pth"}).values["weights"] == str(tmp_path / "w.pth")
    assert request(None, None, {"weights": "pretrained"}).values["weights"] == "pretrained"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "--seed must be 0"),
        ({"seed": "a"}, "--seed must be a whole number"),
        ({"path_column": None}, "--path-column must be text"),
        ({"test": 5}, "--test must be text"),
    ],
)
def test_bad_options_for_files_are_one_line(photos, changes, message):
    with pytest.raises(InputError, match=message):
        pl.train(photos, quiet=True, **QUICK, **changes)


def test_the_test_images_may_be_given_as_a_path(photos, tmp_path):
    clean = write_images(tmp_path / "clean", counts=(3, 3, 3, 3), seed=2)
    run = pl.train(photos, test=clean, quiet=True, **QUICK)
    assert run.summary["accuracy"]["on"] == "the images of clean"


def test_files_that_are_decoded_in_every_epoch_give_the_same_run(photos):
    one = pl.train(photos, quiet=True, images="host", **QUICK)
    other = pl.train(photos, quiet=True, images="files", **QUICK)
    assert one.labels.equals(other.labels)
    assert one.summary["accuracy"]["last"] == other.summary["accuracy"]["last"]


def test_a_run_on_files_resumes_where_it_stopped(photos, tmp_path):
    whole = pl.train(photos, out=tmp_path / "whole", quiet=True, hold_out=0.25, **QUICK)
    out = tmp_path / "run"
    pl.train(photos, out=out, quiet=True, hold_out=0.25, minutes=1e-9, **QUICK)
    with pytest.raises(InputError, match="--hold-out is not what the run began with"):
        pl.train(out=out, resume=True, quiet=True, hold_out=0.5)
    resumed = pl.train(out=out, resume=True, quiet=True, images="files")
    assert resumed.finished
    assert resumed.labels["label_score"].equals(whole.labels["label_score"])


def test_a_changed_file_is_noticed_when_a_run_is_resumed(photos, tmp_path):
    pl.train(photos, out=tmp_path / "run", quiet=True, minutes=1e-9, **QUICK)
    Image.new("RGB", (10, 10), "red").save(photos / "ant" / "000.png")
    with pytest.raises(InputError, match="are not those the run began with"):
        pl.train(out=tmp_path / "run", resume=True, quiet=True)


def test_a_file_that_vanishes_during_a_run_does_not_end_it(photos, tmp_path, monkeypatch):
    whole = Trainer.train_epoch

    def lose(trainer, epoch):
        (photos / "cat" / "003.png").unlink(missing_ok=True)
        return whole(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", lose)
    monkeypatch.setattr("pseudoloss.engine.loop.MOST_LOST", 1 / 64)
    run = pl.train(photos, quiet=True, images="files", hold_out=0, **QUICK)
    assert run.finished
    (notice,) = [n["text"] for n in run.summary["notices"] if n["kind"] == "files"]
    assert "1 file can no longer be read (the first: cat/003.png)" in notice


def test_many_files_that_vanish_end_the_run(photos, monkeypatch):
    whole = Trainer.train_epoch

    def lose(trainer, epoch):
        for path in photos.rglob("*.png") if epoch else ():
            path.unlink(missing_ok=True)
        return whole(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", lose)
    with pytest.raises(TrainingError, match=r"64 files can no longer be read .*--resume"):
        pl.train(photos, quiet=True, images="files", hold_out=0, **QUICK)


def test_workers_decode_the_images_in_the_order_of_the_steps(photos):
    paths = tuple(sorted(photos.rglob("*.png")))
    reader = Reader(3, (8, 8))
    all_images = torch.stack([torch.from_numpy(reader.read(path)) for path in paths])
    files = FileImages(ImageFiles(paths, reader, torch.ones(3, 256)), torch.device("cpu"))
    assert len(files) == 64
    for _ in range(2):
        order = torch.randperm(64)[:60].view(6, 10)
        seen = [files.batch(order[i]).clone() for i, _ in enumerate(files.batches(order))]
        assert torch.equal(torch.stack(seen), all_images[order])
        assert torch.equal(torch.cat(list(files.parts(9))), all_images)


def test_two_classes(tmp_path):
    photos = write_images(tmp_path / "photos", counts=(30, 30, 0, 0))
    for name in ("cat", "dog"):
        (photos / name).rmdir()
    run = pl.train(photos, quiet=True, **QUICK)
    assert run.model.classes == ("ant", "bee")
    assert set(run.labels["predicted_label"]) <= {"ant", "bee"}


def accuracy_with_a_rare_class(n, **settings):
    """Accuracy of each of three classes; the last one has an eighth of the images of the others."""
    images, labels = make_images(n=n, classes=3, size=9)
    keep = np.flatnonzero((labels != 2) | (np.arange(n) % 8 == 0))
    assert np.bincount(labels[keep]).tolist() == [n // 3, n // 3, n // 24]
    settings |= {"network": "small-cnn", "epochs": 10, "batch_size": 32, "lr": 0.05}
    settings |= {"flip": False, "pad": 0, "balance_prior": "given", "device": "cpu"}
    run = pl.train(pl.arrays(images[keep], labels[keep]), quiet=True, **settings)
    test_images, test_labels = make_images(n=90, classes=3, size=9, seed=1)
    right = run.model.predict(test_images) == test_labels
    return [right[test_labels == label].mean() for label in range(3)]


@pytest.mark.parametrize(("n", "seed"), [(480, 1), (288, 7), (288, 8)])
def test_a_rare_class_is_learned(n, seed):
    assert min(accuracy_with_a_rare_class(n, seed=seed)) > 0.8


def test_without_protection_a_rare_class_may_be_lost():
    """Stage 1 flags all of its labels at first, and the network never learns it."""
    *others, rare = accuracy_with_a_rare_class(288, seed=8, protect_rare_classes=False)
    assert min(others) > 0.8
    assert rare < 0.5
