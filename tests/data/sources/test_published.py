"""Sources that others publish: CNWL, the web sets, ImageNet32, on small trees of their layout."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

import pseudoloss as pl
from pseudoloss.cli import main
from pseudoloss.cli.inspection import inspect
from pseudoloss.config import request
from pseudoloss.data import OUT, ImageFiles, Reader, ReadOptions, absolute, find_source, open_source
from pseudoloss.data import scanning as listings
from pseudoloss.data.images import in_order
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.errors import InputError

BICUBIC = InterpolationMode.BICUBIC
QUICK = {"network": "small-cnn", "epochs": 3, "warmup": 1, "device": "cpu", "quiet": True}


def save(path, colour, size=(84, 84)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def save_odd(folder):
    """Images in whose pixels ways of reading differ: large, turned, see-through, of any shape."""
    random = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for i, size in enumerate([(1300, 900), (84, 84), (33, 90)]):
        small = Image.fromarray(random.integers(0, 256, (9, 9, 4), dtype=np.uint8))
        image = small.resize(size, Image.Resampling.BILINEAR)
        image.convert("RGB").save(folder / f"n{i}.jpg", exif=turned)
        image.save(folder / f"n{i}.png")
        image.convert("CMYK").save(folder / f"n{i}c.jpg")
        image.convert("RGB").quantize(40).save(folder / f"n{i}.gif", transparency=3)


def read(words, where="auto"):
    """A source as training reads it, and what is left out."""
    listing = find_source(words)
    settings = choose_settings(listing, request(None, None, {})).settings
    return listing.read(*choose_reader(listing, settings, "crop"), where, False)


def refused(words, message):
    with pytest.raises(InputError, match=message) as error:
        find_source(words)
    assert "\n" not in str(error.value)


def cut(path):
    """A download that stopped half-way."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


# -------------------------------------------------------------------------------------- CNWL


def save_class(folder, c, own, web):
    """Images of ImageNet and, from the web, a right one and a wrong one."""
    for i in range(own):
        save(folder / str(c) / f"n0{c}_{i}.jpg", (2 * c, 0, 0))
    if web:
        save(folder / str(c) / f"good{c}.jpg", (2 * c, 90, 0), (50, 100))
        save(folder / str(c) / f"web{c}.jpg", 2 * c)  # grey


@pytest.fixture
def cnwl(tmp_path):
    """100 classes; in each three images of ImageNet, and two from the web: 40%."""
    root, notes = tmp_path / "cnwl", []
    for c in range(100):
        save_class(root / "training" / "red_noise_nl_0.4", c, own=3, web=True)
        save(root / "validation" / str(c) / f"n1{c}.jpg", (2 * c, 0, 200))
        for name, is_clean in ((f"good{c}", 1), (f"web{c}", 0)):
            note = {"image/id": name, "image/class/label/is_clean": is_clean}
            notes.append([note | {"image/class/label": c, "image/uri": "http://…"}])
    notes[0].append({"image/id": "good0", "image/class/label/is_clean": 0, "image/class/label": 5})
    (root / "mini-imagenet-annotations.json").write_text(json.dumps({"data": notes}))
    return root


def test_cnwl(cnwl):
    data, skipped = read(f"cnwl:{cnwl}:0.4")
    assert skipped == ()
    assert data.train.images_NCHW.shape == (500, 3, 32, 32)
    assert data.test.images_NCHW.shape == (100, 3, 32, 32)
    assert data.train.classes == tuple(str(c) for c in range(100))  # 10 after 9
    assert data.train.given_N.tolist() == [c for c in range(100) for _ in range(5)]
    for path, given, true in zip(
        data.train.paths, data.train.given_N.tolist(), data.train.true_N.tolist(), strict=True
    ):
        assert path.startswith(f"training/red_noise_nl_0.4/{given}/")
        assert true == (OUT if "web" in path else given)
    assert data.train.noise == {"in": 0, "out": 1 / 5}
    red = data.train.images_NCHW[:, 0, 9, 9].int() - 2 * data.train.given_N
    assert red.abs().max() <= 4  # JPEG
    assert data.normalisation()[0] == (0.4728, 0.4487, 0.4031)
    assert data.preset == "cnwl-40"
    assert (data.test_name, data.noisy_test, data.test.true_N) == ("the test images", False, None)


