"""CNWL, on a small folder with its layout."""

import json
import shutil

import pytest
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
from pseudoloss.data import OUT, find_source
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.presets import request

SETTINGS = QUICK | {"image_size": 8, "batch_size": 125}
OWNERS = "owners publish it at https://google.github.io/controlled-noisy-web-labels"


def save_class(folder, c, clean, web):
    """Save ImageNet images and, from the web, one with a correct and one with a wrong label."""
    for i in range(clean):
        save(folder / str(c) / f"n0{c}_{i}.jpg", (2 * c, 0, 0))
    if web:
        save(folder / str(c) / f"good{c}.jpg", (2 * c, 90, 0), (50, 100))
        save(folder / str(c) / f"web{c}.jpg", 2 * c)  # grey


@pytest.fixture(scope="module")
def cnwl(tmp_path_factory):
    """100 classes, each with three ImageNet images and two web images (40%). Not to be changed."""
    root, notes = tmp_path_factory.mktemp("cnwl"), []
    for c in range(100):
        save_class(root / "training" / "red_noise_nl_0.4", c, clean=3, web=True)
        save(root / "validation" / str(c) / f"n1{c}.jpg", (2 * c, 0, 200))
        for name, is_clean in ((f"good{c}", 1), (f"web{c}", 0)):
            note = {"image/id": name, "image/class/label/is_clean": is_clean}
            notes.append([note | {"image/class/label": c, "image/uri": "http://…"}])
    notes[0].append({"image/id": "good0", "image/class/label/is_clean": 0, "image/class/label": 5})
    (root / "mini-imagenet-annotations.json").write_text(json.dumps({"data": notes}))
    return root


