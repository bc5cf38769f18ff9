"""Features of images. The oracles: timm's network on PIL's pixels, and the logits of a run."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from conftest import make_images
from pseudoloss.auditing import extractors, features
from pseudoloss.auditing.extractors import Extractor, open_extractor
from pseudoloss.auditing.features import (
    extract_arrays,
    extract_files,
    given_features,
    load_features,
)
from pseudoloss.data import Reader
from pseudoloss.data.decoding import Item
from pseudoloss.errors import InputError
from pseudoloss.nn.weights import embedded_file
from pseudoloss.runs import open_model


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSEUDOLOSS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def fake(monkeypatch):
    """An extractor that is quick and counts its images: the mean of each channel and row."""
    seen = []

    def compute(pixels_BCHW):
        seen.append(len(pixels_BCHW))
        return pixels_BCHW.mean(3).reshape(len(pixels_BCHW), -1).astype(np.float16)

    extractor = Extractor("fake", "f" * 64, Reader(3, (8, 8), "crop"), 24, 4, compute)
    monkeypatch.setattr(features, "open_extractor", lambda spec, side, device: extractor)
    return seen


@pytest.fixture
def files(tmp_path):
    images, _ = make_images(n=11, channels=3)
    paths = [tmp_path / f"{i}.png" for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    return paths


def names(paths):
    return [path.name for path in paths]


def random_photo(width, height, seed=0):
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def embedded_by_hand(pixels_BHWC):
    """The embedded network without anything of ours: weights renamed by their order."""
    network = timm.create_model("tf_efficientnet_lite0")
    state = torch.load(embedded_file(), weights_only=True)
    keys = [key for key in network.state_dict() if "num_batches" not in key]
    values = [value for key, value in state.items() if "num_batches" not in key]
    network.load_state_dict(dict(zip(keys, values, strict=True)), strict=False)
    network.reset_classifier(0)
    x = torch.from_numpy(np.stack(pixels_BHWC)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        return network.eval()(x).numpy()


# ------------------------------------------------------------------------- the embedded network


def test_photographs(tmp_path):
    photo = random_photo(400, 300)
    photo.save(tmp_path / "photo.png")
    found = extract_files([tmp_path / "photo.png"], ["photo"])
    resized = photo.resize((round(400 * 256 / 300), 256), Image.Resampling.BICUBIC)
    left = (resized.width - 224) // 2
    crop = np.asarray(resized.crop((left, 16, left + 224, 240)))
    expected = embedded_by_hand([crop])[0]
    assert found.name == "efficientnet-lite0@224"
    similarity = np.corrcoef(found.values_ND[0].astype(np.float64), expected)[0, 1]
    assert similarity > 0.999  # a crop between two pixels differs a little


def test_small_images(tmp_path):
    images, _ = make_images(n=5, channels=3, size=32)
    found = extract_arrays(torch.from_numpy(images).permute(0, 3, 1, 2))
    enlarged = [
        np.asarray(Image.fromarray(image).resize((128, 128), Image.Resampling.BICUBIC))
        for image in images
    ]
    assert found.name == "efficientnet-lite0@128"
    np.testing.assert_allclose(found.values_ND, embedded_by_hand(enlarged), atol=5e-3)


def test_features_do_not_depend_on_the_other_images():
    images, _ = make_images(n=7, channels=3, size=16)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    whole = extract_arrays(pixels, cache=False).values_ND
    order = [3, 0, 6]
    np.testing.assert_array_equal(
        extract_arrays(pixels[order], cache=False).values_ND, whole[order]
    )


def test_features_do_not_depend_on_the_number_of_threads(monkeypatch):
    images, _ = make_images(n=70, channels=3, size=16)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    extractor = open_extractor("efficientnet-lite0@32", 16, "cpu")
    found = []
    for workers in (1, 3):
        changed = replace(extractor, workers=workers)
        monkeypatch.setattr(features, "open_extractor", lambda *args, e=changed: e)
        found.append(extract_arrays(pixels, cache=False).values_ND)
    np.testing.assert_array_equal(*found)
    with ThreadPoolExecutor(1) as threads:  # as before
        assert threads.submit(torch.get_num_threads).result() == torch.get_num_threads()


def test_the_size_can_be_chosen():
    assert open_extractor("efficientnet-lite0@128", 32, "cpu").reader.size == (128, 128)
    assert open_extractor("efficientnet-lite0@112", 500, "cpu").reader.size == (128, 128)
    with pytest.raises(InputError, match="--features efficientnet-lite0@x: the size"):
        open_extractor("efficientnet-lite0@x", 32, "cpu")


def test_the_key_tells_extractors_apart():
    specs = [("efficientnet-lite0", 32), ("efficientnet-lite0", 500), ("efficientnet-lite0@64", 32)]
    keys = {open_extractor(spec, side, "cpu").key for spec, side in specs}
    assert len(keys) == len(specs)
    assert open_extractor(None, 20, "cpu").key == open_extractor("efficientnet-lite0", 9, "cpu").key


# --------------------------------------------------------------------------- other networks


def test_features_of_a_run_give_its_logits(tiny_run):
    images, _ = make_images(n=6)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    found = extract_arrays(pixels, f"run:{tiny_run.path}", device="cpu")
    model = open_model(tiny_run.path)
    with torch.no_grad():
        logits = model.network.classifier(torch.from_numpy(found.values_ND).float())
    np.testing.assert_allclose(logits.softmax(1), model.predict_proba(images), atol=2e-3)
    assert found.name == f"run:{tiny_run.path}"


def test_a_run_that_does_not_exist():
    with pytest.raises(InputError, match=r"^--features run:nowhere: nowhere: no such run$"):
        extract_arrays(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "run:nowhere")


def test_a_timm_model(monkeypatch):
    real = extractors.create_timm
    monkeypatch.setattr(
        extractors, "create_timm", lambda name, C, size, pretrained: real(name, C, size)
    )
    found = open_extractor("resnet10t.c3_in1k@64", 300, "cpu")
    assert (found.name, found.width) == ("resnet10t.c3_in1k@64", 512)
    assert found.reader == Reader(3, (73, 73), "crop")  # its crop_pct is 0.875
    assert open_extractor("resnet10t.c3_in1k", 300, "cpu").name == "resnet10t.c3_in1k"


def test_a_timm_model_that_cannot_be_downloaded(monkeypatch):
    def fail(*args, **options):
        raise OSError("no connection\nmore")

    monkeypatch.setattr(extractors, "create_timm", fail)
    with pytest.raises(InputError, match=r"^--features resnet18: .*\(no connection\).*FILE\.npy$"):
        open_extractor("resnet18", 300, "cpu")


@pytest.mark.parametrize("spec", ["resnot18", "no/such", "@96", "x" * 200])
def test_a_network_that_does_not_exist(spec):
    with pytest.raises(InputError, match=r"--features .*: no such network"):
        open_extractor(spec, 300, "cpu")


def test_an_empty_name():
    with pytest.raises(InputError, match="--features is empty"):
        open_extractor("", 300, "cpu")


# ------------------------------------------------------------------------------- all images


def test_arrays_have_the_features_of_files(files):
    arrays = np.stack([np.asarray(Image.open(path)) for path in files])
    pixels = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    from_files = extract_files(files, names(files), cache=False)
    np.testing.assert_array_equal(
        extract_arrays(pixels, cache=False).values_ND, from_files.values_ND
    )


def test_grey_arrays():
    grey, _ = make_images(n=3)
    pixels = torch.from_numpy(grey).permute(0, 3, 1, 2)
    found = extract_arrays(pixels, cache=False).values_ND
    colour = extract_arrays(pixels.expand(-1, 3, -1, -1), cache=False).values_ND
    np.testing.assert_array_equal(found, colour)


def test_unreadable_files_are_skipped(fake, files):
    files[2].write_bytes(b"no image")
    files[5].unlink()
    found = extract_files(files, names(files))
    assert [entry.path for entry in found.skipped] == ["2.png", "5.png"]
    assert np.flatnonzero(~found.kept_N).tolist() == [2, 5]
    assert not found.values_ND[~found.kept_N].any()
    rest = [path for path in files if path not in (files[2], files[5])]
    kept = found.values_ND[found.kept_N]
    np.testing.assert_array_equal(extract_files(rest, names(rest)).values_ND, kept)


def test_nothing_can_be_read(tmp_path, fake):
    with pytest.raises(InputError, match=r"no image can be read \(the first of 2: a, "):
        extract_files([tmp_path / "a", tmp_path / "b"], ["a", "b"])


def test_items(fake, files):
    items = [Item(lambda path=path: Image.open(path).copy()) for path in files]
    expected = extract_files(files, names(files), cache=False)
    first = extract_files(items, names(files))
    np.testing.assert_array_equal(first.values_ND, expected.values_ND)
    assert extract_files(items, names(files)).cached


def test_items_that_differ_in_one_thing(fake):
    """Equal bytes of pixels, but another orientation, palette, transparency, mode or shape."""
    grey = Image.fromarray(make_images(n=1)[0][0, :, :, 0])
    rotated, clear = grey.copy(), grey.copy()
    rotated.getexif()[0x0112] = 6
    clear.info["transparency"] = 0
    palettes = [Image.frombytes("P", (8, 8), grey.tobytes()) for _ in range(2)]
    palettes[0].putpalette(bytes(range(256)) * 3)
    palettes[1].putpalette(bytes(range(255, -1, -1)) * 3)
    wide = Image.frombytes("L", (16, 4), grey.tobytes())
    images = [grey, rotated, clear, *palettes, wide]
    extract_files([Item(lambda image=image: image) for image in images], "abcdef")
    assert sum(fake) == len(images)
    extract_files([Item(lambda image=image: image) for image in images], "abcdef")
    assert sum(fake) == len(images)


def test_progress_reaches_the_end(fake, files):
    calls = []
    extract_files(files, names(files), progress=lambda *call: calls.append(call))
    assert calls[-1] == ("features", 11, 11)


# ------------------------------------------------------------------------------------- cache


def test_a_second_time_nothing_is_computed(fake, files):
    first = extract_files(files, names(files))
    assert (sum(fake), first.cached) == (11, False)
    fake.clear()
    second = extract_files(files, names(files))
    assert (fake, second.cached, second.key) == ([], True, first.key)
    np.testing.assert_array_equal(second.values_ND, first.values_ND)


def test_only_new_images_are_computed(fake, files, tmp_path):
    extract_files(files[:8], names(files[:8]))
    fake.clear()
    moved = files[0].rename(tmp_path / "moved.png")
    found = extract_files([*files[1:], moved], [*names(files[1:]), "moved"])
    assert sum(fake) == 3
    assert not found.cached


def test_a_changed_file_is_computed_again(fake, files):
    before = extract_files(files, names(files))
    Image.new("RGB", (8, 8), "red").save(files[4])
    after = extract_files(files, names(files))
    assert sum(fake) == 12
    assert after.key != before.key
    assert (after.values_ND != before.values_ND).any(1).nonzero()[0].tolist() == [4]


def test_an_interrupted_extraction_resumes(fake, files, monkeypatch):
    extractor = features.open_extractor(None, 8, "cpu")

    def interrupted(pixels_BCHW):
        if len(fake) == 2:
            raise KeyboardInterrupt
        return extractor.compute(pixels_BCHW)

    broken = replace(extractor, compute=interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(features, "open_extractor", lambda *args: broken)
        with pytest.raises(KeyboardInterrupt):
            extract_files(files, names(files))
    assert fake == [4, 4]
    found = extract_files(files, names(files))
    assert fake == [4, 4, 3]
    np.testing.assert_array_equal(
        found.values_ND, extract_files(files, names(files), cache=False).values_ND
    )


def test_without_the_cache_nothing_is_written(fake, files, tmp_path):
    extract_files(files, names(files), cache=False)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_cache_is_computed_again(fake, files, tmp_path):
    expected = extract_files(files, names(files))
    for shard in (tmp_path / "cache").rglob("*.shard"):
        shard.write_bytes(shard.read_bytes()[:-2] + b"??")
    found = extract_files(files, names(files))
    assert not found.cached
    assert "damaged" in found.notices[0]
    np.testing.assert_array_equal(found.values_ND, expected.values_ND)
    assert extract_files(files, names(files)).notices == ()


# ------------------------------------------------------------------------------------- files


def test_features_from_a_file(tmp_path):
    values = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    np.save(tmp_path / "z.npy", values)
    found = load_features(tmp_path / "z.npy", 6)
    np.testing.assert_array_equal(found.values_ND, values)
    assert isinstance(found.values_ND, np.memmap)
    assert (found.name, found.kept_N.all(), found.skipped) == ("z.npy", True, ())
    by_spec = extract_files([tmp_path] * 6, ["x"] * 6, str(tmp_path / "z.npy"))
    assert by_spec.key == found.key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(6, np.float32), r"one row per image \(N×D\), not the shape 6$"),
        (np.zeros((6, 0), np.float32), "not the shape 6×0$"),
        (np.zeros((5, 2), np.float32), "has 5 rows for 6 images$"),
        (np.zeros((6, 2), int), "must be floats, not int64$"),
        (np.array([[0.0]] * 4 + [[np.nan]] * 2), "row 4 contains NaN or infinity$"),
        (np.full((6, 1), 1e300), "row 0 contains NaN or infinity$"),
        (np.array([[None]] * 6, dtype=object), "not a .npy file of numbers"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, values, message):
    np.save(tmp_path / "z.npy", values, allow_pickle=True)
    with pytest.raises(InputError, match=f"^--features .*z.npy: .*{message}"):
        load_features(tmp_path / "z.npy", 6)


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY\x01\x00", b"PK\x03\x04"])
def test_other_files(tmp_path, content):
    (tmp_path / "z.npy").write_bytes(content)
    with pytest.raises(InputError, match=r"^--features .*z\.npy: not a .npy file"):
        load_features(tmp_path / "z.npy", 6)
    with pytest.raises(InputError, match="no such file"):
        load_features(tmp_path / "other.npy", 6)


def test_several_arrays_under_the_wrong_name(tmp_path):
    np.savez(tmp_path / "z.npz", a=np.zeros((6, 2)))
    (tmp_path / "z.npz").rename(tmp_path / "z.npy")
    with pytest.raises(InputError, match=r"not a \.npy file"):
        load_features(tmp_path / "z.npy", 6)


def test_given_features_have_a_key_of_their_content():
    values = np.random.default_rng(0).standard_normal((6, 3))
    key = given_features(values, 6, "features").key
    assert given_features(values.copy(), 6, "features").key == key
    values[2, 1] += 1
    assert given_features(values, 6, "features").key != key
