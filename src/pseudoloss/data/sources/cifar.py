"""CIFAR-10 and CIFAR-100 from their official Python files."""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pseudoloss.data.images import Data, arrays
from pseudoloss.errors import InputError, reason
from pseudoloss.files import at_home, open_regular

# MD5 checksums of the official files. They are checked before anything is unpickled, because a
# pickle can run any code.
CIFAR10_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
CIFAR100_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
TEST_FILES = ("test_batch", "test")


def _without_test(sums: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in sums if name not in TEST_FILES)


FILES = {
    "cifar10": ("cifar-10-batches-py", tuple(CIFAR10_MD5)),
    "cifar100": ("cifar-100-python", tuple(CIFAR100_MD5)),
    "cifar10-train": ("cifar-10-batches-py", _without_test(CIFAR10_MD5)),
    "cifar100-train": ("cifar-100-python", _without_test(CIFAR100_MD5)),
}
"""Folder and files of each source. Those of NAME-train have no test images: the test file is not
opened and may be missing."""

OWNERS = "its owners publish it at https://www.cs.toronto.edu/~kriz/cifar.html"


def cifar10(folder: str, kind: str = "cifar10") -> Data:
    """CIFAR-10: 50,000 training and 10,000 test images of 10 classes."""
    files = _read_files(kind, folder, CIFAR10_MD5)
    return _data(
        name=kind,
        train=[files[f"data_batch_{i}"] for i in range(1, 6)],
        test=files.get("test_batch"),
        labels=b"labels",
        classes=files["batches.meta"][b"label_names"],
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )


def cifar100(folder: str, kind: str = "cifar100") -> Data:
    """CIFAR-100: 50,000 training and 10,000 test images of 100 classes."""
    files = _read_files(kind, folder, CIFAR100_MD5)
    data = _data(
        name=kind,
        train=[files["train"]],
        test=files.get("test"),
        labels=b"fine_labels",
        classes=files["meta"][b"fine_label_names"],
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    )
    superclass_of = dict(
        zip(files["train"][b"fine_labels"], files["train"][b"coarse_labels"], strict=True)
    )
    superclasses = tuple(superclass_of[label] for label in range(len(data.train.classes)))
    return replace(data, train=replace(data.train, superclasses=superclasses))


def find_cifar(kind: str, folder: str) -> Path:
    """The folder with the files: `folder` itself or its subfolder. No file is opened."""
    spec, (inner, files) = f"{kind}:{folder}", FILES[kind]
    root, names = at_home(folder), ", ".join(files)
    if not folder or not root.is_dir():
        raise InputError(f"{spec}: no such folder; it should hold {inner}/ with {names}; {OWNERS}")
    for place in (root / inner, root):
        missing = [name for name in files if not (place / name).exists()]
        if not missing:
            return place
        if len(missing) < len(files):
            raise InputError(f"{spec}: {', '.join(missing)} missing in {place}; {OWNERS}")
    archive = next(root.glob("cifar-*-python.tar.gz"), None)
    hint = f" (unpack {archive} first)" if archive else ""
    raise InputError(f"{spec}: found neither {inner}/ nor its files {names}{hint}; {OWNERS}")


def _read_files(kind: str, folder: str, sums: dict[str, str]) -> dict[str, Any]:
    root = find_cifar(kind, folder)
    return {name: _read(f"{kind}:{folder}", root / name, sums[name]) for name in FILES[kind][1]}


def _read(spec: str, path: Path, md5: str) -> Any:
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise InputError(f"{spec}: {path} cannot be read ({reason(error)}); {OWNERS}") from None
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise InputError(
            f"{spec}: {path} is not the official file (its MD5 checksum differs); download it "
            f"again; {OWNERS}"
        )
    return pickle.loads(content, encoding="bytes")  # noqa: S301


def _data(
    *,
    name: str,
    train: list[Any],
    test: Any,
    labels: bytes,
    classes: list[bytes],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Data:
    given = np.concatenate([batch[labels] for batch in train])
    data = arrays(
        np.concatenate([batch[b"data"] for batch in train]).reshape(-1, 3, 32, 32),
        given,
        test_images=None if test is None else test[b"data"].reshape(-1, 3, 32, 32),
        test_labels=None if test is None else test[labels],
        classes=[class_name.decode() for class_name in classes],
        true_labels=given,
        paths=[file.decode() for batch in train for file in batch[b"filenames"]],
        name=name,
    )
    return replace(data, mean=mean, std=std)
