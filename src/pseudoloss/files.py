"""Writing files so that a kill at any moment leaves the old file or the new one, never a half."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in the place of `path` at once."""
    draft = path.with_name(f".{path.name}.draft")
    write(draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


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
