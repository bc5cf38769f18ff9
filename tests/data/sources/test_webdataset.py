"""WebDataset shards as a source. The oracle is the webdataset library; shards are made here."""

import io
import json
import shutil
import tarfile

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import pseudoloss as pl
from conftest import TINY, make_images
from pseudoloss.cli import main
from pseudoloss.data import Reader, ReadOptions, absolute, find_source
from pseudoloss.data.decoding import content_of
from pseudoloss.data.sources import open_files
from pseudoloss.data.sources import webdataset as module
from pseudoloss.data.sources.webdataset import (
    expand_braces,
    unlabelled_images,
    webdataset,
)
from pseudoloss.errors import InputError

CLASSES = ["bar left", "bar middle", "bar right", "bar far right"]


def encoded(image, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, form)
    return file.getvalue()


def write_shard(path, files):
    """A tar archive of (name, content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def samples(images, labels, first=0):
    for i, (image, label) in enumerate(zip(images, labels, strict=True), first):
        yield f"{i:05}.png", encoded(image)
        yield f"{i:05}.cls", str(label).encode()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards of 16 images for training and one of 16 for testing; class names in a file."""
    folder = tmp_path_factory.mktemp("shards")
    images, labels = make_images(80)
    for k in range(4):
        chosen = slice(16 * k, 16 * k + 16)
        write_shard(
            folder / f"set-train-{k:06}.tar", samples(images[chosen], labels[chosen], 16 * k)
        )
    write_shard(folder / "set-test-000000.tar", samples(images[64:], labels[64:], 64))
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """A run on the shards whose images are read from them in every epoch."""
    out = tmp_path_factory.mktemp("trained") / "run"
    settings = TINY | {"epochs": 2, "images": "files", "image_size": 8, "corrupt": "symmetric:0.4"}
    pl.train(f"wds:{shards}", out=out, quiet=True, device="cpu", **settings)
    return out


def all_of(source):
    """Names, bytes and labels of every split."""
    return {
        split: [
            (name, content_of(entry), label)
            for name, entry, label in zip(files.names, files.paths, files.labels, strict=True)
        ]
        for split, files in webdataset(source).splits.items()
    }


# ------------------------------------------------------------------------------ which images


def test_the_samples_are_those_of_the_webdataset_library(tmp_path):
    """Folders in names, several dots, other files and upper case; written by their writer and by
    tarfile."""
    wds = pytest.importorskip("webdataset")
    image = [encoded(make_images(1, seed=i)[0][0], "PNG") for i in range(8)]
    files = [
        ("a/000.seg.png", image[0]),
        ("a/000.png", image[1]),
        ("a/000.cls", b"3"),
        ("./b/000.PNG", image[2]),
        ("./b/000.cls", b"1\n"),
        ("__note__", b"x"),
        ("__meta__/x.png", image[0]),
        ("b/001.cls", b"2"),
        ("b/001.png", image[3]),
    ]
    write_shard(tmp_path / "0.tar", files)
    with wds.TarWriter(str(tmp_path / "1.tar")) as tar:
        for i in range(4, 8):
            tar.write({"__key__": f"x{i}", "png": image[i], "cls": i, "other": "text"})
    urls = [str(tmp_path / f"{k}.tar") for k in range(2)]
    expected = [
        (sample["png"], sample["cls"].decode().strip())
        for sample in wds.WebDataset(urls, shardshuffle=False)
    ]
    found = all_of(str(tmp_path))["train"]
    assert [(content, label) for _, content, label in found] == expected
    names = ["0.tar/a/000.png", "0.tar/b/000.PNG", "0.tar/b/001.png"]
    assert [name for name, *_ in found][:3] == names


