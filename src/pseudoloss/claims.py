"""A claim keeps other processes out of a folder, also those of other machines that share it.

The claims of a folder are the files FOLDER/.lock/1, 2, … The highest number counts. Its file says
which process has the folder, and that process renews the time of the file. A claim ends when it is
released, when its process on this machine is gone, or some minutes after it was last renewed. Then
another process may create the next number: only one can. So nothing that another process may have
claimed in the meantime is ever removed, and no locks of the file system are needed.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pseudoloss.errors import BusyError, InputError, TrainingError
from pseudoloss.files import write_json

FOLDER = ".lock"
RENEW_SECONDS = 20.0
EXPIRED_SECONDS = 180.0  # without being renewed, on another machine
LATE_SECONDS = 3 * RENEW_SECONDS  # after which something is probably wrong
TRIES = 20  # other processes that may be faster

_held: dict[str, "Claim"] = {}  # by folder


@dataclass(frozen=True)
class Holder:
    """The process that has a folder."""

    pid: int
    host: str
    is_here: bool  # on this machine, so that it is known to be alive
    silent: float  # seconds since the claim was renewed

    @property
    def is_late(self) -> bool:
        return not self.is_here and self.silent > LATE_SECONDS

    def __str__(self) -> str:
        if self.is_here:
            return f"process {self.pid} on this machine"
        left = max(1, round(EXPIRED_SECONDS - self.silent))
        return (
            f"process {self.pid} on {self.host}, last seen {self.silent:.0f} seconds ago; if it "
            f"has died, its claim ends in {left} seconds"
        )


@contextmanager
def lock_folder(path: Path, inner: Path) -> Iterator[None]:
    """Create `inner`, a folder in `path` or itself, and keep other processes out of `path`. If it
    ends with an error before anything is written, only what was there before is left."""
    needed = (path / FOLDER, inner, *inner.parents)
    missing = [folder for folder in needed if not folder.exists()]
    try:
        inner.mkdir(parents=True, exist_ok=True)
        held = take(path)
    except OSError as error:
        for folder in missing:  # leave nothing behind
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise InputError(f"--out {path}: cannot be written ({error.strerror})") from None
    try:
        with held:
            yield
    except BaseException:
        if path / FOLDER in missing:
            _remove_beginnings(path, missing, held.path)
        raise


def _remove_beginnings(path: Path, new_folders: Sequence[Path], claim: Path) -> None:
    """Remove the claim, and folders that were created, if nothing else is in them."""
    with contextlib.suppress(OSError):
        if all(entry in new_folders for entry in path.iterdir()):
            claim.unlink()
            for folder in new_folders:
                folder.rmdir()


def take(folder: Path) -> "Claim":
    """Claim a folder, or raise BusyError. The claim is to be used as a context manager."""
    place = folder / FOLDER
    if place.is_file():  # of an older version
        place.unlink()
    place.mkdir(parents=True, exist_ok=True)
    mine = _take(place, f"--out {folder}: another process is working on this run")
    _held[str(folder.resolve())] = mine
    Thread(target=mine.renew, name="claim", daemon=True).start()
    return mine


def holder(folder: Path) -> Holder | None:
    """The process that has a folder; None if it is free. Writes nothing."""
    place = folder / FOLDER
    latest = _latest(place)
    return _holder(place / str(latest), time.time()) if latest else None


def check(folder: Path) -> None:
    """Before a write: raise TrainingError if another process has taken over a folder that this one
    had claimed, because it seemed to be dead."""
    mine = _held.get(str(folder.resolve())) if _held else None
    if mine is not None and mine.is_lost():
        raise TrainingError(
            f"--out {folder}: another process has taken over, since nothing was heard of this one "
            f"for {EXPIRED_SECONDS / 60:g} minutes; nothing more is written here"
        )


@dataclass(eq=False)
class Claim:
    """A claim of this process. A thread renews it."""

    path: Path
    token: str
    ended: Event = field(default_factory=Event)

    def is_lost(self) -> bool:
        """Whether another process has claimed the folder since."""
        try:
            return _latest(self.path.parent) > int(self.path.name)
        except OSError:  # the file system does not answer: writing fails too
            return False

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):  # it ends with the process
            if not self.is_lost():
                write_json(self.path, {"released": True})
        for folder in [folder for folder, mine in _held.items() if mine is self]:
            del _held[folder]

    def renew(self) -> None:
        while not self.ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # perhaps it works the next time
                if self.is_lost():
                    return
                os.utime(self.path)  # the time of the file server, if there is one


def _take(place: Path, busy: str) -> Claim:
    for _ in range(TRIES):
        latest = _latest(place)
        other = _holder(place / str(latest), _clock(place)) if latest else None
        if other is not None:
            raise BusyError(f"{busy} ({other})")
        path = place / str(latest + 1)
        token = uuid.uuid4().hex
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(_this_process() | {"token": token}))
        except FileExistsError:
            continue  # another process was faster
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if _latest(place) != latest + 1:  # others have come and gone since we looked
            path.unlink(missing_ok=True)
            continue
        for old in range(latest, 0, -1):
            if not (place / str(old)).exists():
                break
            (place / str(old)).unlink(missing_ok=True)
        return Claim(path, token)
    raise BusyError(busy)


def _latest(place: Path) -> int:
    """The number of the last claim; 0 if there is none."""
    try:
        return max((int(path.name) for path in place.iterdir() if path.name.isdecimal()), default=0)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _holder(path: Path, now: float) -> Holder | None:
    """The process that holds a claim; None if the claim has ended."""
    try:
        silent = max(0.0, now - path.stat().st_mtime)
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("released") is True:
            return None
        host, pid, token = str(found["host"]), int(found["pid"]), str(found["token"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # it is being written, or damaged
        found, host, pid, token = {}, "another machine", 0, ""
    here = _this_process()
    if found and all(found.get(name) == here[name] for name in ("host", "boot", "space")):
        if pid == os.getpid():
            alive = any(mine.token == token for mine in _held.values())
        else:
            alive = _started(pid) == found.get("started") is not None
        if found.get("started") is not None:
            return Holder(pid, host, True, silent) if alive else None
    if found and host == here["host"] and found.get("boot") != here["boot"] and found.get("boot"):
        return None  # this machine has been started again since
    return Holder(pid, host, False, silent) if silent < EXPIRED_SECONDS else None


def _this_process() -> dict[str, Any]:
    """What tells this process from all others: pids are used again, and containers count their
    own."""
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "space": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _started(pid: int) -> int | None:
    """When a process was started, in ticks of its system; None if there is no such process, or if
    the system does not say."""
    if os.name == "posix" and not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return 0
    text = _text(f"/proc/{pid}/stat")
    state, *fields = text.rpartition(")")[2].split() or [""]
    return None if state in ("", "Z", "X") else int(fields[18])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115, it leads nowhere
    except OSError:
        return ""


def _clock(place: Path) -> float:
    """The time by the clock that sets the times of files in a folder."""
    path = place / f".clock-{uuid.uuid4().hex}"
    try:
        path.touch()
        now = path.stat().st_mtime
        path.unlink()
    except OSError:
        return time.time()
    return now
