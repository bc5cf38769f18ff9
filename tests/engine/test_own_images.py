"""Training on folders and tables of image files, from the command to the label table."""

import json
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
from pseudoloss.config import Settings
from pseudoloss.presets import request
from pseudoloss.data import ImageFiles, Reader, find_source
from pseudoloss.data.storage import FileImages
from pseudoloss.engine.choices import choose_normalisation, choose_reader
from pseudoloss.engine.fitting import Pace, choose_settings, epochs_in, fit_to_data, measure_pace
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.progress import SilentReporter

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
    assert noise["rate"] == pytest.approx(trained_on["is_label_issue"].mean())


def test_the_command_says_what_it_leaves_out_and_how_accuracy_is_meant(photos, tmp_path, capsys):
    (photos / "ant" / "broken.png").write_bytes(b"\x89PNG")
    words = ["train", photos, "--out", tmp_path / "run", "--network", "small-cnn", "--epochs", "2"]
    assert main([str(word) for word in [*words, "--image-size", "8", "--fit", "stretch"]]) == 0
    text = capsys.readouterr().out
    assert "1 file is left out (the first: ant/broken.png" in text
    assert "Settings: --preset scratch and, to fit the images, --batch-size 4" in text
    assert "on held-out images" in text
    assert "on noisy labels" in text
    assert "of the labels seem to be wrong; most in class" in text


def left_out(run):
    (notice,) = (notice for notice in run.summary["notices"] if notice["kind"] == "skipped")
    return notice


def test_what_is_left_out_is_told_without_a_folder_too(photos, tmp_path, capsys):
    (photos / "ant" / "broken.png").write_bytes(b"\x89PNG")
    notice = left_out(pl.train(photos, **QUICK))
    assert notice["epoch"] == 1
    assert notice["text"].startswith("1 file is left out (the first: ant/broken.png, ")
    assert "lists all" not in notice["text"]
    assert f"notice: {notice['text']}\n" in capsys.readouterr().out
    notice = left_out(pl.train(photos, tmp_path / "run", quiet=True, **QUICK))
    assert notice["text"].endswith(f"; {tmp_path}/run/skipped.csv lists all")


def test_what_is_left_out_of_a_resumed_run_is_listed(photos, tmp_path):
    """A table that was saved into the folder of images, say, while the run was stopped."""
    out = tmp_path / "run"
    pl.train(photos, out, quiet=True, minutes=1e-9, **QUICK)
    assert not (out / "skipped.csv").exists()
    (photos / "mended.csv").write_text("path,label\n")
    run = pl.train(out=out, resume=True, quiet=True)
    assert run.finished
    assert "mended.csv" in left_out(run)["text"]
    assert pd.read_csv(out / "skipped.csv")["path"].tolist() == ["mended.csv"]


def test_what_is_left_out_may_be_another_file_later(photos, tmp_path):
    out = tmp_path / "run"
    (photos / "a.txt").write_text("no image")
    pl.train(photos, out, quiet=True, minutes=1e-9, **QUICK)
    (photos / "a.txt").rename(photos / "b.txt")
    run = pl.train(out=out, resume=True, quiet=True, minutes=1e-9)
    assert "b.txt" in left_out(run)["text"]
    assert pd.read_csv(out / "skipped.csv")["path"].tolist() == ["b.txt"]
    (photos / "b.txt").unlink()
    run = pl.train(out=out, resume=True, quiet=True)
    assert (run.finished, (out / "skipped.csv").exists()) == (True, False)
    assert "skipped" not in {notice["kind"] for notice in run.summary["notices"]}


def test_a_run_inside_the_test_images_is_refused(photos, tmp_path):
    checked = tmp_path / "checked"
    shutil.copytree(photos, checked)
    with pytest.raises(InputError, match=r"checked/run: lies in .*checked, whose folders are cla"):
        pl.train(photos, checked / "run", test=str(checked), quiet=True, **QUICK)
    assert not (checked / "run").exists()


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_class_is_the_same_however_its_signs_are_written(photos, tmp_path, form):
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
    words = {"label_column": "kind", "test": str(tmp_path / "checked.csv")}
    pl.train(photos, quiet=True, **words, **QUICK)  # its test images come from one


