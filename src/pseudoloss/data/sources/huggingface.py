"""Hugging Face datasets: from the hub, from a folder written by `save_to_disk`, or as objects."""

from functools import partial
from typing import Any

from pseudoloss.data.decoding import Item
from pseudoloss.data.items import Rows
from pseudoloss.data.scanning import LabelledFiles, ReadOptions
from pseudoloss.errors import InputError, name_hint, reason
from pseudoloss.files import at_home

IMAGES, LABELS = ("image", "img"), ("label", "labels")  # the usual names of the columns


def load_dataset(place: str, where: str) -> Any:
    """A dataset of the hub (NAME or NAME:CONFIG), or a folder written by `save_to_disk`."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{where}: needs Hugging Face's datasets: pip install 'pseudoloss[hf]'"
        ) from None
    if not place:
        raise InputError(f"{where}: name a dataset, as in hf:NAME, hf:NAME:CONFIG or hf:FOLDER")
    folder = at_home(place)
    name, _, config = place.partition(":")
    try:
        if folder.is_dir():
            return datasets.load_from_disk(str(folder))
        if place.startswith((".", "/", "~")) or place.endswith("/"):
            raise InputError(f"{where}: no such folder")
        return datasets.load_dataset(name, config or None)
    except InputError:
        raise
    except Exception as error:  # the library and the hub can raise anything
        if folder.is_dir():
            raise InputError(
                f"{where}: not a folder written by save_to_disk ({reason(error)})"
            ) from None
        raise InputError(
            f"{where}: cannot be loaded from the hub ({reason(error)}). On a machine with access, "
            "run load_dataset(NAME).save_to_disk(FOLDER), copy the folder, and use hf:FOLDER here"
        ) from None


def is_huggingface_dataset(source: Any) -> bool:
    """Whether the object is a Hugging Face dataset. Does not import their library."""
    return any(
        kind.__module__.startswith("datasets.") and "Dataset" in kind.__name__
        for kind in type(source).__mro__
    )


def labelled_rows(
    rows: Any, options: ReadOptions, where: str, may_lack_labels: bool = False
) -> LabelledFiles | None:
    """The rows of a `Dataset`; None if it has no labels and need not have any."""
    import datasets

    if not isinstance(rows, datasets.Dataset):
        raise InputError(
            f"{where}: must be a Dataset, not {type(rows).__name__} (streaming is not supported)"
        )
    rows = rows.with_format(None)
    image = _image_column(rows, options, where)
    label = _label_column(rows, options, where)
    if len(rows) == 0:
        return LabelledFiles((), (), ())
    labels = _labels(rows, label, where, may_lack_labels)
    if labels is None:
        return None
    names = [f"{where}[{i}]" for i in range(len(rows))]
    if isinstance(rows.features[image], datasets.Image):
        rows = rows.cast_column(image, datasets.Image(decode=False))
        files = rows.select_columns([image]).flatten()[f"{image}.path"][:]
        if all(files) and len(set(files)) == len(files):
            names = files
    source = Rows(lambda i: rows[i][image], where)
    items = tuple(Item(partial(source.content, i)) for i in range(len(rows)))
    return LabelledFiles(items, tuple(names), labels)


def _image_column(rows: Any, options: ReadOptions, where: str) -> str:
    import datasets

    if options.path_column != ReadOptions.path_column:
        return _named(rows, options.path_column, "--path-column", where)
    typed = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    return _only(typed, IMAGES, rows, "images", "--path-column", where)


def _label_column(rows: Any, options: ReadOptions, where: str) -> str:
    import datasets

    if options.label_column != ReadOptions.label_column:
        return _named(rows, options.label_column, "--label-column", where)
    typed = [name for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    return _only(typed, LABELS, rows, "labels", "--label-column", where)


def _named(rows: Any, name: str, flag: str, where: str) -> str:
    if name not in rows.column_names:
        hint = name_hint(name, rows.column_names)
        raise InputError(f"{where}: has no column {name} (see {flag}){hint}")
    return name


def _only(
    typed: list[str], usual: tuple[str, ...], rows: Any, what: str, flag: str, where: str
) -> str:
    """The only column of the type; otherwise a column with a usual name."""
    if len(typed) == 1:
        return typed[0]
    for name in usual:
        if name in (typed or rows.column_names):
            return name
    found = ", ".join(typed or rows.column_names)
    if typed:
        raise InputError(
            f"{where}: has several columns of {what} ({found}); choose one with {flag}"
        )
    raise InputError(f"{where}: has no column of {what}, only {found}; choose one with {flag}")


def _labels(rows: Any, column: str, where: str, may_lack: bool) -> tuple[str, ...] | None:
    """Labels as text; the labels of a `ClassLabel` column by their names."""
    import datasets

    values = rows.select_columns([column])[column][:]
    kind = rows.features[column]
    missing = [value is None or (isinstance(value, int) and value < 0) for value in values]
    if all(missing) and may_lack:
        return None
    if any(missing):
        raise InputError(f"{where}: row {missing.index(True)} has no label in {column}")
    if isinstance(kind, datasets.ClassLabel):
        return tuple(kind.names[value] for value in values)
    for row, value in enumerate(values):
        if not isinstance(value, str | int | bool):
            raise InputError(
                f"{where}: row {row}: {column} must be a whole number or text, "
                f"not {type(value).__name__}"
            )
    return tuple(map(str, values))
