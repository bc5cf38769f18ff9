"""Folders: which files belong to which class and split."""

import os

import numpy as np
import pytest
from PIL import Image

from pseudoloss.data import Reader, ReadOptions, ScannedSource, find_source
from pseudoloss.data.sources.folder import files_below, folder_splits
from pseudoloss.engine.training import train
from pseudoloss.errors import InputError

ALL = ReadOptions(hold_out=0)


def names_of(folder, options=ALL):
    found = find_source(folder, options)
    assert isinstance(found, ScannedSource)
    return dict(zip(found.train.names, found.train.labels, strict=True))


def test_one_class_per_folder(photos):
    folder = photos("cat/b.png", "cat/a.png", "dog/a.png", "10/a.png", "9/x.png")
    found = find_source(str(folder), ALL)
    assert found.train.names == ("10/a.png", "9/x.png", "cat/a.png", "cat/b.png", "dog/a.png")
    assert found.classes == ("9", "10", "cat", "dog")  # numbers by their value
    assert found.counts == {"9": 1, "10": 1, "cat": 2, "dog": 1}
    assert (found.test, found.skipped) == (None, ())


def test_file_names_do_not_matter(photos):
    odd = ["a b.png", "two\nlines.png", 'it\'s "quoted".png', "😀.png", "A.PNG", "none", "x.y.z"]
    found = names_of(photos(*(f"cat/{name}" for name in odd), "dog/a.png"))
    assert set(found) == {*(f"cat/{name}" for name in odd), "dog/a.png"}


def test_names_that_are_not_valid_text(photos):
    folder = photos("cat/a.png", "dog/a.png")
    strange = os.fsdecode(b"caf\xe9")
    (folder / "cat" / "a.png").rename(folder / "cat" / f"{strange}.png")
    (folder / "dog").rename(folder / strange)
    assert names_of(folder) == {r"cat/caf\xe9.png": "cat", r"caf\xe9/a.png": r"caf\xe9"}


def test_folders_inside_a_class(photos):
    found = names_of(photos("cat/2020/may/a.png", "cat/a.png", "dog/x/a.png"))
    assert found == {"cat/2020/may/a.png": "cat", "cat/a.png": "cat", "dog/x/a.png": "dog"}


def test_hidden_files_and_folders_are_ignored(photos):
    hidden = ["cat/.a.png", "cat/.cache/a.png", ".git/a.png", "__MACOSX/._a.png"]
    assert set(names_of(photos("cat/a.png", "dog/a.png", *hidden))) == {"cat/a.png", "dog/a.png"}


# --------------------------------------------------------------------------------------- links


def linked(photos):
    """A folder with links to a file and to folders elsewhere, one of them as a class."""
    folder = photos("cat/a.png", "cat/in/b.png", "dog/a.png", "dog/b.png")
    other = photos("more/b.png", root="elsewhere")
    (folder / "cat" / "link.png").symlink_to(other / "more" / "b.png")
    (folder / "cat" / "inner").symlink_to(other / "more")
    (folder / "cat" / "same.png").symlink_to("in/b.png")
    (folder / "dog" / "up").symlink_to("..")
    return folder, other


def test_links_out_of_a_class_are_skipped_by_default(photos, tmp_path):
    folder, _ = linked(photos)
    (tmp_path / "link").symlink_to(folder)  # the user named it, so it is followed
    for place in (folder, tmp_path / "link"):
        found = find_source(place, ALL)
        assert set(found.train.names) == {
            *("cat/a.png", "cat/in/b.png", "cat/same.png", "dog/a.png", "dog/b.png"),
        }
        assert {entry.path: entry.reason for entry in found.skipped} == dict.fromkeys(
            ["cat/inner", "cat/link.png", "dog/up"],
            "a link out of its folder; --follow-links follows it",
        )
    with pytest.raises(InputError, match=r"cat/inner cannot be read .*--follow-links"):
        find_source(folder, ReadOptions(hold_out=0, strict=True))


