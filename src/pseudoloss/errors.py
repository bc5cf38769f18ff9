"""What can go wrong, in two kinds: the user's input, and the training itself."""

import difflib
import re
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave is wrong: a flag, a file, an array.

    The message is one line, names the flag, file or row, and says what was expected.
    The command line prints it and exits with code 2; nothing has been written by then.
    """


class BusyError(InputError):
    """The run folder is another process's just now."""


class TrainingError(RuntimeError):
    """Training could not go on (the loss became NaN, say). The last checkpoint is intact."""


class ExportError(TrainingError):
    """A model could not be exported, or what was exported says something else than the model.
    Nothing is left behind."""


def first_line(error: Exception) -> str:
    """What an error of others says, in one line and in no colours. Where that line only announces
    another process's error, the error too."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    line = text.strip().partition("\n")[0]
    causes = re.findall(r"^\w*(?:Error|Exception): .+", text, re.MULTILINE)
    if line.endswith(":") and causes:
        line += f" {causes[-1]}"
    return line or type(error).__name__


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: names that are close to it, if there are any."""
    close = difflib.get_close_matches(name, sorted(names), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def known(names: Iterable[str]) -> str:
    """The end of an error about an unknown name: all that there are."""
    return f"; known: {', '.join(sorted(names))}"
