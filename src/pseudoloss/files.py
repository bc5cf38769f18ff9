"""Paths, and files that are written completely or not at all.

Every write goes to a draft first, which then replaces the file. If the process is killed, the old
file is still there; if the disk is full, no draft is left. Files of tensors and JSON records carry
a checksum, which is verified when they are read. Importing this module does not load torch.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pseudoloss.errors import InputError, cannot_write, reason

if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Literal

    import numpy as np
    from torch import Tensor

# --------------------------------------------------------------------------------------- paths


def as_path(value: Any, flag: str) -> Path:
    """`value` as a path that the system accepts, or an error that names the flag."""
    try:
        path = Path(value)
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (TypeError, ValueError, OSError) as error:
        raise InputError(f"{flag} {str(value)[:60]}: no usable path ({reason(error)})") from None
    return path


def at_home(path: str | Path) -> Path:
    """The path with ~ replaced by the home folder, if there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_folder(name: str) -> Path:
    """Where something is kept between commands: PSEUDOLOSS_CACHE, else XDG_CACHE_HOME/pseudoloss,
    else ~/.cache/pseudoloss; in its folder `name`."""
    own, shared = os.environ.get("PSEUDOLOSS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return at_home(own) / name
    return at_home(shared or "~/.cache") / "pseudoloss" / name


def refuse_existing(path: Path, flag: str = "--out", hint: str = "choose another name") -> None:
    """Refuse an output that exists: nothing is overwritten."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{flag} {path}: exists already; {hint}")


def free_name(name: str) -> str:
    """A name to suggest: the first of NAME.csv, NAME-2.csv, … that does not exist."""
    path, number = Path(name), 2
    while os.path.lexists(path):
        path = Path(name).with_stem(f"{Path(name).stem}-{number}")
        number += 1
    return str(path)


def check_replaceable(path: Path, force: bool, flag: str = "--out") -> None:
    """Refuse an output that exists, without --force; anything but a file also with it."""
    refuse_special(path, flag)
    if not force:
        refuse_existing(path, flag, "add --force to overwrite it")


def refuse_special(path: Path, flag: str = "--out") -> None:
    """Refuse to replace anything but a file: a link, a device, a pipe, a folder."""
    if os.path.lexists(path) and not (path.is_file() and not path.is_symlink()):
        raise InputError(f"{flag} {path}: is {_kind(path)}, which is not replaced; remove it first")


def _kind(path: Path) -> str:
    if path.is_symlink():
        return "a link"
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a device or a socket"


# -------------------------------------------------------------------------------------- reading


def open_regular(path: str | Path) -> "BufferedReader":
    """Open a file for reading. OSError for anything else, such as a folder, a pipe or a device;
    nothing blocks."""
    import errno
    import stat

    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = "pipe" if stat.S_ISFIFO(mode) else "device"
            raise OSError(errno.EINVAL, f"a {kind}, not a file", str(path))
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_text(path: str | Path) -> str:
    """The content of a file of UTF-8, with or without a byte order mark."""
    with open_regular(path) as file:
        return file.read().decode("utf-8-sig")


def read_json(path: str | Path) -> Any:
    """The content of a file of JSON; OSError or ValueError if there is none."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`; ValueError also for values that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_npz(path: str | Path, most: float = math.inf) -> "dict[str, np.ndarray]":
    """The arrays of an `.npz` file. ValueError or OSError if it is damaged, holds objects, or needs
    more than `most` bytes."""
    import numpy as np

    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                needed = sum(member.file_size for member in archive.infolist())
            if needed > most:
                raise ValueError(f"its arrays need {needed / 2**30:,.1f} GiB of memory")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
            for name, array in found.items():
                if not isinstance(array, np.ndarray):
                    raise ValueError(f"{name} is not an array")
            return found
        except (OSError, ValueError):
            raise
        except Exception as error:  # a damaged archive can raise anything
            raise ValueError(reason(error)) from None


def open_npy(path: str | Path, mode: "Literal['r', 'c']" = "r") -> "np.ndarray":
    """The array of a `.npy` file, which stays in the file. ValueError or OSError if it is damaged
    or holds objects."""
    import numpy as np

    open_regular(path).close()
    try:
        return np.lib.format.open_memmap(path, mode=mode)
    except (OSError, ValueError):
        raise
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(reason(error)) from None


# -------------------------------------------------------------------------------------- writing


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a draft next to `path`, then replace `path` by it in one step."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a draft must not keep a full disk full
            draft.unlink()
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a failed write of an open file does not name it
        raise


def keep_as(path: Path, name: Path) -> None:
    """Keep the present content of `path` under another name when `path` is replaced. At every
    moment the file exists under `path`, where the file system has hard links."""
    draft = name.with_name(f".{name.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        os.link(path, draft)
    except OSError:
        path.replace(name)
    else:
        draft.replace(name)


def remove_drafts(folder: Path) -> None:
    """Remove what a process that was killed while writing has left."""
    for draft in folder.glob(".*.draft"):
        with contextlib.suppress(OSError):
            draft.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    def write(draft: Path) -> None:
        draft.write_bytes(content)

    write_atomically(path, write)


@contextmanager
def new_folder(path: Path, flag: str = "--out") -> Iterator[Path]:
    """Yield a draft folder next to `path`. It is renamed to `path` at the end, and removed if
    something fails."""
    refuse_existing(path, flag)
    draft = path.with_name(f".{path.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
        draft.mkdir(parents=True)
        yield draft
        draft.rename(path)
    except OSError as error:
        raise cannot_write(flag, path, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# ----------------------------------------------------------------------------------------- JSON

CHECKSUM = "checksum"  # the key of the SHA-256 in records and in files of tensors


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (to_json(value, indent=2) + "\n").encode())


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of its content."""
    write_json(path, with_checksum(json.loads(to_json(value))))


def read_checked(path: Path) -> dict[str, Any]:
    """A JSON object that `write_checked` wrote, without its checksum; ValueError if damaged."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {reason(error)}") from None
    return without_checksum(value, path.name)


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, CHECKSUM: _checksum_of(value)}


def without_checksum(value: Any, name: str = "it") -> dict[str, Any]:
    """A JSON object without its checksum; ValueError if that is wrong. Files of older versions have
    none."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    content = dict(value)
    found = content.pop(CHECKSUM, None)
    if found is not None and found != _checksum_of(content):
        raise ValueError(
            f"{name} is not as it was written: its checksum is wrong. If you changed it on "
            f'purpose, remove "{CHECKSUM}" from it'
        )
    return content


def _checksum_of(value: Mapping[str, Any]) -> str:
    """Of the values; spaces and the order of keys do not count."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --------------------------------------------------------------------------------------- tensors

RECORD = "pseudoloss"  # the key of our JSON record in the metadata of a safetensors file
BLANK = "0" * 64  # stands for the checksum while it is computed
HEADER_LIMIT = 100_000_000  # bytes, that of the safetensors library
DTYPES = {  # the names of torch, and those of the file format
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, "Tensor"], record: Any) -> None:
    """Write tensors of any layout and device, with a JSON record and a checksum of the whole file
    in the header. Equal content gives equal bytes.

    We do not use the writers of the safetensors library: one builds the whole file in memory while
    it holds the interpreter lock, the other chooses its own draft, permissions and errors.
    """
    import torch

    flat_tensors = {
        name: tensor.detach().to("cpu").contiguous().flatten()
        for name, tensor in sorted(tensors.items(), key=_widest_first)
    }
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: BLANK, RECORD: to_json(record)}}
    end = 0
    for name, flat in flat_tensors.items():
        start, end = end, end + flat.nbytes
        header[name] = {
            "dtype": DTYPES[str(flat.dtype).removeprefix("torch.")],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def write(draft: Path) -> None:
        digest = hashlib.sha256(head)
        with draft.open("wb") as file:
            file.write(head)
            for flat in flat_tensors.values():
                data = flat.view(torch.uint8).numpy().data
                digest.update(data)
                file.write(data)
            file.seek(head.index(BLANK.encode()))
            file.write(digest.hexdigest().encode())

    write_atomically(path, write)


def _widest_first(item: tuple[str, "Tensor"]) -> tuple[int, str]:
    """Sort key with which every tensor starts at a multiple of the size of its elements."""
    return -item[1].element_size(), item[0]


def from_safetensors(path: Path, prefix: str = "") -> tuple[dict[str, "Tensor"], Any]:
    """The tensors (those whose names start with `prefix`) and the record of a file that
    `write_safetensors` wrote; ValueError for any other file, and for one that is damaged."""
    from safetensors import SafetensorError, safe_open

    verify(path)
    try:
        with safe_open(path, "pt", device="cpu") as file:
            record = (file.metadata() or {}).get(RECORD)
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(str(error)) from None
    if record is None:
        raise ValueError("it was not written by pseudoloss")
    return tensors, parse_json(record)


def verify(path: Path) -> bool:
    """Compare a file of tensors with its checksum; ValueError if it is damaged. False: it has no
    checksum, like those of older versions and of other programs."""
    try:
        with open_regular(path) as file:
            head, metadata = _header_of(file)
            found = metadata.get(CHECKSUM)
            if found is None and not metadata.keys() - {RECORD, "format"}:
                return False
            if not isinstance(found, str) or len(found) != len(BLANK):
                return _refuse_foreign(metadata)
            digest = hashlib.sha256(head.replace(found.encode(), BLANK.encode(), 1))
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise ValueError(reason(error)) from None
    if digest.hexdigest() != found:
        raise ValueError("it is damaged: its checksum is wrong")
    return True


def read_header(path: Path) -> Any:
    """The record of a file of tensors, without a look at those; ValueError if there is none."""
    try:
        with open_regular(path) as file:
            return parse_json(_header_of(file)[1][RECORD])
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(reason(error)) from None


def _header_of(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the tensors, and the metadata in them; ValueError if they are damaged."""
    size = file.read(8)
    length = int.from_bytes(size, "little")
    if len(size) < 8 or length > HEADER_LIMIT:
        raise ValueError("it is no file of tensors, or damaged")
    text = file.read(length)
    try:
        metadata = parse_json(text).get("__metadata__", {})
    except (ValueError, AttributeError):
        raise ValueError("it is no file of tensors, or damaged") from None
    if not isinstance(metadata, dict):
        raise ValueError("it is no file of tensors, or damaged")
    return size + text, metadata


def _refuse_foreign(metadata: Mapping[str, Any]) -> bool:
    """Our files have no other metadata; those of other programs have any, but not our record."""
    if RECORD in metadata:
        raise ValueError("it is damaged: its header is not as it was written")
    return False
