"""Where images come from. A source is written in words, or is the arrays themselves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pseudoloss.data.images import Data, arrays, check_trainable, with_held_out
from pseudoloss.data.scanning import (
    LabelledFiles,
    Parts,
    Progress,
    ReadOptions,
    ScannedSource,
    list_files,
    no_progress,
    with_test,
)
from pseudoloss.data.sources.cifar import FILES, cifar10, cifar100, find_cifar
from pseudoloss.data.sources.cnwl import cnwl
from pseudoloss.data.sources.folder import folder_parts, part_names
from pseudoloss.data.sources.hub import dataset_rows, is_dataset, load_hub
from pseudoloss.data.sources.imagenet32 import imagenet32
from pseudoloss.data.sources.map_style import dataset_items, is_map_style
from pseudoloss.data.sources.table import TABLE_SUFFIXES, table_parts
from pseudoloss.data.sources.webfg import web
from pseudoloss.errors import InputError, did_you_mean
from pseudoloss.paths import as_path, at_home

# Words or a path; arrays; or a data set of Hugging Face's or torch's, which have no common type.
Source = str | Path | tuple[Any, Any] | Data | dict[str, Any] | Any

# Sources that are written NAME:PLACE: thousands of images in a file, or image files.
IN_ARRAYS: dict[str, Callable[[str], Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagenet32": imagenet32,
}
IN_FILES: dict[str, Callable[[str], Parts]] = {
    "cnwl": cnwl,
    **{name: partial(web, name) for name in ("web-aircraft", "web-bird", "web-car")},
}
PLACED = sorted([*IN_ARRAYS, *IN_FILES])
PLACES = {"cnwl": "DIR:0.4"}  # where it is more than a folder

COLUMNS = ("path_column", "label_column", "split_column")  # options of tables
NPZ_ARRAYS = ("images", "labels", "test_images", "test_labels", "classes", "true_labels")


def find_source(
    source: Source,
    options: ReadOptions | None = None,
    seed: int = 1,
    progress: Progress = no_progress,
) -> Data | ScannedSource:
    """A source: its images, checked; or, of images that are still to be decoded, what there is.

    Args:
        source: the path of a folder of class folders, of a table (`.csv`, `.tsv`, `.parquet`) or of
            an `.npz` file; `"hf:NAME"`, `"hf:NAME:CONFIG"` or `"hf:FOLDER"`; `"digits"`,
            `"cifar10:DIR"`, `"cifar100:DIR"`, `"cnwl:DIR:0.4"`, `"imagenet32:DIR"`,
            `"web-aircraft:DIR"`, `"web-bird:DIR"`, `"web-car:DIR"`; a `Dataset` of Hugging Face, or
            of torch with items (image, label), or a dict of such for train, val and test; a pair
            of arrays `(images, labels)`, or what `arrays` returned.
        options: how image files are read.
        seed: decides which images are held out.
        progress: is told how far reading has come.
    """
    options = options or ReadOptions()
    parts = image_parts(source, options, progress)
    if parts is not None:
        if parts.recipe is not None:
            _refuse(options, ["fit"])
            _refuse_hold_out(options, parts.name)
        if not any(_has_columns(place) for place in (source, options.test)):
            _refuse(options, COLUMNS, "tables")
        listing = list_files(parts, options, seed, progress)
        if options.test is not None:
            listing = with_test(listing, named_test(options), options, progress)
        return listing
    if isinstance(source, str | Path):
        data = open_words(str(source))
    elif isinstance(source, Data):
        data = source
    elif isinstance(source, tuple) and len(source) == 2:
        data = arrays(*source)
    else:
        raise InputError(
            "source must be words, a path, a data set or a pair (images, labels), "
            f"not {type(source).__name__}"
        )
    _refuse(options, ["test", "strict", "fit", *COLUMNS])
    if data.test is not None:
        _refuse_hold_out(options, data.name)
    if options.hold_out:
        data = with_held_out(data, options.hold_out, seed)
    check_trainable(data.train, data.name)
    return data


def _has_columns(source: Source | None) -> bool:
    """Whether it has columns that --path-column and the like may name."""
    if isinstance(source, str | Path):
        words = str(source)
        return words.startswith("hf:") or Path(words).suffix.lower() in TABLE_SUFFIXES
    sets = source.values() if isinstance(source, dict) else [source]
    return any(is_dataset(rows) for rows in sets)


def _refuse(
    options: ReadOptions, names: Sequence[str], those: str = "folders and tables of images"
) -> None:
    """Refuse options that mean nothing for a source."""
    for name in names:
        if vars(options)[name] != vars(ReadOptions())[name]:
            raise InputError(f"--{name.replace('_', '-')} is for {those}")


def _refuse_hold_out(options: ReadOptions, name: str) -> None:
    if options.hold_out:
        raise InputError(f"--hold-out: {name} has test images already")


def image_parts(
    source: Any, options: ReadOptions, progress: Progress = no_progress
) -> Parts | None:
    """The parts of a source whose images are still to be decoded; None for others."""
    if isinstance(source, str | Path):
        if not source:
            raise InputError("SOURCE is empty")
        return file_parts(str(source), options)
    sets = source.values() if isinstance(source, dict) else [source]
    if not sets or not all(is_dataset(rows) or is_map_style(rows) for rows in sets):
        return None
    name = "data" if isinstance(source, dict) else type(source).__name__
    return Parts(name, set_parts(source, options, name, progress))


def set_parts(
    source: Any, options: ReadOptions, name: str, progress: Progress = no_progress
) -> dict[str, LabelledFiles]:
    """The parts of a data set of others, or of a dict of such."""
    if isinstance(source, dict):
        chosen = part_names(source, name)
        if not chosen:
            raise InputError(f"{name}: has no part called train, only {', '.join(source)}")
        others = [str(key) for key in source if key not in chosen.values()]
        if others and type(source) is dict:  # sets of the hub often have parts for other uses
            raise InputError(f"{name}: {others[0]} is no part; parts are train, val and test")
        sets = {part: (source[key], f"{name}[{key}]") for part, key in chosen.items()}
    else:
        sets = {"train": (source, name)}
    parts = {}
    for part, (rows, where) in sets.items():
        if is_dataset(rows):
            found = dataset_rows(rows, options, where, may_lack_labels=part != "train")
        else:
            found = dataset_items(rows, where, progress)
        if found is not None:
            parts[part] = found
    return parts


def named_test(options: ReadOptions) -> LabelledFiles:
    """The images of --test: all that is in a folder, in a table, or in its part for testing."""
    words = options.test or ""
    parts = file_parts(words, options)
    if parts is None:
        what = "neither a folder nor a table" if at_home(words).exists() else "no such source"
        raise InputError(f"--test {words}: {what}")
    listed = parts.listed
    return listed.get("test") or listed.get("val") or listed["train"]


def open_source(source: Source) -> Data:
    """The images of a source that are not in files of their own (see `find_source`)."""
    found = find_source(source)
    if isinstance(found, ScannedSource):
        raise InputError(f"{found.name}: is a source of image files, which must be read first")
    return found


def file_parts(words: str, options: ReadOptions) -> Parts | None:
    """The parts of a folder, a table, a published set of image files or a set of the hub; None
    where words mean something else."""
    kind, colon, place = words.partition(":")
    if words in ("", "digits") or (colon and kind in IN_ARRAYS):
        return None
    if colon and kind in IN_FILES:
        return IN_FILES[kind](place)
    if colon and kind == "hf":
        return Parts(words, set_parts(load_hub(place, words), options, words))
    path = as_path(at_home(words), "source")
    if path.suffix.lower() in TABLE_SUFFIXES:
        return Parts(words, table_parts(path, options, words))
    if path.is_dir():
        return Parts(words, folder_parts(path, words))
    return None


def open_words(words: str) -> Data:
    """A source that is not made of image files, by its words."""
    kind, colon, place = words.partition(":")
    if words == "digits":
        return digits()
    if colon and kind in IN_ARRAYS:
        return IN_ARRAYS[kind](place)
    if words.endswith(".npz"):
        return npz(words)
    spelt = {name: f"{name}:{PLACES.get(name, 'DIR')}" for name in PLACED}
    if kind in PLACED:
        raise InputError(f"source {words}: say where its files are, as {spelt[kind]}")
    known = ("digits", *spelt.values(), "FILE.npz", "FOLDER/", "TABLE.csv", "hf:NAME")
    if words and at_home(words).exists():
        raise InputError(f"source {words}: neither a folder nor a table (.csv, .parquet, .npz)")
    if "/" in words:
        raise InputError(f"source {words}: no such file or folder")
    raise InputError(f"source {words}: no such source{did_you_mean(words, known)}")


def look_for(words: str) -> None:
    """Refuse a source NAME:PLACE whose files are not there. No image is read."""
    kind, _, place = words.partition(":")
    if kind in FILES:
        find_cifar(kind, place)
    elif kind in IN_FILES:
        IN_FILES[kind](place)


def absolute(words: str) -> str:
    """A source as it can be opened again from any folder."""
    kind, colon, place = words.partition(":")
    if colon and kind in PLACED:
        inner, colon, ratio = place.rpartition(":") if kind in PLACES else (place, "", "")
        return f"{kind}:{at_home(inner).resolve()}{colon}{ratio}"
    if colon and kind == "hf":
        folder = at_home(place)
        return f"hf:{folder.resolve()}" if place and folder.is_dir() else words
    path = at_home(words)
    is_path = words != "digits" and (
        path.suffix.lower() in (*TABLE_SUFFIXES, ".npz") or path.is_dir()
    )
    return str(path.resolve()) if is_path else words


def digits() -> Data:
    """scikit-learn's handwritten digits: 8×8, grey, 1,797 images, a fifth of them for testing.

    They come inside scikit-learn, so nothing is downloaded.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    # A writer's digits lie side by side; a fixed shuffle spreads every writer over both parts.
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    data = arrays(
        images[train],
        bunch.target[train],
        test_images=images[test],
        test_labels=bunch.target[test],
        classes=[str(name) for name in bunch.target_names],
        true_labels=bunch.target[train],
        name="digits",
    )
    return replace(data, preset="digits")


def npz(path: str) -> Data:
    """A NumPy archive with `images` and `labels`; see docs/data.md for what else it may hold."""
    try:
        with np.load(at_home(path), allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # a damaged archive raises whatever it likes
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a NumPy archive of plain arrays ({reason})") from None
    for key in found:
        if key not in NPZ_ARRAYS:
            raise InputError(f"{path}: unknown array {key}{did_you_mean(key, NPZ_ARRAYS)}")
    for key in ("images", "labels"):
        if key not in found:
            raise InputError(f"{path}: the array {key} is missing")
    classes = found.pop("classes", None)
    if classes is not None and classes.ndim != 1:
        raise InputError(f"{path}: classes must be a list of names")
    names = None if classes is None else [str(name) for name in classes.tolist()]
    return arrays(found.pop("images"), found.pop("labels"), classes=names, name=path, **found)