def test_shards_are_in_the_order_of_their_names_and_indices_are_stable(shards, tmp_path):
    found = all_of(str(shards))
    assert [name for name, *_ in found["train"]] == [
        f"set-train-{i // 16:06}.tar/{i:05}.png" for i in range(64)
    ]
    images, labels = make_images(80)
    assert [content for _, content, _ in found["train"]] == [encoded(i) for i in images[:64]]
    assert [label for *_, label in found["train"]] == [CLASSES[c] for c in labels[:64]]
    assert len(found["test"]) == 16
    pattern = f"{shards}/set-{{test,train}}-{{000000..000000}}.tar"
    assert all_of(pattern)["train"] == found["train"][:16]
    moved = shutil.copytree(shards, tmp_path / "moved")
    assert all_of(str(moved)) == found


def test_splits_are_folders_or_words_in_names(tmp_path):
    image = encoded(make_images(1)[0][0])
    for name in ("train/0.tar", "train/1.tar", "valid/0.tar", "other/notes.txt"):
        if name.endswith(".tar"):
            write_shard(tmp_path / "a" / name, [("x.png", image), ("x.cls", b"0")])
    assert {split: len(found) for split, found in all_of(str(tmp_path / "a")).items()} == {
        **{"train": 2, "val": 1}
    }
    assert [name for name, *_ in all_of(str(tmp_path / "a"))["val"]] == ["valid/0.tar/x.png"]
    # All shards of one split, named alone: all of the source.
    assert list(all_of(str(tmp_path / "a" / "valid"))) == ["train"]
    write_shard(tmp_path / "a" / "more.tar", [("x.png", image), ("x.cls", b"0")])
    with pytest.raises(InputError, match="has shards beside the folder train/"):
        webdataset(str(tmp_path / "a"))
    write_shard(tmp_path / "b" / "x-train.tar", [("x.png", image), ("x.cls", b"0")])
    write_shard(tmp_path / "b" / "y.tar", [("x.png", image), ("x.cls", b"0")])
    with pytest.raises(InputError, match=r"x-train\.tar belongs to a split .* y\.tar does not"):
        webdataset(str(tmp_path / "b"))


@pytest.mark.parametrize(
    "text", ["a-{8..11}.tar", "{003..000}", "{a,b}x{1..2}{c,}", "plain", "{x}"]
)
def test_patterns_mean_what_they_mean_to_the_library(text):
    braceexpand = pytest.importorskip("braceexpand").braceexpand
    assert expand_braces(text, "wds") == list(dict.fromkeys(braceexpand(text)))


@pytest.mark.parametrize("text", ["{0..99999999999}", "{1..9999}{1..9999}"])
def test_a_pattern_of_too_many_shards_is_refused(text):
    with pytest.raises(InputError, match="more than 1,000,000 shards"):
        expand_braces(text, "wds:x")


# ------------------------------------------------------------------------------------- labels


def labels_of(tmp_path, files, **options):
    image = encoded(make_images(1)[0][0])
    content = [pair for key, *rest in files for pair in [(f"{key}.png", image), *rest]]
    path = write_shard(tmp_path / "0.tar", content)
    (split,) = webdataset(str(path), ReadOptions(**options)).splits.values()
    return list(split.labels), {entry.path: entry.reason for entry in split.skipped}


def test_labels_from_cls_or_json(tmp_path):
    files = [
        ("a", ("a.cls", b" cat\n")),
        ("b", ("b.json", b'{"label": 7, "cls": 2}')),
        ("c", ("c.json", b'{"cls": "dog"}')),
        ("d", ("d.json", b'{"label": 7}'), ("d.cls", b"8")),
        ("e", ("e.json", b'{"kind": "x"}')),
        ("f", ("f.json", b'{"label": null}')),
    ]
    found, skipped = labels_of(tmp_path, files)
    assert found == ["cat", "7", "dog", "8"]
    why = "has no label: neither a .cls file nor a label in .json"
    assert skipped == {"0.tar/e.png": why, "0.tar/f.png": why}
    found, skipped = labels_of(tmp_path, files, label_column="kind")
    assert found == ["x"]
    assert skipped["0.tar/a.png"] == "has no label: no kind in .json"


