"""Options that several commands share."""

import argparse
from typing import Any

from pseudoloss.cli.parser import Parser, argument_for
from pseudoloss.config import as_text, flag
from pseudoloss.reading import READ_OPTIONS

COLUMNS = ("path_column", "label_column", "split_column")
LIMITS = ("follow_links", "max_megabytes", "max_megapixels")


def add_read_options(parser: Parser, names: tuple[str, ...] = tuple(READ_OPTIONS)) -> None:
    """Add options that say how a source is read."""
    group = parser.add_argument_group("Reading folders and tables of images")
    for name in names:
        option = READ_OPTIONS[name]
        settings: dict[str, Any] = {"action": "store_true", "help": option.help}
        if option.type is not bool:
            settings = argument_for(option.type)
            settings["help"] = with_default(option.help, option.default)
        if option.metavar:
            settings["metavar"] = option.metavar
        group.add_argument(flag(name), default=argparse.SUPPRESS, **settings)


def given_read_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those read options that were given."""
    return {name: value for name, value in vars(args).items() if name in READ_OPTIONS}


def add_best(parser: Parser) -> None:
    text = "use the model of the epoch with the best test accuracy, instead of the last epoch"
    parser.add_argument("--best", action="store_true", help=text)


def add_device(parser: Parser) -> None:
    text = "auto, cpu, cuda, cuda:N or mps (default: auto)"
    parser.add_argument("--device", default="auto", metavar="NAME", help=text)


def add_safe_csv(parser: Parser) -> None:
    text = "put an apostrophe before names that a spreadsheet would evaluate (= + - @)"
    parser.add_argument("--safe-csv", action="store_true", help=text)


def with_default(text: str, value: Any) -> str:
    """Help text for argparse; ends with the default value, unless it names the default itself."""
    if value is not None and "(default:" not in text:
        text = f"{text} (default: {as_text(value)})"
    return text.replace("%", "%%")
