"""Read arrays from untrusted pickles without running any code in them.

Some datasets are published as pickles: the batch files of ImageNet32, the `.pt` files of CIFAR-N. A
pickle can name any function and have it called. Here the few names that a NumPy array needs are
replaced by the stand-ins below, and every other name is refused. A pickle cannot call any function
of NumPy or torch, so nothing in it can run.
"""

import io
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from pseudoloss.errors import InputError, reason
from pseudoloss.files import open_regular, read_npz

LARGEST = 2**30  # bytes of the pickle in a zip archive
ZIP = b"PK\x03\x04"  # the start of a zip archive; its directory is at the end
TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the start of torch's files before they were zip archives


def read_arrays(path: Path, where: str, owners: str) -> dict[str, Any]:
    """The named arrays, lists and numbers in a pickle, an `.npz` file or a file of torch.save.
    `owners` says where the file is published, for the error if it is damaged."""
    try:
        open_regular(path).close()
        if zipfile.is_zipfile(path):
            return _from_zip(path, where)
        with open_regular(path) as file:
            if file.read(len(ZIP)) == ZIP:
                raise ValueError("it ends too early, perhaps an incomplete download")
            file.seek(0)
            found = _load(file)
            if found == TORCH_MAGIC:
                _load(file), _load(file)  # the version of torch, and facts about the machine
                found = _load(file)
        return _named(found, path, where)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{where}: {path} cannot be read ({reason(error)})") from None
    except RefusedError as error:
        raise InputError(
            f"{where}: {path} holds more than NumPy arrays ({error}) and is not read"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{where}: {path} is damaged ({reason(error)}); {owners}") from None


def _from_zip(path: Path, where: str) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        inner = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not inner:
            return dict(read_npz(path))
        if archive.getinfo(inner[0]).file_size > LARGEST:
            raise ValueError("its list of arrays is too large")
        return _named(_load(io.BytesIO(archive.read(inner[0]))), path, where)


def _named(found: Any, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InputError(f"{where}: {path} must hold named arrays")
    return {
        str(name): value.array if isinstance(value, _Array) else value
        for name, value in found.items()
    }


class RefusedError(Exception):
    """The pickle asks for something that arrays do not need."""


class _DType:
    """Stands in for numpy.dtype."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[biuf][1248]", code):
            raise RefusedError(f"an array of {code}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands in for numpy.ndarray."""

    array: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        self.array = _to_array(content, dtype, shape, "F" if is_fortran else "C")


def _to_array(content: Any, dtype: _DType, shape: tuple[int, ...], order: Any) -> np.ndarray:
    content = content.encode("latin1") if isinstance(content, str) else content  # of Python 2
    if len(content) != math.prod(shape) * dtype.dtype.itemsize:
        raise ValueError("an array has the wrong length")
    return np.frombuffer(content, dtype.dtype).reshape(shape, order=order)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(content: Any, dtype: _DType, shape: tuple[int, ...], order: str) -> _Array:
    found = _Array()
    found.array = _to_array(content, dtype, shape, order)
    return found


def _scalar(dtype: _DType, content: Any) -> Any:
    return _to_array(content, dtype, (), "C").item()


def _encode(text: str, encoding: str) -> bytes:
    """Protocols 0 to 2 store bytes as encoded text."""
    if encoding != "latin1":
        raise RefusedError(f"text in {encoding}")
    return text.encode("latin1")


STAND_INS = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": _encode,
}


class _Unpickler(pickle._Unpickler):
    """In Python: the one in C allocates as many places as the largest number of a place says."""

    def find_class(self, module: str, name: str) -> Any:
        asked = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if asked not in STAND_INS:
            raise RefusedError(f"it asks for {module}.{name}")
        return STAND_INS[asked]

    def persistent_load(self, _: Any) -> Any:
        raise RefusedError("it refers to another file")


def _load(file: Any) -> Any:
    return _Unpickler(file, encoding="latin1").load()