def test_strict_refuses_and_writes_nothing(photos, tmp_path):
    (photos / "ant" / "broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match=r"ant/broken.png cannot be read .*--strict"):
        pl.train(photos, out=tmp_path / "run", strict=True, quiet=True, **QUICK)
    assert not (tmp_path / "run").exists()


def test_a_file_that_breaks_behind_its_header_is_left_out(photos, tmp_path):
    whole = (photos / "ant" / "000.png").read_bytes()
    (photos / "ant" / "half.png").write_bytes(whole[: len(whole) // 2])
    run = pl.train(photos, out=tmp_path / "run", hold_out=0, quiet=True, **QUICK)
    assert "ant/half.png" not in set(run.labels["path"])
    assert pd.read_csv(tmp_path / "run" / "skipped.csv")["path"].tolist() == ["ant/half.png"]
    with pytest.raises(InputError, match=r"ant/half.png cannot be read"):
        pl.train(photos, strict=True, quiet=True, **QUICK)


def test_parts_of_a_folder_and_a_test_set_from_elsewhere(tmp_path):
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


def test_a_table_and_the_folder_that_it_describes_train_alike(photos, tmp_path):
    rows = [
        (path.relative_to(tmp_path), path.parent.name) for path in sorted(photos.rglob("*.png"))
    ]
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(tmp_path / "set.csv", index=False)
    one = pl.train(photos, quiet=True, **QUICK)
    other = pl.train(tmp_path / "set.csv", quiet=True, **QUICK)
    assert one.labels["label_score"].equals(other.labels["label_score"])


def test_normalisation_is_the_same_wherever_images_lie(photos):
    listing = find_source(str(photos))
    found = [
        listing.read(Reader(3, (8, 8)), 8, where, strict=False)[0] for where in ("host", "files")
    ]
    assert found[0].normalisation() == found[1].normalisation()
    assert found[0].fingerprint() == found[1].fingerprint()


def test_a_worker_that_is_killed_is_said_in_one_line(photos, monkeypatch):
    whole = Trainer.train_epoch

    def kill(trainer, epoch):
        if epoch == 1:
            os.kill(trainer.pixels.loader._iterator._workers[0].pid, signal.SIGKILL)
        return whole(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", kill)
    with pytest.raises(TrainingError, match=r"decoding images failed \(.*\); --resume goes on"):
        pl.train(photos, quiet=True, images="files", **QUICK)


def test_the_same_command_resumes_from_another_folder(photos, tmp_path, monkeypatch):
    write_images(tmp_path / "clean", counts=(3, 3, 3, 3), seed=2)
    monkeypatch.chdir(tmp_path)
    words = {"out": tmp_path / "run", "quiet": True, **QUICK}
    pl.train("photos", test="clean", minutes=1e-4, **words)
    pl.train("photos", test="clean", minutes=1e-4, resume=True, **words)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pl.train(out=tmp_path / "run", resume=True, quiet=True).finished


def test_weights_are_found_again_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert request(None, None, {"weights": "w.pth"}).values["weights"] == str(tmp_path / "w.pth")
    assert request(None, None, {"weights": "pretrained"}).values["weights"] == "pretrained"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"seed": -1}, "--seed must be 0"),
        ({"seed": "a"}, "--seed must be a whole number"),
        ({"path_column": None}, "--path-column must be text"),
        ({"test": 5}, "--test must be text"),
    ],
)
def test_wrong_words_about_files_are_one_line(photos, words, message):
    with pytest.raises(InputError, match=message):
        pl.train(photos, quiet=True, **QUICK, **words)


def test_a_path_may_name_the_test_images(photos, tmp_path):
    clean = write_images(tmp_path / "clean", counts=(3, 3, 3, 3), seed=2)
    run = pl.train(photos, test=clean, quiet=True, **QUICK)
    assert run.summary["accuracy"]["on"] == "the images of clean"


def test_files_that_are_decoded_in_every_epoch_train_alike(photos):
    one = pl.train(photos, quiet=True, images="host", **QUICK)
    other = pl.train(photos, quiet=True, images="files", **QUICK)
    assert one.labels.equals(other.labels)
    assert one.summary["accuracy"]["last"] == other.summary["accuracy"]["last"]


def test_a_run_on_files_goes_on_where_it_stopped(photos, tmp_path):
    whole = pl.train(photos, out=tmp_path / "whole", quiet=True, hold_out=0.25, **QUICK)
    out = tmp_path / "run"
    pl.train(photos, out=out, quiet=True, hold_out=0.25, minutes=1e-4, **QUICK)
    with pytest.raises(InputError, match="--hold-out is not what the run began with"):
        pl.train(out=out, resume=True, quiet=True, hold_out=0.5)
    resumed = pl.train(out=out, resume=True, quiet=True, images="files")
    assert resumed.finished
    assert resumed.labels["label_score"].equals(whole.labels["label_score"])


