"""How a source is read: the options, with the help text of each. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

from pseudoloss.errors import InputError


def _about(metavar: str, text: str) -> Mapping[str, str]:
    return {"metavar": metavar, "help": text}


@dataclass(frozen=True)
class ReadOptions:
    """How a source is read. Belongs to the source, and is written to config.json beside it."""

    test: str | None = field(
        default=None,
        metadata=_about("SOURCE", "folder or table with correct labels, to test on"),
    )
    hold_out: float | None = field(
        default=None,
        metadata=_about(
            "X",
            "fraction of the images to hold out for testing, if SOURCE has no test images "
            "(default: 0.1 of image files, 0 of arrays)",
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_about("", "refuse files that cannot be read, instead of skipping them"),
    )
    fit: Literal["crop", "stretch"] = field(
        default="crop",
        metadata=_about("", "how images become squares: crop the centre, or stretch the image"),
    )
    follow_links: bool = field(
        default=False,
        metadata=_about("", "follow links out of a class folder, instead of skipping them"),
    )
    max_megabytes: float | None = field(
        default=None,
        metadata=_about("X", "largest image file that is read, in MB (default: 256)"),
    )
    max_megapixels: float | None = field(
        default=None,
        metadata=_about("X", "largest image that is decoded, in million pixels (default: 178)"),
    )
    path_column: str = field(
        default="path",
        metadata=_about(
            "NAME",
            "column of a table with the image paths (default: path; of hf:NAME, found by type)",
        ),
    )
    label_column: str = field(
        default="label",
        metadata=_about(
            "NAME", "column of a table with the labels (default: label; of hf:NAME, found by type)"
        ),
    )
    split_column: str = field(
        default="split",
        metadata=_about("NAME", "column of a table with the split: train, val or test"),
    )

    def __post_init__(self) -> None:
        share = self.hold_out
        if share is not None and not (isinstance(share, int | float) and 0 <= share < 1):
            raise InputError(f"--hold-out must be a number from 0 to below 1, not {share!r}")
        for name in ("strict", "follow_links"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(f"{_flag(name)} must be True or False, not {value!r}")
        for name in ("max_megabytes", "max_megapixels"):
            limit = getattr(self, name)
            if limit is not None and not (isinstance(limit, int | float) and limit > 0):
                raise InputError(f"{_flag(name)} must be a number above 0, not {limit!r}")
        if isinstance(self.test, Path):
            object.__setattr__(self, "test", str(self.test))
        for name in ("test", "path_column", "label_column", "split_column"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "test" and value is None):
                raise InputError(f"{_flag(name)} must be text, not {value}")
        if self.fit not in ("crop", "stretch"):
            raise InputError(f"--fit must be crop or stretch, not {self.fit}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def recorded_options(reading: Mapping[str, Any]) -> ReadOptions:
    """The options in the config.json of a run or an audit. Before version 2.0, links were
    followed."""
    known = {name: value for name, value in reading.items() if name in READ_OPTIONS}
    return ReadOptions(**{"follow_links": True, **known})


class ReadOption(NamedTuple):
    """One field of `ReadOptions`, as help and documentation describe it."""

    type: Any
    default: Any
    metavar: str
    help: str


_TYPES = get_type_hints(ReadOptions)
READ_OPTIONS: dict[str, ReadOption] = {
    entry.name: ReadOption(_TYPES[entry.name], entry.default, **entry.metadata)
    for entry in fields(ReadOptions)
}
"""All options by name, in order."""
