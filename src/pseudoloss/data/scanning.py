"""Image files with a label each: listed first, read when it is known what is wanted of them.

A folder, a table, a published set or a dataset of another library becomes a `ScannedSource`. The
file headers tell image sizes and colours, on which settings depend; then `read` decodes the images,
or leaves them to be decoded in every epoch.
"""

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, Literal, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from pseudoloss.data.decoding import (
    Entry,
    Header,
    Item,
    Reader,
    UnreadableError,
    content_of,
    header,
    hushed,
    shown,
)
from pseudoloss.data.images import OUT, Data, ImageFiles, ImageSet, held_out, in_order
from pseudoloss.errors import InputError
from pseudoloss.reading import ReadOptions as ReadOptions

LARGE = 64  # pixels: images whose shorter side is longer than this are photographs
MOST_OF_THE_MEMORY = 0.5  # share of the free memory that decoded images may take
HOLD_OUT = 0.1  # share of image files, where nothing else is asked for
AT_ONCE = 256  # files that a thread pool is given at a time

Progress = Callable[[str, int, int], None]  # what is done, how many of how many


def no_progress(what: str, done: int, total: int) -> None:
    """Tells nothing."""


@dataclass(frozen=True)
class LabelledFiles:
    """Images with a label each."""

    paths: tuple[Entry, ...]  # most often files
    names: tuple[str, ...]  # of the images, for tables
    labels: tuple[str, ...]
    loose: tuple[str, ...] = ()  # names of files beside them that have no label
    empty: tuple[str, ...] = ()  # classes whose folders are empty
    truths: tuple[str | None, ...] = ()  # the right labels, where they are known; None: of no class
    places: tuple[int, ...] = ()  # in the source; none: all of it, in its order

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, keep: Sequence[bool] | np.ndarray) -> "LabelledFiles":
        chosen = np.flatnonzero(np.asarray(keep)).tolist()
        return LabelledFiles(
            tuple(self.paths[i] for i in chosen),
            tuple(self.names[i] for i in chosen),
            tuple(self.labels[i] for i in chosen),
            truths=tuple(self.truths[i] for i in chosen) if self.truths else (),
            places=tuple(self.places[i] for i in chosen) if self.places else tuple(chosen),
        )


