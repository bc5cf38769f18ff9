"""Predictions for image files. Threads decode files ahead of the batch that is classified.

Shapes: B images in a batch, C classes, K most likely classes.
"""

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

import numpy as np
import pandas as pd

from pseudoloss.data import Reader, ReadOptions, Skipped
from pseudoloss.data.decoding import (
    USUAL,
    Entry,
    Limits,
    UnreadableError,
    no_warnings,
    printable,
)
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.data.scanning import name_of
from pseudoloss.data.sources.folder import LINK, files_below
from pseudoloss.data.sources.table import TABLE_SUFFIXES, table_files
from pseudoloss.data.sources.webdataset import ShardImages, unlabelled_images
from pseudoloss.errors import InputError
from pseudoloss.files import as_path, at_home, to_json, write_atomically
from pseudoloss.inference.passes import images_at_once
from pseudoloss.progress import Reporter, SilentReporter
from pseudoloss.spreadsheets import safe_for_spreadsheets
from pseudoloss.terminal import VisibleOutput, one_line

if TYPE_CHECKING:
    from pseudoloss.inference.model import Model

AHEAD = 3  # batches in memory: one is classified while the others are decoded
AT_ONCE = 256  # largest number of files in a batch

Format = Literal["csv", "jsonl"]


class Batch(NamedTuple):
    """Predictions for some of the images."""

    indices: list[int]  # of the images
    probabilities_BC: np.ndarray
    skipped: list[Skipped]  # files that could not be read


class FoundImages(NamedTuple):
    """Image files, and their names in tables."""

    paths: Sequence[Entry]
    names: Sequence[str]
    skipped: list[Skipped]  # links that are not followed


def find_images(
    images: Sequence[str | Path],
    options: ReadOptions = ReadOptions(),  # noqa: B008, is frozen
) -> FoundImages:
    """All image files: files themselves, files in folders, in tables and in WebDataset shards.

    The files of a single folder or table have the names that the label table of a run on it has, so
    that both tables can be joined. Other names are paths as they were given.
    """
    if not isinstance(images, Iterable):
        raise InputError(f"images must be paths, not {type(images).__name__}")
    images = list(images)
    if len(images) == 1 and _in_shards(images[0]):
        only = _shards(images[0])
        return FoundImages(only, only.names, [])
    found: list[Entry] = []
    names: list[str] = []
    roots: list[Path] = []
    skipped: list[Skipped] = []
    for given in images:
        if _in_shards(given):
            inside_shards = _shards(given)
            found += inside_shards
            names += [f"{given}/{name}" for name in inside_shards.names]
            continue
        path = at_home(as_path(given, "images"))
        if path.is_dir():
            (inside, links), root = files_below(path, options.follow_links), path
            skipped += [Skipped(printable(link), LINK) for link in links]
        elif not path.exists():
            raise InputError(f"{given}: no such file or folder")
        elif path.suffix.lower() in TABLE_SUFFIXES:
            inside = table_files(path, options.path_column, str(given))
            root = path.parent
        else:
            inside, root = [path], Path()
        if not inside:
            why = f" but {skipped[-1].path}: {skipped[-1].reason}" if skipped else ""
            raise InputError(f"{given}: contains no files{why}")
        found += inside
        names += [printable(path) for path in inside]
        roots.append(root)
    if not found:
        raise InputError("no images: give files or folders")
    if len(images) == 1:
        names = [name_of(path, roots[0]) for path in inside]
    return FoundImages(found, names, skipped)


def _in_shards(given: str | Path) -> bool:
    return isinstance(given, str) and given.startswith("wds:")


def _shards(given: str | Path) -> ShardImages:
    return unlabelled_images(str(given).removeprefix("wds:"))


def predict_batches(
    model: "Model",
    paths: Sequence[Entry],
    progress: Progress = no_progress,
    limits: Limits = USUAL,
) -> Iterator[Batch]:
    """Predictions for files, in their order."""
    size = min(AT_ONCE, images_at_once(model.views))
    done = 0
    for results in _read_ahead(replace(model.reader, limits=limits), paths, size):
        indices, pixels, skipped = [], [], []
        for i, result in enumerate(results, done):
            if isinstance(result, np.ndarray):
                indices.append(i)
                pixels.append(result)
            else:
                skipped.append(Skipped(_name(paths[i]), result))
        shown = [_name(paths[i]) for i in indices]
        probabilities = (
            model.predict_proba(np.stack(pixels), shown.__getitem__) if pixels else np.empty(0)
        )
        yield Batch(indices, probabilities.reshape(-1, len(model.classes)), skipped)
        done += len(results)
        progress("images", done, len(paths))


def _name(entry: Entry) -> str:
    return printable(entry) if isinstance(entry, Path) else str(entry)


