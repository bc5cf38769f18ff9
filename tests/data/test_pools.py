"""Pools of out-of-distribution images."""

import pickle
import re

import numpy as np
import pytest
from PIL import Image

from pseudoloss.data.pools import draw
from pseudoloss.errors import InputError


def generator(seed=0):
    return np.random.default_rng(seed)


def save(path, colour, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def folder(tmp_path):
    """Like Places365: class folders inside folders with one letter. Every image has its own red."""
    for i in range(12):
        save(tmp_path / "places" / "a" / f"airfield{i % 2}" / f"{i}.png", (20 * i, 5, 250))
    (tmp_path / "places" / "readme.txt").write_text("no image")
    (tmp_path / "places" / ".hidden.png").write_text("no image")
    return tmp_path / "places"


def test_nested_folders(folder):
    drawn = draw(str(folder), 12, (32, 16), 3, generator())
    assert drawn.shape == (12, 3, 32, 16)
    assert sorted(drawn[:, 0, 5, 5].tolist()) == [20 * i for i in range(12)]
    assert drawn[:, 0, 5, 5].tolist() != sorted(drawn[:, 0, 5, 5].tolist())  # in random order
    assert (drawn[:, 2] == 250).all()
    grey = draw(str(folder), 3, (8, 8), 1, generator())
    assert grey.shape == (3, 1, 8, 8)


def test_images_are_resized_with_bilinear_pil(tmp_path):
    pixels = generator().integers(0, 256, (50, 41, 3), dtype=np.uint8)
    (tmp_path / "p").mkdir()
    Image.fromarray(pixels).save(tmp_path / "p" / "a.png")
    wanted = Image.fromarray(pixels).resize((24, 32), Image.Resampling.BILINEAR)
    np.save(tmp_path / "p.npy", pixels[None])
    for place in ("p", "p.npy"):
        drawn = draw(str(tmp_path / place), 1, (32, 24), 3, generator())
        np.testing.assert_array_equal(drawn[0].permute(1, 2, 0), np.asarray(wanted))


@pytest.mark.parametrize(
    ("stored", "channels"),
    [((20, 9, 9, 3), 3), ((20, 9, 9), 1), ((20, 9, 9), 3), ((20, 3, 9, 9), 1)],
)
def test_arrays(tmp_path, stored, channels):
    images = generator().integers(0, 256, stored, dtype=np.uint8)
    np.save(tmp_path / "p.npy", images)
    drawn = draw(str(tmp_path / "p.npy"), 20, (9, 9), channels, generator())
    assert drawn.shape == (20, channels, 9, 9)
    again = draw(str(tmp_path / "p.npy"), 20, (9, 9), channels, generator())
    assert (drawn == again).all()
    if len(stored) == 3:
        found = sorted(image.tobytes() for image in drawn[:, 0].numpy())
        assert found == sorted(image.tobytes() for image in images)


@pytest.mark.parametrize("form", ["pickle", "npz"])
def test_imagenet32_batches(tmp_path, form):
    """All ten are needed: fewer are an incomplete download."""
    images = np.zeros((50, 3072), np.uint8)
    images[:, 0] = np.arange(50)
    for i in range(10):
        batch = {"data": images[5 * i : 5 * i + 5], "labels": np.arange(1, 6)}
        path = tmp_path / f"train_data_batch_{i + 1}"
        if form == "pickle":
            path.write_bytes(pickle.dumps(batch | {"labels": list(range(1, 6))}))
        else:
            np.savez(path.with_suffix(".npz"), **batch)
    drawn = draw(str(tmp_path), 50, (32, 32), 3, generator())
    assert sorted(drawn[:, 0, 0, 0].tolist()) == list(range(50))
    some = draw(str(tmp_path), 4, (32, 32), 3, generator(1))
    assert len(set(some[:, 0, 0, 0].tolist())) == 4
    for i in (4, 9):
        next(tmp_path.glob(f"train_data_batch_{i}*")).unlink()
    missing = f"train_data_batch_4, train_data_batch_9 missing in {tmp_path}; its owners publish it"
    with pytest.raises(InputError, match=f"--pool {tmp_path}: {missing} at https://image-net.org"):
        draw(str(tmp_path), 4, (32, 32), 3, generator())


def test_invalid_pools_are_refused(folder, tmp_path):
    def refused(place, message, count=1):
        with pytest.raises(InputError, match=rf"--pool .*{message}") as error:
            draw(str(place), count, (32, 32), 3, generator())
        assert "\n" not in str(error.value)

    refused(folder, "has 12 images, but 13 are needed", 13)
    places, imagenet = "http://places2.csail.mit.edu", "https://image-net.org/download-images"
    usage = rf"a pool is a folder of images .*{places}\), a .npy file, .*ImageNet32 \({imagenet}\)$"
    refused(tmp_path / "nowhere", f"no such file or folder; {usage}")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", f"neither images nor batch files of ImageNet32; {usage}")
    (tmp_path / "text.npy").write_text("no array")
    refused(tmp_path / "text.npy", "not a .npy file of one plain array .the magic string")
    np.save(tmp_path / "flat.npy", np.zeros((1500, 8), np.uint8))
    refused(tmp_path / "flat.npy", "must be an array of N,H,W or N,H,W,C, not of shape 1500,8")
    refused("", "is empty")
    np.savez(tmp_path / "many.npz", a=np.zeros(3))
    refused(tmp_path / "many.npz", "not a .npy file of one plain array .the magic string")
    np.save(tmp_path / "flat.npy", np.zeros((3, 3), np.uint8))
    refused(tmp_path / "flat.npy", "must be an array of N,H,W")
    np.save(tmp_path / "object.npy", np.array([object()]), allow_pickle=True)
    refused(tmp_path / "object.npy", "not a .npy file of one plain array")
    path = folder / "a" / "airfield0" / "0.png"
    path.write_bytes(path.read_bytes()[:60])
    refused(folder, r"12 images are needed, but 1 of 12 cannot be read \(the first: .*0.png, ", 12)
    (tmp_path / "b").mkdir()
    for i in range(1, 11):
        (tmp_path / "b" / f"train_data_batch_{i}").write_bytes(pickle.dumps({"data": 3}))
    refused(tmp_path / "b", "train_data_batch_1 must hold data .* and labels")


def test_unreadable_images_are_replaced_by_others(folder):
    whole = draw(str(folder), 8, (8, 8), 3, generator(), (messages := []).append)
    assert messages == []
    first, second = (int(red) // 20 for red in whole[[0, 5], 0, 5, 5])
    for i in (first, second):
        (folder / "a" / f"airfield{i % 2}" / f"{i}.png").write_bytes(b"")
    drawn = draw(str(folder), 8, (8, 8), 3, generator(), messages.append)
    kept = [1, 2, 3, 4, 6, 7]
    assert (drawn[kept] == whole[kept]).all()
    reds = drawn[:, 0, 5, 5].tolist()
    assert len(set(reds)) == 8
    assert not {20 * first, 20 * second} & set(reds)
    (notice,) = messages
    assert re.match(rf"--pool {folder}: 2 of its images cannot be read \(the first: .*", notice)
    assert notice.endswith("); others are used instead")
    with pytest.warns(UserWarning, match="others are used instead"):
        assert (draw(str(folder), 8, (8, 8), 3, generator()) == drawn).all()


def test_zero_images(folder):
    assert draw(str(folder), 0, (32, 32), 3, generator()).shape == (0, 3, 32, 32)