def test_labels_that_cannot_be_used_are_skipped(tmp_path):
    bad = {
        "a": (b'{"label": [1]}', "its label is neither a whole number nor text"),
        "b": (b'{"label": 1.5}', "its label is neither a whole number nor text"),
        "c": (b"[" * 100_000, "its .json cannot be read"),
        "d": (b"[]", "its .json is not an object with a label"),
        "e": (b'{"label": "a\\nb"}', "its label is not one line"),
        "f": (b"\xff", "its label is not text in UTF-8"),
        "g": (b'{"label": "' + b"a" * 2_000_000, "its label file has 2,000,011 bytes"),
        "h": (b'{"label": ' + b"9" * 10_000 + b"}", "its .json cannot be read"),
    }
    files = [(key, (f"{key}.json", content)) for key, (content, _) in bad.items()]
    found, skipped = labels_of(tmp_path, [*files, ("z", ("z.cls", b"0"))])
    assert found == ["0"]
    for key, (_, why) in bad.items():
        assert skipped[f"0.tar/{key}.png"].startswith(why), key


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classes.txt", "zero\none\n"),
        ("classes.json", '["zero", "one"]'),
        ("classes.json", '{"1": "one", "0": "zero"}'),
    ],
)
def test_class_names(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    files = [("a", ("a.cls", b"1")), ("b", ("b.cls", b"0")), ("c", ("c.cls", b"one"))]
    assert labels_of(tmp_path, files)[0] == ["one", "zero", "one"]
    with pytest.raises(InputError, match=r"0\.tar/c\.png: its label is 2, and there are 2 class"):
        labels_of(tmp_path, [*files[:2], ("c", ("c.cls", b"2"))])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("classes.json", "[" * 100_000, "is no list of class names"),
        ("classes.json", '{"2": "a"}', "is no list of class names"),
        ("classes.json", "[1, 2]", "must be a list of class names"),
        ("classes.txt", "a\n\nb", "must be a list of class names"),
        ("classes.txt", "a\na", "two classes have the same name"),
    ],
)
def test_class_names_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        labels_of(tmp_path, [("a", ("a.cls", b"0"))])


# ----------------------------------------------------------------------- damaged and hostile shards


def test_what_cannot_be_used_is_skipped_with_a_reason(tmp_path):
    image = encoded(make_images(1)[0][0])
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:

        def add(name, content=b"", kind=tarfile.REGTYPE, to=""):
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, to
            tar.addfile(info, io.BytesIO(content))

        for name in ("../../evil.png", "/etc/evil.png", "a/../../evil.png"):
            add(name, image)
        add("link.png", kind=tarfile.SYMTYPE, to="/etc/passwd")
        add("device.png", kind=tarfile.CHRTYPE)
        add("text.txt", b"1")
        add("noextension", b"1")
        add("empty.png")
        for key in ("good", "twice", "twice2", "twice"):
            add(f"{key}.png", image)
            add(f"{key}.cls", b"0")
        add("\x1b]0;title\a.png", image)
    content = path.read_bytes()
    write_shard(tmp_path / "1.tar", samples(make_images(4)[0], [0, 1, 0, 1]))
    cut = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(cut[: 512 * 9])  # in the middle of the third sample
    (tmp_path / "2.tar").write_bytes(b"no tar" * 1000)
    (tmp_path / "3.tar").write_bytes(b"")
    (split,) = webdataset(str(tmp_path)).splits.values()
    assert split.names == (
        *(f"0.tar/{key}.png" for key in ("good", "twice", "twice2")),
        *(f"1.tar/0000{i}.png" for i in range(2)),
    )
    reasons = {entry.path: entry.reason for entry in split.skipped}
    assert path.read_bytes() == content
    out = "its name leads out of the archive"
    assert reasons["0.tar/../../evil.png"] == reasons["0.tar//etc/evil.png"] == out
    assert reasons["0.tar/a/../../evil.png"] == out
    assert (reasons["0.tar/link.png"], reasons["0.tar/device.png"]) == ("a link", "a device")
    assert reasons["0.tar/text.txt"] == "has no image"
    assert reasons["0.tar/noextension"] == "has no extension"
    assert reasons["0.tar/empty.png"] == "empty file"
    assert reasons["0.tar/twice.png"] == "the shard has this name twice"
    assert reasons["1.tar"].startswith("truncated")
    assert reasons["2.tar"] == "not a tar archive, or damaged at byte 0"
    assert reasons["3.tar"] == "empty file"