@pytest.fixture
def cnwl_copy(cnwl, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(cnwl, tmp_path / "cnwl")


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


def test_pixels_equal_torchvision(cnwl_copy):
    for folder in (cnwl_copy / "training" / "red_noise_nl_0.4", cnwl_copy / "validation"):
        save_unusual(folder / "3", largest=(300, 200))
    for where in ("host", "files"):
        data, _ = read(f"cnwl:{cnwl_copy}:0.4", where)
        for images, count in ((data.train, 512), (data.test, 112)):
            assert len(images) == count
            assert_torchvision_pixels(images, cnwl_copy, 32)


def test_broken_files_are_skipped_with_their_true_labels(cnwl_copy):
    folder = cnwl_copy / "training" / "red_noise_nl_0.4"
    truncate(folder / "3" / "good3.jpg")
    (folder / "5" / "web5.jpg").write_bytes(b"<html>gone</html>")
    data, skipped = read(f"cnwl:{cnwl_copy}:0.4")
    assert {
        (entry.path.rpartition("/")[2], entry.reason.partition(" (")[0]) for entry in skipped
    } == {
        ("web5.jpg", "not an image, or a broken one"),
        ("good3.jpg", "truncated file"),
    }
    assert len(data.train) == 498
    for path, true in zip(data.train.paths, data.train.true_N.tolist(), strict=True):
        assert true == (OUT if "web" in path else int(path.split("/")[2]))


def test_true_labels_are_used_in_metrics(cnwl, tmp_path):
    """And training gives the same labels for images in memory and in files."""
    for where in ("host", "files"):
        run = pl.train(f"cnwl:{cnwl}:0.4", tmp_path / where, images=where, **SETTINGS)
        assert run.summary["noise"] == {"in": 0, "out": 1 / 5}
        assert run.summary["source"] == "cnwl-0.4"
        assert run.summary["detection"]["auc"] is not None
    tables = [(tmp_path / where / "labels.csv").read_bytes() for where in ("host", "files")]
    assert tables[0] == tables[1]


def test_label_noise_and_labels_from_a_table(cnwl, tmp_path):
    source, settings = f"cnwl:{cnwl}:0.4", SETTINGS | {"epochs": 1}
    run = pl.train(source, corrupt="pair:1", **settings)
    assert run.summary["noise"] == {"in": 4 / 5, "out": 1 / 5}
    rows = run.labels[["path", "given_label"]].rename(columns={"given_label": "label"})
    rows.to_csv(tmp_path / "mine.csv", index=False)
    again = pl.train(source, corrupt=f"labels:{tmp_path / 'mine.csv'}", **settings)
    assert again.labels["given_label"].tolist() == run.labels["given_label"].tolist()
    assert again.summary["noise"] == run.summary["noise"]


@pytest.mark.parametrize(
    ("folder", "ratio", "preset", "clean"),
    [("0.2", "0.2", "cnwl-20", 8), ("0.0", "0", "cnwl-40", 2)],
)
def test_other_noise_ratios(cnwl_copy, folder, ratio, preset, clean):
    for c in range(100):
        place = cnwl_copy / "training" / f"red_noise_nl_{folder}"
        save_class(place, c, clean, web=ratio != "0")
    found = find_source(f"cnwl:{cnwl_copy}:{ratio}")
    assert (found.preset, found.name) == (preset, f"cnwl-{ratio}")


def test_its_preset_is_used_unchanged(cnwl):
    """On any machine, with any number of images."""
    asked = request(None, None, {"device": "cpu"})
    chosen = choose_settings(find_source(f"cnwl:{cnwl}:0.4"), asked)
    assert chosen.settings == request("cnwl-40", None, {"device": "cpu"}).settings("default")
    assert chosen.fitting == {}


def test_missing_files_are_refused(cnwl_copy, tmp_path):
    root, source = cnwl_copy, f"cnwl:{cnwl_copy}:0.4"
    assert_refused(f"cnwl:{root}", "name the folder and the noise ratio, as in cnwl:DIR:0.4")
    assert_refused("cnwl", "name the folder of its files, as in cnwl:DIR:0.4")
    assert_refused(f"cnwl:{tmp_path}/nowhere:0.4", rf"nowhere/training is missing.*{OWNERS}")
    ratios = "existing values of RATIO: 0.4"
    assert_refused(f"cnwl:{root}:0.6", rf"red_noise_nl_0.6 is missing.*{ratios}.*{OWNERS}")
    image = root / "training" / "red_noise_nl_0.4" / "3" / "web3.jpg"
    image.rename(image.with_name("other.jpg"))
    no_entry = "other.jpg has no entry in mini-imagenet-annotations.json"
    assert_refused(source, rf"{no_entry}; .*{OWNERS}")
    image.with_name("other.jpg").rename(image)
    (root / "validation" / "7" / "n17.jpg").unlink()
    assert_refused(source, rf"validation/7/ holds no images; .*{OWNERS}")
    (root / "validation" / "7").rmdir()
    assert_refused(source, rf"validation/7/ is missing; .*{OWNERS}")
    # An incomplete download, with the same class missing in both splits.
    (root / "training" / "red_noise_nl_0.4" / "7").rename(tmp_path / "7")
    too_few = "red_noise_nl_0.4/ holds 99 class folders, not the 100 of mini-ImageNet"
    assert_refused(source, rf"{too_few}; .*{OWNERS}")
    notes = root / "mini-imagenet-annotations.json"
    for text in ("{", "[]", '{"data": [[{"image/id": 3}]]}'):
        notes.write_text(text)
        assert_refused(source, rf"is not the annotation file .*; .*{OWNERS}")
    notes.unlink()
    assert_refused(source, rf"annotations.json is missing; .* should hold .*{OWNERS}")


def test_missing_images_are_refused(cnwl_copy):
    """In an incomplete download the noise ratio is not that of the folder name."""
    source = f"cnwl:{cnwl_copy}:0.4"
    folder = cnwl_copy / "training" / "red_noise_nl_0.4"
    for c in range(20):
        (folder / str(c) / f"web{c}.jpg").unlink()
    find_source(source)  # 37.5%
    (folder / "3" / "good3.jpg").unlink()
    (folder / "3" / "n03_0.jpg").unlink()
    few = "nl_0.4/3/ holds 2 images, the other classes about 5: some are missing"
    assert_refused(source, rf"{few}; .*{OWNERS}")
    save_class(folder, 3, clean=3, web=True)
    for c in range(100):
        (folder / str(c) / f"web{c}.jpg").unlink(missing_ok=True)
    share = r"25% of the images in .*nl_0.4/ are web images \(.* begin with n\), not 40%"
    assert_refused(source, rf"{share}: some are missing; .*{OWNERS}")
    (folder.parent / "red_noise_nl_0.1").symlink_to(folder.name)
    assert_refused(f"cnwl:{cnwl_copy}:0.1", "25% of the images .*, not 10%")
    for c in range(100):
        (folder / str(c) / f"good{c}.jpg").unlink()
    assert_refused(source, "0% of the images .*, not 40%")
    (folder.parent / "red_noise_nl_0.05").symlink_to(folder.name)
    assert_refused(f"cnwl:{cnwl_copy}:0.05", "0% of the images .*, not 5%")
