"""Sources that others publish: CNWL, the web sets, ImageNet32, on small trees of their layout."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

import pseudoloss as pl
from pseudoloss.data import OUT, absolute, open_source
from pseudoloss.data.decode import centre, in_order
from pseudoloss.errors import InputError


def save(path, colour, size=(84, 84)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def refused(words, message):
    with pytest.raises(InputError, match=message) as error:
        open_source(words)
    assert "\n" not in str(error.value)


# -------------------------------------------------------------------------------------- CNWL


@pytest.fixture
def cnwl(tmp_path):
    """11 classes; in each an image of ImageNet, a right one and a wrong one from the web."""
    root, notes = tmp_path / "cnwl", []
    for c in range(11):
        folder = root / "training" / "red_noise_nl_0.4" / str(c)
        save(folder / f"n0{c}.jpg", (10 * c, 0, 0))
        save(folder / f"good{c}.jpg", (10 * c, 90, 0), (50, 100))
        save(folder / f"web{c}.jpg", 10 * c)  # grey
        save(root / "validation" / str(c) / f"n1{c}.jpg", (10 * c, 0, 200))
        for name, is_clean in ((f"good{c}", 1), (f"web{c}", 0)):
            note = {"image/id": name, "image/class/label/is_clean": is_clean}
            notes.append([note | {"image/class/label": c, "image/uri": "http://…"}])
    notes[0].append({"image/id": "good0", "image/class/label/is_clean": 0, "image/class/label": 5})
    (root / "mini-imagenet-annotations.json").write_text(json.dumps({"data": notes}))
    return root


def test_cnwl(cnwl):
    data = open_source(f"cnwl:{cnwl}:0.4")
    assert data.train.images_NCHW.shape == (33, 3, 32, 32)
    assert data.test.images_NCHW.shape == (11, 3, 32, 32)
    assert data.train.classes == tuple(str(c) for c in range(11))  # 10 after 9
    assert data.train.given_N.tolist() == [c for c in range(11) for _ in range(3)]
    for path, given, true in zip(
        data.train.paths, data.train.given_N.tolist(), data.train.true_N.tolist(), strict=True
    ):
        assert path.startswith(f"training/red_noise_nl_0.4/{given}/")
        assert true == (OUT if "web" in path else given)
    assert data.train.noise == {"in": 0, "out": pytest.approx(1 / 3)}
    red = data.train.images_NCHW[:, 0, 9, 9].int() - 10 * data.train.given_N
    assert red.abs().max() <= 4  # JPEG
    assert data.normalisation()[0] == (0.4728, 0.4487, 0.4031)
    assert data.preset == "cnwl-40"


def test_other_shares_of_noise(cnwl):
    for name, words, preset in (("0.8", "0.8", "cnwl-80"), ("0.0", "0", "cnwl-40")):
        (cnwl / "training" / f"red_noise_nl_{name}").symlink_to("red_noise_nl_0.4")
        data = open_source(f"cnwl:{cnwl}:{words}")
        assert (data.preset, data.name) == (preset, f"cnwl-{words}")


def test_a_preset_of_its_own_is_used(cnwl):
    source = open_source(f"cnwl:{cnwl}:0.4")
    run = pl.train(source, quiet=True, network="small-cnn", epochs=2, batch_size=8, device="cpu")
    assert run.settings.warmup == 1
    assert run.summary["noise"] == {"in": 0, "out": pytest.approx(1 / 3)}


def test_cnwl_in_part(cnwl, tmp_path):
    owners = "owners publish it at https://google.github.io/controlled-noisy-web-labels"
    refused(f"cnwl:{cnwl}", "say where and how noisy, as cnwl:DIR:0.4")
    refused("cnwl", "say where its files are, as cnwl:DIR:0.4")
    refused(f"cnwl:{tmp_path}/nowhere:0.4", rf"nowhere/training is missing.*{owners}")
    refused(f"cnwl:{cnwl}:0.6", rf"red_noise_nl_0.6 is missing.*RATIO there: 0.4.*{owners}")
    image = cnwl / "training" / "red_noise_nl_0.4" / "3" / "web3.jpg"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    refused(f"cnwl:{cnwl}:0.4", r"web3.jpg cannot be read \(.*[Tt]runcated")
    image.write_bytes(b"<html>gone</html>")
    refused(f"cnwl:{cnwl}:0.4", "web3.jpg is no image, or a broken one")
    image.write_bytes(whole)
    image.rename(image.with_name("other.jpg"))
    refused(f"cnwl:{cnwl}:0.4", "other.jpg has no entry in mini-imagenet-annotations.json")
    image.with_name("other.jpg").rename(image)
    (cnwl / "validation" / "7" / "n17.jpg").unlink()
    refused(f"cnwl:{cnwl}:0.4", rf"validation/7/ holds no images; .*{owners}")
    (cnwl / "validation" / "7").rmdir()
    refused(f"cnwl:{cnwl}:0.4", rf"validation/7/ is missing; .*{owners}")
    notes = cnwl / "mini-imagenet-annotations.json"
    for text in ("{", "[]", '{"data": [[{"image/id": 3}]]}'):
        notes.write_text(text)
        refused(f"cnwl:{cnwl}:0.4", "is not the file of annotations")
    notes.unlink()
    refused(f"cnwl:{cnwl}:0.4", rf"annotations.json is missing; .* should hold .*{owners}")


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
    data = open_source(f"{name}:{web}")
    assert data.train.images_NCHW.shape == (6, 3, 512, 512)
    assert data.test.images_NCHW.shape == (3, 3, 512, 512)
    assert data.train.given_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.train.images_NCHW[:, 0, 9, 9].int() - 40 * torch.arange(6)).abs().max() <= 4
    assert (data.train.true_N, data.preset, data.name) == (None, name, name)
    assert data.train.paths[4] == "train/k1/4.jpg"
    assert data.test.paths[1] == "val/k1/a:b.png"


def test_the_square_in_the_centre():
    """Against torchvision: the shorter side resized, then the centre."""
    from torchvision.transforms import CenterCrop, Compose, Resize

    random = np.random.default_rng(0)
    for size in ((90, 60), (41, 77), (64, 64), (300, 40)):
        image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
        ours = np.asarray(centre(64)(image))
        theirs = np.asarray(Compose([Resize(64), CenterCrop(64)])(image))
        np.testing.assert_array_equal(ours, theirs)


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
    refused(f"web-bird:{web}", "val-list.txt: line 3: no training image has the class 9")
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
    refused(f"imagenet32:{root}", "train_data_batch_4.* is damaged")
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