@pytest.mark.parametrize("where", ["host", "files"])
def test_pixels_of_cnwl_are_torchvisions(cnwl, where):
    """Bit by bit: it is the paper's benchmark."""
    for folder in (cnwl / "training" / "red_noise_nl_0.4" / "3", cnwl / "validation" / "3"):
        save_odd(folder)
    data, _ = read(f"cnwl:{cnwl}:0.4", where)
    for part, count in ((data.train, 512), (data.test, 112)):
        assert len(part) == count
        images = part.images_NCHW
        for i, name in enumerate(part.paths):
            with Image.open(cnwl / name) as image:
                theirs = Compose([Resize(32, BICUBIC), CenterCrop(32)])(image.convert("RGB"))
            ours = images[i] if where == "host" else images.reader.read(images.paths[i])
            np.testing.assert_array_equal(ours, np.asarray(theirs).transpose(2, 0, 1))


def test_broken_files_of_cnwl_are_left_out_with_their_truth(cnwl):
    folder = cnwl / "training" / "red_noise_nl_0.4"
    cut(folder / "3" / "good3.jpg")
    (folder / "5" / "web5.jpg").write_bytes(b"<html>gone</html>")
    data, skipped = read(f"cnwl:{cnwl}:0.4")
    assert {
        (entry.path.rpartition("/")[2], entry.reason.partition(" (")[0]) for entry in skipped
    } == {
        ("web5.jpg", "not an image, or a broken one"),
        ("good3.jpg", "truncated file"),
    }
    assert len(data.train) == 498
    for path, true in zip(data.train.paths, data.train.true_N.tolist(), strict=True):
        assert true == (OUT if "web" in path else int(path.split("/")[2]))


def test_the_truth_of_cnwl_goes_into_the_figures(cnwl, tmp_path):
    """And is the same wherever the images lie."""
    words, settings = f"cnwl:{cnwl}:0.4", QUICK | {"batch_size": 50}
    runs = [
        pl.train(words, tmp_path / where, images=where, **settings) for where in ("host", "files")
    ]
    for run in runs:
        assert run.summary["noise"] == {"in": 0, "out": 1 / 5}
        assert run.summary["source"] == "cnwl-0.4"
        assert run.summary["detection"]["auc"] is not None
    tables = [(tmp_path / where / "labels.csv").read_bytes() for where in ("host", "files")]
    assert tables[0] == tables[1]


def test_other_labels_for_cnwl(cnwl, tmp_path):
    words, settings = f"cnwl:{cnwl}:0.4", QUICK | {"batch_size": 50, "epochs": 2}
    run = pl.train(words, corrupt="pair:1", **settings)
    assert run.summary["noise"] == {"in": 4 / 5, "out": 1 / 5}
    rows = run.labels[["path", "given_label"]].rename(columns={"given_label": "label"})
    rows.to_csv(tmp_path / "mine.csv", index=False)
    again = pl.train(words, corrupt=f"labels:{tmp_path / 'mine.csv'}", **settings)
    assert again.labels["given_label"].tolist() == run.labels["given_label"].tolist()
    assert again.summary["noise"] == run.summary["noise"]


def test_other_shares_of_noise(cnwl):
    for name, words, preset, own in (("0.2", "0.2", "cnwl-20", 8), ("0.0", "0", "cnwl-40", 2)):
        for c in range(100):
            save_class(cnwl / "training" / f"red_noise_nl_{name}", c, own, web=name != "0.0")
        found = find_source(f"cnwl:{cnwl}:{words}")
        assert (found.preset, found.name) == (preset, f"cnwl-{words}")


