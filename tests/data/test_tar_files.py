"""Listing tar archives: Python's tarfile is the oracle; damaged and hostile archives."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pseudoloss.data import tar_files
from pseudoloss.data.decoding import UnreadableError
from pseudoloss.data.tar_files import members, open_archive, open_member, read_member

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def write_tar(path, files, form=tarfile.GNU_FORMAT):
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def listed(path):
    archive = open_archive(path)
    return [(m.name, read_member(archive, m.offset, m.size)) for m in members(archive)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("length", [5, 90, 99, 100, 101, 140, 300])
def test_files_and_their_bytes_are_those_of_tarfile(tmp_path, form, length):
    random = np.random.default_rng(length)
    folder = "f" * min(length - 4, 90)
    names = [f"{i}{folder}/{'n' * max(1, length - len(folder) - 6)}.jpg" for i in range(3)]
    names += ["übel.png"] if form != tarfile.USTAR_FORMAT else []
    files = [
        (name, random.bytes(size)) for name, size in zip(names, (0, 511, 1025, 3), strict=False)
    ]
    try:
        path = write_tar(tmp_path / "a.tar", files, form)
    except ValueError:
        assert form == tarfile.USTAR_FORMAT  # it has no place for such a name
        return
    assert listed(path) == files
    with tarfile.open(path) as tar:
        offsets = [info.offset_data for info in tar]
    assert [member.offset for member in members(open_archive(path))] == offsets


def test_what_is_no_ordinary_file_is_named_and_folders_are_ignored(tmp_path):
    kinds = {
        tarfile.SYMTYPE: "a link",
        tarfile.LNKTYPE: "a link",
        tarfile.CHRTYPE: "a device",
        tarfile.BLKTYPE: "a device",
        tarfile.FIFOTYPE: "a pipe",
        b"Z": "of an unknown kind",
        tarfile.DIRTYPE: None,
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, kind in enumerate(kinds):
            info = tarfile.TarInfo(f"{i}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    found = [member.problem for member in members(open_archive(tmp_path / "a.tar"))]
    assert found == [why for why in kinds.values() if why]


def test_numbers_beyond_octal(tmp_path):
    """A member of more than 8 GiB has a binary size; the file is sparse, so it takes no space."""
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("large.jpg")
    info.size = 9 * 2**30
    header = info.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(header)
    os.truncate(path, len(header) + info.size + 1024)
    (found,) = members(open_archive(path))
    assert (found.name, found.size) == ("large.jpg", 9 * 2**30)


def header(name="a.jpg", size=4, **changes):
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in changes.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"no tar archive" * 100, "not a tar archive, or damaged at byte 0"),
        (header(), "truncated: a member needs 4 bytes, and 0 follow"),
        (header(size=2**62), "truncated: a member needs 4,611,686,018,427,387,904 bytes"),
        (header() + b"abcd" + bytes(508), "it has no end mark"),
        (header() + b"abcd" + bytes(508) + b"x", "truncated after 1,024 bytes"),
        (header(size=2**20, type=b"L") + bytes(2**20), "damaged: a name has 1,048,576 bytes"),
        (
            header(size=9, type=b"x") + b"99 path=a".ljust(512, b"\0"),
            "extended header is not valid",
        ),
        (
            header(size=9, type=b"x") + b"0 path=aa".ljust(512, b"\0"),
            "extended header is not valid",
        ),
        (
            header(size=11, type=b"x") + b"11 size=-1\n".ljust(512, b"\0") + header(),
            "a member has no valid size",
        ),
        (b"\x1f\x8b\x08" + bytes(600), r"compressed \(gzip\)"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), r"compressed \(zstd\)"),
    ],
)
def test_damage_is_named(tmp_path, content, message):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=message):
        list(members(open_archive(path)))


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")  # opening it would block
    (tmp_path / "zero.tar").symlink_to("/dev/zero")
    for name in ("pipe.tar", "zero.tar", ""):
        with pytest.raises(UnreadableError, match="not a regular file"):
            open_archive(tmp_path / name)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_bytes_give_members_inside_the_archive_or_an_error(tmp_path, data):
    path = write_tar(
        tmp_path / "a.tar", [("a.jpg", b"x" * 600), ("n" * 150, b"y"), ("b.cls", b"1")]
    )
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 3583))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # with a checksum that is right
        block = 512 * data.draw(st.integers(0, 5))
        content[block + 148 : block + 156] = b" " * 8
        content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
    path.write_bytes(content)
    archive = open_archive(path)
    with contextlib.suppress(UnreadableError):
        for member in members(archive):
            assert 0 <= member.offset <= member.offset + member.size <= archive.size
            assert len(read_member(archive, member.offset, member.size)) == member.size


def test_an_archive_that_has_changed_is_not_read(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"abcd")])
    archive = open_archive(path)
    write_tar(path, [("other.jpg", b"efgh"), ("b.jpg", b"i")])
    os.utime(path, ns=(1, 1))
    with pytest.raises(UnreadableError, match=r"a\.tar has changed since it was listed"):
        read_member(archive, 512, 4)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_archives_than_are_kept_open(tmp_path, monkeypatch):
    count = tar_files.OPEN_ARCHIVES + 10
    archives = [
        open_archive(write_tar(tmp_path / f"{i}.tar", [("a.jpg", b"%04d" % i)]))
        for i in range(count)
    ]
    before = open_files()
    for _ in range(2):
        assert [int(read_member(archive, 512, 4)) for archive in archives] == list(range(count))
    assert open_files() - before <= tar_files.OPEN_ARCHIVES


def test_a_stream_reads_only_what_is_asked_for(tmp_path, monkeypatch):
    content = bytes(range(256)) * 4096
    archive = open_archive(write_tar(tmp_path / "a.tar", [("a.jpg", content)]))
    asked = []
    real = tar_files._Handle.read
    monkeypatch.setattr(
        tar_files._Handle, "read", lambda self, at, n: asked.append(n) or real(self, at, n)
    )
    with open_member(archive, 512, len(content)) as stream:
        assert stream.read(100) == content[:100]
        assert sum(asked) == tar_files.BUFFER
        assert (stream.seek(-5, io.SEEK_END), stream.read()) == (len(content) - 5, content[-5:])
        assert (stream.seek(len(content) + 9), stream.read()) == (len(content) + 9, b"")
        stream.seek(7)
        assert stream.read(300_000) == content[7:300_007]
