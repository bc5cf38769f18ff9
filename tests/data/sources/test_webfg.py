"""Web-aircraft, Web-bird and Web-car, on a small folder with their layout."""

import shutil

import pandas as pd
import pytest
import torch
from published import (
    QUICK,
    assert_refused,
    assert_torchvision_pixels,
    read,
    save,
    save_unusual,
    truncate,
)

import pseudoloss as pl
from pseudoloss.cli import main
from pseudoloss.cli.inspection import inspect
from pseudoloss.data import ImageFiles, Reader, ReadOptions, find_source, scanning
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.errors import InputError
from pseudoloss.presets import request

SETTINGS = QUICK | {"weights": None, "image_size": 16, "batch_size": 3}


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """Paths in the training list are relative to the folder, in the other list to val/. Not to be
    changed."""
    root = tmp_path_factory.mktemp("web")
    lists = {"train": [], "val": []}
    for i in range(6):
        save(root / "train" / f"k{i % 3}" / f"{i}.jpg", (40 * i, 9, 9), (700, 520 + i))
        lists["train"].append(f"train/k{i % 3}/{i}.jpg:{i % 3}")
    for i in range(3):
        save(root / "val" / f"k{i}" / "a:b.png", 40 * i, (300, 200))
        lists["val"].append(f"k{i}/a:b.png:{i}")
    for split, lines in lists.items():
        (root / f"{split}-list.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def web_copy(web, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(web, tmp_path / "web")


@pytest.fixture(scope="module")
def web_run(web, tmp_path_factory):
    """A run with the images in memory."""
    out = tmp_path_factory.mktemp("runs") / "host"
    return pl.train(f"web-bird:{web}", out, images="host", **SETTINGS)


@pytest.mark.parametrize("name", ["web-aircraft", "web-bird", "web-car"])
def test_web_datasets(web, name):
    data, _ = read(f"{name}:{web}")
    assert data.train.images_NCHW.shape == (6, 3, 512, 512)
    assert data.test.images_NCHW.shape == (3, 3, 512, 512)
    assert data.train.given_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.train.images_NCHW[:, 0, 9, 9].int() - 40 * torch.arange(6)).abs().max() <= 4
    assert (data.train.true_N, data.preset, data.name) == (None, name, name)
    assert data.train.paths[4] == "train/k1/4.jpg"
    assert data.test.paths[1] == "val/k1/a:b.png"
    assert (data.test_name, data.noisy_test) == ("the test images", False)
    assert data.normalisation() == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert data.image_size == 448


def test_pixels_equal_torchvision(web_copy):
    save_unusual(web_copy, largest=(1300, 900))
    lines = [f"{path.name}:{i % 3}" for i, path in enumerate(sorted(web_copy.glob("n*")))]
    (web_copy / "train-list.txt").write_text("\n".join(lines))
    for where in ("host", "files"):
        data, _ = read(f"web-bird:{web_copy}", where)
        assert len(data.train) == 12
        assert_torchvision_pixels(data.train, web_copy, 512)


def test_images_stay_in_files_if_memory_is_short(web, web_run, tmp_path, monkeypatch):
    """And training gives the same labels as with images in memory."""
    source = f"web-bird:{web}"
    monkeypatch.setattr(scanning, "free_memory", lambda: 2**20)
    data, _ = read(source)
    assert isinstance(data.train.images_NCHW, ImageFiles)
    assert inspect(source).plan.images == "files"
    run = pl.train(source, tmp_path / "files", **SETTINGS)
    assert run.labels.equals(web_run.labels)
    assert run.summary["accuracy"] == web_run.summary["accuracy"]


def test_model_reads_files_as_in_training(web, web_run):
    assert web_run.model.reader == Reader(3, (512, 512), "published-crop")
    found = web_run.model.evaluate(f"web-bird:{web}")
    assert (found.source, found.part) == ("web-bird", "test")
    assert found.accuracy == pytest.approx(web_run.summary["accuracy"]["last"])


def test_label_noise(web):
    run = pl.train(f"web-bird:{web}", corrupt="pair:1", **(SETTINGS | {"epochs": 1}))
    assert run.labels["given_label"].astype(str).tolist() == ["1", "2", "0"] * 2
    assert run.summary["noise"] == {"in": 1, "out": 0}


def test_its_preset_is_used_unchanged(web):
    """On any machine, with any number of images."""
    chosen = choose_settings(find_source(f"web-car:{web}"), request(None, None, {"device": "cpu"}))
    assert chosen.settings == request("web-car", None, {"device": "cpu"}).settings("default")
    assert chosen.fitting == {}


