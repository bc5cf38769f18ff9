"""Where the files in a tar archive are, without unpacking it; reading them by offset.

Archives may be damaged or hostile: nothing is written, links are not followed, names are never used
as paths, and no more than a few megabytes of headers are in memory at a time.
"""

import io
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pseudoloss.data.decoding import UnreadableError
from pseudoloss.errors import reason

BLOCK = 512
LONGEST_NAME = 2**16  # bytes of the extended header of a file, in which long names are
OPEN_ARCHIVES = 64  # kept open by each process
BUFFER = 2**14  # bytes that are read at once for an image header
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# What a member that is not a file is called in messages, by its type in the header.
OTHER_KINDS = {
    b"1": "a link",
    b"2": "a link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
FILE, FOLDER, COMMENT = (b"0", b"\0", b"7"), b"5", b"g"
LONG_NAME, LONG_LINK, EXTENDED = b"L", b"K", b"x"


class Archive(NamedTuple):
    """An archive as it was when it was listed."""

    path: Path
    size: int
    modified: int  # in nanoseconds


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int  # of its first byte in the archive
    size: int
    problem: str = ""  # why it is not an ordinary file, if it is not


class CompressedError(UnreadableError):
    """The archive is compressed: nothing in it can be read by offset."""


def open_archive(path: Path) -> Archive:
    """An archive; UnreadableError if it is not a regular file."""
    try:
        found = path.stat()
    except OSError as error:
        raise UnreadableError(reason(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableError("not a regular file")
    if found.st_size == 0:
        raise UnreadableError("empty file")
    return Archive(path, found.st_size, found.st_mtime_ns)


def members(archive: Archive) -> Iterator[Member]:
    """The files in an archive, in order. Raises UnreadableError where it is damaged."""
    with _Handle(archive) as handle:
        _refuse_compressed(handle.read(0, min(8, archive.size)))
        at, long_name, long_size = 0, None, None
        while True:
            if at == archive.size:
                raise UnreadableError("it has no end mark: it may be truncated")
            if at + BLOCK > archive.size:
                raise UnreadableError(f"truncated after {at:,} bytes")
            block = handle.read(at, BLOCK)
            if not any(block):
                return
            kind, size = _checked(block, at)
            size = size if long_size is None or kind in (EXTENDED, LONG_NAME) else long_size
            start, at = at + BLOCK, at + BLOCK + -(-size // BLOCK) * BLOCK
            if start + size > archive.size:
                raise UnreadableError(
                    f"truncated: a member needs {size:,} bytes, and {archive.size - start:,} follow"
                )
            at = min(at, archive.size)  # the padding of the last member may be missing
            if kind in (LONG_NAME, EXTENDED):
                if size > LONGEST_NAME:
                    raise UnreadableError(f"damaged: a name has {size:,} bytes")
                header = handle.read(start, size)
                if kind == LONG_NAME:
                    long_name = header.rstrip(b"\0")
                else:
                    long_name, long_size = _extended(header, long_name)
                continue
            if kind in (COMMENT, LONG_LINK):
                continue
            name = _name(block) if long_name is None else long_name
            long_name = long_size = None
            if kind != FOLDER:
                problem = "" if kind in FILE else OTHER_KINDS.get(kind, "of an unknown kind")
                yield Member(os.fsdecode(name), start, size, problem)


def _refuse_compressed(start: bytes) -> None:
    for magic, name in COMPRESSED.items():
        if start.startswith(magic):
            raise CompressedError(f"compressed ({name})")


def _checked(block: bytes, at: int) -> tuple[bytes, int]:
    """Type and size of a member, from its header block."""
    others = block[:148] + b" " * 8 + block[156:]
    signed = sum(others) - 256 * sum(byte > 127 for byte in others)  # as some old programs sum
    if _number(block[148:156]) not in (sum(others), signed):
        raise UnreadableError(f"not a tar archive, or damaged at byte {at:,}")
    size = _number(block[124:136])
    if size < 0:
        raise UnreadableError(f"damaged: a member has no valid size at byte {at:,}")
    return block[156:157], size


def _number(field: bytes) -> int:
    """A number in a header: octal digits, or binary if the first bit is set; -1: neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        return -1


def _name(block: bytes) -> bytes:
    name, prefix = (block[a:b].split(b"\0", 1)[0] for a, b in ((0, 100), (345, 500)))
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _extended(header: bytes, name: bytes | None) -> tuple[bytes | None, int | None]:
    """Name and size from an extended header, whose records are like "18 path=a/b.jpg\\n"."""
    size = None
    while header:
        length, space, _ = header.partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(header):
            raise UnreadableError("damaged: an extended header is not valid")
        key, _, value = header[len(length) + 1 : int(length)].removesuffix(b"\n").partition(b"=")
        header = header[int(length) :]
        if key == b"path":
            name = value
        elif key == b"size":
            if not value.isdigit() or len(value) > 20:
                raise UnreadableError("damaged: a member has no valid size")
            size = int(value)
    return name, size


# ---------------------------------------------------------------------------- reading by offset


def read_member(archive: Archive, offset: int, size: int) -> bytes:
    """Some bytes of an archive."""
    return _handle(archive).read(offset, size)


def open_member(archive: Archive, offset: int, size: int) -> BinaryIO:
    """The same bytes as a stream, of which only what is asked for is read."""
    return io.BufferedReader(_Window(_handle(archive), offset, size), BUFFER)


class _Handle:
    """An open archive; may be used in threads and after a fork. It is closed when no one uses it
    any more: an archive that leaves the cache may still be read by another thread."""

    def __init__(self, archive: Archive) -> None:
        self.file: BinaryIO | None = None
        try:
            self.file = archive.path.open("rb", buffering=0)
            found = os.fstat(self.file.fileno())
        except OSError as error:
            raise UnreadableError(reason(error)) from None
        if (found.st_size, found.st_mtime_ns) != archive[1:]:
            raise UnreadableError(f"{archive.path.name} has changed since it was listed")

    def read(self, offset: int, size: int) -> bytes:
        assert self.file is not None
        parts = []
        while size:
            try:
                part = os.pread(self.file.fileno(), size, offset)
            except OSError as error:
                raise UnreadableError(reason(error)) from None
            if not part:
                raise UnreadableError("truncated file")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def __enter__(self) -> "_Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.__del__()

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


_handle = lru_cache(maxsize=OPEN_ARCHIVES)(_Handle)


class _Window(io.RawIOBase):
    """Some bytes of an archive as a file."""

    def __init__(self, handle: _Handle, offset: int, size: int) -> None:
        self.handle, self.offset, self.size, self.at = handle, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        if base + to < 0:
            raise ValueError("negative seek position")
        self.at = base + to
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.size - self.at))
        buffer[:count] = self.handle.read(self.offset + self.at, count)
        self.at += count
        return count
