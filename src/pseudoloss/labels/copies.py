"""Corrected copies of a source: a table, a folder of links, or an archive of arrays.

`rows` are the label table with the columns that `applying.corrected` adds.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from pseudoloss.data import Data
from pseudoloss.data.decoding import (
    Entry,
    Item,
    Limits,
    UnreadableError,
    content_of,
    header,
    printable,
)
from pseudoloss.data.images import ImageSet
from pseudoloss.data.scanning import LabelledFiles
from pseudoloss.data.sources.folder import SPLIT_NAMES
from pseudoloss.errors import InputError, cannot_write
from pseudoloss.files import new_folder, open_regular, write_atomically
from pseudoloss.labels.exports import write_table
from pseudoloss.labels.images import SPLIT_OF, RunImages
from pseudoloss.labels.opening import LabelSet

TABLES = (".csv", ".parquet")
SPLITS = ("train", "val", "test")
COLUMNS = ["path", "label", "split", "given_label", "changed", "decided_by"]


# ------------------------------------------------------------------------------- image files


def write_files(
    labels: LabelSet,
    rows: pd.DataFrame,
    splits: dict[str, LabelledFiles],
    images: RunImages,
    out: Path,
    copy: bool,
) -> pd.DataFrame:
    """Write a table, or a folder of links or copies. Returns all rows, with those of splits that
    the label table does not have."""
    rows = _in_source_order(pd.concat([rows, _other_splits(rows, splits)]))
    entries = _entries(rows, splits, images)
    missing = [
        entry is None or (isinstance(entry, Path) and not os.path.exists(entry))  # noqa: PTH110
        for entry in entries
    ]
    left_out = rows["left_out"].to_numpy(dtype=object).copy()
    left_out[np.array(missing, dtype=bool) & (left_out == "")] = "no such file any more"
    if out.suffix.lower() in TABLES:
        for i, entry in enumerate(entries):
            if isinstance(entry, Path) and printable(entry) != str(entry) and left_out[i] == "":
                left_out[i] = "its name is not valid UTF-8"
    rows = rows.assign(left_out=left_out)
    kept = np.flatnonzero(left_out == "")
    if not len(kept):
        raise InputError(f"--out {out}: no image is left; is {labels.source} where it was?")
    chosen = rows.iloc[kept].assign(split=rows["part"].iloc[kept].map(SPLIT_OF))
    files_of = [entries[i] for i in kept]
    has_splits = set(chosen["split"]) != {"train"}
    if out.suffix.lower() in TABLES:
        chosen["path"] = [os.path.abspath(str(entry)) for entry in files_of]  # noqa: PTH100
        columns = [name for name in COLUMNS if name != "split" or has_splits]
        write_table(chosen[columns], out, "csv" if out.suffix.lower() == ".csv" else "parquet")
        return rows
    failed = _write_links(chosen, files_of, images, out, has_splits, copy)
    for i, why in failed.items():
        left_out[kept[i]] = why
    return rows.assign(left_out=left_out)


def _entries(
    rows: pd.DataFrame, splits: dict[str, LabelledFiles], images: RunImages
) -> list[Entry | None]:
    """The file or item of each row; None if the source does not have it any more."""
    found: list[Entry | None] = []
    places = (rows.index.tolist(), rows["part"].tolist(), rows["index"].tolist())
    for position, part, index in zip(*places, strict=True):
        files = splits.get(SPLIT_OF[part])
        if images.root is not None and position < len(images):
            found.append(images.path(position))
        else:
            inside = files is not None and 0 <= index < len(files)
            found.append(files.paths[index] if files is not None and inside else None)
    return found


def _other_splits(rows: pd.DataFrame, splits: dict[str, LabelledFiles]) -> pd.DataFrame:
    """Rows for the splits of the source that the label table does not have, unchanged."""
    present = set(rows["part"].map(SPLIT_OF))
    others = []
    for split in SPLITS:
        if split not in splits or split in present:
            continue
        files = splits[split]
        others.append(
            pd.DataFrame(
                {
                    "index": np.arange(len(files)),
                    "path": np.array(files.names, dtype=object),
                    "part": split,
                    "given_label": np.array(files.labels, dtype=object),
                    "label": np.array(files.labels, dtype=object),
                    "changed": False,
                    "decided_by": "",
                    "for_review": False,
                    "left_out": "",
                }
            )
        )
    more = pd.concat(others) if others else rows.iloc[:0]
    return more.set_index(np.arange(len(rows), len(rows) + len(more)))


def _write_links(
    rows: pd.DataFrame,
    entries: Sequence[Entry | None],
    images: RunImages,
    out: Path,
    has_splits: bool,
    copy: bool,
) -> dict[int, str]:
    """One folder per class, with links to the images or copies of them. Returns the rows that
    could not be written, and why."""
    names = list(rows["label"].unique())
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith("."):
            raise InputError(
                f"--out {out}: class {name!r} cannot be the name of a folder; write a table "
                "instead, such as fixed.csv"
            )
    # Class folders with the name of a split would be read as splits.
    has_splits = has_splits or any(name.lower() in SPLIT_NAMES for name in names)
    failed: dict[int, str] = {}
    used: set[Path] = set()
    with new_folder(out) as draft:
        for i, (entry, label, split) in enumerate(
            zip(entries, rows["label"], rows["split"], strict=True)
        ):
            folder = draft / split / label if has_splits else draft / label
            folder.mkdir(parents=True, exist_ok=True)
            if isinstance(entry, Path):
                target = _free_name(folder / (entry.name.lstrip(".") or "image"), used)
                if copy:
                    try:
                        _copy(entry, target, images.limits)
                    except UnreadableError as error:
                        failed[i] = str(error)
                else:
                    target.symlink_to(os.path.abspath(entry))  # noqa: PTH100, keeps links
            elif isinstance(entry, Item):
                try:
                    _save_item(entry, folder / f"{rows['index'].iloc[i]:07}", used)
                except UnreadableError as error:
                    failed[i] = str(error)
    return failed


def _copy(file: Path, target: Path, limits: Limits) -> None:
    """Copy an image. Anything else in the table is not copied."""
    header(file, limits)
    with open_regular(file) as content, target.open("wb") as copied:
        shutil.copyfileobj(content, copied)


def _free_name(path: Path, used: set[Path]) -> Path:
    """The path, with a number if another image has it already."""
    free, number = path, 1
    while free in used:
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    used.add(free)
    return free


def _save_item(item: Item, path: Path, used: set[Path]) -> None:
    """Write an image of a dataset to a file of its own."""
    content = content_of(item)
    ending = "png" if isinstance(content, Image.Image) else header(item).format.lower()
    target = _free_name(path.with_name(f"{path.name}.{ending}"), used)
    if isinstance(content, Image.Image):
        content.save(target)
    else:
        target.write_bytes(content)


def _in_source_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Split by split, each in the order of the source."""
    order = rows["part"].map(lambda part: SPLITS.index(SPLIT_OF[part])).to_numpy()
    return rows.iloc[np.lexsort((rows["index"].to_numpy(), order))]


