"""The images of a source with their labels, all splits together: what an audit looks at."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data import OUT, Data, ImageFiles, ImageSet, Reader, Skipped, arrays, corrupt
from pseudoloss.data.corruption import parse_noise
from pseudoloss.data.decoding import Entry
from pseudoloss.data.images import in_order
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.data.scanning import FileSource, LabelledFiles, loose_files
from pseudoloss.data.sources import Source, open_all
from pseudoloss.errors import InputError
from pseudoloss.reading import ReadOptions

PARTS = ("train", "val", "test")
UNKNOWN = -2  # a true label that is not known


@dataclass(frozen=True)
class AuditImages:
    """N images or rows of features, with one label each, in the order train, val, test."""

    name: str
    classes: tuple[str, ...]
    given_N: np.ndarray  # int64, 0 to C-1
    part_N: np.ndarray  # int64: index into PARTS
    index_N: np.ndarray  # int64: position in the split
    paths: tuple[str, ...] | None = None
    true_N: np.ndarray | None = None  # int64; OUT: no class, UNKNOWN: not known
    entries: tuple[Entry, ...] | None = None  # image files
    images_NCHW: Tensor | None = None  # images in memory
    superclasses: tuple[int, ...] | None = None
    skipped: tuple[Skipped, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.given_N)

    @property
    def counts_C(self) -> np.ndarray:
        """Images of each class."""
        return np.bincount(self.given_N, minlength=len(self.classes))

    @property
    def parts(self) -> dict[str, int]:
        """Images of each split."""
        counts = np.bincount(self.part_N, minlength=len(PARTS)).tolist()
        return {part: count for part, count in zip(PARTS, counts, strict=True) if count}

    def select(self, kept_N: np.ndarray) -> "AuditImages":
        """Some of the images. Pixels are not needed any more and are dropped; classes without an
        image stay."""
        chosen = np.flatnonzero(kept_N).tolist()
        return replace(
            self,
            given_N=self.given_N[kept_N],
            part_N=self.part_N[kept_N],
            index_N=self.index_N[kept_N],
            paths=None if self.paths is None else tuple(self.paths[i] for i in chosen),
            true_N=None if self.true_N is None else self.true_N[kept_N],
            entries=None,
            images_NCHW=None,
        )


def open_images(
    source: Source, options: ReadOptions, progress: Progress = no_progress
) -> AuditImages:
    """All images of a source; files are listed, not read."""
    found = open_all(source, options, progress)
    images = _of_files(found) if isinstance(found, FileSource) else _of_data(found)
    check_classes(images)
    return images


def labelled_rows(count: int, labels: Any) -> AuditImages:
    """Rows of features with labels: whole numbers or text, one per row."""
    # `arrays` checks labels of any kind; the images are not looked at.
    data = arrays(np.zeros((count, 8, 8), np.uint8), labels, name="labels")
    images = replace(_of_data(data), name="features", images_NCHW=None)
    check_classes(images)
    return images


def check_classes(images: AuditImages) -> None:
    """Refuse labels of fewer than two classes."""
    present = np.flatnonzero(images.counts_C)
    if not len(images):
        raise InputError(f"{images.name}: has no images")
    if len(present) < 2:
        only = images.classes[present[0]]
        raise InputError(
            f"{images.name}: all labels are of one class ({only}); at least 2 classes are needed"
        )


def with_noise(images: AuditImages, noise: str, seed: int) -> AuditImages:
    """Add label noise to the training split; the labels become the true labels."""
    where = f"--corrupt {noise}"
    if parse_noise(noise).out is not None:
        raise InputError(f"{where}: an audit can only change labels; omit out:RATE")
    rows = np.flatnonzero(images.part_N == 0)
    pixels = images.images_NCHW
    if pixels is None:
        stand_ins = tuple(Path() for _ in rows)
        subset: Tensor | ImageFiles = ImageFiles(stand_ins, Reader(1, (8, 8)), torch.empty(0))
    else:
        subset = pixels[: len(rows)]  # the training split comes first
    true_N = images.true_N
    known = true_N is not None and bool((true_N[rows] != UNKNOWN).all())
    train = ImageSet(
        subset,
        torch.from_numpy(images.given_N[rows]),
        images.classes,
        torch.from_numpy(true_N[rows]) if known and true_N is not None else None,
        None if images.paths is None else tuple(images.paths[i] for i in rows.tolist()),
        superclasses=images.superclasses,
        positions_N=torch.from_numpy(images.index_N[rows]),
    )
    changed = corrupt(train, noise, seed)
    given_N = images.given_N.copy()
    given_N[rows] = changed.given_N.numpy()
    truth_N = np.full(len(images), UNKNOWN) if true_N is None else true_N.copy()
    truth_N[rows] = UNKNOWN if changed.true_N is None else changed.true_N.numpy()
    return replace(images, given_N=given_N, true_N=truth_N)


def _of_files(source: FileSource) -> AuditImages:
    """The splits of a source of files."""
    splits: dict[str, LabelledFiles] = {}
    skipped: list[Skipped] = []
    for part in PARTS:
        split = source.splits.get(part)
        if split is not None:
            skipped += loose_files(split)
            skipped += split.skipped
            # The label of an item that could not be loaded is empty.
            loaded = [label != "" for label in split.labels]
            skipped += [
                Skipped(name, "cannot be loaded")
                for name, good in zip(split.names, loaded, strict=True)
                if not good
            ]
            splits[part] = split.select(loaded)
    labels = [label for split in splits.values() for label in split.labels]
    if not labels:
        raise InputError(f"{source.name}: has no images")
    true_labels = [
        true
        for split in splits.values()
        for true in (split.true_labels or ["\0unknown"] * len(split))
    ]
    known = any(split.true_labels for split in splits.values())
    real = {true for true in true_labels if true not in (None, "\0unknown")} if known else set()
    classes = tuple(in_order({*labels, *(str(name) for name in real)}))
    number: dict[str | None, int] = {name: i for i, name in enumerate(classes)}
    number |= {None: OUT, "\0unknown": UNKNOWN}
    return AuditImages(
        name=source.name,
        classes=classes,
        given_N=np.array([number[label] for label in labels], dtype=np.int64),
        part_N=_part_numbers({part: len(split) for part, split in splits.items()}),
        index_N=np.concatenate([np.array(s.positions, dtype=np.int64) for s in splits.values()]),
        paths=tuple(name for split in splits.values() for name in split.names),
        true_N=np.array([number[true] for true in true_labels], np.int64) if known else None,
        entries=tuple(entry for split in splits.values() for entry in split.paths),
        skipped=tuple(skipped),
    )


def _of_data(data: Data) -> AuditImages:
    """The splits of a source of arrays."""
    splits = {"train": data.train} | ({} if data.test is None else {"test": data.test})
    sets: Sequence[ImageSet] = list(splits.values())
    true_N = None
    if any(split.true_N is not None for split in sets):
        true_N = np.concatenate(
            [
                np.full(len(split), UNKNOWN) if split.true_N is None else split.true_N.numpy()
                for split in sets
            ]
        )
    pixels = [split.images_NCHW for split in sets if isinstance(split.images_NCHW, Tensor)]
    if len(pixels) < len(sets):
        raise InputError(f"{data.name}: images must be in memory")
    paths = None
    if any(split.paths for split in sets):
        paths = tuple(path for split in sets for path in (split.paths or [""] * len(split)))
    return AuditImages(
        name=data.name,
        classes=data.train.classes,
        given_N=np.concatenate([split.given_N.numpy() for split in sets]),
        part_N=_part_numbers({part: len(split) for part, split in splits.items()}),
        index_N=np.concatenate([split.in_source_N.numpy() for split in sets]),
        paths=paths,
        true_N=true_N,
        images_NCHW=pixels[0] if len(pixels) == 1 else torch.cat(pixels),
        superclasses=data.train.superclasses,
    )


def _part_numbers(counts: dict[str, int]) -> np.ndarray:
    return np.concatenate([np.full(n, PARTS.index(part)) for part, n in counts.items()])
