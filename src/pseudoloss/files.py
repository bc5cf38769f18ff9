"""Writing files so that a kill at any moment leaves the old file or the new one, never a half."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pseudoloss.errors import InputError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in the place of `path` at once."""
    draft = path.with_name(f".{path.name}.draft")
    write(draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def as_path(value: Any, flag: str) -> Path:
    """A path that the system can look at, or an error in the words of the flag."""
    try:
        path = Path(value)
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (TypeError, ValueError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{flag} {str(value)[:60]}: no usable path ({reason})") from None
    return path


def to_safetensors(tensors: Mapping[str, Tensor], record: Any) -> bytes:
    """Tensors of any layout and device, and a record beside them. One entry of metadata, with
    sorted keys: equal content gives equal bytes. Copies: layers may share a tensor."""
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(plain, {RECORD: to_json(record)})


def from_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """What `to_safetensors` wrote. ValueError where the file is another's."""
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