def _read_ahead(
    reader: Reader, paths: Sequence[Entry], size: int
) -> Iterator[list[np.ndarray | str]]:
    """Pixels of files, `size` at a time; for a file that cannot be read, the reason."""

    def attempt(path: Entry) -> np.ndarray | str:
        try:
            return reader.read(path)
        except (UnreadableError, ValueError) as error:  # ValueError: not a valid path
            return str(error)

    waiting: deque[list[Future[np.ndarray | str]]] = deque()
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        with no_warnings():
            for start in range(0, len(paths), size):
                some = paths[start : start + size]
                waiting.append([threads.submit(attempt, path) for path in some])
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
    """One row per image: `path`, `label`, `probability`; `label_2`, `probability_2` and so on for
    the `top` most likely classes; with `every`, a column `p_CLASS` for every class."""
    likely_BK = _most_likely(probabilities_BC, top)
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
    """One line of JSON per image: `path`, `label`, `probability`; `top`, a list of labels and
    probabilities; with `every`, `probabilities` by class."""
    lines = []
    for name, likely_K, p_C in zip(
        names, _most_likely(probabilities_BC, top), probabilities_BC, strict=True
    ):
        found = [{"label": classes[c], "probability": _six_digits(p_C[c])} for c in likely_K]
        line: dict[str, Any] = {"path": name, **found[0]}
        if top > 1:
            line["top"] = found
        if every:
            line["probabilities"] = {label: _six_digits(p_C[c]) for c, label in enumerate(classes)}
        lines.append(to_json(line) + "\n")
    return "".join(lines)


def check_top(top: int, classes: int) -> None:
    if not 1 <= top <= classes:
        raise InputError(f"--top {top}: must be 1 to {classes}, the number of classes")


def predict_files(
    model: "Model", images: Sequence[str | Path], top: int = 1, probabilities: bool = False
) -> pd.DataFrame:
    """One row per file that can be read (see `as_table`), and a warning if some cannot."""
    check_top(top, len(model.classes))
    paths, names_of, links = find_images(images)
    tables: list[pd.DataFrame] = []
    skipped: list[Skipped] = []
    for batch in predict_batches(model, paths):
        names = [names_of[i] for i in batch.indices]
        tables.append(as_table(names, batch.probabilities_BC, model.classes, top, probabilities))
        skipped += batch.skipped
    refuse_if_none(len(paths), skipped)
    count, skipped = len(paths) + len(links), [*links, *skipped]
    if skipped:
        first = skipped[0]
        warnings.warn(
            f"{len(skipped):,} of {count:,} files cannot be read and are skipped (the first: "
            f"{one_line(first.path)}, {first.reason})",
            stacklevel=3,
        )
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def write_predictions(
    model: "Model",
    images: FoundImages,
    file: "TextIO | VisibleOutput",
    *,
    form: Format = "csv",
    top: int = 1,
    probabilities: bool = False,
    safe_csv: bool = False,
    limits: Limits = USUAL,
    reporter: Reporter | None = None,
) -> int:
    """Write one row per image as soon as its batch is done, and report files that cannot be read.
    Returns the number of rows."""
    reporter = reporter or SilentReporter()
    skipped: list[Skipped] = []
    for link in images.skipped:
        reporter.notice(f"{link.path}: skipped ({link.reason})")
    header = True
    for batch in predict_batches(model, images.paths, reporter.progress, limits):
        for entry in batch.skipped:
            reporter.notice(f"{entry.path}: skipped ({entry.reason})")
        skipped += batch.skipped
        names = [images.names[i] for i in batch.indices]
        rows = (names, batch.probabilities_BC, model.classes, top, probabilities)
        if not names:
            continue
        if form == "jsonl":
            file.write(as_lines(*rows))
        else:
            table = as_table(*rows)
            table = safe_for_spreadsheets(table) if safe_csv else table
            text = table.to_csv(
                index=False, header=header, float_format="%.6g", lineterminator="\n"
            )
            file.write(text)
            header = False
        file.flush()
    refuse_if_none(len(images.paths), skipped)
    count, skipped = len(images.paths) + len(images.skipped), [*images.skipped, *skipped]
    if skipped:
        reporter.notice(f"{len(skipped):,} of {count:,} files cannot be read and are skipped")
    return count - len(skipped)


def write_predictions_to(out: Path, model: "Model", images: FoundImages, **options: Any) -> int:
    """`write_predictions` to a file, which appears only when it is complete."""
    rows = 0

    def write(draft: Path) -> None:
        nonlocal rows
        try:
            with draft.open("w", encoding="utf-8", newline="") as file:
                rows = write_predictions(model, images, file, **options)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    try:
        write_atomically(out, write)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--out {out}: cannot be written ({reason})") from None
    return rows


def refuse_if_none(files: int, skipped: Sequence[Skipped]) -> None:
    if len(skipped) == files:
        first = skipped[0]
        raise InputError(
            f"no image can be read (the first of {files:,} files: {first.path}, {first.reason})"
        )


def _most_likely(probabilities_BC: np.ndarray, top: int) -> np.ndarray:
    """The most likely classes, in order; ties are broken by the order of the classes."""
    return np.argsort(-probabilities_BC, axis=1, kind="stable")[:, :top]


def _six_digits(p: float) -> float:
    return float(f"{p:.6g}")
