"""Web-aircraft, Web-bird and Web-car, on a small folder with their layout."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from published import BICUBIC, QUICK, cut, read, refused, save, save_odd
from torchvision.transforms import CenterCrop, Compose, Resize

import pseudoloss as pl
from pseudoloss.cli import main
from pseudoloss.cli.inspection import inspect
from pseudoloss.data import ImageFiles, Reader, ReadOptions, find_source, scanning
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.errors import InputError
from pseudoloss.presets import request

WEB = QUICK | {"weights": None, "image_size": 16, "batch_size": 3}


@pytest.fixture
def web(tmp_path):
    """Lists as they are published: paths from the folder (train), and from its part (val)."""
    root = tmp_path / "web"
    lists = {"train": [], "val": []}
    for i in range(6):
        save(root / "train" / f"k{i % 3}" / f"{i}.jpg", (40 * i, 9, 9), (700, 520 + i))
        lists["train"].append(f"train/k{i % 3}/{i}.jpg:{i % 3}")
    for i in range(3):
        save(root / "val" / f"k{i}" / "a:b.png", 40 * i, (300, 200))
        lists["val"].append(f"k{i}/a:b.png:{i}")
    for part, lines in lists.items():
        (root / f"{part}-list.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize("name", ["web-aircraft", "web-bird", "web-car"])
def test_web(web, name):
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


@pytest.mark.parametrize("where", ["host", "files"])
def test_pixels_of_the_web_sets_are_torchvisions(web, where):
    save_odd(web)
    lines = [f"{path.name}:{i % 3}" for i, path in enumerate(sorted(web.glob("n*")))]
    (web / "train-list.txt").write_text("\n".join(lines))
    data, _ = read(f"web-bird:{web}", where)
    assert len(data.train) == 12
    images = data.train.images_NCHW
    for i, name in enumerate(data.train.paths):
        with Image.open(web / name) as image:
            theirs = Compose([Resize(512, BICUBIC), CenterCrop(512)])(image.convert("RGB"))
        ours = images[i] if where == "host" else images.reader.read(images.paths[i])
        np.testing.assert_array_equal(ours, np.asarray(theirs).transpose(2, 0, 1))


def test_the_web_sets_stay_in_their_files_where_memory_is_short(web, tmp_path, monkeypatch):
    """And give the same labels as from memory."""
    words = f"web-bird:{web}"
    runs = [pl.train(words, tmp_path / "host", images="host", **WEB)]
    monkeypatch.setattr(scanning, "free_memory", lambda: 2**20)
    data, _ = read(words)
    assert isinstance(data.train.images_NCHW, ImageFiles)
    assert inspect(words).plan.images == "files"
    runs.append(pl.train(words, tmp_path / "files", **WEB))
    tables = [(tmp_path / name / "labels.csv").read_bytes() for name in ("host", "files")]
    assert tables[0] == tables[1]
    assert runs[0].summary["accuracy"] == runs[1].summary["accuracy"]


def test_a_model_of_a_web_set_reads_files_as_its_training_did(web):
    words = f"web-bird:{web}"
    run = pl.train(words, **WEB)
    assert run.model.reader == Reader(3, (512, 512), "published-crop")
    found = run.model.evaluate(words)
    assert (found.source, found.part) == ("web-bird", "test")
    assert found.accuracy == pytest.approx(run.summary["accuracy"]["last"])


def test_other_labels_for_a_web_set(web):
    run = pl.train(f"web-bird:{web}", corrupt="pair:1", **WEB)
    assert run.labels["given_label"].astype(str).tolist() == ["1", "2", "0"] * 2
    assert run.summary["noise"] == {"in": 1, "out": 0}


def test_its_preset_is_used_unchanged(web):
    """On any machine, with any number of images."""
    chosen = choose_settings(find_source(f"web-car:{web}"), request(None, None, {"device": "cpu"}))
    assert chosen.settings == request("web-car", None, {"device": "cpu"}).settings("default")
    assert chosen.fitting == {}


def test_broken_files_of_a_web_set(web, tmp_path, capsys):
    with (web / "train-list.txt").open("a") as lines:
        lines.write("train/k1/6.jpg:1\n")
    save(web / "train" / "k1" / "6.jpg", (9, 9, 9), (700, 520))  # cut behind its header
    cut(web / "train" / "k1" / "6.jpg")
    (web / "val" / "k0" / "a:b.png").write_bytes(b"")
    pl.train(f"web-bird:{web}", tmp_path / "run", **WEB)
    skipped = pd.read_csv(tmp_path / "run" / "skipped.csv")
    assert skipped["path"].tolist() == ["val/k0/a:b.png", "train/k1/6.jpg"]
    words = ["train", f"web-bird:{web}", "--out", str(tmp_path / "strict"), "--strict"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "web-bird: val/k0/a:b.png cannot be read (empty file); without --strict" in said
    assert "Traceback" not in said
    assert not (tmp_path / "strict").exists()
    for name in ("1.jpg", "4.jpg"):
        cut(web / "train" / "k1" / name)
    with pytest.raises(InputError, match="web-bird: no image of the class 1 can be read"):
        read(f"web-bird:{web}")


def test_missing_files_end_the_command(web, tmp_path, capsys):
    (web / "train" / "k1" / "4.jpg").unlink()
    assert main(["train", f"web-bird:{web}", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "k1/4.jpg is missing; its owners publish it at https://github.com/NUST-" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": "stretch"}, "--fit is for folders and tables of images"),
        ({"label_column": "x"}, "--label-column is for tables"),
        ({"hold_out": 0.2}, "--hold-out: web-bird has test images already"),
    ],
)
def test_what_a_recipe_leaves_no_choice_about(web, options, message):
    with pytest.raises(InputError, match=message):
        find_source(f"web-bird:{web}", ReadOptions(**options))


def test_web_sets_and_images_of_ones_own_test_each_other(web, photos):
    found = find_source(f"web-bird:{web}", ReadOptions(test=str(photos("0/a.png", "2/b.png"))))
    assert (found.test.labels, found.test_name) == (("0", "2"), "the images of photos")
    mine = photos("0/a.png", "1/a.png", "2/a.png", root="mine")
    found = find_source(mine, ReadOptions(test=f"web-bird:{web}"))
    assert found.test.names == tuple(f"val/k{i}/a:b.png" for i in range(3))


def test_web_images_are_not_made_larger(web):
    listing = find_source(f"web-bird:{web}")
    settings = request(None, None, {"image_size": 600}).settings("web-bird")
    with pytest.raises(InputError, match=r"--image-size 600 is larger than the images \(512×512"):
        choose_reader(listing, settings, "crop")


def test_empty_lines_at_the_end_of_a_list(web):
    before = find_source(f"web-bird:{web}")
    for name in ("train-list.txt", "val-list.txt"):
        (web / name).write_text((web / name).read_text().rstrip() + "\n\n \n")
    after = find_source(f"web-bird:{web}")
    assert (after.train, after.test) == (before.train, before.test)


def test_web_in_part(web, tmp_path):
    owners = "https://github.com/NUST-Machine-Intelligence-Laboratory/weblyFG-dataset"
    refused(f"web-bird:{tmp_path}/nowhere", rf"no such folder; .*train-list.txt and .*{owners}")
    refused("web-car", "name the folder of its files, as in web-car:DIR")
    image = web / "train" / "k1" / "4.jpg"
    image.rename(web / "moved.jpg")
    refused(f"web-bird:{web}", rf"train-list.txt: line 5: .*k1/4.jpg is missing; .*{owners}")
    (web / "moved.jpg").rename(image)
    lines = (web / "val-list.txt").read_text()
    (web / "val-list.txt").write_text(lines.replace(":2", ":9"))
    refused(f"web-bird:{web}", "val/k2/a:b.png has the class 9, which no training image has")
    (web / "val-list.txt").write_text("k0/a.jpg\n")
    refused(f"web-bird:{web}", "val-list.txt: line 1 is not PATH:CLASS")
    (web / "val-list.txt").write_bytes(b"\xff\xfe\x00")
    refused(f"web-bird:{web}", "val-list.txt is not text")
    (web / "val-list.txt").write_text("")
    refused(f"web-bird:{web}", rf"val-list.txt is empty; .*{owners}")
    (web / "val-list.txt").unlink()
    refused(f"web-bird:{web}", rf"val-list.txt cannot be read .*{owners}")
