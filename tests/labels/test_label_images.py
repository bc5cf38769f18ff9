import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import make_images
from label_folders import scored_table, write_audit
from pseudoloss.data.decoding import UnreadableError
from pseudoloss.labels.images import RunImages, media_type
from pseudoloss.labels.opening import open_labels


def images_of(tmp_path, source, n=4, **table):
    return RunImages(
        open_labels(write_audit(tmp_path / "audit", scored_table(n, **table), source=source))
    )


def decoded(content):
    return Image.open(io.BytesIO(content))


def test_files_of_a_folder(tmp_path, photos):
    names = ["ant/a.png", "ant/=1.png", "bee/b,\n.png", "bee/ü.png"]
    root = photos(*names)
    found = images_of(tmp_path, root, paths=names)
    assert [found.path(i) for i in range(4)] == [root / name for name in names]
    for i, name in enumerate(names):
        expected = np.asarray(Image.open(root / name))
        assert np.array_equal(np.asarray(decoded(found.thumbnail(i, 64))), expected)
        assert found.content(i) == (root / name).read_bytes()


def test_files_of_a_table_are_relative_to_it(tmp_path, photos):
    root = photos("x/a.png", "y.png")
    (root / "table.csv").touch()
    names = ["x/a.png", str(root / "y.png")]
    found = images_of(tmp_path, root / "table.csv", 2, paths=names)
    assert [found.path(i) for i in range(2)] == [root / "x/a.png", root / "y.png"]


def test_a_file_name_that_is_not_utf8(tmp_path, photos):
    root = photos("ant/a.png")
    try:
        (root / "ant/a.png").rename(root / "ant" / "a\udcff.png")
    except OSError:
        pytest.skip("file names must be UTF-8 here")
    found = images_of(tmp_path, root, 1, paths=["ant/a\\xff.png"])
    assert found.path(0).exists()
    assert media_type(found.full(0)) == "image/png"


@pytest.mark.parametrize(
    ("source", "root"),
    [
        ("/d/photos", "/d/photos"),
        ("/d/t.csv", "/d"),
        ("cnwl:/d/red:0.4", "/d/red"),
        ("web-bird:/d/web", "/d/web"),
        ("digits", None),
        ("cifar10:/d", None),
        ("hf:/d", None),
        ("/d/x.npz", None),
    ],
)
def test_the_folder_of_a_source(tmp_path, source, root):
    found = images_of(tmp_path, source, 1, paths=["x/a.png"]).root
    assert found == (None if root is None else Path(root))


def test_a_photograph_is_upright_and_reduced(tmp_path):
    image = Image.fromarray(np.zeros((300, 500, 3), np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6  # to be rotated by a quarter
    (tmp_path / "ant").mkdir()
    image.save(tmp_path / "ant/a.jpg", exif=exif)
    found = images_of(tmp_path, tmp_path, 1, paths=["ant/a.jpg"])
    for size, expected in ((100, (60, 100)), (500, (300, 500)), (900, (300, 500))):
        small = found.thumbnail(0, size)
        assert media_type(small) == "image/jpeg"
        assert decoded(small).size == expected
        assert not decoded(small).getexif()
    assert decoded(found.full(0)).size == (300, 500)


@pytest.mark.parametrize("part", ["train", "held-out", "test"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_an_archive(tmp_path, npz, part, channels):
    images, labels = make_images(channels=channels)
    test = images[::-1].copy()
    source = npz(images=images, labels=labels, test_images=test, test_labels=labels[::-1].copy())
    found = images_of(tmp_path, source, part=part)
    expected = test if part == "test" else images
    assert found.path(0) is None
    for i in range(4):
        pixels = np.asarray(decoded(found.thumbnail(i, 64)))
        assert np.array_equal(pixels, np.broadcast_to(expected[i], pixels.shape))


def test_rows_of_a_huggingface_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    images, labels = make_images(8, channels=3)
    rows = {"image": [Image.fromarray(image) for image in images], "label": labels.tolist()}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    found = images_of(tmp_path, f"hf:{tmp_path / 'rows'}", 8)
    for i in range(8):
        assert np.array_equal(np.asarray(decoded(found.full(i))), images[i])


def test_images_that_cannot_be_found(tmp_path, tiny_run, photos):
    python = RunImages(open_labels(tiny_run.path))
    assert not python.available
    with pytest.raises(UnreadableError, match="passed in Python"):
        python.thumbnail(0, 64)
    gone = images_of(tmp_path, photos("ant/a.png"), 1, paths=["ant/b.png"])
    with pytest.raises(UnreadableError, match="No such file"):
        gone.thumbnail(0, 64)
    with pytest.raises(IndexError):
        gone.thumbnail(1, 64)
    with pytest.raises(IndexError):
        gone.path(-1)


def test_a_source_that_is_gone_or_shorter(tmp_path, npz):
    source = npz()
    found = images_of(tmp_path / "a", source, 70)
    with pytest.raises(UnreadableError, match="no such image any more"):
        found.thumbnail(69, 64)
    source.unlink()
    with pytest.raises(UnreadableError, match="no such file"):
        images_of(tmp_path / "b", source).thumbnail(0, 64)


def test_images_of_a_pool_are_not_those_of_the_source(tmp_path, npz):
    table = scored_table(2).assign(true_label=["ant", np.nan], truth=["clean", "out"])
    folder = write_audit(tmp_path / "run", table, source=npz(), settings={"pool": "noise"})
    found = RunImages(open_labels(folder))
    found.thumbnail(0, 64)
    with pytest.raises(UnreadableError, match="--pool"):
        found.thumbnail(1, 64)


def test_a_file_with_too_many_pixels_is_refused(tmp_path, photos, monkeypatch):
    found = images_of(tmp_path, photos("ant/a.png", size=(100, 100)), 1, paths=["ant/a.png"])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableError, match="too many pixels"):
        found.full(0)
