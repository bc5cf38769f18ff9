"""Scan image files with labels, then decode them.

A folder, a table, a published dataset or a dataset object is first scanned: the file headers give
the sizes and colours, on which the settings depend. Then `ScannedSource.read` decodes all images.
It keeps them in memory, or leaves them to be decoded again in every epoch.
"""

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.data.decoding import (
    MAX_MEGABYTES,
    MAX_MEGAPIXELS,
    USUAL,
    Entry,
    Header,
    Item,
    Limits,
    Reader,
    UnreadableError,
    content,
    header,
    printable,
)
from pseudoloss.data.images import OUT, Data, ImageFiles, ImageSet, held_out, in_order
from pseudoloss.data.loops import Progress, for_each, no_progress
from pseudoloss.errors import InputError
from pseudoloss.reading import ReadOptions as ReadOptions

LARGE = 64  # pixels: images with a longer shorter side than this count as photographs
MAX_MEMORY_SHARE = 0.5  # of the free memory, for decoded images
DEFAULT_HOLD_OUT = 0.1  # share of the image files


@runtime_checkable
class Selectable(Protocol):
    """Entries that are not all in memory at once."""

    def select(self, chosen: Sequence[int]) -> Sequence[Entry]: ...


@dataclass(frozen=True)
class Skipped:
    """A file that is skipped, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class LabelledFiles:
    """Images that are not decoded yet, with one label per image."""

    paths: Sequence[Entry]  # files, or items of a dataset
    names: tuple[str, ...]  # of the images, for tables
    labels: tuple[str, ...]
    loose: tuple[str, ...] = ()  # names of files next to the class folders, which have no label
    empty: dict[str, str] = field(default_factory=dict)  # classes without any file, and why
    links: tuple[Skipped, ...] = ()  # that are not followed
    true_labels: tuple[str | None, ...] = ()  # if known; None: the image belongs to no class
    positions: tuple[int, ...] = ()  # in the source; empty: all of it, in order
    skipped: tuple["Skipped", ...] = ()  # what the source itself has found unusable

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, keep: Sequence[bool] | np.ndarray) -> "LabelledFiles":
        chosen = np.flatnonzero(np.asarray(keep)).tolist()
        paths = self.paths
        return LabelledFiles(
            paths.select(chosen)
            if isinstance(paths, Selectable)
            else tuple(paths[i] for i in chosen),
            tuple(self.names[i] for i in chosen),
            tuple(self.labels[i] for i in chosen),
            true_labels=tuple(self.true_labels[i] for i in chosen) if self.true_labels else (),
            positions=tuple(self.positions[i] for i in chosen) if self.positions else tuple(chosen),
        )


class Recipe(NamedTuple):
    """How a published dataset is used, whatever its files look like."""

    reader: Reader
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preset: str


class FileSource(NamedTuple):
    """A source of images that have not been scanned yet."""

    name: str
    splits: dict[str, LabelledFiles]  # "train" and, if they exist, "val" and "test"
    recipe: Recipe | None = None


@dataclass(frozen=True)
class ScannedSource:
    """A source whose file headers have been read. No image is decoded yet."""

    name: str
    train: LabelledFiles
    test: LabelledFiles | None
    test_name: str = ""  # what messages call the test images
    noisy_test: bool = False  # whether the labels of the test images may be wrong too
    skipped: tuple[Skipped, ...] = ()
    headers: tuple[Header, ...] = field(default=(), repr=False)  # of the training images
    missing_classes: dict[str, str] = field(default_factory=dict)  # without any image, and why
    recipe: Recipe | None = None
    limits: Limits = USUAL

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return tuple(in_order([*self.train.labels, *self.missing_classes]))

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of training images of each class."""
        return dict(Counter(self.train.labels))

    @property
    def typical_side(self) -> int:
        """The median of the shorter sides."""
        return int(median(min(h.width, h.height) for h in self.headers))

    @property
    def is_grey(self) -> bool:
        return all(h.is_grey for h in self.headers)

    @property
    def preset(self) -> str:
        """The preset of the recipe. Without one: a pretrained network for photographs, training
        from scratch for small images."""
        if self.recipe is not None:
            return self.recipe.preset
        return "finetune" if self.typical_side > LARGE else "scratch"

    @property
    def splits(self) -> list[LabelledFiles]:
        return [split for split in (self.train, self.test) if split is not None]

    def needs(self, reader: Reader) -> int:
        """The bytes that all decoded images need."""
        return sum(map(len, self.splits)) * reader.channels * reader.size[0] * reader.size[1]

    def keeps(self, reader: Reader, where: Literal["auto", "device", "host", "files"]) -> bool:
        """Whether decoded images are kept in memory, or decoded again in every epoch."""
        needed = self.needs(reader) * distributed.processes_here()
        fits = distributed.agree(needed <= MAX_MEMORY_SHARE * free_memory())
        if not any(_in_memory(entry) for split in self.splits for entry in split.paths):
            return where in ("device", "host") or (where == "auto" and fits)
        if where == "files":
            raise InputError(f"--images files: the images of {self.name} are not stored in files")
        if where == "auto" and not fits:
            raise InputError(
                f"{self.name}: its images take {self.needs(reader) / 2**30:.1f} GiB and do not fit "
                "into memory; write them to a folder of image files, which can stay on disk"
            )
        return True

    def read(
        self,
        reader: Reader,
        image_size: int,
        where: Literal["auto", "device", "host", "files"],
        strict: bool,
        progress: Progress = no_progress,
    ) -> tuple[Data, tuple[Skipped, ...]]:
        """Decode all images to one size. Returns them, and all files that are skipped.

        Every file is decoded once here, so that no broken file turns up during training. "auto"
        keeps the decoded images if they fit into memory; "files" decodes them again in every epoch.
        A class without any image is an error.
        """
        _refuse_missing_classes(self.missing_classes, self.name)
        keep = self.keeps(reader, where)
        index = {label: i for i, label in enumerate(self.classes)}
        skipped = list(self.skipped)
        sets = []
        for split, what in zip(self.splits, ("images", "test images"), strict=False):
            images, digest, kept, broken = _decode(split, reader, keep, what, progress)
            skipped += broken
            if broken and strict:
                refuse_unreadable(broken[0], self.name)
            left = split.select(kept)
            if what == "images":
                _refuse_missing_classes(_missing_classes(split, left, broken), self.name)
            given_N = torch.tensor([index[label] for label in left.labels], dtype=torch.long)
            true_N = None
            if left.true_labels:
                true_N = torch.tensor([OUT if t is None else index[t] for t in left.true_labels])
            positions_N = torch.tensor(left.positions, dtype=torch.long)
            sets.append(
                ImageSet(
                    images,
                    given_N,
                    self.classes,
                    true_N,
                    left.names,
                    digest=digest,
                    positions_N=positions_N,
                )
            )
        test = sets[1] if len(sets) > 1 and len(sets[1]) else None
        mean, std = (self.recipe.mean, self.recipe.std) if self.recipe else ((), ())
        data = Data(
            self.name,
            sets[0],
            test,
            mean=mean,
            std=std,
            preset=self.preset,
            test_name=self.test_name,
            noisy_test=self.noisy_test,
            image_size=image_size,
            fit=reader.fit,
        )
        return data, tuple(skipped)