# ------------------------------------------------------------------------------------ arrays


def write_arrays(labels: LabelSet, rows: pd.DataFrame, data: Data, out: Path) -> pd.DataFrame:
    """An .npz file with images and corrected labels, as `pseudoloss train` reads it."""
    rows = _in_source_order(rows)
    kept = rows[rows["left_out"] == ""]
    arrays: dict[str, Any] = {}
    texts = {}
    for prefix, part, images in (("", "train", data.train), ("test_", "test", data.test)):
        if images is None:
            continue
        chosen = kept[kept["part"].map(SPLIT_OF) == part]
        if part == "test" and not (rows["part"].map(SPLIT_OF) == part).any():
            given = np.array(images.classes, dtype=object)[images.given_N.numpy()]
            index, texts[prefix] = np.arange(len(images)), given
        else:
            _check_same(labels, rows[rows["part"].map(SPLIT_OF) == part], images)
            index, texts[prefix] = chosen["index"].to_numpy(), chosen["label"].to_numpy()
            if prefix == "" and "truth" in chosen and chosen["truth"].notna().all():
                texts["true"] = chosen["true_label"].to_numpy(dtype=object)
        if not len(index):
            continue
        pixels = np.asarray(images.images_NCHW)[index]
        arrays[f"{prefix}images"] = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    if "images" not in arrays:
        raise InputError(f"--out {out}: no image is left")
    used = {name for column in texts.values() for name in column if isinstance(name, str)}
    classes = [name for name in labels.classes if name in used]
    number = {name: i for i, name in enumerate(classes)}
    for prefix, column in texts.items():
        key = "true_labels" if prefix == "true" else f"{prefix}labels"
        if len(column):
            arrays[key] = np.array([number.get(name, -1) for name in column], dtype=np.int64)

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            np.savez_compressed(file, classes=np.array(classes, dtype=str), **arrays)

    try:
        write_atomically(out, write)
    except OSError as error:
        raise cannot_write("--out", out, error) from None
    return rows


def _check_same(labels: LabelSet, rows: pd.DataFrame, images: ImageSet) -> None:
    """Refuse a source whose labels are not those of the run any more."""
    index = rows["index"].to_numpy()
    settings = labels.config.get("settings") or {}
    same = bool(len(index)) and index.min() >= 0 and index.max() < len(images)
    if same and not (isinstance(settings, dict) and settings.get("corrupt")):
        given = np.array(images.classes, dtype=object)[images.given_N.numpy()[index]]
        same = bool((given == rows["given_label"].to_numpy()).all())
    if not same:
        raise InputError(f"{labels.source}: its labels are not those of {labels.path} any more")
