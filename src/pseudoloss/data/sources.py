"""Where images come from. A source is written in words, or is the arrays themselves."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pseudoloss.config import did_you_mean
from pseudoloss.data.cifar import cifar10, cifar100
from pseudoloss.data.cnwl import cnwl
from pseudoloss.data.imagenet32 import imagenet32
from pseudoloss.data.images import Data, arrays, check_trainable
from pseudoloss.data.webfg import web
from pseudoloss.errors import InputError

Source = str | Path | tuple[Any, Any] | Data

# Sources that are written NAME:PLACE.
PLACED: dict[str, Callable[[str], Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cnwl": cnwl,
    "imagenet32": imagenet32,
    **{name: partial(web, name) for name in ("web-aircraft", "web-bird", "web-car")},
}
PLACES = {"cnwl": "DIR:0.4"}  # where it is more than a folder

NPZ_ARRAYS = ("images", "labels", "test_images", "test_labels", "classes", "true_labels")


def open_source(source: Source) -> Data:
    """The images of a source, checked.

    Args:
        source: `"digits"`, `"cifar10:DIR"`, `"cifar100:DIR"`, `"cnwl:DIR:0.4"`,
            `"imagenet32:DIR"`, `"web-aircraft:DIR"`, `"web-bird:DIR"`, `"web-car:DIR"`, the path
            of an `.npz` file, a pair of arrays `(images, labels)`, or what `arrays` returned.
    """
    if isinstance(source, Data):
        data = source
    elif isinstance(source, tuple) and len(source) == 2:
        data = arrays(*source)
    elif isinstance(source, str | Path):
        data = _open_words(str(source))
    else:
        raise InputError(
            f"source must be words, a path or a pair (images, labels), not {type(source).__name__}"
        )
    check_trainable(data.train, data.name)
    return data


def _open_words(words: str) -> Data:
    kind, colon, place = words.partition(":")
    if words == "digits":
        return digits()
    if colon and kind in PLACED:
        return PLACED[kind](place)
    if words.endswith(".npz"):
        return npz(words)
    spelt = {name: f"{name}:{PLACES.get(name, 'DIR')}" for name in PLACED}
    if kind in PLACED:
        raise InputError(f"source {words}: say where its files are, as {spelt[kind]}")
    known = ("digits", *spelt.values(), "FILE.npz")
    raise InputError(f"source {words}: no such source{did_you_mean(words, known)}")


def absolute(words: str) -> str:
    """A source as it can be opened again from any folder."""
    kind, colon, place = words.partition(":")
    if colon and kind in PLACED:
        folder, colon, ratio = place.rpartition(":") if kind in PLACES else (place, "", "")
        return f"{kind}:{Path(folder).expanduser().resolve()}{colon}{ratio}"
    return str(Path(words).expanduser().resolve()) if words.endswith(".npz") else words


def digits() -> Data:
    """scikit-learn's handwritten digits: 8×8, grey, 1,797 images, a fifth of them for testing.

    They come inside scikit-learn, so nothing is downloaded.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    # A writer's digits lie side by side; a fixed shuffle spreads every writer over both parts.
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    data = arrays(
        images[train],
        bunch.target[train],
        test_images=images[test],
        test_labels=bunch.target[test],
        classes=[str(name) for name in bunch.target_names],
        true_labels=bunch.target[train],
        name="digits",
    )
    return replace(data, preset="digits")


def npz(path: str) -> Data:
    """A NumPy archive with `images` and `labels`; see docs/data.md for what else it may hold."""
    try:
        with np.load(Path(path).expanduser(), allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # a damaged archive raises whatever it likes
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a NumPy archive of plain arrays ({reason})") from None
    for key in found:
        if key not in NPZ_ARRAYS:
            raise InputError(f"{path}: unknown array {key}{did_you_mean(key, NPZ_ARRAYS)}")
    for key in ("images", "labels"):
        if key not in found:
            raise InputError(f"{path}: the array {key} is missing")
    classes = found.pop("classes", None)
    if classes is not None and classes.ndim != 1:
        raise InputError(f"{path}: classes must be a list of names")
    names = None if classes is None else [str(name) for name in classes.tolist()]
    return arrays(found.pop("images"), found.pop("labels"), classes=names, name=path, **found)