def scan(
    source: FileSource, options: ReadOptions, seed: int, progress: Progress = no_progress
) -> ScannedSource:
    """Read the file headers of a source.

    Files whose headers cannot be read are skipped. Accuracy is measured on "val", else on "test",
    else on images that are held out of "train".
    """
    name, splits, recipe = source
    if "train" not in splits:
        raise InputError(f"{name}: has no images to train on, only {' and '.join(splits)}")
    limits = limits_of(options)
    train, headers, skipped = _read_headers(splits["train"], "headers", progress, limits)
    skipped += splits["train"].skipped
    if skipped and options.strict:
        refuse_unreadable(skipped[0], name)
    missing = _missing_classes(splits["train"], train, skipped)
    skipped += loose_files(splits["train"])
    if not len(train):
        reason = f" ({skipped[0].path}: {skipped[0].reason})" if skipped else ""
        raise InputError(f"{name}: no images can be read{reason}")
    share = DEFAULT_HOLD_OUT if options.hold_out is None else options.hold_out
    split = next((split for split in ("val", "test") if split in splits), None)
    if options.hold_out and (split is not None or options.test is not None):
        other = f"{name} has a {split} split" if split is not None else f"--test {options.test}"
        raise InputError(f"--hold-out: there are test images already ({other})")
    test: LabelledFiles | None = None
    test_name = ""
    if split is not None:
        test, _, more = _read_headers(splits[split], f"headers of {split}", progress, limits)
        more += splits[split].skipped
        if more and options.strict:
            refuse_unreadable(more[0], name)
        skipped += [*more, *loose_files(splits[split])]
        _refuse_other_classes(test, {*train.labels, *missing}, f"{name}: the {split} split")
        test_name = f"the {split} images"
    elif options.test is None and share > 0:
        out = held_out(train.labels, share, seed)
        if out.any():
            test = train.select(out)
            train, headers = train.select(~out), [headers[i] for i in np.flatnonzero(~out)]
            test_name = "held-out images"
    if test is not None and not len(test):
        test, test_name = None, ""
    noisy_test = split is None and test is not None
    facts = (tuple(skipped), tuple(headers), missing)
    return ScannedSource(name, train, test, test_name, noisy_test, *facts, recipe, limits)


