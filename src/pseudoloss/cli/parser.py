"""The argument parser of the commands, and readers of option values."""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

from pseudoloss.errors import InputError, did_you_mean, name_hint

MANY = 8  # choices: more of them are not listed in braces, the help text names them


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `InputError`, with one line that names the argument.

    Args:
        name: name of the command.
        command: its function; the docstring is the description in the help.
        examples: command lines for the end of the help.
    """

    def __init__(
        self, name: str, command: Callable[[list[str]], None], examples: tuple[str, ...] = ()
    ) -> None:
        super().__init__(
            prog=f"pseudoloss {name}",
            description=inspect.cleandoc(command.__doc__ or ""),
            epilog="\n  ".join(("examples:", *examples)) if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args([_with_dashes(argument) for argument in arguments])
        if unknown:
            first = unknown[0].partition("=")[0]
            options = [name for name in self._option_string_actions if name.startswith("--")]
            kind = "option" if first.startswith("-") else "argument"
            hint = did_you_mean(first, options) if kind == "option" else ""
            hint = hint or f" (see {self.prog} --help)"
            raise InputError(f"{first}: no such {kind}{hint}")
        return args

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Instead of argparse's list of all choices, the similar ones."""
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or str(action.metavar or action.dest)
            hint = name_hint(str(value), map(str, action.choices))
            raise InputError(f"{name} {value}: no such choice{hint}")

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        _, required, names = message.partition("the following arguments are required: ")
        if required:
            message = f"missing: {names}"
        raise InputError(f"{message} (see {self.prog} --help)")


def add_several(parser: Parser, name: str, metavar: str, text: str) -> None:
    """Add an option that takes several values and may be repeated."""
    parser.add_argument(name, nargs="+", action="extend", default=[], metavar=metavar, help=text)


def argument_for(hint: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for an option of this type."""
    choices = get_args(hint)
    if choices and isinstance(choices[0], str):  # a Literal
        return {"choices": choices} | ({"metavar": "NAME"} if len(choices) > MANY else {})
    kind, optional = choices[0] if choices else hint, type(None) in choices
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    readers: dict[type, tuple[Callable[[str], Any], str]]
    readers = {int: (whole, "N"), float: (number, "X"), str: (str, "TEXT")}
    read, metavar = readers[kind]
    if optional:
        return {
            "type": lambda text: None if text.lower() == "none" else read(text),
            "metavar": metavar,
        }
    return {"type": read, "metavar": metavar}


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text}") from None


def duration(text: str) -> float:
    """Minutes, from 90s, 30m, 2h or a number of minutes."""
    units = {"s": 1 / 60, "m": 1.0, "h": 60.0}
    amount, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "m")
    try:
        minutes = float(amount) * units[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a time such as 30m or 2h, not {text}") from None
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"must be a time above 0, not {text}")
    return minutes


def path(text: str) -> Path:
    """A path. An empty string (an unset shell variable, say) must not mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return Path(text)


def _with_dashes(argument: str) -> str:
    """--batch_size is accepted as --batch-size."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if argument.startswith("--") else argument


def peek(arguments: list[str], name: str) -> str | None:
    """The value of an option, before the arguments are parsed."""
    for i, argument in enumerate(arguments):
        if argument == name:
            return arguments[i + 1] if i + 1 < len(arguments) else None
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None
