"""What a model says of image files: found, decoded ahead by threads, classified in batches.

Shapes: B images at a time, C classes, K of them the most likely ones.
"""

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

import numpy as np
import pandas as pd

from pseudoloss.data import Reader, ReadOptions, Skipped
from pseudoloss.data.decoding import Entry, UnreadableError, printable
from pseudoloss.data.scanning import Progress, no_progress
from pseudoloss.data.sources.folder import files_below
from pseudoloss.data.sources.table import TABLE_SUFFIXES, table_files
from pseudoloss.engine.tracking import images_at_once
from pseudoloss.errors import InputError
from pseudoloss.files import to_json, write_atomically
from pseudoloss.paths import as_path, at_home
from pseudoloss.progress import Reporter, SilentReporter

if TYPE_CHECKING:
    from pseudoloss.inference.model import Model

AHEAD = 3  # batches in memory: one is classified while the others are decoded
AT_ONCE = 256  # files in a batch, at most

Format = Literal["csv", "jsonl"]


class Batch(NamedTuple):
    """Some images, and what the model says of them."""

    places: list[int]  # among all images
    probabilities_BC: np.ndarray
    skipped: list[Skipped]  # files that should have been here


def find_images(images: Sequence[str | Path]) -> list[Path]:
    """All the files that are meant: files, the files in folders, the files named in tables."""
    if not isinstance(images, Iterable):
        raise InputError(f"images must be paths, not {type(images).__name__}")
    found: list[Path] = []
    for words in images:
        path = at_home(as_path(words, "images"))
        if path.is_dir():
            inside = files_below(path)
        elif not path.exists():
            raise InputError(f"{words}: no such file or folder")
        elif path.suffix.lower() in TABLE_SUFFIXES:
            inside = table_files(path, ReadOptions.path_column, str(words))
        else:
            inside = [path]
        if not inside:
            raise InputError(f"{words}: holds no files")
        found += inside
    if not found:
        raise InputError("no images: name files or folders")
    return found


def predict_batches(
    model: "Model", paths: Sequence[Entry], progress: Progress = no_progress
) -> Iterator[Batch]:
    """What the model says of files, in their order."""
    size = min(AT_ONCE, images_at_once(model.views))
    done = 0
    for results in _read_ahead(model.reader, paths, size):
        places, pixels, skipped = [], [], []
        for place, result in enumerate(results, done):
            if isinstance(result, np.ndarray):
                places.append(place)
                pixels.append(result)
            else:
                skipped.append(Skipped(_name(paths[place]), result))
        probabilities = model.predict_proba(np.stack(pixels)) if pixels else np.empty(0)
        yield Batch(places, probabilities.reshape(-1, len(model.classes)), skipped)
        done += len(results)
        progress("images", done, len(paths))


def _name(entry: Entry) -> str:
    return printable(entry) if isinstance(entry, Path) else str(entry)


def _read_ahead(
    reader: Reader, paths: Sequence[Entry], size: int
) -> Iterator[list[np.ndarray | str]]:
    """Pixels of files, or why they cannot be read, so many at a time."""

    def attempt(path: Entry) -> np.ndarray | str:
        try:
            return reader.read(path)
        except (UnreadableError, ValueError) as error:  # ValueError: no path at all
            return str(error)

    waiting: deque[list[Future[np.ndarray | str]]] = deque()
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        for start in range(0, len(paths), size):
            waiting.append([threads.submit(attempt, path) for path in paths[start : start + size]])
            if len(waiting) == AHEAD:
                yield [future.result() for future in waiting.popleft()]
        while waiting:
            yield [future.result() for future in waiting.popleft()]
    finally:
        threads.shutdown(cancel_futures=True)


def as_table(
    names: Sequence[str],
    probabilities_BC: np.ndarray,
    classes: Sequence[str],
    top: int = 1,
    every: bool = False,
) -> pd.DataFrame:
    """One row an image: `path`, `label`, `probability`; `label_2`, `probability_2` and so on for
    the `top` most likely classes; and, for `every` class, a column `p_CLASS`."""
    likely_BK = _likely(probabilities_BC, top)
    columns: dict[str, Any] = {"path": np.array(names, dtype=object)}
    for k, place_B in enumerate(likely_BK.T, 1):
        suffix = "" if k == 1 else f"_{k}"
        columns[f"label{suffix}"] = np.array(classes, dtype=object)[place_B]
        columns[f"probability{suffix}"] = probabilities_BC[np.arange(len(place_B)), place_B]
    if every:
        columns |= {f"p_{name}": probabilities_BC[:, c] for c, name in enumerate(classes)}
    return pd.DataFrame(columns)


