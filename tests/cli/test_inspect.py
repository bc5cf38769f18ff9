"""`pseudoloss inspect`: its facts, its report and the command."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import make_images
from pseudoloss.cli import inspection, main
from pseudoloss.cli.inspection import Range, inspect
from pseudoloss.cli.inspection_report import _about, _bytes, report
from pseudoloss.config import as_json
from pseudoloss.data import scanning
from pseudoloss.engine.training import prepare
from pseudoloss.errors import InputError
from pseudoloss.nn.devices import choose_device, device_name
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter


@pytest.fixture
def folder(photos):
    """Two classes in train/ and test/, all images different."""
    parts = (("train", 10), ("test", 4))
    return photos(*(f"{part}/{k}/{i}.png" for part, n in parts for k in "ab" for i in range(n)))


def names(copies):
    return [{image["image"] for image in group} for group in copies.examples]


def test_counts_and_sizes(folder):
    Image.new("L", (40, 20)).save(folder / "train" / "a" / "wide.bmp")
    for i in range(10, 20):
        Image.new("CMYK", (12, 10), (i, 0, 0, 0)).save(folder / "train" / "a" / f"{i}.jpg")
    found = inspect(folder)
    assert (found.train, found.test, found.test_name) == (31, 8, "the test images")
    assert found.classes == {"a": 21, "b": 10}
    assert found.imbalance == 2.1
    assert (found.width, found.height) == (Range(12, 12, 40), Range(10, 10, 20))
    assert found.aspect == Range(1.2, 1.2, 2)
    assert found.modes == {"RGB": 28, "CMYK": 10, "L": 1}
    assert found.formats == {"PNG": 28, "JPEG": 10, "BMP": 1}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert found.bytes == sum(path.stat().st_size for path in files)
    assert found.plan.balance_prior == "given"


def test_unreadable_files_are_grouped_by_reason(folder):
    for i in range(5):
        (folder / "train" / "a" / f"empty{i}.jpg").touch()
    for i in (3, 4):
        path = folder / "test" / "b" / f"{i - 1}.png"
        path.write_bytes(path.read_bytes()[:-25])
    found = inspect(folder, limit=2)
    assert [(group.reason, group.count) for group in found.unreadable] == [
        ("empty file", 5),
        ("truncated file", 2),
    ]
    assert found.unreadable[0].files == ["train/a/empty0.jpg", "train/a/empty1.jpg"]
    assert (found.train, found.test) == (20, 6)
    text = report(found)
    assert "7 files that training cannot use" in text
    assert "5 × empty file: train/a/empty0.jpg, train/a/empty1.jpg, …" in text
    assert inspect(folder, strict=True).train == 20  # reported even if training would refuse them


def test_singular_and_plural(photos):
    folder = photos(*(f"{k}/{i}.png" for k in "ab" for i in range(3)))
    assert "classes    3 images per class" in report(inspect(folder, hold_out=0))
    shutil.copy(folder / "b" / "0.png", folder / "a" / "copy.png")
    text = report(inspect(folder, hold_out=0))
    assert "from 3 images (b) to 4 (a), a ratio of 1.3" in text
    assert "1 copy with the same bytes, 0 with the same pixels only" in text
    for path in sorted((folder / "b").iterdir())[1:]:
        path.unlink()
    (folder / "notes.txt").write_text("no image")
    text = report(inspect(folder, hold_out=0))
    assert "from 1 image (b) to 4 (a), a ratio of 4.0" in text
    assert "1 file that training cannot use" in text
    assert ": notes.txt\n" in text
    (folder / "c").mkdir()
    assert "from 0 images (c) to 4 (a)\n" in report(inspect(folder, hold_out=0))


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 byte"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (3e9, "2.8 GiB")],
)
def test_bytes_in_binary_units(count, text):
    assert _bytes(int(count)) == text


# ---------------------------------------------------------------------------------- duplicates


def test_folder_without_duplicates(folder):
    found = inspect(folder).duplicates
    assert (found.same_bytes, found.same_pixels) == (0, 0)
    assert found.within_class.pictures == found.across_classes.pictures == 0


def test_same_bytes_and_same_pixels_are_told_apart(folder):
    a = folder / "train" / "a"
    shutil.copy(a / "0.png", a / "copy.png")
    Image.open(a / "0.png").save(a / "other.bmp")
    Image.open(a / "1.png").convert("RGBA").save(a / "alpha.tif")
    found = inspect(folder).duplicates
    assert (found.same_bytes, found.same_pixels) == (1, 2)
    assert (found.within_class.pictures, found.within_class.images) == (2, 5)
    assert names(found.within_class)[1] == {"train/a/1.png", "train/a/alpha.tif"}
    assert found.across_classes.pictures == found.across_parts.pictures == 0


def test_same_image_with_two_labels(folder):
    shutil.copy(folder / "train" / "a" / "0.png", folder / "train" / "b" / "new.png")
    found = inspect(folder)
    assert names(found.duplicates.across_classes) == [{"train/a/0.png", "train/b/new.png"}]
    assert found.duplicates.within_class.pictures == 0
    text = report(found)
    assert "1 picture with different labels: at least one label is wrong" in text
    assert "train/a/0.png (a) = train/b/new.png (b)" in text


def test_same_image_for_training_and_testing(folder):
    Image.open(folder / "train" / "a" / "0.png").save(
        folder / "test" / "a" / "leak.webp", lossless=True
    )
    found = inspect(folder)
    assert names(found.duplicates.across_parts) == [{"train/a/0.png", "test/a/leak.webp"}]
    assert "1 picture both for training and for testing" in report(found)
    assert "test/a/leak.webp (a, test)" in report(found)


def test_copies_of_held_out_images_are_not_a_leak(photos):
    folder = photos(*(f"{k}/{i}.png" for k in "ab" for i in range(10)))
    for path in sorted((folder / "a").iterdir()):
        shutil.copy(path, folder / "a" / f"copy-{path.name}")
    found = inspect(folder, hold_out=0.5)
    assert found.held_out
    assert found.test == 15
    assert found.duplicates.across_parts.pictures == 0
    assert found.duplicates.within_class.pictures == 10


def test_metadata_does_not_make_an_image_different(folder, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    path = folder / "train" / "a" / "photo.jpg"
    Image.fromarray(noise).save(path, quality=80)
    content = path.read_bytes()
    comment = b"\xff\xfe\x00\x08hello!"
    (folder / "train" / "b" / "photo.jpg").write_bytes(content[:2] + comment + content[2:])
    Image.open(path).save(folder / "train" / "b" / "photo.png")
    found = inspect(folder).duplicates
    assert (found.same_bytes, found.same_pixels) == (0, 2)
    assert found.across_classes.images == 3


def test_examples_show_every_class_first(photos):
    """Many copies in one class, one copy in another."""
    folder = photos(*(f"{k}/{i}.png" for k in "ab" for i in range(3)))
    for i in range(9):
        shutil.copy(folder / "a" / "0.png", folder / "a" / f"copy{i}.png")
    shutil.copy(folder / "a" / "0.png", folder / "b" / "z.png")
    found = inspect(folder, limit=2, hold_out=0).duplicates
    assert {image["label"] for image in found.across_classes.examples[0]} == {"a", "b"}
    assert found.across_classes.images == 11


# ------------------------------------------------------------------------------------ the plan


def test_the_plan_is_what_training_does(folder, photos, tmp_path):
    large = photos(*(f"{k}/{i}.png" for k in "ab" for i in range(9)), root="large", size=(90, 70))
    Image.new("RGB", (90, 70), "red").save(large / "a" / "more.jpg")
    images, labels = make_images(300)
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    for source in (folder, large, tmp_path / "set.npz", "digits"):
        plan = inspect(source).plan
        prepared = prepare(source, request(None, None, {}), None, {}, SilentReporter())
        settings, train = prepared.settings, prepared.data.train
        for name in ("network", "weights", "epochs", "batch_size", "lr", "balance_prior"):
            assert getattr(plan, name) == as_json(settings)[name]
        assert (plan.channels, plan.stored) == (train.channels, train.size)
        test = prepared.data.test
        assert plan.memory == train.images_NCHW.nbytes + (test.images_NCHW.nbytes if test else 0)
        assert plan.preset == prepared.data.preset


def test_images_that_do_not_fit_into_memory(folder, monkeypatch):
    assert inspect(folder).plan.images == "device"
    monkeypatch.setattr(scanning, "free_memory", lambda: 10)
    found = inspect(folder)
    assert found.plan.images == "files"
    assert "files are decoded in every epoch" in report(found)


def test_suggested_command_repeats_the_options(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    table = folder.with_suffix(".csv")
    rows = (f"{path},{path.parent.name}\n" for path in files)
    table.write_text("path,a b\n" + "".join(rows))
    found = inspect(table, strict=True, hold_out=0, fit="stretch", label_column="a b")
    assert found.plan.command == (
        f"pseudoloss train {table} --out run --hold-out 0 --strict --fit stretch "
        "--label-column 'a b'"
    )
    assert found.plan.audit_command == (
        f"pseudoloss audit {table} --out audit --strict --label-column 'a b'"
    )
    pair = make_images()
    assert inspect(pair).plan.command == 'pseudoloss.train(source, out="run")'
    assert inspect(pair).plan.audit_command is None


def test_reasons_for_which_training_would_refuse(photos):
    found = inspect(photos("a/0.png", "a/1.png", "b/0.png"))
    assert found.problems == ["class b has one image; every class needs at least 2"]
    assert "Training would refuse this: class b has one image" in report(found)
    assert "Next: repair this, or audit the images as they are: pseudoloss audit" in report(found)
    assert "pseudoloss train" not in report(found)
    assert "Next:" not in report(inspect(photos("a/0.png", "a/1.png", root="one")))


def test_class_without_an_image(photos):
    folder = photos(*(f"{k}/{i}.png" for k in "ab" for i in range(4)))
    (folder / "c").mkdir()
    found = inspect(folder)
    assert found.classes == {"a": 4, "b": 4, "c": 0}
    assert found.problems == ["class c has no image; every class needs at least 2"]
    (folder / "c" / "0.png").write_text("no image")
    assert inspect(folder).problems == found.problems


def test_truncated_files_with_valid_headers(photos):
    folder = photos("a/0.png", "a/1.png", "b/0.png", "b/1.png")
    for path in folder.rglob("*.png"):
        path.write_bytes(path.read_bytes()[:-25])
    found = inspect(folder)
    assert (found.train, found.imbalance, found.width) == (0, None, None)
    assert found.problems == ["no image can be read"]
    assert "4 × truncated file" in report(found)


# --------------------------------------------------------------------------- other sources


def test_arrays_are_inspected_too(tiny_source):
    found = inspect(tiny_source)
    assert (found.train, found.test) == (64, 32)
    assert (found.modes, found.formats, found.bytes) == ({"L": 96}, {}, None)
    images, labels = make_images()
    images[5] = images[0]
    found = inspect((images, labels))
    assert names(found.duplicates.across_classes) == [{"arrays[train][0]", "arrays[train][5]"}]
    assert "all 8×8 pixels" in report(found)


def test_without_duplicates_only_headers_are_read(folder):
    path = folder / "train" / "a" / "0.png"
    path.write_bytes(path.read_bytes()[:-25])
    found = inspect(folder, duplicates=False)
    assert (found.train, found.duplicates, found.decoded) == (20, None, False)
    assert "only file headers were read" in report(found)
    assert inspect(make_images(), duplicates=False).duplicates is None


def test_negative_limit_is_refused():
    with pytest.raises(InputError, match="--limit must be 0 or more, not -1"):
        inspect("digits", limit=-1)


# ------------------------------------------------------------------------------- the command


def call(*arguments, capsys):
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_prints_the_report(folder, capsys):
    (folder / "train" / "a" / "two\nlines.jpg").write_text("no image")
    code, out, err = call(folder, "--no-timing", capsys=capsys)
    assert (code, err) == (0, "")
    assert f"{folder}: 28 images, 2 classes" in out
    assert "1 × not an image, or a broken one: train/a/two lines.jpg" in out
    assert out.endswith(
        f"Next: pseudoloss audit {folder} --out audit\n  or: pseudoloss train {folder} --out run\n"
    )


def test_command_prints_json(folder, capsys):
    shutil.copy(folder / "train" / "a" / "0.png", folder / "test" / "b" / "x.png")
    code, out, err = call(folder, "--json", "--limit", "1", "--no-timing", capsys=capsys)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["classes"] == {"a": 10, "b": 10}
    assert found["duplicates"]["across_parts"]["pictures"] == 1
    assert found["plan"]["command"].startswith("pseudoloss train ")
    found = json.loads(call(folder, "--json", "--no-duplicates", capsys=capsys)[1])
    assert found["train"] == 20
    assert found["timing"].keys() == {"device", "audit", "training"}


def test_command_says_how_long_it_takes(folder, capsys):
    code, out, err = call(folder, capsys=capsys)
    assert (code, err) == (0, "")
    title, audit, training = out.split("Time on this machine, ")[1].splitlines()[:3]
    assert title == device_name(choose_device("auto"))
    assert re.fullmatch(r"  audit      about [\d.]+ (s|min|h)", audit)
    assert re.fullmatch(r"  training   about [\d.]+ (s|min|h) \(\d+ epochs\)", training)


def test_no_timing_skips_it(folder, capsys, monkeypatch):
    monkeypatch.setattr(inspection, "measure", lambda *_: pytest.fail("was timed"))
    assert "Time on this machine" not in call(folder, "--no-timing", capsys=capsys)[1]
    assert json.loads(call(folder, "--no-timing", "--json", capsys=capsys)[1])["timing"] is None


@pytest.mark.parametrize("source", ["digits", make_images()], ids=["digits", "arrays"])
def test_arrays_are_timed_and_the_cache_stays_empty(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PSEUDOLOSS_CACHE", str(tmp_path / "cache"))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    timing = inspect(source, timing=True).timing
    assert timing.audit > 0
    assert timing.training > 0
    assert not (tmp_path / "cache").exists()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_training_that_would_be_refused_is_not_timed(photos):
    found = inspect(photos("a/0.png", "a/1.png", "b/0.png"), timing=True)
    assert found.problems
    assert found.timing.audit > 0
    assert found.timing.training is None
    assert "training   about" not in report(found)


def test_images_that_cannot_be_timed(folder):
    found = inspect(folder, timing=True)
    unknown = replace(found, timing=replace(found.timing, audit=None, training=None))
    assert report(unknown).count("could not be estimated") == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.02, "about 1 s"),
        (43.7, "about 40 s"),
        (89.9, "about 90 s"),
        (90, "about 1.5 min"),
        (739, "about 12 min"),
        (5400, "about 1.5 h"),
        (200_000, "about 2.3 days"),
        (10_000_000, "about 120 days"),
    ],
)
def test_durations(seconds, text):
    assert _about(seconds) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "source nowhere: no such file, folder or dataset"),
        (["no/where"], "source no/where: no such file or folder"),
        ([], "SOURCE"),
        (["digits", "--hold-out", "0.2"], "--hold-out: digits has test images"),
        (["digits", "--limit", "x"], "--limit"),
        (["digits", "--limit", "-1"], "--limit must be 0 or more"),
        (["digits", "--out", "x"], "--out: no such option"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