def test_an_image_that_claims_to_be_large_is_not_read(tmp_path):
    info = tarfile.TarInfo("a.png")
    info.size = module.LARGEST_IMAGE + 1
    path = write_shard(tmp_path / "0.tar", samples(make_images(2)[0], "01"))
    rest = path.read_bytes()
    with path.open("wb") as file:  # sparse
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.seek(-(-info.size // 512) * 512, io.SEEK_CUR)
        file.write(rest)
    (split,) = webdataset(str(path)).splits.values()
    assert len(split) == 2
    assert [tuple(vars(e).values()) for e in split.skipped] == [
        ("0.tar/a.png", "larger than 256 MiB")
    ]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "name shards, as in"),
        ("nowhere", "1 of 1 shards are missing"),
        ("{0..3}.tar", "4 of 4 shards are missing"),
        ("s3://bucket/{0..3}.tar", "only shards on a disk"),
        ("pipe:rm -rf x", "only shards on a disk"),
        (".", r"holds no \.tar files"),
    ],
)
def test_shards_that_are_not_there(tmp_path, monkeypatch, place, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        open_files(f"wds:{place}", ReadOptions())
    assert str(error.value).startswith(f"wds:{place}: ")


def test_compressed_shards_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(InputError, match=r"a\.tar is compressed \(gzip\); uncompress it"):
        webdataset(str(tmp_path))


# ---------------------------------------------------------------------------- the lists of shards


def test_a_shard_is_listed_once(shards, monkeypatch):
    before = all_of(str(shards))

    def fail(*arguments):
        raise AssertionError("listed again")

    monkeypatch.setattr(module, "_list_shard", fail)
    assert all_of(str(shards)) == before


def test_a_damaged_or_old_list_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PSEUDOLOSS_CACHE", str(tmp_path / "cache"))
    path = write_shard(tmp_path / "s" / "0.tar", samples(make_images(4)[0], "0101"))
    before = all_of(str(path))
    (cached,) = (tmp_path / "cache" / "shards").iterdir()
    intact = cached.read_text()
    changed = json.loads(intact)
    changed["samples"][0][1] = 10**12
    for text in (json.dumps(changed), "{", "[]", '{"samples": [[1, 2]], "problems": []}'):
        cached.write_text(text)
        assert all_of(str(path)) == before
        assert cached.read_text() == intact
    write_shard(path, samples(make_images(2)[0], "01"))
    assert len(all_of(str(path))["train"]) == 2


def test_without_a_place_for_lists(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSEUDOLOSS_CACHE", str(tmp_path / "file"))
    path = write_shard(tmp_path / "0.tar", samples(make_images(4)[0], "0101"))
    assert len(all_of(str(path))["train"]) == 4


# ------------------------------------------------------------------------- all of the commands


def test_pixels_in_memory_and_from_the_shards_are_the_same(shards):
    reader = Reader(1, (8, 8))
    in_memory, files = (
        find_source(f"wds:{shards}").read(reader, 8, where, strict=True)[0]
        for where in ("host", "files")
    )
    assert in_memory.fingerprint() == files.fingerprint()
    images = files.train.images_NCHW
    stack = np.stack([reader.read(images.paths[i]) for i in range(len(images))])
    assert (stack == in_memory.train.images_NCHW.numpy()).all()
    assert in_memory.normalisation() == files.normalisation()


def test_a_run_on_shards_is_the_run_on_the_same_files(shards, trained, tmp_path):
    for split, rows in all_of(str(shards)).items():
        for name, content, label in rows:
            path = tmp_path / "files" / split / label / name.replace("/", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    config = json.loads((trained / "config.json").read_text())
    assert config["source"] == f"wds:{shards}"
    assert config["data"]["classes"] == sorted(CLASSES)
    table = pd.read_csv(trained / "labels.csv")
    assert table["path"].tolist() == [name for name, *_ in all_of(str(shards))["train"]]
    assert table["index"].tolist() == list(range(64))
    files = find_source(str(tmp_path / "files")).read(Reader(1, (8, 8)), 8, "host", True)[0]
    by_content = {image.numpy().tobytes() for image in files.train.images_NCHW}
    run = find_source(f"wds:{shards}").read(Reader(1, (8, 8)), 8, "host", True)[0]
    assert by_content == {image.numpy().tobytes() for image in run.train.images_NCHW}


def test_commands_work_on_shards(shards, trained, tmp_path, capsys, monkeypatch):
    def run(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    source = f"wds:{shards}"
    assert "80 images" in (text := run("inspect", source, "--no-timing")) or "64" in text
    pattern = f"wds:{shards}/set-train-{{000000..000003}}.tar"
    predicted = run("predict", trained, pattern).splitlines()
    assert len(predicted) == 65
    assert predicted[1].startswith("set-train-000000.tar/00000.png,")
    assert "accuracy" in run("evaluate", trained, source, "--part", "train").lower()
    run("report", trained)
    report = (trained / "report.html").read_text()
    assert report.count("data:image/png;base64,") > 4  # its galleries show images
    assert len(run("labels", trained).splitlines()) > 1
    run("apply", trained, "--out", tmp_path / "fixed", "--copy")
    copied = sorted(path.read_bytes() for path in (tmp_path / "fixed").rglob("*.png"))
    assert copied == sorted(
        content for rows in all_of(str(shards)).values() for _, content, _ in rows
    )
    np.save(tmp_path / "features.npy", np.random.default_rng(0).standard_normal((80, 4)))
    run("audit", source, "--out", tmp_path / "audit", "--features", tmp_path / "features.npy")
    assert len(pd.read_csv(tmp_path / "audit" / "labels.csv")) == 80
    code = main(["apply", str(trained), "--out", str(tmp_path / "fixed.csv")])
    assert (code, "are not files; write a folder" in capsys.readouterr().err) == (2, True)


def test_images_without_labels_can_be_predicted(trained, tmp_path):
    image = encoded(make_images(1)[0][0])
    path = write_shard(tmp_path / "0.tar", [("a.png", image), ("b.png", b"broken"), ("b.cls", b"")])
    assert unlabelled_images(str(path)).names == ("0.tar/a.png", "0.tar/b.png")
    with pytest.raises(InputError, match=r"has no labelled images \(0\.tar/a\.png: has no label"):
        webdataset(str(path))


def test_what_is_skipped_is_in_the_run_folder_and_refused_with_strict(shards, tmp_path, capsys):
    folder = shutil.copytree(shards, tmp_path / "shards")
    files = [("y.png", encoded(make_images(1)[0][0])), ("z.png", b"broken"), ("z.cls", b"0")]
    write_shard(folder / "set-train-000009.tar", files)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in (TINY | {"epochs": 2}).items()]
    flags += ["--image-size=8", "--device=cpu", "--quiet"]
    out = tmp_path / "run"
    assert main(["train", f"wds:{folder}", "--out", str(out), *flags]) == 0
    skipped = pd.read_csv(out / "skipped.csv")
    assert sorted(skipped["path"]) == [f"set-train-000009.tar/{key}.png" for key in "yz"]
    strict = ["train", f"wds:{folder}", "--out", str(tmp_path / "other"), "--strict", *flags]
    assert main(strict) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["train", f"wds:{folder}", "--out", str(out), "--path-column=x"]) == 2


def test_the_source_is_recorded_with_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("wds:a/{0..3}.tar") == f"wds:{tmp_path}/a/{{0..3}}.tar"
    assert absolute("wds:../x") == f"wds:{tmp_path.parent}/x"
