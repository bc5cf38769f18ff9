"""Text on its way to a terminal. Names of files and classes are the work of others: they must not
clear the screen, set the title of the window or turn the order of the letters around.
"""

import os
import re
import stat
import sys
from typing import TextIO

# Control characters but tab and new line, and those that change the direction of text.
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)


def visible(text: object) -> str:
    """The text with control characters as in JSON (\\u001b), so that JSON keeps its meaning."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def one_line(text: object, most: int = 4000) -> str:
    """As `visible`, on one line; the middle of a line of more characters is left out."""
    line = str(text)
    if len(line) > most:
        line = f"{line[: most // 2]} … {line[-most // 2 :]}"
    return visible(" ".join(line.splitlines()))


def show(*texts: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """As `print`, for text that holds names."""
    print(*map(visible, texts), file=file or sys.stdout, end=end, flush=flush)


class VisibleOutput:
    """A text file for rows of data. A regular file gets them as they are; a terminal and a pipe,
    which may lead to one (`| head`), get them `visible`."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.is_terminal = file, file.isatty()
        self.is_exact = not self.is_terminal and _is_regular(file)

    def write(self, text: str) -> int:
        return self.file.write(text if self.is_exact else visible(text))

    def flush(self) -> None:
        self.file.flush()


def _is_regular(file: TextIO) -> bool:
    """Whether it is a file on disk, or one in memory."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # no file of the system
        return True
