"""Writing files so that a kill at any moment leaves the old file or the new one, never a half."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pseudoloss.errors import InputError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in the place of `path` at once."""
    draft = path.with_name(f".{path.name}.draft")
    write(draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def refuse_existing(path: Path, flag: str = "--out", hint: str = "choose another name") -> None:
    """Nothing of the user's is overwritten."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{flag} {path}: exists already; {hint}")


@contextmanager
def new_folder(path: Path, flag: str = "--out") -> Iterator[Path]:
    """A folder to fill, beside `path`; in its place once it is full, and gone if that fails."""
    refuse_existing(path, flag)
    draft = path.with_name(f".{path.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        draft.mkdir(parents=True)
        yield draft
        draft.rename(path)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{flag} {path}: cannot be written ({reason})") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], record: Any) -> None:
    """Tensors of any layout and device, and a record beside them: a header of JSON, then the bytes
    of the tensors. Equal content gives equal bytes.

    The library's own writers either build the whole file in memory and hold Python up meanwhile,
    or choose the draft, its permissions and its errors themselves.
    """
    plain = {
        name: tensor.detach().to("cpu").contiguous().flatten()
        for name, tensor in sorted(tensors.items(), key=_wide_first)
    }
    header: dict[str, Any] = {"__metadata__": {RECORD: to_json(record)}}
    end = 0
    for name, flat in plain.items():
        start, end = end, end + flat.nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": DTYPES[flat.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for flat in plain.values():
                file.write(flat.view(torch.uint8).numpy().data)

    write_atomically(path, write)


def _wide_first(item: tuple[str, Tensor]) -> tuple[int, str]:
    """So every tensor begins at a multiple of its width."""
    return -item[1].element_size(), item[0]


def from_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """What `write_safetensors` wrote. ValueError where the file is another's."""
    try:
        with safe_open(path, "pt", device="cpu") as file:
            record = (file.metadata() or {}).get(RECORD)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(str(error)) from None
    if record is None:
        raise ValueError("it was not written by pseudoloss")
    return tensors, json.loads(record)


RECORD = "pseudoloss"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_bytes(path: Path, content: bytes) -> None:
    def write(draft: Path) -> None:
        draft.write_bytes(content)

    write_atomically(path, write)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity, which it does not have, become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
