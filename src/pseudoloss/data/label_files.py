"""Labels from a file: human annotations (CIFAR-N), or a table."""

from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import torch

from pseudoloss.data.images import ImageSet, check_trainable
from pseudoloss.data.pickles import read_arrays
from pseudoloss.data.sources.table import read_rows, texts
from pseudoloss.errors import InputError, did_you_mean, name_hint
from pseudoloss.files import at_home

HUMAN_DEFAULTS = ("noisy_label", "worse_label")  # of CIFAR-100N, of CIFAR-10N
LABELS = ("label", "given_label")  # label columns of a table; labels.csv has the second
MAX_LISTED = 20  # classes that an error lists
HELD_OUT = -1  # in place of an index, for a held-out image
OWNERS = "the owners of CIFAR-N publish its files at http://www.noisylabels.com"


def human(images: ImageSet, file: str, name: str | None, where: str) -> ImageSet:
    """The labels of CIFAR-10N or CIFAR-100N. Its clean labels must be the labels of the images."""
    path = at_home(file)
    if not path.is_file():
        raise InputError(
            f"{where}: no such file; it should be CIFAR-10_human.pt or CIFAR-100_human.pt; {OWNERS}"
        )
    content = read_arrays(path, where, OWNERS)
    known = [key for key in content if key != "clean_label"]
    if name is None:
        name = next((key for key in HUMAN_DEFAULTS if key in content), HUMAN_DEFAULTS[0])
    for key in ("clean_label", name):
        if key not in content:
            raise InputError(f"{where}: has no {key}{name_hint(key, known)}")
    clean, given = (
        _whole_numbers(content[key], images, f"{where}: {key}") for key in ("clean_label", name)
    )
    differs = np.flatnonzero(clean != images.given_N.numpy())
    if len(differs):
        raise InputError(
            f"{where}: its clean labels are not those of the source ({len(differs):,} differ, "
            f"first for image {differs[0]}): it is for another dataset or in another order"
        )
    changed = images.with_labels(torch.from_numpy(given), images.given_N)
    check_trainable(changed, where)
    return changed


def table(images: ImageSet, file: str, where: str, held_out: ImageSet | None = None) -> ImageSet:
    """The labels in a CSV file with one row per image, which has its index or its path. A
    labels.csv is such a file. Rows of images that are held out now are ignored.

    The true labels are not changed.
    """
    rows = read_rows(at_home(file), where, ("index", "path", *LABELS))
    column = next((name for name in LABELS if name in rows), None)
    if column is None or not {"index", "path"} & set(rows):
        raise InputError(f"{where}: needs the columns index,label or path,label")
    # A path identifies an image even after files were added or removed, unless two images have the
    # same path (as in CIFAR).
    paths = [*_keys(images, "path"), *(_keys(held_out, "path") if held_out else ())]
    by_path = "path" in rows and ("index" not in rows or len(paths) == len(set(paths)) > 0)
    key = "path" if by_path else "index"
    index = _indices(texts(rows[key], key, where), key, images, held_out, where)
    labels = _labels(texts(rows[column], column, where), images.classes, where)
    index, labels = index[index != HELD_OUT], labels[index != HELD_OUT]
    given = np.full(len(images), -1)
    given[index] = labels
    missing, names = np.flatnonzero(given < 0), list(_keys(images, key))
    if len(missing):
        raise InputError(
            f"{where}: {len(missing):,} images have no row (the first has the {key} "
            f"{names[missing[0]]})"
        )
    if len(index) > len(images):
        counts = np.bincount(index)
        twice = int(np.flatnonzero(counts > 1)[0])
        raise InputError(f"{where}: the {key} {names[twice]} has {counts[twice]} rows")
    changed = images.with_labels(torch.from_numpy(given), images.true_N)
    check_trainable(changed, where)
    return changed


def _whole_numbers(values: Any, images: ImageSet, where: str) -> np.ndarray:
    labels = np.asarray(values).reshape(-1)
    if labels.dtype.kind not in "iu" or len(labels) != len(images):
        raise InputError(f"{where}: must be {len(images)} whole numbers")
    wrong = np.flatnonzero((labels < 0) | (labels >= len(images.classes)))
    if len(wrong):
        raise InputError(
            f"{where}: {labels[wrong[0]]} of image {wrong[0]} is not a class "
            f"(0 to {len(images.classes) - 1})"
        )
    return labels.astype(np.int64)


def _indices(
    keys: list[str], key: str, images: ImageSet, held_out: ImageSet | None, where: str
) -> np.ndarray:
    """The index of the image of each row; HELD_OUT for a held-out image."""
    if key == "path" and images.paths is None:
        raise InputError(f"{where}: the images of this source have no paths; use the column index")
    known = {} if held_out is None else dict.fromkeys(_keys(held_out, key), HELD_OUT)
    known |= {value: i for i, value in enumerate(_keys(images, key))}
    keys = [_strip(value, known) for value in keys]
    for row, value in enumerate(keys, 1):
        if value not in known:
            raise InputError(
                f"{where}: row {row}: no image that is trained on or held out has the {key} {value}"
            )
    return np.array([known[value] for value in keys], dtype=np.int64)


def _keys(images: ImageSet, key: str) -> Iterable[str]:
    """The index or the path of every image."""
    return map(str, images.in_source_N.tolist()) if key == "index" else images.paths or ()


def _labels(labels: list[str], classes: tuple[str, ...], where: str) -> np.ndarray:
    """The class of each row, by name or by number, whichever fits more rows."""
    by_name = {name: i for i, name in enumerate(classes)}
    by_number = {str(i): i for i in range(len(classes))}
    labels = [_strip(label, by_name) for label in labels]
    known = max(by_name, by_number, key=lambda known: sum(label in known for label in labels))
    for row, label in enumerate(labels, 1):
        if label not in known:
            hint = (did_you_mean if len(known) > MAX_LISTED else name_hint)(label, known)
            raise InputError(f"{where}: row {row}: {label} is not a class{hint}")
    return np.array([known[label] for label in labels], dtype=np.int64)


def _strip(text: str, known: Container[str]) -> str:
    """A cell without surrounding spaces, unless a known name has them."""
    return text if text in known else text.strip()