def with_test(
    scanned: ScannedSource,
    test: LabelledFiles,
    options: ReadOptions,
    progress: Progress = no_progress,
) -> ScannedSource:
    """A scanned source with the test images of --test."""
    loose, unusable = loose_files(test), test.skipped
    test, _, skipped = _read_headers(test, "headers of test images", progress, scanned.limits)
    skipped += unusable
    if skipped and options.strict:
        refuse_unreadable(skipped[0], f"--test {options.test}")
    _refuse_other_classes(test, set(scanned.classes), f"--test {options.test}")
    if not len(test):
        raise InputError(f"--test {options.test}: no images can be read")
    return replace(
        scanned,
        test=test,
        test_name=f"the images of {Path(options.test or '').name}",
        noisy_test=False,
        skipped=(*scanned.skipped, *skipped, *loose),
    )


def _in_memory(entry: Entry) -> bool:
    """Whether an image is an object of a dataset, which cannot be read again in every epoch."""
    return isinstance(entry, Item) and entry.stream is None


def _missing_classes(
    split: LabelledFiles, kept: LabelledFiles, skipped: Sequence[Skipped]
) -> dict[str, str]:
    """Classes of which no image is left, and why."""
    reasons = {entry.path: entry.reason for entry in skipped}
    present = {*kept.labels, ""}  # "" is the label of an item that could not be loaded
    missing = dict(split.empty)
    for name, label in zip(split.names, split.labels, strict=True):
        if label not in present:
            missing.setdefault(label, f"{name}: {reasons[name]}")
    return missing


def _refuse_missing_classes(missing: dict[str, str], where: str) -> None:
    for label, reason in missing.items():
        raise InputError(
            f"{where}: no image of the class {label} can be read ({reason}); fix its files or "
            "remove the class"
        )


def _refuse_other_classes(test: LabelledFiles, known: set[str], where: str) -> None:
    for name, label in zip(test.names, test.labels, strict=True):
        if label not in known:
            raise InputError(f"{where}: {name} has the class {label}, which no training image has")


def refuse_unreadable(skipped: Skipped, name: str) -> NoReturn:
    raise InputError(
        f"{name}: {skipped.path} cannot be read ({skipped.reason}); without --strict it would be "
        "skipped"
    )


def loose_files(split: LabelledFiles) -> list[Skipped]:
    """What is not among the images of a split: files outside of class folders, and links."""
    return [*(Skipped(name, "is not in a class folder") for name in split.loose), *split.links]