def test_links_are_followed_on_request(photos, tmp_path):
    folder, other = linked(photos)
    (folder / "bird").symlink_to(other / "more")
    options = ReadOptions(hold_out=0, follow_links=True)
    scanned = find_source(folder, options)
    found = dict(zip(scanned.train.names, scanned.train.labels, strict=True))
    assert found["cat/link.png"] == found["cat/inner/b.png"] == "cat"
    assert found["bird/b.png"] == "bird"
    assert found["dog/up/cat/a.png"] == "dog"  # loops end: every folder is entered once
    assert not scanned.skipped


def test_a_class_or_split_that_is_a_link(photos, tmp_path):
    folder, other = linked(photos)
    (folder / "bird").symlink_to(other / "more")
    found = find_source(folder, ALL)
    assert "bird" not in found.train.labels
    with pytest.raises(InputError, match=r"class bird can be read \(bird: a link out of .*-links"):
        found.read(Reader(3, (8, 8)), 8, "host", False)
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "train").symlink_to(folder)
    with pytest.raises(InputError, match="train is a link; add --follow-links"):
        find_source(tmp_path / "split", ALL)


def test_link_loops_end(photos):
    folder = photos("cat/a.png", "cat/in/b.png", "dog/a.png")
    (folder / "cat" / "in" / "up").symlink_to(folder / "cat")
    (folder / "dog" / "self").symlink_to("self")
    found = find_source(folder, ALL)
    assert set(found.train.names) == {"cat/a.png", "cat/in/b.png", "dog/a.png"}
    assert [entry.path for entry in found.skipped] == ["dog/self"]


def test_broken_links_are_skipped(photos):
    folder = photos("cat/a.png", "dog/a.png")
    (folder / "cat" / "gone.png").symlink_to("nowhere.png")
    (folder / "bird").symlink_to("nowhere")
    found = find_source(folder, ALL)
    assert found.classes == ("cat", "dog")
    assert [vars(entry) for entry in found.skipped] == [
        {"path": "cat/gone.png", "reason": "No such file or directory"},
        {"path": "bird", "reason": "is not in a class folder"},
    ]


# ------------------------------------------------------------------------------------- broken


def test_unreadable_files_are_skipped_with_a_reason(photos):
    folder = photos("cat/a.png", "cat/b.png", "cat/cut.png", "dog/a.png", "dog/b.png")
    (folder / "cat" / "empty.jpg").touch()
    (folder / "cat" / "text.jpg").write_text("hello")
    (folder / "dog" / "x.jpg").mkdir()  # an empty folder
    whole = (folder / "cat" / "cut.png").read_bytes()
    (folder / "cat" / "cut.png").write_bytes(whole[:-25])
    found = find_source(folder, ALL)
    assert {entry.path: entry.reason for entry in found.skipped} == {
        "cat/empty.jpg": "empty file",
        "cat/text.jpg": "not an image, or a broken one",
    }
    data, skipped = found.read(Reader(3, (8, 8)), 8, "host", False)
    assert data.train.paths == ("cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")
    assert [entry.path for entry in skipped] == ["cat/empty.jpg", "cat/text.jpg", "cat/cut.png"]
    assert "truncated" in skipped[2].reason


def test_pipes_do_not_block(photos):
    folder = photos("cat/a.png", "dog/a.png")
    os.mkfifo(folder / "cat" / "pipe.png")
    assert find_source(folder, ALL).skipped[0].reason == "a pipe, not a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_missing_permissions(photos):
    folder = photos("cat/a.png", "cat/b.png", "dog/a.png", "dog/in/a.png")
    (folder / "cat" / "b.png").chmod(0)
    assert find_source(folder, ALL).skipped[0].reason == "Permission denied"
    (folder / "dog" / "in").chmod(0)
    with pytest.raises(InputError, match=r"dog/in: cannot be read \(Permission denied\)"):
        find_source(folder, ALL)


def test_folders_that_cannot_be_listed_are_refused(photos, monkeypatch):
    """Also for root, who may read everything."""
    folder = photos("cat/in/a.png", "dog/a.png")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("in"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"cat/in: cannot be read \(Permission denied\)"):
        files_below(folder / "cat")


