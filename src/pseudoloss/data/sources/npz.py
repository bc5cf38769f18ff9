"""NumPy archives (`.npz`)."""

from typing import Any

from pseudoloss.data.images import Data, arrays
from pseudoloss.data.scanning import free_memory
from pseudoloss.errors import InputError, name_hint, reason
from pseudoloss.files import at_home, read_npz

ARRAYS = ("images", "labels", "test_images", "test_labels", "classes", "true_labels")


def npz(path: str) -> Data:
    """An archive with `images` and `labels`; docs/data.md lists the optional arrays."""
    try:
        found: dict[str, Any] = dict(read_npz(at_home(path), free_memory()))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a NumPy archive of plain arrays ({reason(error)})") from None
    for key in found:
        if key not in ARRAYS:
            raise InputError(f"{path}: unknown array {key}{name_hint(key, ARRAYS)}")
    for key in ("images", "labels"):
        if key not in found:
            raise InputError(f"{path}: the array {key} is missing")
    classes = found.pop("classes", None)
    if classes is not None and classes.ndim != 1:
        raise InputError(f"{path}: classes must be a list of names")
    names = None if classes is None else [str(name) for name in classes.tolist()]
    return arrays(found.pop("images"), found.pop("labels"), classes=names, name=path, **found)
