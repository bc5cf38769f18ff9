"""A folder of class folders, with or without train/, val/ and test/."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from pseudoloss.data.decoding import shown
from pseudoloss.data.scanning import LabelledFiles, name_of
from pseudoloss.errors import InputError

PARTS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SOME = 5  # more folders than this are not all named in an error


def folder_parts(root: Path, where: str) -> dict[str, LabelledFiles]:
    """The parts of a folder: "train", "val" and "test", those that are there.

    A folder of such a name is a part if it holds folders; otherwise it is a class of that name.
    Folders beside the parts would be lost, so they are refused.
    """
    folders = _folders(root, where)
    named = [path for path in folders if path.name.lower() in PARTS]
    if not named or not (len(named) == len(folders) or any(_folders(p, where) for p in named)):
        return {"train": class_folders(root, root, where)}
    beside = [shown(path.name) for path in folders if path not in named]
    if beside:
        some = ", ".join(beside[:SOME]) + (", …" if len(beside) > SOME else "")
        raise InputError(
            f"{where}: {named[0].name} looks like a part, for it has folders inside, but beside "
            f"it there is {some}; move that elsewhere or, if {named[0].name} is a class, move all "
            "classes into one folder called train"
        )
    chosen = part_names([path.name for path in named], where)
    found = {part: class_folders(root / name, root, where) for part, name in chosen.items()}
    if "train" in found:
        loose = (*_loose(root, root), *found["train"].loose)
        found["train"] = replace(found["train"], loose=loose)
    return {part: listed for part, listed in found.items() if part == "train" or len(listed)}


def part_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Which of the names means which part; others mean none."""
    found: dict[str, str] = {}
    for name in names:
        part = PARTS.get(name.lower())
        if part in found:
            raise InputError(f"{where}: {found[part]} and {name} mean the same part; keep one")
        if part is not None:
            found[part] = name
    return found


def class_folders(root: Path, base: Path, where: str) -> LabelledFiles:
    """Every file below each folder of `root`; the folder's name is the label."""
    folders = _folders(root, where)
    if not folders:
        hint = (
            "; it holds images themselves, and each class wants a folder of its own"
            if any(path.is_file() for path in root.iterdir())
            else ""
        )
        raise InputError(f"{where}: {root} holds no folders of classes{hint}")
    paths, labels, empty = [], [], []
    for folder in folders:
        inside = files_below(folder)
        paths += inside
        labels += [shown(folder.name)] * len(inside)
        empty += [] if inside else [shown(folder.name)]
    names = tuple(name_of(path, base) for path in paths)
    return LabelledFiles(tuple(paths), names, tuple(labels), _loose(root, base), tuple(empty))


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and in all folders inside it, in order; links are followed, once."""
    found: list[Path] = []
    seen: set[str] = set()
    for inner, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = str(Path(inner).resolve())
        if real in seen:  # a link to a folder further up
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _hidden(name))
        found += [Path(inner) / name for name in names if not _hidden(name)]
    return sorted(found)


def images_below(folder: Path) -> list[Path]:
    """Those of them that are called as image files are."""
    return [path for path in files_below(folder) if path.suffix.lower() in IMAGE_SUFFIXES]


def _folders(root: Path, where: str) -> list[Path]:
    try:
        inside = sorted(root.iterdir())
        return [path for path in inside if path.is_dir() and not _hidden(path.name)]
    except OSError as error:
        raise InputError(f"{where}: {root} cannot be read ({error.strerror})") from None


def _loose(root: Path, base: Path) -> tuple[str, ...]:
    """Files that lie beside the folders of classes, and so have none."""
    inside = sorted(root.iterdir())
    return tuple(name_of(p, base) for p in inside if not p.is_dir() and not _hidden(p.name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # which a Mac adds to archives


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{shown(error.filename)}: cannot be read ({error.strerror})") from None
