"""torch datasets: any object with a length whose items are pairs (image, label)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from pseudoloss.data.decoding import Item, UnreadableError, header, no_warnings
from pseudoloss.data.items import Rows, as_content
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.data.scanning import LabelledFiles
from pseudoloss.errors import InputError


def is_torch_dataset(source: Any) -> bool:
    """Whether the object has items and a length, and is no collection of Python, NumPy, pandas or
    torch (`torch.utils.data` excepted)."""
    package, _, module = type(source).__module__.partition(".")
    built_in = package in ("builtins", "numpy", "pandas", "torch")
    if built_in and not module.startswith("utils"):
        return False
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def labelled_items(dataset: Any, where: str, progress: Progress = no_progress) -> LabelledFiles:
    """The items of a dataset. If it has no `targets`, every item is loaded once for its label."""
    rows = Rows(dataset.__getitem__, where)
    classes = _attribute(dataset, "classes")
    if classes is not None and len(set(map(str, classes))) < len(classes):
        raise InputError(f"{where}: two classes have the same name")
    # A target transform changes the labels, so `targets` are not the labels of the items then.
    has_transform = bool(_attribute(dataset, "target_transform"))
    targets = None if has_transform else _attribute(dataset, "targets")
    files = _attribute(dataset, "samples")
    items, labels = [], []
    with no_warnings():
        for i in range(len(dataset)):
            item = Item(partial(_image, rows, i))
            label = None if targets is None else targets[i]
            if targets is None:
                try:
                    image, label = _pair(rows, i)[:2]
                    content = as_content(image, f"{where}[{i}]")
                    item = Item(item.get, header(Item(partial(_same, content))))
                except UnreadableError as error:  # it has no label, and is reported as skipped
                    item, label = Item(partial(_fail, str(error))), ""
                progress("labels", i + 1, len(dataset))
            items.append(item)
            labels.append(_label(label, classes, f"{where}[{i}]"))
    names = [f"{where}[{i}]" if files is None else str(files[i][0]) for i in range(len(items))]
    return LabelledFiles(tuple(items), tuple(names), tuple(labels))


def _attribute(dataset: Any, name: str) -> Any:
    """An attribute of a dataset or, for a `Subset`, of the dataset behind it; None if missing."""
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None:
        return getattr(dataset, name, None)
    found = _attribute(inner, name)
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
        raise InputError(
            f"{where}: the label {number} is out of range (there are {len(classes)} classes)"
        )
    return str(classes[int(number)])


def _same(content: bytes | Image.Image) -> bytes | Image.Image:
    return content


def _fail(reason: str) -> bytes:
    raise UnreadableError(reason)
