"""A folder with one folder per class, with or without train/, val/ and test/ around them."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from pseudoloss.data.decoding import printable
from pseudoloss.data.scanning import LabelledFiles, Skipped, name_of
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
LINK = "a link out of its folder; --follow-links follows it"


def folder_splits(root: Path, where: str, follow: bool = False) -> dict[str, LabelledFiles]:
    """The splits of a folder: those of "train", "val" and "test" that exist.

    A folder with such a name is a split if it contains folders; otherwise it is a class. Other
    folders next to a split are an error, because their images would be ignored. Links that lead out
    of a class folder are followed only with `follow`.
    """
    folders = _folders(root, where)
    named = [path for path in folders if path.name.lower() in SPLIT_NAMES]
    if not named or not (len(named) == len(folders) or any(_folders(p, where) for p in named)):
        return {"train": class_folders(root, root, where, follow)}
    if not follow:
        for path in named:
            if path.is_symlink():
                raise InputError(f"{where}: {path.name} is a link; add --follow-links to follow it")
    others = [printable(path.name) for path in folders if path not in named]
    if others:
        listed = ", ".join(others[:MAX_LISTED]) + (", …" if len(others) > MAX_LISTED else "")
        raise InputError(
            f"{where}: {named[0].name} looks like a split, because it contains folders, but there "
            f"are other folders next to it ({listed}); move those elsewhere or, if "
            f"{named[0].name} is a class, move all classes into one folder called train"
        )
    chosen = split_names([path.name for path in named], where)
    found = {
        split: class_folders(root / name, root, where, follow) for split, name in chosen.items()
    }
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


def class_folders(root: Path, base: Path, where: str, follow: bool = False) -> LabelledFiles:
    """Every file below each folder of `root`; the folder's name is the label."""
    folders = _folders(root, where)
    if not folders:
        hint = (
            "; it holds images directly, and each class needs a folder of its own"
            if any(path.is_file() for path in root.iterdir())
            else ""
        )
        place = "" if root == Path(where) else f"{root} "
        raise InputError(f"{where}: {place}holds no class folders{hint}")
    paths: list[Path] = []
    labels: list[str] = []
    empty: dict[str, str] = {}
    skipped: list[Skipped] = []
    for folder in folders:
        label = printable(folder.name)
        is_link = folder.is_symlink() and not follow
        inside, links = ([], [folder]) if is_link else files_below(folder, follow)
        paths += inside
        labels += [label] * len(inside)
        skipped += [Skipped(name_of(path, base), LINK) for path in links]
        if not inside:
            empty[label] = f"{skipped[-1].path}: {LINK}" if links else "its folder is empty"
    names = tuple(name_of(path, base) for path in paths)
    return LabelledFiles(
        tuple(paths),
        names,
        tuple(labels),
        loose=_loose(root, base),
        empty=empty,
        links=tuple(skipped),
    )


def files_below(folder: Path, follow: bool = False) -> tuple[list[Path], list[Path]]:
    """All files in a folder and its subfolders, and the links that lead out of it; both sorted.
    With `follow`, those links are followed too. Each folder is entered once, so loops end."""
    files: list[str] = []
    links: list[str] = []
    seen: set[str] = set()
    root = os.path.realpath(folder)
    waiting = [str(folder)]
    while waiting:
        inner = waiting.pop()
        real = os.path.realpath(inner)
        if real in seen:  # a link to a parent folder
            continue
        seen.add(real)
        folders = []
        try:
            with os.scandir(inner) as entries:
                for entry in entries:
                    if _hidden(entry.name):
                        continue
                    is_link = entry.is_symlink()
                    if is_link and not follow and not _is_inside(entry.path, root):
                        links.append(entry.path)
                    elif os.path.isdir(entry.path) if is_link else entry.is_dir():  # noqa: PTH112
                        folders.append(entry.path)
                    else:
                        files.append(entry.path)
        except OSError as error:
            _refuse(error)
        waiting += sorted(folders, reverse=True)  # the first one is entered next
    return _sorted(files), _sorted(links)


def _is_inside(link: str, root: str) -> bool:
    """Whether a link leads to `root`, which is a real path, or a place below it."""
    return f"{os.path.realpath(link)}{os.sep}".startswith(f"{root}{os.sep}")


def _sorted(paths: list[str]) -> list[Path]:
    # As sorted paths, but several times as fast.
    return [Path(path) for path in sorted(paths, key=lambda path: path.replace(os.sep, "\0"))]


def images_below(folder: Path) -> list[Path]:
    """The files with the suffix of an image, of a published dataset or a pool. All links are
    followed: some of these datasets are published as links."""
    files, _ = files_below(folder, follow=True)
    return [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]


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
