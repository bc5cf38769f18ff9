"""NumPy archives (`.npz`)."""

import numpy as np

from pseudoloss.data.images import Data, arrays
from pseudoloss.errors import InputError, name_hint, reason
from pseudoloss.files import at_home

ARRAYS = ("images", "labels", "test_images", "test_labels", "classes", "true_labels")


def npz(path: str) -> Data:
    """An archive with `images` and `labels`; docs/data.md lists the optional arrays."""
    try:
        with np.load(at_home(path), allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # a damaged archive can raise anything
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
