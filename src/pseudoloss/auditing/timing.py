"""How long an audit will take on this machine.

Shapes: N images, C channels, H×W pixels, D features.
"""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pseudoloss.auditing.extractors import Extractor, open_extractor
from pseudoloss.auditing.features import decode_pixels, typical_side
from pseudoloss.auditing.scoring import SMALL
from pseudoloss.data.decoding import Entry, UnreadableError
from pseudoloss.errors import InputError
from pseudoloss.nn.devices import choose_device, using

SAMPLE = 16  # images that are timed
# Arithmetic of the heads with three repeats, for 1,280 features: so many operations per image and
# class, and as if there were so many classes more. Measured with 300 to 12,000 images.
OPERATIONS = 1.5e7
MORE_CLASSES = 13.5


class _Decoded(NamedTuple):
    """Some images, and the seconds that decoding took for each."""

    pixels_NCHW: np.ndarray
    seconds: float


def audit_seconds(
    images: Sequence[Entry] | Tensor, count: int, classes: int, device: str = "auto"
) -> float:
    """About how many seconds an audit with the embedded network takes, if no features are cached.

    Args:
        images: files, items of a dataset, or uint8 images (N,C,H,W); up to 16 of them are read.
        count: number of images of the audit.
        classes: number of classes.
        device: as --device.

    Raises:
        InputError: none of the images can be read.
    """
    place = choose_device(device)
    with using(place), torch.random.fork_rng(devices=[]):  # a new network draws its weights
        start = time.monotonic()
        side = min(images.shape[2:]) if isinstance(images, Tensor) else typical_side(images)
        extractor = open_extractor(None, side, device)
        startup = time.monotonic() - start
        decoded = _decode_some(images, extractor)
        image = decoded.seconds / (os.cpu_count() or 1) + _compute_time(extractor, decoded)
        return startup + count * image + heads_seconds(count, classes, place)


def _decode_some(images: Sequence[Entry] | Tensor, extractor: Extractor) -> _Decoded:
    chosen = np.unique(np.linspace(0, len(images) - 1, SAMPLE).round().astype(int)).tolist()
    start, found = time.monotonic(), []
    for i in chosen:
        entry = images[i]
        try:
            if isinstance(entry, Tensor):
                found.append(decode_pixels(extractor.reader, entry.numpy()))
            else:
                found.append(extractor.reader.read(entry))
        except UnreadableError:
            continue
    if not found:
        raise InputError("none of the images that were tried can be read")
    return _Decoded(np.stack(found), (time.monotonic() - start) / len(chosen))


def _compute_time(extractor: Extractor, decoded: _Decoded) -> float:
    """Seconds per image, with one batch for each worker. Batches are always full (padded)."""
    with extractor.threads() as threads:
        start = time.monotonic()
        batch_BCHW = decoded.pixels_NCHW[: extractor.batch]
        list(threads.map(extractor.compute, [batch_BCHW] * extractor.workers))
        return (time.monotonic() - start) / (extractor.workers * extractor.batch)


def heads_seconds(count: int, classes: int, device: torch.device) -> float:
    """Seconds of the cross-validated heads, by the time of a matrix product."""
    a, b = torch.ones(2048, 1280, device=device), torch.ones(1280, 512, device=device)
    (a @ b)[0, 0].item()  # the first one takes longer
    start = time.monotonic()
    for _ in range(8):
        product = a @ b
    product[0, 0].item()  # waits for the device
    speed = 8 * 2 * 2048 * 1280 * 512 / (time.monotonic() - start)
    repeats = 1.0 if count <= SMALL else 1 / 3
    return count * (classes + MORE_CLASSES) * repeats * OPERATIONS / speed