def test_another_file_is_noticed_when_a_run_goes_on(photos, tmp_path):
    pl.train(photos, out=tmp_path / "run", quiet=True, minutes=1e-4, **QUICK)
    Image.new("RGB", (10, 10), "red").save(photos / "ant" / "000.png")
    with pytest.raises(InputError, match="are not those the run began with"):
        pl.train(out=tmp_path / "run", resume=True, quiet=True)


def test_a_file_that_is_lost_on_the_way_does_not_end_the_run(photos, tmp_path, monkeypatch):
    whole = Trainer.train_epoch

    def lose(trainer, epoch):
        (photos / "cat" / "003.png").unlink(missing_ok=True)
        return whole(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", lose)
    monkeypatch.setattr("pseudoloss.engine.training.MOST_LOST", 1 / 64)
    run = pl.train(photos, quiet=True, images="files", hold_out=0, **QUICK)
    assert run.finished
    (notice,) = [n["text"] for n in run.summary["notices"] if n["kind"] == "files"]
    assert "1 file cannot be read any more (the first: cat/003.png)" in notice


def test_many_lost_files_end_the_run(photos, monkeypatch):
    whole = Trainer.train_epoch

    def lose(trainer, epoch):
        for path in photos.rglob("*.png") if epoch else ():
            path.unlink(missing_ok=True)
        return whole(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", lose)
    with pytest.raises(TrainingError, match=r"64 files cannot be read any more .*--resume goes on"):
        pl.train(photos, quiet=True, images="files", hold_out=0, **QUICK)


def test_workers_bring_the_images_of_the_order(photos):
    paths = tuple(sorted(photos.rglob("*.png")))
    reader = Reader(3, (8, 8))
    all_images = torch.stack([torch.from_numpy(reader.read(path)) for path in paths])
    pixels = FileImages(ImageFiles(paths, reader, torch.ones(3, 256)), torch.device("cpu"))
    assert len(pixels) == 64
    for _ in range(2):
        order = torch.randperm(64)[:60].view(6, 10)
        seen = [pixels.batch(order[i]).clone() for i, _ in enumerate(pixels.batches(order))]
        assert torch.equal(torch.stack(seen), all_images[order])
        assert torch.equal(torch.cat(list(pixels.parts(9))), all_images)


# ----------------------------------------------------------------------- settings that fit


@pytest.mark.parametrize(("side", "preset"), [(64, "scratch"), (65, "finetune")])
def test_the_preset_that_fits(tmp_path, side, preset):
    listing = find_source(str(write_images(tmp_path / "photos", size=side)))
    assert (listing.preset, listing.typical_side) == (preset, side)


def test_photographs_are_stored_larger_than_they_are_seen(photos):
    listing = find_source(str(photos))
    reader, seen = choose_reader(listing, Settings(network="resnet50"), "crop")
    assert (reader.size, reader.channels, seen) == ((256, 256), 3, 224)
    reader, seen = choose_reader(listing, Settings(network="resnet50", image_size=448), "crop")
    assert (reader.size, seen) == ((512, 512), 448)  # row 21
    reader, seen = choose_reader(listing, Settings(), "stretch")
    assert (reader.size, reader.fit, seen) == ((32, 32), "stretch", 32)


def test_grey_images_stay_grey_unless_the_weights_know_colours(tmp_path):
    for path in write_images(tmp_path / "photos").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    listing = find_source(str(tmp_path / "photos"))
    assert choose_reader(listing, Settings(), "crop")[0].channels == 1
    published = Settings(network="resnet10t", weights="pretrained")
    assert choose_reader(listing, published, "crop")[0].channels == 3


def test_normalisation_comes_with_the_weights(tiny_source, tmp_path):
    images, labels = make_images(channels=3)
    colour = pl.arrays(images, labels)
    published = Settings(network="resnet50", weights="pretrained")
    assert choose_normalisation(colour, published)[0] == (0.485, 0.456, 0.406)
    assert choose_normalisation(colour, Settings(network="resnet50")) == colour.normalisation()
    assert choose_normalisation(tiny_source, published) == tiny_source.normalisation()


@pytest.mark.parametrize(
    ("counts", "changes", "fitting"),
    [
        ((64,) * 4, {}, {"batch_size": 32}),
        ((512,) * 4, {}, {}),
        ((250, 250, 250, 100), {}, {"balance_prior": "given"}),
        ((3,) * 4, {}, {"batch_size": 2}),
        ((3,) * 4, {"accumulate": 4}, {"batch_size": 8}),
        ((3,) * 4, {"accumulate": 4, "batch_size": 40}, {"batch_size": 20}),
        ((3,) * 4, {"accumulate": 4, "batch_size": 20}, {}),
        ((30,) * 4, {"batch_size": 50}, {"batch_size": 25}),
    ],
)
def test_few_or_uneven_images(counts, changes, fitting):
    usual = Settings(**{"batch_size": 64} | changes)
    assert fit_to_data(dict(zip(NAMES, counts, strict=True)), usual) == fitting


def test_a_cpu_gets_a_small_network_unless_another_is_asked_for(photos):
    listing = find_source(str(photos))
    chosen = choose_settings(listing, request(None, None, {"device": "cpu"}))
    assert (chosen.settings.network, chosen.settings.epochs) == ("small-cnn", 30)
    asked = request(None, None, {"device": "cpu", "network": "preactresnet18"})
    settings = choose_settings(listing, asked).settings
    assert (settings.network, settings.epochs) == ("preactresnet18", 100)


def test_photographs_with_a_network_of_ours_need_no_weights(tmp_path):
    listing = find_source(str(write_images(tmp_path / "photos", size=80)))
    settings = choose_settings(listing, request(None, None, {"network": "small-cnn"})).settings
    assert (listing.preset, settings.weights) == ("finetune", None)
    asked = request(None, None, {"network": "small-cnn", "weights": "pretrained"})
    assert choose_settings(listing, asked).settings.weights == "pretrained"  # and is refused later


def test_arrays_get_settings_that_fit_too():
    images, labels = make_images(n=40)
    run = pl.train((images, labels), quiet=True, network="small-cnn", epochs=2, hold_out=0.2)
    assert run.settings.batch_size == 4
    assert run.summary["images"] == 32
    assert run.summary["accuracy"]["on"] == "held-out images"
    assert run.summary["accuracy"]["noisy_labels"] is True
    assert pl.train((images, labels), quiet=True, **QUICK).summary["accuracy"]["last"] is None


def test_arrays_with_test_images_hold_none_out(tiny_source):
    with pytest.raises(InputError, match="--hold-out: arrays has test images already"):
        pl.train(tiny_source, hold_out=0.2, quiet=True, **QUICK)


def test_few_images_train_with_all_that_fits(tmp_path):
    photos = write_images(tmp_path / "photos", counts=(40, 5, 3, 3))
    run = pl.train(photos, preset="scratch", quiet=True, network="small-cnn", epochs=2)
    assert run.settings.balance_prior == "given"
    assert run.settings.batch_size == 4
    assert run.settings.lr == pytest.approx(0.05 * 4 / 128)


def test_two_classes(tmp_path):
    photos = write_images(tmp_path / "photos", counts=(30, 30, 0, 0))
    for name in ("cat", "dog"):
        (photos / name).rmdir()
    run = pl.train(photos, quiet=True, **QUICK)
    assert run.model.classes == ("ant", "bee")
    assert set(run.labels["predicted_label"]) <= {"ant", "bee"}


def test_the_prior_of_an_imbalanced_set_is_that_of_its_labels():
    images, labels = make_images(n=64)
    keep = np.flatnonzero((labels == 0) | (np.arange(64) % 8 == 1))
    data = pl.arrays(images[keep], labels[keep])
    settings = request(None, None, QUICK | {"balance_prior": "given", "batch_size": 4})
    with Trainer(data, settings.settings("default"), SilentReporter()) as trainer:
        assert trainer.method.prior_C.tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(("n", "seed"), [(864, 1), (288, 7), (288, 8)])
def test_a_rare_class_is_learnt(n, seed):
    """Of 36 images beside 288 of each other class, or of 12 beside 96: there stage 1 first takes
    all its labels for noise, which with seed 8 would be the end of it."""
    images, labels = make_images(n=n, classes=3, size=9)
    keep = np.flatnonzero((labels != 2) | (np.arange(n) % 8 == 0))
    assert np.bincount(labels[keep]).tolist() == [n // 3, n // 3, n // 24]
    settings = {"network": "small-cnn", "epochs": 10, "batch_size": 32, "lr": 0.05, "flip": False}
    settings |= {"pad": 0, "balance_prior": "given", "seed": seed}
    run = pl.train(pl.arrays(images[keep], labels[keep]), quiet=True, **settings)
    test_images, test_labels = make_images(n=90, classes=3, size=9, seed=1)
    right = run.model.predict(test_images) == test_labels.astype(str)
    assert all(right[test_labels == label].mean() > 0.8 for label in range(3))


@pytest.mark.parametrize("warmup", [None, 6])
@pytest.mark.parametrize("seconds", [1, 50, 500, 12345])
def test_epochs_fit_into_the_time(warmup, seconds):
    pace = Pace(warm_up=1, main=3, track=0.5, validate=0.25, ready=0)
    settings = Settings(epochs=40, warmup=warmup)
    epochs = epochs_in(pace, settings, seconds)
    assert epochs == 2 or pace.of(settings, epochs) <= seconds
    assert pace.of(settings, epochs + 1) > seconds
    if epochs > 10:  # the warm-up keeps its share
        mean = 0.15 * 1 + 0.85 * 3.5 + 0.25
        assert pace.of(settings, epochs) == pytest.approx(epochs * mean, rel=0.05)


def test_the_pace_counts_the_way_of_the_images(photos, monkeypatch):
    """By a clock that only decoding moves: a second a batch."""
    clock = [0.0]

    def slowly(pixels):
        for batch in whole(pixels):
            clock[0] += 1
            yield batch

    whole = FileImages._decoded
    monkeypatch.setattr(FileImages, "_decoded", slowly)
    monkeypatch.setattr("pseudoloss.engine.fitting.time.monotonic", lambda: clock[0])
    listing = find_source(str(photos))
    data, _ = listing.read(Reader(3, (8, 8)), 8, "files", strict=False)
    with Trainer(data, request(None, None, QUICK).settings("default"), SilentReporter()) as trainer:
        pace = measure_pace(trainer)
    assert pace == pytest.approx((3, 3, 1, 8 / 56, 0))  # 56 images: three batches, or one part


def test_epochs_that_the_time_chooses_are_not_named_before(photos, capsys):
    pl.train(photos, device="cpu", minutes=1e-9, image_size=8)
    assert "--network small-cnn --epochs 30" in capsys.readouterr().out
    pl.train(photos, device="cpu", time_budget=0.05, image_size=8)
    text = capsys.readouterr().out
    assert "--network small-cnn\n" in text
    assert "--epochs" not in text.partition("Done")[0].partition("notice")[0]


def test_a_time_that_is_too_short_is_in_the_summary(photos):
    run = pl.train(photos, quiet=True, device="cpu", time_budget=1e-6, image_size=8)
    (notice,) = (notice for notice in run.summary["notices"] if notice["kind"] == "time")
    assert "is too short: 2 epochs, the least, take about" in notice["text"]


def test_a_budget_of_time_chooses_the_epochs(tiny_source, tmp_path):
    run = pl.train(
        *(tiny_source, tmp_path / "run"),
        time_budget=0.05,
        network="small-cnn",
        batch_size=16,
        quiet=True,
    )
    assert run.finished
    assert run.settings.epochs == run.summary["epochs"] >= 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["epochs"] == run.settings.epochs


@pytest.mark.parametrize(
    ("word", "minutes"), [("30m", 30), ("2h", 120), ("90s", 1.5), ("5", 5), ("0.5h", 30)]
)
def test_times_in_words(word, minutes):
    from pseudoloss.cli import train_parser

    assert train_parser(None).parse(["x", "--time", word]).time == pytest.approx(minutes)


@pytest.mark.parametrize("word", ["soon", "0", "", "h", "1e9h", "nan"])
def test_other_words_are_no_time(word, capsys):
    assert main(["train", "digits", "--out", "x", "--time", word]) == 2
    assert "--time: must be a time" in capsys.readouterr().err


# ------------------------------------------------------------------------------- accumulation


def test_a_step_in_parts_computes_each_part_alone(tiny_source, tiny_settings):
    """Cross-entropy without batch statistics is a mean, so parts add up to the whole."""
    values = tiny_settings | {"method": "ce", "network": "resnet10t", "flip": False, "pad": 0}
    found = []
    for parts in (1, 4):
        settings = request(None, None, values | {"accumulate": parts}).settings("default")
        with Trainer(tiny_source, settings, SilentReporter()) as trainer:
            for norm in trainer.network.modules():
                if isinstance(norm, torch.nn.BatchNorm2d):  # by running statistics, always
                    norm.eval()
                    norm.train = lambda mode: None
            trainer.train_epoch(0)
            found.append(torch.cat([p.detach().flatten() for p in trainer.network.parameters()]))
    assert torch.allclose(*found, atol=1e-5)


def test_every_method_trains_in_parts(tiny_source, tiny_settings):
    for method in ("pls", "ce", "mixup"):
        run = pl.train(
            tiny_source, quiet=True, **tiny_settings | {"method": method, "accumulate": 2}
        )
        assert run.finished