def as_lines(
    names: Sequence[str],
    probabilities_BC: np.ndarray,
    classes: Sequence[str],
    top: int = 1,
    every: bool = False,
) -> str:
    """The same as lines of JSON: `path`, `label`, `probability`; `top`, a list of labels with their
    probabilities; `probabilities`, by class."""
    lines = []
    for name, likely_K, p_C in zip(
        names, _likely(probabilities_BC, top), probabilities_BC, strict=True
    ):
        found = [{"label": classes[c], "probability": _short(p_C[c])} for c in likely_K]
        line: dict[str, Any] = {"path": name, **found[0]}
        if top > 1:
            line["top"] = found
        if every:
            line["probabilities"] = {label: _short(p_C[c]) for c, label in enumerate(classes)}
        lines.append(to_json(line) + "\n")
    return "".join(lines)


def check_top(top: int, classes: int) -> None:
    if not 1 <= top <= classes:
        raise InputError(f"--top {top}: must be 1 to {classes}, the number of classes")


def predict_files(
    model: "Model", images: Sequence[str | Path], top: int = 1, probabilities: bool = False
) -> pd.DataFrame:
    """A row for every file that can be read (see `as_table`), and a warning if there are others."""
    check_top(top, len(model.classes))
    paths = find_images(images)
    tables, skipped = [], []
    for batch in predict_batches(model, paths):
        names = [printable(paths[place]) for place in batch.places]
        tables.append(as_table(names, batch.probabilities_BC, model.classes, top, probabilities))
        skipped += batch.skipped
    refuse_if_none(len(paths), skipped)
    if skipped:
        first = skipped[0]
        warnings.warn(
            f"{len(skipped):,} of {len(paths):,} files cannot be read and are left out (the first: "
            f"{first.path}, {first.reason})",
            stacklevel=3,
        )
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def write_predictions(
    model: "Model",
    paths: Sequence[Path],
    file: TextIO,
    *,
    form: Format = "csv",
    top: int = 1,
    probabilities: bool = False,
    reporter: Reporter | None = None,
) -> None:
    """Write a row an image as soon as its batch is done, and tell of files that cannot be read."""
    reporter = reporter or SilentReporter()
    skipped: list[Skipped] = []
    header = True
    for batch in predict_batches(model, paths, reporter.progress):
        for entry in batch.skipped:
            reporter.notice(f"{entry.path}: left out ({entry.reason})")
        skipped += batch.skipped
        names = [printable(paths[place]) for place in batch.places]
        row = (names, batch.probabilities_BC, model.classes, top, probabilities)
        if not names:
            continue
        if form == "jsonl":
            file.write(as_lines(*row))
        else:
            table = as_table(*row)
            table.to_csv(file, index=False, header=header, float_format="%.6g", lineterminator="\n")
            header = False
        file.flush()
    refuse_if_none(len(paths), skipped)
    if skipped:
        reporter.notice(f"{len(skipped):,} of {len(paths):,} files cannot be read and are left out")


def write_predictions_to(out: Path, model: "Model", paths: Sequence[Path], **options: Any) -> None:
    """`write_predictions` into a file, which is there once it is whole."""

    def write(draft: Path) -> None:
        try:
            with draft.open("w", encoding="utf-8", newline="") as file:
                write_predictions(model, paths, file, **options)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    try:
        write_atomically(out, write)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--out {out}: cannot be written ({reason})") from None


def refuse_if_none(files: int, skipped: Sequence[Skipped]) -> None:
    if len(skipped) == files:
        first = skipped[0]
        raise InputError(
            f"no image can be read (the first of {files:,} files: {first.path}, {first.reason})"
        )


def _likely(probabilities_BC: np.ndarray, top: int) -> np.ndarray:
    """The most likely classes, the likeliest first; of equals the first."""
    return np.argsort(-probabilities_BC, axis=1, kind="stable")[:, :top]


def _short(p: float) -> float:
    return float(f"{p:.6g}")