def test_a_preset_of_its_own_is_used_as_it_is(cnwl, web):
    """Whatever the machine, and however few the images."""
    for words, preset in ((f"cnwl:{cnwl}:0.4", "cnwl-40"), (f"web-car:{web}", "web-car")):
        chosen = choose_settings(find_source(words), request(None, None, {"device": "cpu"}))
        assert chosen.settings == request(preset, None, {"device": "cpu"}).settings("default")
        assert chosen.fitting == {}


def test_cnwl_in_part(cnwl, tmp_path):
    owners = "owners publish it at https://google.github.io/controlled-noisy-web-labels"
    refused(f"cnwl:{cnwl}", "say where and how noisy, as cnwl:DIR:0.4")
    refused("cnwl", "say where its files are, as cnwl:DIR:0.4")
    refused(f"cnwl:{tmp_path}/nowhere:0.4", rf"nowhere/training is missing.*{owners}")
    refused(f"cnwl:{cnwl}:0.6", rf"red_noise_nl_0.6 is missing.*RATIO there: 0.4.*{owners}")
    image = cnwl / "training" / "red_noise_nl_0.4" / "3" / "web3.jpg"
    image.rename(image.with_name("other.jpg"))
    refused(
        f"cnwl:{cnwl}:0.4", rf"other.jpg has no entry in mini-imagenet-annotations.json; .*{owners}"
    )
    image.with_name("other.jpg").rename(image)
    (cnwl / "validation" / "7" / "n17.jpg").unlink()
    refused(f"cnwl:{cnwl}:0.4", rf"validation/7/ holds no images; .*{owners}")
    (cnwl / "validation" / "7").rmdir()
    refused(f"cnwl:{cnwl}:0.4", rf"validation/7/ is missing; .*{owners}")
    # A download that stopped half-way, at the same class in both parts.
    (cnwl / "training" / "red_noise_nl_0.4" / "7").rename(tmp_path / "7")
    said = "red_noise_nl_0.4/ holds 99 folders of classes, not the 100 of mini-ImageNet"
    refused(f"cnwl:{cnwl}:0.4", rf"{said}; .*{owners}")
    notes = cnwl / "mini-imagenet-annotations.json"
    for text in ("{", "[]", '{"data": [[{"image/id": 3}]]}'):
        notes.write_text(text)
        refused(f"cnwl:{cnwl}:0.4", rf"is not the file of annotations .*; .*{owners}")
    notes.unlink()
    refused(f"cnwl:{cnwl}:0.4", rf"annotations.json is missing; .* should hold .*{owners}")


def test_cnwl_without_some_of_its_images(cnwl):
    """A download that stopped half-way: the share of noise would not be that of its name."""
    owners = "owners publish it at https://google.github.io/controlled-noisy-web-labels"
    folder = cnwl / "training" / "red_noise_nl_0.4"
    for c in range(20):
        (folder / str(c) / f"web{c}.jpg").unlink()
    find_source(f"cnwl:{cnwl}:0.4")  # 37.5%
    (folder / "3" / "good3.jpg").unlink()
    (folder / "3" / "n03_0.jpg").unlink()
    refused(f"cnwl:{cnwl}:0.4", rf"nl_0.4/3/ holds 2 images, and the others about 5: .*{owners}")
    save_class(folder, 3, own=3, web=True)
    for c in range(100):
        (folder / str(c) / f"web{c}.jpg").unlink(missing_ok=True)
    said = r"25% of the images in .*nl_0.4/ are from the web \(.* begin with n\), not 40%"
    refused(f"cnwl:{cnwl}:0.4", rf"{said}: some are missing; .*{owners}")
    (folder.parent / "red_noise_nl_0.1").symlink_to(folder.name)
    refused(f"cnwl:{cnwl}:0.1", "25% of the images .*, not 10%")
    for c in range(100):
        (folder / str(c) / f"good{c}.jpg").unlink()
    refused(f"cnwl:{cnwl}:0.4", "0% of the images .*, not 40%")
    (folder.parent / "red_noise_nl_0.05").symlink_to(folder.name)
    refused(f"cnwl:{cnwl}:0.05", "0% of the images .*, not 5%")


