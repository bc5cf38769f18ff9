"""A table of images: CSV, TSV or Parquet, one row per image."""

import codecs
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_scalar

from pseudoloss.data.scanning import LabelledFiles, ReadOptions, name_of
from pseudoloss.data.sources.folder import SPLIT_NAMES
from pseudoloss.errors import InputError, name_hint, reason
from pseudoloss.files import at_home, open_regular

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
HEADER = 2**16  # bytes of the first line that are looked at


def table_splits(path: Path, options: ReadOptions, where: str) -> dict[str, LabelledFiles]:
    """The splits of a table. Paths in it are absolute or relative to the folder of the table."""
    columns = (options.path_column, options.label_column, options.split_column)
    rows = read_rows(path, where, columns)
    for name in (options.path_column, options.label_column):
        if name not in rows:
            flag = "--path-column" if name == options.path_column else "--label-column"
            hint = name_hint(name, map(str, rows.columns))
            raise InputError(f"{where}: has no column {name} (see {flag}){hint}")
    paths = _files(rows, options.path_column, path.parent, where)
    labels = [
        label.strip() for label in texts(rows[options.label_column], options.label_column, where)
    ]
    splits = ["train"] * len(rows)
    if options.split_column in rows:
        splits = [
            SPLIT_NAMES.get(split.strip().lower(), split)
            for split in texts(rows[options.split_column], options.split_column, where)
        ]
    elif options.split_column != ReadOptions.split_column:
        hint = name_hint(options.split_column, map(str, rows.columns))
        raise InputError(
            f"{where}: has no column {options.split_column} (see --split-column){hint}"
        )
    for row, split in enumerate(splits):
        if split not in ("train", "val", "test"):
            raise InputError(
                f"{where}: row {row + 1}: {options.split_column} must be train, val or test, "
                f"not {split}"
            )
    found = {}
    for split in ("train", "val", "test"):
        chosen = [i for i, split_of_row in enumerate(splits) if split_of_row == split]
        if chosen:
            files = [paths[i] for i in chosen]
            found[split] = LabelledFiles(
                tuple(files),
                tuple(name_of(file, path.parent) for file in files),
                tuple(labels[i] for i in chosen),
            )
    if not found:
        raise InputError(f"{where}: has no rows")
    return found


def table_files(path: Path, column: str, where: str) -> list[Path]:
    """The files in one column of a table."""
    rows = read_rows(path, where, [column])
    if column not in rows:
        raise InputError(
            f"{where}: has no column {column}{name_hint(column, map(str, rows.columns))}"
        )
    return _files(rows, column, path.parent, where)


def _files(rows: pd.DataFrame, column: str, root: Path, where: str) -> list[Path]:
    """The paths in a column, with ~ as the home folder. Spaces around a path are removed unless a
    file of that exact name exists."""
    folder = str(root)

    def place(text: str) -> Path:
        # Of one text: a path of several parts takes three times as long.
        home = str(at_home(text)) if text.startswith("~") else text
        return Path(os.path.join(folder, home))  # noqa: PTH118

    found = []
    for text in texts(rows[column], column, where):
        stripped = text.strip()
        is_clean = text == stripped or os.path.exists(place(text))  # noqa: PTH110, takes any name
        found.append(place(text if is_clean else stripped))
    return found


def read_rows(path: Path, where: str, used: Iterable[str]) -> pd.DataFrame:
    """All rows of a table. Two columns with one of the names in `used` are an error."""
    try:
        with open_regular(path) as file:
            if path.suffix.lower() == ".parquet":
                return pd.read_parquet(file)
            separator = "\t" if path.suffix.lower() == ".tsv" else ","
            _check_header(file.readline(HEADER), separator, where)
            file.seek(0)
            # The header is read as a row, so that a longer row is an error. Otherwise pandas uses
            # the first column of such a table as the index and shifts all other columns.
            rows = pd.read_csv(
                file, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8"
            )
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{where}: no such file") from None
    except ImportError:
        raise InputError(
            f"{where}: reading Parquet needs pyarrow: pip install 'pseudoloss[parquet]'"
        ) from None
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        why = reason(error)
        if _starts(path) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InputError(f"{where}: is in UTF-16; save it as UTF-8") from None
        longer = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", why)
        if longer:
            columns, line, fields = map(int, longer.groups())
            raise InputError(
                f"{where}: row {line - 1} has {fields} fields, but there are {columns} columns; "
                "put quotes around a field that contains the separator"
            ) from None
        broken = _broken_line(path)
        if broken:
            raise InputError(f"{where}: {broken}") from None
        raise InputError(f"{where}: cannot be read ({why})") from None
    except Exception as error:  # pyarrow can raise anything
        raise InputError(f"{where}: cannot be read ({reason(error)})") from None
    rows.columns = rows.iloc[0].str.strip()
    again = rows.columns.duplicated()
    for name in used:
        if name in rows.columns[again]:
            raise InputError(f"{where}: has two columns {name}; rename one of them")
    return rows[1:].loc[:, ~again]


def _check_header(line: bytes, separator: str, where: str) -> None:
    """Refuse an empty file, and one with other separators: spreadsheets write semicolons where a
    comma is part of numbers."""
    if not line:
        raise InputError(f"{where}: is empty")
    used = next((name for name in SEPARATORS if name.encode() in line), separator)
    if separator.encode() not in line and used != separator:
        raise InputError(
            f"{where}: its columns are separated by {SEPARATORS[used]}; save it with "
            f"{SEPARATORS[separator]}"
        )


def _starts(path: Path) -> bytes:
    """The first two bytes of a file; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(2)
    except OSError:
        return b""


def _broken_line(path: Path) -> str:
    """What is wrong with the first line that is not UTF-8; empty if all are."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    byte = line[error.start]
                    return f"line {number} is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8"
    except OSError:
        pass
    return ""


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if is_scalar(value) and pd.isna(value) else str(value)


def texts(column: Any, name: str, where: str) -> list[str]:
    """A column as text, whole numbers without a decimal point. An empty cell is an error."""
    found = []
    for row, value in enumerate(column.tolist(), 1):
        text = value if type(value) is str else _text(value)
        if not text.strip():
            raise InputError(f"{where}: row {row}: {name} is empty")
        if "\0" in text:
            raise InputError(f"{where}: row {row}: {name} contains a NUL byte")
        found.append(text)
    return found