# ------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("layout", "train", "test", "name"),
    [
        ("train/c val/c test/c", "train/c", "val/c", "the val images"),
        ("train/c test/c", "train/c", "test/c", "the test images"),
        ("training/c validation/c", "training/c", "validation/c", "the val images"),
        ("Train/c Valid/c", "Train/c", "Valid/c", "the val images"),
        ("train/c testing/c .other/c", "train/c", "testing/c", "the test images"),
    ],
)
def test_splits(photos, layout, train, test, name):
    folder = photos(*(f"{c}{k}/{i}.png" for c in layout.split() for k in "ab" for i in range(3)))
    found = find_source(folder)
    assert {str(path.parent.parent.name) for path in found.train.paths} == {train.split("/")[0]}
    assert {str(path.parent.parent.name) for path in found.test.paths} == {test.split("/")[0]}
    assert (found.test_name, found.noisy_test) == (name, False)
    assert found.classes == ("ca", "cb")
    assert (len(found.train), len(found.test)) == (6, 6)


def test_images_are_held_out_without_a_test_split(photos):
    folder = photos(*(f"train/{k}/{i}.png" for k in "ab" for i in range(10)))
    found = find_source(folder)
    assert (len(found.train), len(found.test)) == (18, 2)
    assert (found.test_name, found.noisy_test) == ("held-out images", True)
    assert not set(found.train.names) & set(found.test.names)


def test_empty_test_split_is_ignored(photos):
    folder = photos(*(f"train/{k}/{i}.png" for k in "ab" for i in range(10)))
    (folder / "test" / "a").mkdir(parents=True)
    assert find_source(folder).test_name == "held-out images"


def test_class_can_be_called_train(photos):
    found = find_source(photos("train/a.png", "plane/a.png", "test/a.png"), ALL)
    assert found.classes == ("plane", "test", "train")
    inner = find_source(photos("train/train/a.png", "train/car/a.png", root="other"), ALL)
    assert inner.classes == ("car", "train")


def test_folders_next_to_a_split_are_refused(photos):
    folder = photos("train/steam/a.png", "train/diesel/a.png", "bus/a.png", "car/a.png")
    with pytest.raises(
        InputError, match=r"other folders next to it \(bus, car\); move those"
    ) as error:
        find_source(folder)
    assert "\n" not in str(error.value)
    folder.rename(folder.with_name("train"))  # as the error suggests
    folder.mkdir()
    folder.with_name("train").rename(folder / "train")
    assert find_source(folder, ALL).classes == ("bus", "car", "train")
    many = photos("val/c/a.png", *(f"{i}/a.png" for i in range(9)), root="many")
    with pytest.raises(InputError, match=r"next to it \(0, 1, 2, 3, 4, …\)"):
        find_source(many)


def test_files_next_to_class_folders_are_reported(photos):
    folder = photos("cat/a.png", "dog/a.png", "loose.png", ".hidden.png")
    reason = "is not in a class folder"
    for options in (ALL, ReadOptions(hold_out=0, strict=True)):  # the file itself can be read
        assert [vars(entry) for entry in find_source(folder, options).skipped] == [
            {"path": "loose.png", "reason": reason}
        ]
    files = [f"{split}/{k}/a.png" for split in ("train", "test") for k in ("cat", "dog")]
    split = photos(*files, "x.png", "train/y.png", "test/z.png", root="split")
    names = ["x.png", "train/y.png", "test/z.png"]
    assert [entry.path for entry in find_source(split).skipped] == names
    found = find_source(
        photos("cat/a.png", "dog/a.png", root="other"), ReadOptions(test=str(folder))
    )
    assert [entry.path for entry in found.skipped] == ["loose.png"]


def test_separate_test_folder(photos):
    names = [f"{k}/{i}.png" for k in "ab" for i in range(4)]
    folder = photos(*names)
    flat, split = (
        photos(*names, root="flat"),
        photos(*(f"test/{name}" for name in names), root="split"),
    )
    for test in (flat, split):
        found = find_source(folder, ReadOptions(test=str(test)))
        assert (len(found.train), len(found.test)) == (8, 8)
        assert (found.test_name, found.noisy_test) == (f"the images of {test.name}", False)
    table = flat / "t.csv"
    table.write_text("path,label,split\na/1.png,a,test\nb/1.png,b,test\n")
    assert len(find_source(folder, ReadOptions(test=str(table))).test) == 2