# ------------------------------------------------------------------------------ the web sets


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


def test_the_square_in_the_centre():
    """Against torchvision: the shorter side resized, then the centre."""
    random = np.random.default_rng(0)
    for size in ((90, 60), (41, 77), (64, 64), (300, 40)):
        image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
        ours = Reader(3, (64, 64), "published-crop").pixels(image)
        theirs = np.asarray(Compose([Resize(64, BICUBIC), CenterCrop(64)])(image))
        np.testing.assert_array_equal(ours.transpose(1, 2, 0), theirs)


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


WEB = QUICK | {"weights": None, "image_size": 16, "batch_size": 3}


def test_the_web_sets_stay_in_their_files_where_memory_is_short(web, tmp_path, monkeypatch):
    """And give the same labels as from memory."""
    words = f"web-bird:{web}"
    runs = [pl.train(words, tmp_path / "host", images="host", **WEB)]
    monkeypatch.setattr(listings, "free_memory", lambda: 2**20)
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
    refused("web-car", "say where its files are, as web-car:DIR")
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


def test_numbers_are_sorted_by_value():
    assert in_order(["10", "9", "b", "a", "10"]) == ["9", "10", "a", "b"]


# --------------------------------------------------------------------------------- ImageNet32


@pytest.fixture(params=["pickle", "npz"])
def imagenet32(request, tmp_path):
    random = np.random.default_rng(0)
    root, content = tmp_path / "in32", {}
    root.mkdir()
    for name in [f"train_data_batch_{i}" for i in range(1, 11)] + ["val_data"]:
        data = random.integers(0, 256, (6, 3072), dtype=np.uint8)
        content[name] = {"data": data, "labels": [1, 2, 3, 3, 2, 1], "mean": data.mean(0)}
        if request.param == "pickle":
            (root / name).write_bytes(pickle.dumps(content[name]))
        else:
            np.savez(root / f"{name}.npz", **content[name])
    return root, content


def test_imagenet32(imagenet32):
    root, content = imagenet32
    data = open_source(f"imagenet32:{root}")
    assert (len(data.train), len(data.test)) == (60, 6)
    np.testing.assert_array_equal(
        data.train.images_NCHW[54:], content["train_data_batch_10"]["data"].reshape(6, 3, 32, 32)
    )
    assert data.train.classes == ("1", "2", "3")
    assert data.train.given_N.tolist() == [0, 1, 2, 2, 1, 0] * 10
    assert data.train.noise_rate == 0


def test_imagenet32_in_part(imagenet32, tmp_path):
    root, content = imagenet32
    owners = "https://image-net.org/download-images"
    refused(f"imagenet32:{tmp_path}/nowhere", rf"no such folder; .*train_data_batch_1 .*{owners}")
    path = next(root.glob("train_data_batch_4*"))
    path.rename(root / "kept")
    refused(f"imagenet32:{root}", rf"train_data_batch_4 missing in .*{owners}")
    whole = (root / "kept").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(f"imagenet32:{root}", rf"train_data_batch_4.* is damaged .*{owners}")
    wrong = content["train_data_batch_4"]
    for change in ({"data": wrong["data"][:, :9]}, {"labels": [1]}, {"data": wrong["mean"]}):
        path.write_bytes(pickle.dumps(wrong | change))
        refused(f"imagenet32:{root}", rf"train_data_batch_4.* must hold data .*{owners}")
    path.write_bytes(whole)
    next(root.glob("val_data*")).write_bytes(
        pickle.dumps({"data": wrong["data"], "labels": [1, 2, 3, 4, 5, 6]})
    )
    refused(f"imagenet32:{root}", "val_data: no training image has the class 4")


# ------------------------------------------------------------------------------------- places


def test_sources_can_be_opened_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("cnwl:a/b:0.4") == f"cnwl:{tmp_path}/a/b:0.4"
    assert absolute("web-car:a") == f"web-car:{tmp_path}/a"
    assert absolute("imagenet32:../x") == f"imagenet32:{tmp_path.parent}/x"
    assert absolute("digits") == "digits"
