"""A table of images: CSV or Parquet, a row an image."""

import codecs
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_scalar

from pseudoloss.data.scanning import LabelledFiles, ReadOptions, name_of
from pseudoloss.data.sources.folder import PARTS
from pseudoloss.errors import InputError, did_you_mean
from pseudoloss.paths import at_home

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")


def table_parts(path: Path, options: ReadOptions, where: str) -> dict[str, LabelledFiles]:
    """The parts of a table. Paths in it begin beside the table, or at the root of the disk."""
    columns = (options.path_column, options.label_column, options.split_column)
    rows = read_rows(path, where, columns)
    for name in (options.path_column, options.label_column):
        if name not in rows:
            flag = "--path-column" if name == options.path_column else "--label-column"
            hint = did_you_mean(name, map(str, rows.columns))
            raise InputError(f"{where}: has no column {name} (see {flag}){hint}")
    places = _files(rows, options.path_column, path.parent, where)
    labels = [
        label.strip() for label in texts(rows[options.label_column], options.label_column, where)
    ]
    splits = ["train"] * len(rows)
    if options.split_column in rows:
        splits = [
            PARTS.get(split.strip().lower(), split)
            for split in texts(rows[options.split_column], options.split_column, where)
        ]
    elif options.split_column != ReadOptions.split_column:
        hint = did_you_mean(options.split_column, map(str, rows.columns))
        raise InputError(
            f"{where}: has no column {options.split_column} (see --split-column){hint}"
        )
    for row, split in enumerate(splits):
        if split not in ("train", "val", "test"):
            raise InputError(
                f"{where}: row {row + 1}: {options.split_column} must be train, val or test, "
                f"not {split}"
            )
    root = path.parent
    parts = {}
    for part in ("train", "val", "test"):
        chosen = [i for i, split in enumerate(splits) if split == part]
        if chosen:
            files = [places[i] for i in chosen]
            parts[part] = LabelledFiles(
                tuple(files),
                tuple(name_of(file, root) for file in files),
                tuple(labels[i] for i in chosen),
            )
    if not parts:
        raise InputError(f"{where}: has no rows")
    return parts


def table_files(path: Path, column: str, where: str) -> list[Path]:
    """The files in one column of a table."""
    rows = read_rows(path, where, [column])
    if column not in rows:
        raise InputError(
            f"{where}: has no column {column}{did_you_mean(column, map(str, rows.columns))}"
        )
    return _files(rows, column, path.parent, where)


def _files(rows: pd.DataFrame, column: str, root: Path, where: str) -> list[Path]:
    """A column as files. ~ is the home; spaces around a name belong to it if such a file exists."""
    found = []
    for text in texts(rows[column], column, where):
        exact = root / at_home(text)
        is_clean = text == text.strip() or os.path.exists(exact)  # noqa: PTH110, of any name
        found.append(exact if is_clean else root / at_home(text.strip()))
    return found


def read_rows(path: Path, where: str, used: Iterable[str]) -> pd.DataFrame:
    """All rows. Of the columns that are `used` there may be one each."""
    try:
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        # With the header as a row, a row that is longer than it is an error. Otherwise pandas takes
        # the first column of such a table for an index, and each of the others for its neighbour.
        rows = pd.read_csv(
            path, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8"
        )
    except FileNotFoundError:
        raise InputError(f"{where}: no such file") from None
    except ImportError:
        raise InputError(
            f"{where}: reading Parquet needs pyarrow: pip install 'pseudoloss[parquet]'"
        ) from None
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if _starts(path) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InputError(f"{where}: is in UTF-16; save it as UTF-8") from None
        longer = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason)
        if longer:
            columns, line, fields = map(int, longer.groups())
            raise InputError(
                f"{where}: row {line - 1} has {fields} fields, but there are {columns} columns; "
                "a field that contains the separator wants quotes around it"
            ) from None
        raise InputError(f"{where}: cannot be read ({' '.join(reason.split())[:200]})") from None
    rows.columns = rows.iloc[0].str.strip()
    again = rows.columns.duplicated()
    for name in used:
        if name in rows.columns[again]:
            raise InputError(f"{where}: has two columns {name}; rename one of them")
    return rows[1:].loc[:, ~again]


def _starts(path: Path) -> bytes:
    """The first two bytes of a file, if it is one."""
    try:
        with path.open("rb") as file:
            return file.read(2)
    except OSError:
        return b""


def texts(column: Any, name: str, where: str) -> list[str]:
    """A column as texts: whole numbers without a point, and nothing empty."""
    found = []
    for row, value in enumerate(column.tolist(), 1):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = "" if is_scalar(value) and pd.isna(value) else str(value)
        if not text.strip():
            raise InputError(f"{where}: row {row}: {name} is empty")
        found.append(text)
    return found
