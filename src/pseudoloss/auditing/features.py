"""Features of images: one vector per image, from a frozen network or from a file.

Threads read and decode images ahead of the network. Features are cached by the content of the image
(see cache.py), so a second audit only reads the files, and an interrupted one resumes.

Shapes: N images, C channels, H×W pixels, D features.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.auditing.cache import FeatureCache, digest_of
from pseudoloss.auditing.extractors import RUN, Extractor, open_extractor
from pseudoloss.data import Skipped
from pseudoloss.data.decoding import (
    USUAL,
    Entry,
    Limits,
    Reader,
    UnreadableError,
    content,
    header,
    no_warnings,
)
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.errors import InputError, reason
from pseudoloss.files import at_home, cache_folder, open_npy, open_regular

HEADERS = 500  # images whose size is looked at
ORIENTATION = 0x0112  # the EXIF tag
CHECKED = 2**24  # numbers of a file that are checked at a time


@dataclass(frozen=True)
class Features:
    """The features of N images.

    Attributes:
        values_ND: float16 or float32; zeros where `kept_N` is false. May be read-only.
        kept_N: whether the image could be read.
        skipped: the images that could not be read, and why.
        name: of the network or file, such as "efficientnet-lite0@224".
        key: SHA-256 of everything that decides the values.
        cached: whether all values came from the cache.
        notices: problems with the cache, for the user.
    """

    values_ND: np.ndarray
    kept_N: np.ndarray
    skipped: tuple[Skipped, ...]
    name: str
    key: str
    cached: bool
    notices: tuple[str, ...] = ()


def extract_files(
    entries: Sequence[Entry],
    names: Sequence[str],
    spec: str | None = None,
    *,
    device: str = "auto",
    cache: bool = True,
    progress: Progress = no_progress,
    limits: Limits = USUAL,
) -> Features:
    """The features of image files or items of a dataset.

    Args:
        entries: the images.
        names: what the images are called if they are skipped.
        spec: --features: None for the embedded network, the name of a timm model, "run:RUN" or
            "FILE.npy" with one row per image.
        device: as --device.
        cache: whether features are looked up and kept in the cache.
        progress: is told about the progress.
        limits: of files and images.
    """
    if is_file(spec):
        return load_features(at_home(str(spec)), len(entries))
    extractor = open_extractor(spec, typical_side(entries, limits), device)
    reader = replace(extractor.reader, limits=limits)

    def load(i: int, known: "Lookup") -> "Loaded":
        with content(entries[i], limits) as found:
            digest = _digest(found)
            values_D = known(digest)
            pixels = reader.decode(found) if values_D is None else None
        return Loaded(digest, values_D, pixels)

    return _extract(extractor, load, names, cache, progress)


def extract_arrays(
    images_NCHW: Tensor,
    spec: str | None = None,
    *,
    names: Sequence[str] | None = None,
    device: str = "auto",
    cache: bool = True,
    progress: Progress = no_progress,
) -> Features:
    """The features of uint8 images, grey or RGB, of one size; as `extract_files` of such images in
    files without loss."""
    if is_file(spec):
        return load_features(at_home(str(spec)), len(images_NCHW))
    side = min(images_NCHW.shape[2:]) if len(images_NCHW) else 0
    extractor = open_extractor(spec, side, device)
    shape = repr(tuple(images_NCHW.shape[1:])).encode()

    def load(i: int, known: "Lookup") -> "Loaded":
        pixels_CHW = np.ascontiguousarray(images_NCHW[i].numpy())
        digest = digest_of(shape, pixels_CHW.data.cast("B"))
        values_D = known(digest)
        pixels = decode_pixels(extractor.reader, pixels_CHW) if values_D is None else None
        return Loaded(digest, values_D, pixels)

    names = names or [str(i) for i in range(len(images_NCHW))]
    return _extract(extractor, load, names, cache, progress)


def load_features(path: Path, count: int) -> Features:
    """The features in a .npy file: one row of floats per image. They stay in the file."""
    where = f"--features {path}"
    if not path.is_file():
        raise InputError(f"{where}: no such file")
    try:
        values_ND = open_npy(path, "c")
        with open_regular(path) as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: not a .npy file of numbers ({reason(error)})") from None
    return given_features(values_ND, count, where, path.name, key)


def given_features(
    values_ND: np.ndarray, count: int, where: str, name: str = "given", key: str | None = None
) -> Features:
    """Features that the user computed, checked; `where` begins the error messages."""
    if values_ND.ndim != 2 or not values_ND.shape[1]:
        shape = "×".join(map(str, values_ND.shape))
        raise InputError(f"{where}: must have one row per image (N×D), not the shape {shape}")
    if values_ND.dtype.kind != "f":
        raise InputError(f"{where}: must be floats, not {values_ND.dtype}")
    if len(values_ND) != count:
        raise InputError(f"{where}: has {len(values_ND):,} rows for {count:,} images")
    if values_ND.dtype not in (np.float16, np.float32):
        with np.errstate(over="ignore"):
            values_ND = values_ND.astype(np.float32)
    digest = hashlib.sha256(repr((values_ND.shape, values_ND.dtype.str)).encode())
    rows = max(1, CHECKED // values_ND.shape[1])
    for start in range(0, count, rows):
        chunk = np.ascontiguousarray(values_ND[start : start + rows])
        finite = np.isfinite(chunk).all(1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise InputError(f"{where}: row {row} contains NaN or infinity")
        if key is None:
            digest.update(chunk.data.cast("B"))
    kept_N = np.ones(count, dtype=bool)
    return Features(values_ND, kept_N, (), name, key or digest.hexdigest(), cached=False)


def is_file(spec: str | None) -> bool:
    """Whether --features names a file."""
    return spec is not None and spec.endswith(".npy") and not spec.startswith(RUN)


class Loaded(NamedTuple):
    """An image: its digest, and its features if they are known, else its pixels."""

    digest: bytes
    values_D: np.ndarray | None
    pixels_CHW: np.ndarray | None


Lookup = Callable[[bytes], np.ndarray | None]


def _extract(
    extractor: Extractor,
    load: Callable[[int, Lookup], Loaded],
    names: Sequence[str],
    cache: bool,
    progress: Progress,
) -> Features:
    """Features of all images: from the cache, else computed in batches and added to the cache.
    Several processes extract those of a part of the images each."""
    store = FeatureCache(
        cache_folder("features") / extractor.key[:32] if cache else None, extractor.width
    )
    count, computed = len(names), 0
    own = distributed.part(count)
    last, reasons, digests = own.stop - 1, {}, []
    values_ND = np.zeros((count, extractor.width), np.float16)
    kept_N = np.ones(count, dtype=bool)
    batch: list[tuple[int, Loaded]] = []
    with _computing(extractor, values_ND, store) as compute:
        found = _read_ahead(load, store.find, range(count)[own], 3 * extractor.batch)
        for i, result in enumerate(found, own.start):
            if isinstance(result, str):
                reasons[str(i)] = result
                digests.append(b"skipped".hex())
            else:
                digests.append(result.digest.hex())
                if result.values_D is not None:
                    values_ND[i] = result.values_D
                else:
                    batch.append((i, result))
                    computed += 1
            if len(batch) == extractor.batch:
                compute(batch)
                batch = []
            if (i + 1) % extractor.batch == 0 or i == last:
                progress("features", i + 1, own.stop)
        if batch:
            compute(batch)
    told = distributed.all_values([reasons, digests, computed, store.notices])
    distributed.exchange_parts(torch.from_numpy(values_ND))
    unread = {int(i): reason for theirs, *_ in told for i, reason in theirs.items()}
    skipped = [Skipped(names[i], unread[i]) for i in sorted(unread)]
    kept_N[sorted(unread)] = False
    key = hashlib.sha256(extractor.key.encode())
    for digest in (digest for _, theirs, *_ in told for digest in theirs):
        key.update(bytes.fromhex(digest))
    if count and len(skipped) == count:
        raise InputError(
            f"no image can be read (the first of {count:,}: {skipped[0].path}, {skipped[0].reason})"
        )
    return Features(
        values_ND,
        kept_N,
        tuple(skipped),
        extractor.name,
        key.hexdigest(),
        cached=not any(theirs for _, _, theirs, _ in told),
        notices=tuple(dict.fromkeys(text for *_, theirs in told for text in theirs)),
    )


@contextmanager
def _computing(
    extractor: Extractor, values_ND: np.ndarray, store: FeatureCache
) -> Iterator[Callable[[list[tuple[int, Loaded]]], None]]:
    """A function that computes the features of a batch in the background. They are in `values_ND`
    and `store` at the end, as far as they were computed if it is interrupted."""
    waiting: deque[tuple[list[tuple[int, Loaded]], Future[np.ndarray]]] = deque()

    def collect() -> None:
        batch, future = waiting.popleft()
        for (i, image), values_D in zip(batch, future.result(), strict=True):
            values_ND[i] = values_D
            store.add(image.digest, values_D)

    with extractor.threads() as threads:

        def compute(batch: list[tuple[int, Loaded]]) -> None:
            pixels_BCHW = np.stack([image.pixels_CHW for _, image in batch])  # type: ignore[misc]
            waiting.append((batch, threads.submit(extractor.compute, pixels_BCHW)))
            if len(waiting) > extractor.workers:
                collect()

        try:
            yield compute
            while waiting:
                collect()
        finally:
            store.flush()


def _read_ahead(
    load: Callable[[int, Lookup], Loaded], known: Lookup, wanted: Sequence[int], ahead: int
) -> Iterator[Loaded | str]:
    """The wanted images in order; for one that cannot be read, the reason."""

    def attempt(i: int) -> Loaded | str:
        try:
            return load(i, known)
        except (UnreadableError, ValueError) as error:  # ValueError: not a valid path
            if isinstance(error, InputError):
                raise
            return str(error)

    waiting: deque[Future[Loaded | str]] = deque()
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        with no_warnings():
            for i in wanted:
                waiting.append(threads.submit(attempt, i))
                if len(waiting) == ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def _digest(content: bytes | Image.Image) -> bytes:
    """A hash of the bytes of a file, or of everything in an image that decides its pixels."""
    if isinstance(content, bytes):
        return digest_of(content)
    palette = content.getpalette("RGBA") if content.mode in ("P", "PA") else None
    facts = (content.mode, content.size, palette, content.info.get("transparency"))
    return digest_of(repr((*facts, content.getexif().get(ORIENTATION))).encode(), content.tobytes())


def typical_side(entries: Sequence[Entry], limits: Limits = USUAL) -> int:
    """The median of the shorter sides of some images; 0 if none can be read."""
    step = max(1, len(entries) // HEADERS)
    sides = []
    for entry in entries[::step]:
        try:
            found = header(entry, limits)
        except (UnreadableError, ValueError):
            continue
        sides.append(min(found.width, found.height))
    return int(median(sides)) if sides else 0


def decode_pixels(reader: Reader, pixels_CHW: np.ndarray) -> np.ndarray:
    """Pixels in memory as the reader would decode a file of them."""
    pixels = pixels_CHW[0] if len(pixels_CHW) == 1 else pixels_CHW.transpose(1, 2, 0)
    return reader.pixels(Image.fromarray(np.ascontiguousarray(pixels)))
