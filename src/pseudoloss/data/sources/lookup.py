"""From what the user calls a source to its images.

A source is text or a path (`"digits"`, `"photos/"`, `"cifar10:DIR"`), arrays, or a dataset object.
`find_source` returns the images themselves where they are stored as arrays, and a `ScannedSource`
where they still have to be decoded.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pseudoloss.data.images import Data, arrays, check_trainable, with_held_out
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.data.scanning import (
    FileSource,
    LabelledFiles,
    ReadOptions,
    ScannedSource,
    refuse_unreadable,
    scan,
    with_test,
)
from pseudoloss.data.sources.cifar import FILES, cifar10, cifar100, find_cifar
from pseudoloss.data.sources.cnwl import cnwl
from pseudoloss.data.sources.digits import digits
from pseudoloss.data.sources.folder import folder_splits, split_names
from pseudoloss.data.sources.huggingface import is_huggingface_dataset, labelled_rows, load_dataset
from pseudoloss.data.sources.imagenet32 import imagenet32
from pseudoloss.data.sources.npz import npz
from pseudoloss.data.sources.table import TABLE_SUFFIXES, table_splits
from pseudoloss.data.sources.torch_datasets import is_torch_dataset, labelled_items
from pseudoloss.data.sources.webdataset import absolute_place, webdataset
from pseudoloss.data.sources.webfg import web
from pseudoloss.errors import InputError, did_you_mean, name_hint
from pseudoloss.files import as_path, at_home

# Text or a path; arrays; a dataset of Hugging Face or torch, which have no base class in common.
Source = str | Path | tuple[Any, Any] | Data | dict[str, Any] | Any

# Published datasets, written NAME:DIR: those stored as arrays, and those stored as image files.
ARRAY_DATASETS: dict[str, Callable[[str], Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar10-train": partial(cifar10, kind="cifar10-train"),
    "cifar100-train": partial(cifar100, kind="cifar100-train"),
    "imagenet32": imagenet32,
}
FILE_DATASETS: dict[str, Callable[[str], FileSource]] = {
    "cnwl": cnwl,
    **{name: partial(web, name) for name in ("web-aircraft", "web-bird", "web-car")},
}
PUBLISHED = sorted([*ARRAY_DATASETS, *FILE_DATASETS])
WITH_NOISE_RATIO = ("cnwl",)  # written NAME:DIR:RATIO

TABLE_OPTIONS = ("path_column", "label_column", "split_column")
MOST_NAMES = 1000  # in a folder, that a misspelt source is compared with
FILE_OPTIONS = ("strict", "follow_links", "max_megabytes", "max_megapixels")


# ------------------------------------------------------------------------------- the public calls


def find_source(
    source: Source,
    options: ReadOptions | None = None,
    seed: int = 1,
    progress: Progress = no_progress,
) -> Data | ScannedSource:
    """Open a source.

    Args:
        source: one of

            - the path of a folder with one folder per class, of a table (`.csv`, `.tsv`,
              `.parquet`) or of an `.npz` file;
            - `"digits"`, `"cifar10:DIR"`, `"cifar100:DIR"`, `"cnwl:DIR:0.4"`, `"imagenet32:DIR"`,
              `"web-aircraft:DIR"`, `"web-bird:DIR"` or `"web-car:DIR"`; `"cifar10-train:DIR"` and
              `"cifar100-train:DIR"` are the training images alone;
            - `"hf:NAME"`, `"hf:NAME:CONFIG"` or `"hf:FOLDER"`, a dataset of Hugging Face;
            - `"wds:FOLDER"` or `"wds:FOLDER/train-{000..009}.tar"`, WebDataset shards;
            - a Hugging Face `Dataset`, a torch `Dataset` with items (image, label), or a dict of
              them with the keys train, val and test;
            - a pair of arrays `(images, labels)`, or the result of `arrays`.
        options: how image files are read.
        seed: decides which images are held out.
        progress: called with the progress of reading.

    Returns:
        The images and labels, checked; or, if the images are not decoded yet, what the source
        holds.
    """
    options = options or ReadOptions()
    files = open_files(source, options, progress)
    if files is not None:
        return _scan_files(source, files, options, seed, progress)
    data = _open_data(source)
    _reject_options(options, ["test", "fit", *FILE_OPTIONS, *TABLE_OPTIONS])
    if data.test is not None:
        _reject_hold_out(options, data.name)
    if options.hold_out:
        data = with_held_out(data, options.hold_out, seed)
    check_trainable(data.train, data.name)
    return data


def open_source(source: Source) -> Data:
    """The images of a source that is stored as arrays (see `find_source`)."""
    found = find_source(source)
    if isinstance(found, ScannedSource):
        raise InputError(f"{found.name}: is a source of image files, which must be read first")
    return found


def open_files(
    source: Source, options: ReadOptions, progress: Progress = no_progress
) -> FileSource | None:
    """A source whose images are not decoded yet, split by split; None for sources of arrays."""
    if isinstance(source, str | Path):
        if not source:
            raise InputError("SOURCE is empty")
        return _open_files_by_name(str(source), options, progress)
    datasets = source.values() if isinstance(source, dict) else [source]
    if not datasets or not all(_is_dataset(dataset) for dataset in datasets):
        return None
    name = "data" if isinstance(source, dict) else type(source).__name__
    return FileSource(name, _dataset_splits(source, options, name, progress))


def open_all(
    source: Source, options: ReadOptions, progress: Progress = no_progress
) -> FileSource | Data:
    """All images of a source, split by split; nothing is held out (see `find_source`)."""
    files = open_files(source, options, progress)
    if files is None:
        _reject_options(options, [*FILE_OPTIONS, *TABLE_OPTIONS])
        return _open_data(source)
    _reject_columns(options, source)
    return files


def open_arrays(spec: str) -> Data:
    """A source that is stored as arrays, by its name or path."""
    kind, colon, place = spec.partition(":")
    if spec == "digits":
        return digits()
    if colon and kind in ARRAY_DATASETS:
        return ARRAY_DATASETS[kind](place)
    if spec.endswith(".npz"):
        return npz(spec)
    usage = {name: f"{name}:DIR{':0.4' * (name in WITH_NOISE_RATIO)}" for name in PUBLISHED}
    if kind in PUBLISHED:
        raise InputError(f"source {spec}: name the folder of its files, as in {usage[kind]}")
    known = ("digits", *usage.values(), "FILE.npz", "FOLDER/", "TABLE.csv", "hf:NAME", "wds:FOLDER")
    if spec and at_home(spec).exists():
        raise InputError(f"source {spec}: neither a folder nor a table (.csv, .parquet, .npz)")
    if "/" in spec:
        hint = did_you_mean(spec, _beside(spec))
        raise InputError(f"source {spec}: no such file or folder{hint}")
    hint = did_you_mean(spec, [*_beside(spec), *known]) or name_hint(spec, known)
    raise InputError(f"source {spec}: no such file, folder or dataset{hint}")


def _beside(spec: str) -> list[str]:
    """Names that may have been meant: folders and tables in the folder where `spec` should be."""
    folder = at_home(spec).parent
    try:
        found = list(islice(folder.iterdir(), MOST_NAMES))
    except (OSError, ValueError):
        return []
    prefix = spec[: len(spec.rstrip("/")) - len(Path(spec).name)]
    return [
        f"{prefix}{entry.name}"
        for entry in found
        if entry.suffix.lower() in (*TABLE_SUFFIXES, ".npz") or entry.is_dir()
    ]


def check_exists(spec: str) -> None:
    """Refuse a published dataset NAME:DIR whose files are missing. No image is read."""
    kind, _, place = spec.partition(":")
    if kind in FILES:
        find_cifar(kind, place)
    elif kind in FILE_DATASETS:
        FILE_DATASETS[kind](place)


def absolute(spec: str) -> str:
    """The source with an absolute path, so that it can be opened from any folder."""
    kind, colon, place = spec.partition(":")
    if colon and kind in PUBLISHED:
        has_ratio = kind in WITH_NOISE_RATIO
        folder, colon, ratio = place.rpartition(":") if has_ratio else (place, "", "")
        return f"{kind}:{at_home(folder).resolve()}{colon}{ratio}"
    if colon and kind == "hf":
        path = at_home(place)
        return f"hf:{path.resolve()}" if place and path.is_dir() else spec
    if colon and kind == "wds":
        return f"wds:{absolute_place(place)}" if place else spec
    path = at_home(spec)
    is_path = spec != "digits" and (
        path.suffix.lower() in (*TABLE_SUFFIXES, ".npz") or path.is_dir()
    )
    return str(path.resolve()) if is_path else spec


def refuse_inside(out: Path, source: Source | None) -> None:
    """A result inside a folder of images would become one of its classes."""
    if isinstance(source, str | Path) and source:
        root = at_home(str(source))
        is_folder = os.path.isdir(root)  # noqa: PTH112, of any name
        if is_folder and out.resolve().is_relative_to(root.resolve()):
            raise InputError(
                f"--out {out}: is inside {source}, whose folders are classes; "
                "choose a folder outside of it"
            )


# --------------------------------------------------------------------- images that must be decoded


def _scan_files(
    source: Source, files: FileSource, options: ReadOptions, seed: int, progress: Progress
) -> ScannedSource:
    if files.recipe is not None:
        _reject_options(options, ["fit"])
        _reject_hold_out(options, files.name)
    _reject_columns(options, source, options.test)
    scanned = scan(files, options, seed, progress)
    if options.test is not None:
        scanned = with_test(scanned, _test_files(options), options, progress)
    return scanned


def _open_files_by_name(
    spec: str, options: ReadOptions, progress: Progress = no_progress
) -> FileSource | None:
    """A folder, a table, a published dataset of image files, a Hugging Face dataset or WebDataset
    shards; None if the text names something else."""
    kind, colon, place = spec.partition(":")
    if spec in ("", "digits") or (colon and kind in ARRAY_DATASETS):
        return None
    if colon and kind in FILE_DATASETS:
        return FILE_DATASETS[kind](place)
    if colon and kind == "hf":
        return FileSource(spec, _dataset_splits(load_dataset(place, spec), options, spec))
    if colon and kind == "wds":
        return webdataset(place, options, progress)
    path = as_path(at_home(spec), "source")
    if path.suffix.lower() in TABLE_SUFFIXES:
        return FileSource(spec, table_splits(path, options, spec))
    if path.is_dir():
        splits = folder_splits(path, spec, options.follow_links)
        links = [link for split in splits.values() for link in split.links]
        if links and options.strict:
            refuse_unreadable(links[0], spec)
        return FileSource(spec, splits)
    return None


def _dataset_splits(
    source: Any, options: ReadOptions, name: str, progress: Progress = no_progress
) -> dict[str, LabelledFiles]:
    """The splits of a dataset object, or of a dict of them."""
    if isinstance(source, dict):
        chosen = split_names(source, name)
        if not chosen:
            raise InputError(f"{name}: has no split called train, only {', '.join(source)}")
        unknown = [str(key) for key in source if key not in chosen.values()]
        # Only in a plain dict: datasets of the Hugging Face hub often have splits for other uses.
        if unknown and type(source) is dict:
            raise InputError(
                f"{name}: unknown split {unknown[0]}; the splits are train, val and test"
            )
        datasets = {split: (source[key], f"{name}[{key}]") for split, key in chosen.items()}
    else:
        datasets = {"train": (source, name)}
    splits = {}
    for split, (dataset, where) in datasets.items():
        if is_huggingface_dataset(dataset):
            found = labelled_rows(dataset, options, where, may_lack_labels=split != "train")
        else:
            found = labelled_items(dataset, where, progress)
        if found is not None:
            splits[split] = found
    return splits


def _test_files(options: ReadOptions) -> LabelledFiles:
    """The images of --test: its test or val split or, if it has neither, all of it."""
    spec = options.test or ""
    files = _open_files_by_name(spec, options)
    if files is None:
        what = (
            "neither a folder nor a table" if at_home(spec).exists() else "no such file or folder"
        )
        raise InputError(f"--test {spec}: {what}")
    found = next((files.splits[s] for s in ("test", "val", "train") if files.splits.get(s)), None)
    if found is None:
        raise InputError(f"--test {spec}: has no images")
    return found


def _is_dataset(source: Any) -> bool:
    return is_huggingface_dataset(source) or is_torch_dataset(source)


def _reject_columns(options: ReadOptions, *sources: Source | None) -> None:
    """Refuse options for columns that none of the sources has. --label-column also names what a
    sample of WebDataset has."""
    if not any(map(_has_columns, sources)):
        is_wds = any(str(source).startswith("wds:") for source in sources)
        names = [name for name in TABLE_OPTIONS if not (is_wds and name == "label_column")]
        _reject_options(options, names, "tables")


def _has_columns(source: Source | None) -> bool:
    """Whether --path-column, --label-column and --split-column can name columns of the source."""
    if isinstance(source, str | Path):
        spec = str(source)
        return spec.startswith("hf:") or Path(spec).suffix.lower() in TABLE_SUFFIXES
    datasets = source.values() if isinstance(source, dict) else [source]
    return any(is_huggingface_dataset(dataset) for dataset in datasets)


# ----------------------------------------------------------------------------- images in arrays


def _open_data(source: Source) -> Data:
    if isinstance(source, str | Path):
        return open_arrays(str(source))
    if isinstance(source, Data):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        return arrays(*source)
    raise InputError(
        "source must be text, a path, a dataset or a pair (images, labels), "
        f"not {type(source).__name__}"
    )


# ------------------------------------------------------------------------- options that do not fit


def _reject_options(
    options: ReadOptions, names: Sequence[str], meant_for: str = "folders and tables of images"
) -> None:
    """Refuse options that have no meaning for the source."""
    for name in names:
        if vars(options)[name] != vars(ReadOptions())[name]:
            raise InputError(f"--{name.replace('_', '-')} is for {meant_for}")


def _reject_hold_out(options: ReadOptions, name: str) -> None:
    if options.hold_out:
        raise InputError(f"--hold-out: {name} has test images already")
