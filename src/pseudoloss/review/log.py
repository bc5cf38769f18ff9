"""The decisions of people: an append-only file with one JSON object per line.

A decision counts once its line is on disk. Lines are never changed; the last one about an image
wins. One process writes: the file is locked while a server uses it.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pseudoloss.errors import BusyError, InputError, reason
from pseudoloss.files import with_checksum
from pseudoloss.labels.reviewed import Decision, parse_line

try:
    import fcntl
except ImportError:  # not on this system: two servers are not kept apart
    fcntl = None  # type: ignore[assignment]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class DecisionLog:
    """A decisions file that is open for appending. Locked until it is closed."""

    def __init__(self, path: Path, flag: str = "") -> None:
        """Open or create the file.

        Args:
            path: the file.
            flag: the flag that named it, for error messages.
        """
        self.path = path
        where = f"{flag} {path}".strip()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            self.file = os.open(path, flags, 0o644)
            _sync_folder(path.parent)
        except OSError as error:
            raise InputError(
                f"{where}: cannot be written ({reason(error)}); --decisions FILE writes the "
                "decisions to another file"
            ) from None
        if fcntl is not None:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self.file)
                raise BusyError(
                    f"{where}: another pseudoloss review is using this file; open its page, or "
                    "stop it first"
                ) from None
        self.damaged = 0  # lines without a decision, found while reading

    def read(self) -> Iterator[Decision]:
        """All decisions, in the order they were made. Damaged lines are counted."""
        self.damaged = 0
        with self.path.open("rb") as file:
            for line in file:
                found = parse_line(line)
                if found is not None:
                    yield found
                elif line.strip():
                    self.damaged += 1

    def append(self, decisions: Iterable[Decision]) -> None:
        """Write decisions to disk; returns when they are there. On an OSError none of them is."""
        # ASCII: file names need not be valid Unicode.
        lines = b"".join(
            json.dumps(with_checksum(asdict(one))).encode() + b"\n" for one in decisions
        )
        size = os.fstat(self.file).st_size
        # A kill or a full disk may have cut the last line; it must not run into the next one.
        if size:
            os.lseek(self.file, size - 1, os.SEEK_SET)
            if os.read(self.file, 1) != b"\n":
                lines = b"\n" + lines
        try:
            written = 0
            while written < len(lines):
                written += os.write(self.file, lines[written:])
            os.fsync(self.file)
        except OSError:
            os.ftruncate(self.file, size)
            raise

    def close(self) -> None:
        os.close(self.file)


def _sync_folder(folder: Path) -> None:
    """Make sure that a new file in this folder survives a power cut, where the system can."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