class Recipe(NamedTuple):
    """How a published set is used, whatever its files are like."""

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
class Skipped:
    """A file that is left out, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class ScannedSource:
    """What a source of images holds, none of it decoded yet."""

    name: str
    train: LabelledFiles
    test: LabelledFiles | None
    test_name: str = ""  # how the run calls the test images
    noisy_test: bool = False  # whether their labels may be wrong too
    skipped: tuple[Skipped, ...] = ()
    headers: tuple[Header, ...] = field(default=(), repr=False)  # of the training images
    lost: dict[str, str] = field(default_factory=dict)  # classes without an image, and why
    recipe: Recipe | None = None

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return tuple(in_order([*self.train.labels, *self.lost]))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Training images of each class."""
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
        """That of the recipe. Else: photographs are worth a network that has seen others; small
        pictures are not."""
        if self.recipe is not None:
            return self.recipe.preset
        return "finetune" if self.typical_side > LARGE else "scratch"

    @property
    def parts(self) -> list[LabelledFiles]:
        return [part for part in (self.train, self.test) if part is not None]

    def needs(self, reader: Reader) -> int:
        """Bytes that all images take, decoded."""
        return sum(map(len, self.parts)) * reader.channels * reader.size[0] * reader.size[1]

    def keeps(self, reader: Reader, where: Literal["auto", "device", "host", "files"]) -> bool:
        """Whether images stay decoded, or are decoded anew in every epoch."""
        fits = self.needs(reader) <= MOST_OF_THE_MEMORY * free_memory()
        if not any(isinstance(entry, Item) for part in self.parts for entry in part.paths):
            return where in ("device", "host") or (where == "auto" and fits)
        if where == "files":
            raise InputError(f"--images files: the images of {self.name} are no files")
        if where == "auto" and not fits:
            raise InputError(
                f"{self.name}: its images take {self.needs(reader) / 2**30:.1f} GiB, more than "
                "memory has room for; write them to a folder, whose files need not be in memory"
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
        """The images, brought to one size; and the files that had to be left out, all of them.

        Every file is read once, so that none that is broken is met later on. "auto" keeps what was
        decoded if it fits into memory; "files" decodes anew in every epoch. A class without an
        image is an error.
        """
        _refuse_lost(self.lost, self.name)
        parts = self.parts
        keep = self.keeps(reader, where)
        place = {label: i for i, label in enumerate(self.classes)}
        skipped = list(self.skipped)
        sets = []
        for part, what in zip(parts, ("images", "test images"), strict=False):
            images, digest, kept, broken = _decoded(part, reader, keep, what, progress)
            skipped += broken
            if broken and strict:
                refuse(broken[0], self.name)
            left = part.where(kept)
            if what == "images":
                _refuse_lost(_lost(part, left, broken), self.name)
            given_N = torch.tensor([place[label] for label in left.labels], dtype=torch.long)
            true_N = None
            if left.truths:
                true_N = torch.tensor([OUT if t is None else place[t] for t in left.truths])
            places_N = torch.tensor(left.places, dtype=torch.long)
            sets.append(
                ImageSet(images, given_N, self.classes, true_N, left.names, None, digest, places_N)
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
    name, parts, recipe = source
    if "train" not in parts:
        raise InputError(f"{name}: has no images to train on, only {' and '.join(parts)}")
    train, headers, skipped = _with_headers(parts["train"], "headers", progress)
    if skipped and options.strict:
        refuse(skipped[0], name)
    lost = _lost(parts["train"], train, skipped)
    skipped += _without_class(parts["train"])
    if not len(train):
        reason = f" ({skipped[0].path}: {skipped[0].reason})" if skipped else ""
        raise InputError(f"{name}: no images can be read{reason}")
    share = HOLD_OUT if options.hold_out is None else options.hold_out
    part = next((part for part in ("val", "test") if part in parts), None)
    if options.hold_out and (part is not None or options.test is not None):
        other = f"{name} has a {part} part" if part is not None else f"--test {options.test}"
        raise InputError(f"--hold-out: there are test images already ({other})")
    test: LabelledFiles | None = None
    test_name = ""
    if part is not None:
        test, _, more = _with_headers(parts[part], f"headers of {part}", progress)
        if more and options.strict:
            refuse(more[0], name)
        skipped += [*more, *_without_class(parts[part])]
        _refuse_other_classes(test, {*train.labels, *lost}, f"{name}: the {part} part")
        test_name = f"the {part} images"
    elif options.test is None and share > 0:
        out = held_out(train.labels, share, seed)
        if out.any():
            test = train.where(out)
            train, headers = train.where(~out), [headers[i] for i in np.flatnonzero(~out)]
            test_name = "held-out images"
    if test is not None and not len(test):
        test, test_name = None, ""
    noisy_test = part is None and test is not None
    noted = (tuple(skipped), tuple(headers), lost)
    return ScannedSource(name, train, test, test_name, noisy_test, *noted, recipe)


def with_test(
    listing: ScannedSource,
    test: LabelledFiles,
    options: ReadOptions,
    progress: Progress = no_progress,
) -> ScannedSource:
    """A listing with the test images that `options` names."""
    loose = _without_class(test)
    test, _, skipped = _with_headers(test, "headers of test images", progress)
    if skipped and options.strict:
        refuse(skipped[0], f"--test {options.test}")
    _refuse_other_classes(test, set(listing.classes), f"--test {options.test}")
    if not len(test):
        raise InputError(f"--test {options.test}: no images can be read")
    return replace(
        listing,
        test=test,
        test_name=f"the images of {Path(options.test or '').name}",
        noisy_test=False,
        skipped=(*listing.skipped, *skipped, *loose),
    )


def _lost(part: LabelledFiles, kept: LabelledFiles, skipped: Sequence[Skipped]) -> dict[str, str]:
    """Classes of which no image is left, and why."""
    reasons = {entry.path: entry.reason for entry in skipped}
    there = {*kept.labels, ""}  # "": of an item that could not be asked for its label
    lost = dict.fromkeys(part.empty, "its folder is empty")
    for name, label in zip(part.names, part.labels, strict=True):
        if label not in there:
            lost.setdefault(label, f"{name}: {reasons[name]}")
    return lost


def _refuse_lost(lost: dict[str, str], where: str) -> None:
    for label, reason in lost.items():
        raise InputError(
            f"{where}: no image of the class {label} can be read ({reason}); mend its files, or "
            "take the class away"
        )


def _refuse_other_classes(test: LabelledFiles, known: set[str], where: str) -> None:
    for name, label in zip(test.names, test.labels, strict=True):
        if label not in known:
            raise InputError(f"{where}: {name} has the class {label}, which no training image has")


def refuse(skipped: Skipped, name: str) -> NoReturn:
    raise InputError(
        f"{name}: {skipped.path} cannot be read ({skipped.reason}); without --strict it would be "
        "left out"
    )


def _without_class(part: LabelledFiles) -> list[Skipped]:
    return [Skipped(name, "lies in no folder of a class") for name in part.loose]


def free_memory() -> int:
    """Bytes of memory that can be had without pushing anything out, in a container too."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        found.append(_half_of_the_memory())
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(most - used, 0))
    except (OSError, ValueError):  # no such file, or "max": without limit
        pass
    return min(found)


def _half_of_the_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def _with_headers(
    part: LabelledFiles, what: str, progress: Progress
) -> tuple[LabelledFiles, list[Header], list[Skipped]]:
    found = for_each(part.paths, header, what, progress)
    skipped = [
        Skipped(name, result.args[0])
        for name, result in zip(part.names, found, strict=True)
        if isinstance(result, UnreadableError)
    ]
    kept = part.where([not isinstance(result, UnreadableError) for result in found])
    return kept, [result for result in found if isinstance(result, Header)], skipped


def _decoded(
    part: LabelledFiles, reader: Reader, keep: bool, what: str, progress: Progress
) -> tuple[Tensor | ImageFiles, str, np.ndarray, list[Skipped]]:
    """The images of a part, in memory or as files, and their digest; which of its files they are,
    and the others."""
    room = np.empty((len(part) if keep else 0, reader.channels, *reader.size), np.uint8)
    sums = [""] * len(part)
    levels_CV = np.zeros((reader.channels, 256), np.int64)
    counting = Lock()

    def read(i: int) -> None:
        content = content_of(part.paths[i])
        pixels = reader.decode(content)
        raw = content if isinstance(content, bytes) else content.tobytes()
        # Without its name, which depends on how the source is spelt: hf:FOLDER or hf:/FOLDER.
        sums[i] = f"{len(raw)} {zlib.crc32(raw)}"
        if keep:
            room[i] = pixels
            return
        counts = [np.bincount(channel.ravel(), minlength=256) for channel in pixels]
        with counting:
            np.add(levels_CV, counts, out=levels_CV)

    found = for_each(range(len(part)), read, f"reading {what}", progress)
    kept = np.array([result is None for result in found], dtype=bool)
    digest = hashlib.sha256(f"{reader}\n".encode() + "\n".join(sums).encode()).hexdigest()
    skipped = [
        Skipped(name, result.args[0])
        for name, result in zip(part.names, found, strict=True)
        if result is not None
    ]
    if keep:
        for to, i in enumerate(np.flatnonzero(kept)):  # in place: there may be no room for a copy
            if to != i:
                room[to] = room[i]
        return torch.from_numpy(room[: kept.sum()]), digest, kept, skipped
    images = ImageFiles(cast(Any, part.where(kept).paths), reader, torch.from_numpy(levels_CV))
    return images, digest, kept, skipped


def for_each(
    items: Sequence[Any], function: Callable[[Any], Any], what: str, progress: Progress
) -> list[Any]:
    """What a function makes of each, or why it could not; by threads, since PIL lets them run."""

    def attempt(item: Any) -> Any:
        try:
            return function(item)
        except UnreadableError as error:
            return error

    found: list[Any] = []
    with hushed(), ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(items), AT_ONCE):
            found += threads.map(attempt, items[start : start + AT_ONCE])
            progress(what, len(found), len(items))
    return found


def name_of(path: Path, root: Path) -> str:
    """A file as tables call it: its path inside the source, or its whole path if elsewhere."""
    try:
        return shown(path.relative_to(root))
    except ValueError:
        return shown(path)