def limits_of(options: ReadOptions) -> Limits:
    """The limits of files and images."""
    megabytes, megapixels = options.max_megabytes, options.max_megapixels
    return Limits(
        MAX_MEGABYTES if megabytes is None else megabytes,
        MAX_MEGAPIXELS if megapixels is None else megapixels,
    )


def free_memory() -> int:
    """Bytes of available memory; in a container, within its limit."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        found.append(_half_of_memory())
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(most - used, 0))
    except (OSError, ValueError):  # no such file, or "max": no limit
        pass
    return min(found)


def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def _read_headers(
    split: LabelledFiles, what: str, progress: Progress, limits: Limits
) -> tuple[LabelledFiles, list[Header], list[Skipped]]:
    """The files whose headers can be read, their headers, and the other files."""
    found = for_each(split.paths, partial(header, limits=limits), what, progress)
    skipped = [
        Skipped(name, result.args[0])
        for name, result in zip(split.names, found, strict=True)
        if isinstance(result, UnreadableError)
    ]
    kept = split.select([not isinstance(result, UnreadableError) for result in found])
    return kept, [result for result in found if isinstance(result, Header)], skipped


def _decode(
    split: LabelledFiles, reader: Reader, keep: bool, what: str, progress: Progress
) -> tuple[Tensor | ImageFiles, str, np.ndarray, list[Skipped]]:
    """Decode the images of a split. Returns them (with `keep` in memory, otherwise as files), their
    digest, a mask of the files that could be decoded, and the other files. Several processes decode
    a part each."""
    decoded = np.empty((len(split) if keep else 0, reader.channels, *reader.size), np.uint8)
    checksums = [""] * len(split)
    levels_CV = np.zeros((reader.channels, 256), np.int64)
    counting = Lock()

    def read(i: int) -> None:
        with content(split.paths[i], reader.limits) as found:
            pixels = reader.decode(found)
            raw = found if isinstance(found, bytes) else found.tobytes()
            # Not of the file name, which depends on how the source is written: hf:FOLDER or
            # hf:/FOLDER.
            checksums[i] = f"{len(raw)} {zlib.crc32(raw)}"
        if keep:
            decoded[i] = pixels
            return
        counts = [np.bincount(channel.ravel(), minlength=256) for channel in pixels]
        with counting:
            np.add(levels_CV, counts, out=levels_CV)

    rows = distributed.part(len(split))
    found = for_each(range(rows.start, rows.stop), read, f"reading {what}", progress)
    reasons = [None if result is None else result.args[0] for result in found]
    if distributed.active():
        told = distributed.all_values([reasons, checksums[rows]])
        reasons = [reason for theirs, _ in told for reason in theirs]
        checksums = [checksum for _, theirs in told for checksum in theirs]
        distributed.add_up(torch.from_numpy(levels_CV))
        if keep:
            distributed.exchange_parts(torch.from_numpy(decoded))
    kept = np.array([reason is None for reason in reasons], dtype=bool)
    digest = hashlib.sha256(f"{reader}\n".encode() + "\n".join(checksums).encode()).hexdigest()
    skipped = [
        Skipped(name, reason)
        for name, reason in zip(split.names, reasons, strict=True)
        if reason is not None
    ]
    if keep:
        for to, i in enumerate(np.flatnonzero(kept)):  # in place: memory may not hold a copy
            if to != i:
                decoded[to] = decoded[i]
        return torch.from_numpy(decoded[: kept.sum()]), digest, kept, skipped
    images = ImageFiles(split.select(kept).paths, reader, torch.from_numpy(levels_CV))
    return images, digest, kept, skipped


def name_of(path: Path, root: Path) -> str:
    """The name of a file in tables: its path inside the source, or its full path if elsewhere."""
    text, folder = str(path), f"{root}{os.sep}"
    if text.startswith(folder):
        return printable(text[len(folder) :])
    try:
        return printable(path.relative_to(root))
    except ValueError:
        return printable(path)
