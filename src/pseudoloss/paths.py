"""Paths as users name them."""

from pathlib import Path
from typing import Any

from pseudoloss.errors import InputError


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


def at_home(words: str | Path) -> Path:
    """A path, its ~ replaced where that means someone's home."""
    try:
        return Path(words).expanduser()
    except RuntimeError:
        return Path(words)
