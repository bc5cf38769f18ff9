"""A folder with one folder per class, with or without train/, val/ and test/ around them."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from pseudoloss.data.decoding import printable
from pseudoloss.data.scanning import LabelledFiles, name_of
from pseudoloss.errors import InputError, reason

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_LISTED = 5  # folders that an error names; of more, only the first ones


def folder_splits(root: Path, where: str) -> dict[str, LabelledFiles]:
    """The splits of a folder: those of "train", "val" and "test" that exist.

    A folder with such a name is a split if it contains folders; otherwise it is a class. Other
    folders next to a split are an error, because their images would be ignored.
    """
    folders = _folders(root, where)
    named = [path for path in folders if path.name.lower() in SPLIT_NAMES]
    if not named or not (len(named) == len(folders) or any(_folders(p, where) for p in named)):
        return {"train": class_folders(root, root, where)}
    others = [printable(path.name) for path in folders if path not in named]
    if others:
        listed = ", ".join(others[:MAX_LISTED]) + (", …" if len(others) > MAX_LISTED else "")
        raise InputError(
            f"{where}: {named[0].name} looks like a split, because it contains folders, but there "
            f"are other folders next to it ({listed}); move those elsewhere or, if "
            f"{named[0].name} is a class, move all classes into one folder called train"
        )
    chosen = split_names([path.name for path in named], where)
    found = {split: class_folders(root / name, root, where) for split, name in chosen.items()}
    if "train" in found:
        loose = (*_loose(root, root), *found["train"].loose)
        found["train"] = replace(found["train"], loose=loose)
    return {split: files for split, files in found.items() if split == "train" or len(files)}


def split_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Which name means which split. Names that mean none are ignored."""
    found: dict[str, str] = {}
    for name in names:
        split = SPLIT_NAMES.get(name.lower())
        if split in found:
            raise InputError(f"{where}: {found[split]} and {name} mean the same split; keep one")
        if split is not None:
            found[split] = name
    return found


def class_folders(root: Path, base: Path, where: str) -> LabelledFiles:
    """Every file below each folder of `root`; the folder's name is the label."""
    folders = _folders(root, where)
    if not folders:
        hint = (
            "; it holds images directly, and each class needs a folder of its own"
            if any(path.is_file() for path in root.iterdir())
            else ""
        )
        raise InputError(f"{where}: {root} holds no class folders{hint}")
    paths, labels, empty = [], [], []
    for folder in folders:
        inside = files_below(folder)
        paths += inside
        labels += [printable(folder.name)] * len(inside)
        empty += [] if inside else [printable(folder.name)]
    names = tuple(name_of(path, base) for path in paths)
    return LabelledFiles(tuple(paths), names, tuple(labels), _loose(root, base), tuple(empty))


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, sorted. Links are followed, each folder once."""
    found: list[Path] = []
    seen: set[str] = set()
    for inner, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = str(Path(inner).resolve())
        if real in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _hidden(name))
        found += [Path(inner) / name for name in names if not _hidden(name)]
    return sorted(found)


def images_below(folder: Path) -> list[Path]:
    """The files with the suffix of an image."""
    return [path for path in files_below(folder) if path.suffix.lower() in IMAGE_SUFFIXES]


def _folders(root: Path, where: str) -> list[Path]:
    try:
        inside = sorted(root.iterdir())
        return [path for path in inside if path.is_dir() and not _hidden(path.name)]
    except OSError as error:
        raise InputError(f"{where}: {root} cannot be read ({reason(error)})") from None


def _loose(root: Path, base: Path) -> tuple[str, ...]:
    """Files next to the class folders, which have no class."""
    inside = sorted(root.iterdir())
    return tuple(name_of(p, base) for p in inside if not p.is_dir() and not _hidden(p.name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # macOS adds the latter to archives


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{printable(error.filename)}: cannot be read ({reason(error)})") from None
