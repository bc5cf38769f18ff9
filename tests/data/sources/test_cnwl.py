"""CNWL, on a small folder with its layout."""

import json

import numpy as np
import pytest
from PIL import Image
from published import BICUBIC, QUICK, cut, read, refused, save, save_odd
from torchvision.transforms import CenterCrop, Compose, Resize

import pseudoloss as pl
from pseudoloss.data import OUT, find_source
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.presets import request


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


def test_its_preset_is_used_unchanged(cnwl):
    """On any machine, with any number of images."""
    chosen = choose_settings(
        find_source(f"cnwl:{cnwl}:0.4"), request(None, None, {"device": "cpu"})
    )
    assert chosen.settings == request("cnwl-40", None, {"device": "cpu"}).settings("default")
    assert chosen.fitting == {}


def test_cnwl_in_part(cnwl, tmp_path):
    owners = "owners publish it at https://google.github.io/controlled-noisy-web-labels"
    refused(f"cnwl:{cnwl}", "name the folder and the noise ratio, as in cnwl:DIR:0.4")
    refused("cnwl", "name the folder of its files, as in cnwl:DIR:0.4")
    refused(f"cnwl:{tmp_path}/nowhere:0.4", rf"nowhere/training is missing.*{owners}")
    refused(
        f"cnwl:{cnwl}:0.6", rf"red_noise_nl_0.6 is missing.*existing values of RATIO: 0.4.*{owners}"
    )
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
    said = "red_noise_nl_0.4/ holds 99 class folders, not the 100 of mini-ImageNet"
    refused(f"cnwl:{cnwl}:0.4", rf"{said}; .*{owners}")
    notes = cnwl / "mini-imagenet-annotations.json"
    for text in ("{", "[]", '{"data": [[{"image/id": 3}]]}'):
        notes.write_text(text)
        refused(f"cnwl:{cnwl}:0.4", rf"is not the annotation file .*; .*{owners}")
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
    refused(f"cnwl:{cnwl}:0.4", rf"nl_0.4/3/ holds 2 images, the other classes about 5: .*{owners}")
    save_class(folder, 3, own=3, web=True)
    for c in range(100):
        (folder / str(c) / f"web{c}.jpg").unlink(missing_ok=True)
    said = r"25% of the images in .*nl_0.4/ are web images \(.* begin with n\), not 40%"
    refused(f"cnwl:{cnwl}:0.4", rf"{said}: some are missing; .*{owners}")
    (folder.parent / "red_noise_nl_0.1").symlink_to(folder.name)
    refused(f"cnwl:{cnwl}:0.1", "25% of the images .*, not 10%")
    for c in range(100):
        (folder / str(c) / f"good{c}.jpg").unlink()
    refused(f"cnwl:{cnwl}:0.4", "0% of the images .*, not 40%")
    (folder.parent / "red_noise_nl_0.05").symlink_to(folder.name)
    refused(f"cnwl:{cnwl}:0.05", "0% of the images .*, not 5%")