def test_broken_test_images(photos):
    names = [f"{k}/{i}.png" for k in "ab" for i in range(4)]
    folder, test = photos(*names), photos("a/0.png", root="test")
    (test / "a" / "1.png").write_text("no image")
    found = find_source(folder, ReadOptions(test=str(test)))
    assert (len(found.test), found.skipped[0].path) == (1, "a/1.png")
    with pytest.raises(InputError, match=r"--test .*: a/1.png cannot be read"):
        find_source(folder, ReadOptions(test=str(test), strict=True))
    (test / "a" / "0.png").unlink()
    with pytest.raises(InputError, match=r"--test .*: no images can be read"):
        find_source(folder, ReadOptions(test=str(test)))
    split = photos(*(f"train/{name}" for name in names), root="split")
    (split / "val" / "a").mkdir(parents=True)
    (split / "val" / "a" / "0.png").write_text("no image")
    assert find_source(split).test is None
    with pytest.raises(InputError, match=r"val/a/0.png cannot be read"):
        find_source(split, ReadOptions(strict=True))


# ------------------------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a.png"], {}, "holds no class folders; it holds images directly"),
        ([], {}, "photos: holds no class folders$"),
        (["train/a.png", "test/b.png"], {}, "test holds no class folders; it holds images"),
        (["test/c/a.png"], {}, "has no images to train on, only test"),
        (["train/c/a.png", "training/c/a.png"], {}, "train and training mean the same split"),
        (["train/c/a.png", "val/d/a.png"], {}, "the val split: val/d/a.png has the class d, which"),
        (["c/a.png"], {"test": "nowhere"}, "--test nowhere: no such file or folder"),
        (["c/a.png"], {"test": "digits"}, "--test digits: no such file or folder"),
        (["c/a.png"], {"hold_out": 1}, "--hold-out must be a number from 0 to below 1, not 1"),
        (["c/a.png"], {"hold_out": "x"}, "--hold-out must be"),
        (["c/a.png"], {"fit": "pad"}, "--fit must be crop or stretch, not pad"),
    ],
)
def test_invalid_folders_are_refused(photos, names, options, message):
    folder = photos(*names)
    with pytest.raises(InputError, match=message) as error:
        find_source(str(folder), ReadOptions(**options))
    assert "\n" not in str(error.value)


def test_test_source_without_images_is_refused(photos):
    folder, test = photos("c/a.png", "d/a.png"), photos(root="empty")
    (test / "test" / "c").mkdir(parents=True)
    with pytest.raises(InputError, match=r"--test .*empty: has no images"):
        find_source(folder, ReadOptions(test=str(test)))


def test_folder_with_only_broken_files_is_refused(photos):
    folder = photos()
    (folder / "cat").mkdir()
    (folder / "cat" / "a.jpg").write_text("no")
    with pytest.raises(InputError, match=r"no images can be read \(cat/a.jpg: not an image"):
        find_source(folder)
    with pytest.raises(InputError, match=r"cat/a.jpg cannot be read .*without --strict"):
        find_source(folder, ReadOptions(strict=True))


def test_pixels_and_labels_keep_their_order(photos):
    """From the files to the tensor."""
    folder = photos("a/0.png", "a/1.png", "b/0.png", "b/1.png", size=(8, 8))
    data, _ = find_source(folder, ALL).read(Reader(3, (8, 8)), 8, "host", False)
    for pixels, name in zip(data.train.images_NCHW, data.train.paths, strict=True):
        wanted = np.asarray(Image.open(folder / name)).transpose(2, 0, 1)
        np.testing.assert_array_equal(pixels, wanted)
    assert data.train.given_N.tolist() == [0, 0, 1, 1]


def test_splits_by_name(photos):
    folder = photos("train/a/0.png", "val/a/1.png", "test/a/2.png")
    assert {split: files.names for split, files in folder_splits(folder, "x").items()} == {
        "train": ("train/a/0.png",),
        "val": ("val/a/1.png",),
        "test": ("test/a/2.png",),
    }


def test_run_folder_inside_the_source_is_refused(photos):
    folder = photos("cat/a.png", "dog/b.png")
    for out in (folder / "run", folder / "cat" / "run"):
        with pytest.raises(InputError, match=r"--out .*whose folders are classes"):
            train(folder, out)
    assert not (folder / "run").exists()
