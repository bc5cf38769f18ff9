"""Data sets of torch: whatever has a length and gives (image, label) for an index."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from pseudoloss.data.decoding import Item, UnreadableError, header, hushed
from pseudoloss.data.items import Rows, as_content
from pseudoloss.data.scanning import LabelledFiles, Progress, no_progress
from pseudoloss.errors import InputError


def is_map_style(source: Any) -> bool:
    """Whether this can be asked for items, and is none of Python's or NumPy's own collections."""
    package, _, room = type(source).__module__.partition(".")
    known = package in ("builtins", "numpy", "pandas", "torch") and not room.startswith("utils")
    return not known and hasattr(source, "__len__") and hasattr(source, "__getitem__")


def dataset_items(source: Any, where: str, progress: Progress = no_progress) -> LabelledFiles:
    """The items of a data set. Where it has no `targets`, each is asked for its label."""
    rows = Rows(source.__getitem__, where)
    classes = _of(source, "classes")
    if classes is not None and len(set(map(str, classes))) < len(classes):
        raise InputError(f"{where}: two classes have the same name")
    targets = None if _of(source, "target_transform") else _of(source, "targets")
    files = _of(source, "samples")
    items, labels = [], []
    with hushed():
        for i in range(len(source)):
            item = Item(partial(_image, rows, i))
            label = None if targets is None else targets[i]
            if targets is None:
                try:
                    image, label = _pair(rows, i)[:2]
                    content = as_content(image, f"{where}[{i}]")
                    item = Item(item.get, header(Item(partial(_same, content))))
                except UnreadableError as error:  # without a label, it is told and left out
                    item, label = Item(partial(_fail, str(error))), ""
                progress("labels", i + 1, len(source))
            items.append(item)
            labels.append(_label(label, classes, f"{where}[{i}]"))
    names = [f"{where}[{i}]" if files is None else str(files[i][0]) for i in range(len(items))]
    return LabelledFiles(tuple(items), tuple(names), tuple(labels))


def _of(source: Any, name: str) -> Any:
    """An attribute of a data set, or of the set that it is a subset of; None where it has none."""
    inner, indices = getattr(source, "dataset", None), getattr(source, "indices", None)
    if inner is None or indices is None:
        return getattr(source, name, None)
    found = _of(inner, name)
    if name in ("targets", "samples") and found is not None:
        return [found[i] for i in indices]
    return found


def _pair(rows: Rows, i: int) -> Sequence[Any]:
    item = rows.item(i)
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise InputError(
            f"{rows.where}[{i}]: must be a pair of an image and its label, "
            f"not {type(item).__name__}"
        )
    return item


def _image(rows: Rows, i: int) -> bytes | Image.Image:
    return as_content(_pair(rows, i)[0], f"{rows.where}[{i}]")


def _label(label: Any, classes: Sequence[str] | None, where: str) -> str:
    if isinstance(label, str):
        return label
    try:
        number = np.asarray(label).item()
        if number != int(number):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(f"{where}: its label must be a whole number or text") from None
    if classes is None:
        return str(int(number))
    if not 0 <= number < len(classes):
        raise InputError(f"{where}: the label {number} is none of the {len(classes)} classes")
    return str(classes[int(number)])


def _same(content: bytes | Image.Image) -> bytes | Image.Image:
    return content


def _fail(reason: str) -> bytes:
    raise UnreadableError(reason)