def test_broken_files(web_copy, tmp_path, capsys):
    source = f"web-bird:{web_copy}"
    with (web_copy / "train-list.txt").open("a") as lines:
        lines.write("train/k1/6.jpg:1\n")
    save(web_copy / "train" / "k1" / "6.jpg", (9, 9, 9), (700, 520))
    truncate(web_copy / "train" / "k1" / "6.jpg")  # after the header
    (web_copy / "val" / "k0" / "a:b.png").write_bytes(b"")
    pl.train(source, tmp_path / "run", **(SETTINGS | {"epochs": 1}))
    skipped = pd.read_csv(tmp_path / "run" / "skipped.csv")
    assert skipped["path"].tolist() == ["val/k0/a:b.png", "train/k1/6.jpg"]
    assert main(["train", source, "--out", str(tmp_path / "strict"), "--strict"]) == 2
    message = capsys.readouterr().err
    assert "web-bird: val/k0/a:b.png cannot be read (empty file); without --strict" in message
    assert "Traceback" not in message
    assert not (tmp_path / "strict").exists()
    for name in ("1.jpg", "4.jpg"):
        truncate(web_copy / "train" / "k1" / name)
    with pytest.raises(InputError, match="web-bird: no image of the class 1 can be read"):
        read(source)


def test_missing_files_give_one_error_line(web_copy, tmp_path, capsys):
    (web_copy / "train" / "k1" / "4.jpg").unlink()
    assert main(["train", f"web-bird:{web_copy}", "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "k1/4.jpg is missing; its owners publish it at https://github.com/NUST-" in message
    assert len(message.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "stretch"}, "--fit is for folders and tables of images"),
        ({"label_column": "x"}, "--label-column is for tables"),
        ({"hold_out": 0.2}, "--hold-out: web-bird has test images already"),
    ],
)
def test_options_that_the_recipe_decides_are_refused(web, options, message):
    with pytest.raises(InputError, match=message):
        find_source(f"web-bird:{web}", ReadOptions(**options))


def test_test_images_from_another_source(web, photos):
    found = find_source(f"web-bird:{web}", ReadOptions(test=str(photos("0/a.png", "2/b.png"))))
    assert (found.test.labels, found.test_name) == (("0", "2"), "the images of photos")
    own = photos("0/a.png", "1/a.png", "2/a.png", root="own")
    found = find_source(own, ReadOptions(test=f"web-bird:{web}"))
    assert found.test.names == tuple(f"val/k{i}/a:b.png" for i in range(3))


def test_larger_image_size_is_refused(web):
    scanned = find_source(f"web-bird:{web}")
    settings = request(None, None, {"image_size": 600}).settings("web-bird")
    with pytest.raises(InputError, match=r"--image-size 600 is larger than the images \(512×512"):
        choose_reader(scanned, settings, "crop")


def test_empty_lines_at_the_end_of_a_list_are_ignored(web_copy):
    before = find_source(f"web-bird:{web_copy}")
    for name in ("train-list.txt", "val-list.txt"):
        (web_copy / name).write_text((web_copy / name).read_text().rstrip() + "\n\n \n")
    after = find_source(f"web-bird:{web_copy}")
    assert (after.train, after.test) == (before.train, before.test)


def test_incomplete_datasets_are_refused(web_copy, tmp_path):
    source, root = f"web-bird:{web_copy}", web_copy
    owners = "https://github.com/NUST-Machine-Intelligence-Laboratory/weblyFG-dataset"
    layout = "no such folder; .*train-list.txt and"
    assert_refused(f"web-bird:{tmp_path}/nowhere", rf"{layout} .*{owners}")
    assert_refused("web-car", "name the folder of its files, as in web-car:DIR")
    image = root / "train" / "k1" / "4.jpg"
    image.rename(root / "moved.jpg")
    assert_refused(source, rf"train-list.txt: line 5: .*k1/4.jpg is missing; .*{owners}")
    (root / "moved.jpg").rename(image)
    val_list = root / "val-list.txt"
    val_list.write_text(val_list.read_text().replace(":2", ":9"))
    assert_refused(source, "val/k2/a:b.png has the class 9, which no training image has")
    val_list.write_text("k0/a.jpg\n")
    assert_refused(source, "val-list.txt: line 1 is not PATH:CLASS")
    val_list.write_bytes(b"\xff\xfe\x00")
    assert_refused(source, "val-list.txt is not text")
    val_list.write_text("")
    assert_refused(source, rf"val-list.txt is empty; .*{owners}")
    val_list.unlink()
    assert_refused(source, rf"val-list.txt cannot be read .*{owners}")
