"""Errors that users see, and helpers for their messages."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from pseudoloss.terminal import one_line


class InputError(ValueError):
    """The user's input is wrong: a flag, a file, an array.

    The message is one line that names the flag, file or row and says what was expected. The command
    line prints it and exits with code 2. Nothing has been written at that point.
    """

    def __init__(self, message: object) -> None:
        super().__init__(one_line(message))  # it holds names of files and classes


class BusyError(InputError):
    """Another process is using the run folder."""


class TrainingError(RuntimeError):
    """Training had to stop, for example because the loss became NaN. The last checkpoint is
    intact."""


class ExportError(TrainingError):
    """A model could not be exported, or the exported model gives other predictions. No output
    is left behind."""


def reason(error: Exception) -> str:
    """Why something failed, on one line: for an OSError what the system says, without number and
    path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def cannot_write(flag: str, path: Path | str, error: OSError) -> InputError:
    """The error to raise when an output cannot be written."""
    return InputError(f"{flag} {path}: cannot be written ({reason(error)})")


def first_line(error: Exception) -> str:
    """The first line of a library's long error message, without colours. If it only announces the
    error of another process, that error is appended."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    line = text.strip().partition("\n")[0]
    causes = re.findall(r"^\w*(?:Error|Exception): .+", text, re.MULTILINE)
    if line.endswith(":") and causes:
        line += f" {causes[-1]}"
    return line or type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean …?", or nothing if no known name
    is similar. Names that are clearly less similar than the first one are left out."""
    close = difflib.get_close_matches(name, sorted(known), n=3)
    ratios = [difflib.SequenceMatcher(None, other, name).ratio() for other in close]
    similar = [other for other, ratio in zip(close, ratios, strict=True) if ratio > ratios[0] - 0.1]
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def name_hint(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the similar names, or else all known names."""
    names = sorted(known)
    return did_you_mean(name, names) or f"; known: {', '.join(names)}"
