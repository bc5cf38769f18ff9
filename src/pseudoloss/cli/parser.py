"""Flags of the commands: how words become values, and errors of one line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

from pseudoloss.errors import InputError, did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, in the words of the flag."""

    def __init__(self, name: str, command: Callable[[list[str]], None]) -> None:
        super().__init__(
            prog=f"pseudoloss {name}",
            description="\n".join(line.strip() for line in (command.__doc__ or "").splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="show this and exit")

    def parse(self, words: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args([_dashed(word) for word in words])
        if unknown:
            word = unknown[0].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            what = "option" if word.startswith("-") else "argument"
            hint = did_you_mean(word, known) if what == "option" else ""
            hint = hint if hint.startswith("; did") else f" (see {self.prog} --help)"
            raise InputError(f"{word}: no such {what}{hint}")
        return args

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def add_several(parser: Parser, name: str, metavar: str, text: str) -> None:
    """An option that takes several words, and may be given again."""
    parser.add_argument(name, nargs="+", action="extend", default=[], metavar=metavar, help=text)


def as_argument(hint: Any) -> dict[str, Any]:
    """What argparse has to know of a setting with this type to read it."""
    choices = get_args(hint)
    if choices and isinstance(choices[0], str):
        return {"choices": choices}
    kind, optional = choices[0] if choices else hint, type(None) in choices
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    readers: dict[type, tuple[Callable[[str], Any], str]]
    readers = {int: (whole, "N"), float: (number, "X"), str: (str, "TEXT")}
    read, metavar = readers[kind]
    if optional:
        return {
            "type": lambda word: None if word.lower() == "none" else read(word),
            "metavar": metavar,
        }
    return {"type": read, "metavar": metavar}


def whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {word}") from None


def number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {word}") from None


def duration(word: str) -> float:
    """Minutes, from 90s, 30m, 2h or a number of minutes."""
    units = {"s": 1 / 60, "m": 1.0, "h": 60.0}
    amount, unit = (word[:-1], word[-1]) if word[-1:] in units else (word, "m")
    try:
        minutes = float(amount) * units[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a time such as 30m or 2h, not {word}") from None
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"must be a time above 0, not {word}")
    return minutes


def path(word: str) -> Path:
    """A path. Nothing (a variable of the shell that is not set) is not the current folder."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return Path(word)


def _dashed(word: str) -> str:
    """--batch_size is --batch-size."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def peek(words: list[str], name: str) -> str | None:
    """The value of a flag, before the words are parsed properly."""
    for i, word in enumerate(words):
        if word == name:
            return words[i + 1] if i + 1 < len(words) else None
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
