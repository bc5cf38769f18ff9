"""Features of images that were seen before, by the content of the image.

Every extractor has a folder of its own in the cache folder. It holds shards: files that are written
once, under a name of their own, and never changed. So two processes can write at the same time, and
a process that is killed loses only the rows it has not written yet. Shapes: M rows, D features.

A shard is a header (magic, M, D, checksum of the digests, checksum of the values), then M digests,
then M×D values (float16).
"""

import contextlib
import hashlib
import struct
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pseudoloss.errors import reason
from pseudoloss.files import write_atomically

DIGEST = 32  # bytes
DTYPE = np.dtype("<f2")
SHARD_ROWS = 1024
SHARD_SECONDS = 30.0  # a kill loses no more work than this
OLD_DRAFT = 3600.0  # seconds after which the draft of a killed process is removed

_MAGIC = b"plsfeat1"
_HEADER = struct.Struct(f"<8sII{DIGEST}s{DIGEST}s")


def digest_of(*parts: bytes | memoryview) -> bytes:
    """A hash of bytes; the lengths of the parts count too."""
    digest = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@dataclass
class Shard:
    """An opened shard. The values are checked when the first of them is used."""

    path: Path
    values_MD: np.ndarray  # in the file
    checksum: bytes  # of the values
    intact: bool | None = None  # None: not checked yet

    def check(self) -> bool:
        if self.intact is None:
            self.intact = digest_of(self.values_MD.data.cast("B")) == self.checksum
        return self.intact


class FeatureCache:
    """Features of one extractor. `find` may be called in threads; the rest may not.

    `folder` None: nothing is kept. Problems do not stop the work; they are in `notices`.
    """

    def __init__(self, folder: Path | None, width: int) -> None:
        self.folder, self.width = folder, width
        self._places: dict[bytes, tuple[Shard, int]] = {}
        self._new: dict[bytes, np.ndarray] = {}
        self._written = time.monotonic()
        self._damaged: set[Path] = set()
        self._problem: str | None = None
        if folder is not None:
            self._open(folder)

    @property
    def notices(self) -> tuple[str, ...]:
        found = [] if self._problem is None else [self._problem]
        if self._damaged:
            found.append(
                f"{len(self._damaged)} damaged file(s) in the cache of features were removed "
                f"({self.folder}); those features were computed again"
            )
        return tuple(found)

    def find(self, digest: bytes) -> np.ndarray | None:
        """The features (D) of an image, or None if they are not known."""
        place = self._places.get(digest)
        if place is None:
            return self._new.get(digest)
        shard, row = place
        if shard.check():
            return np.asarray(shard.values_MD[row])
        self._remove(shard.path)
        return self._new.get(digest)

    def add(self, digest: bytes, values_D: np.ndarray) -> None:
        """Keep the features of an image; they are written with the next shard."""
        if self.folder is None or digest in self._new:
            return
        self._new[digest] = np.asarray(values_D, dtype=DTYPE)
        late = time.monotonic() - self._written > SHARD_SECONDS
        if len(self._new) >= SHARD_ROWS or late:
            self.flush()

    def flush(self) -> None:
        """Write all rows that are not written yet."""
        if self.folder is None or not self._new:
            return
        digests, values_MD = b"".join(self._new), np.stack(list(self._new.values()))
        self._new.clear()
        self._written = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{uuid.uuid4().hex}.shard"
            content = _header(digests, values_MD) + digests + values_MD.tobytes()
            write_atomically(path, lambda draft: _write(draft, content))
        except OSError as error:
            self._problem = (
                f"features cannot be kept in {self.folder} ({reason(error)}); the next audit "
                "computes them again"
            )
            self.folder = None

    def _open(self, folder: Path) -> None:
        for path in sorted(folder.glob("*.shard")):
            try:
                shard, digests = _read(path, self.width)
            except OSError:  # removed by another process meanwhile, or not ours to read
                continue
            except ValueError:
                self._remove(path)
                continue
            for row in range(len(shard.values_MD)):
                digest = digests[row * DIGEST : (row + 1) * DIGEST]
                self._places.setdefault(digest, (shard, row))
        for draft in folder.glob(".*.draft"):
            with contextlib.suppress(OSError):
                if time.time() - draft.stat().st_mtime > OLD_DRAFT:
                    draft.unlink()

    def _remove(self, path: Path) -> None:
        self._damaged.add(path)
        with contextlib.suppress(OSError):
            path.unlink()


def _write(draft: Path, content: bytes) -> None:
    draft.write_bytes(content)


def _header(digests: bytes, values_MD: np.ndarray) -> bytes:
    rows, width = values_MD.shape
    shape = struct.pack("<II", rows, width)
    checksums = digest_of(shape, digests), digest_of(values_MD.data.cast("B"))
    return _HEADER.pack(_MAGIC, rows, width, *checksums)


def _read(path: Path, width: int) -> tuple[Shard, bytes]:
    """A shard and its digests; ValueError if it is damaged."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError("too short")
        magic, rows, found_width, of_digests, of_values = _HEADER.unpack(head)
        size = _HEADER.size + rows * (DIGEST + found_width * DTYPE.itemsize)
        if magic != _MAGIC or found_width != width or path.stat().st_size != size or not rows:
            raise ValueError("not a shard of this extractor")
        digests = file.read(rows * DIGEST)
    if digest_of(struct.pack("<II", rows, width), digests) != of_digests:
        raise ValueError("wrong checksum")
    offset = _HEADER.size + len(digests)
    values_MD = np.memmap(path, DTYPE, "r", offset, (rows, width))
    return Shard(path, np.asarray(values_MD), of_values), digests
