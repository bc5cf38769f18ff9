"""The facts of `pseudoloss inspect`: what a source holds, and how training would use it."""

import hashlib
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from pseudoloss.auditing.audit import READING
from pseudoloss.auditing.timing import audit_seconds
from pseudoloss.cli.near_duplicates import difference_hash, near_groups
from pseudoloss.config import Settings, as_flag, as_json
from pseudoloss.data import Data, ImageSet, ReadOptions, ScannedSource, Skipped, Source, find_source
from pseudoloss.data.decoding import (
    Entry,
    Header,
    Limits,
    UnreadableError,
    content,
    full_pixels,
    header,
)
from pseudoloss.data.images import check_counts
from pseudoloss.data.loops import Progress, for_each, no_progress
from pseudoloss.data.scanning import LabelledFiles
from pseudoloss.data.storage import choose_place
from pseudoloss.engine.choices import choose_reader, choose_size
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.engine.timing import training_seconds
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.files import free_name
from pseudoloss.nn.devices import choose_device, device_name
from pseudoloss.presets import request


@dataclass(frozen=True)
class Range:
    """Minimum, median and maximum of some numbers."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Unreadable:
    """Files that are skipped for one reason; the first of them by name."""

    reason: str
    count: int
    files: list[str]


@dataclass(frozen=True)
class Copies:
    """Images that look the same: the number of different pictures, the number of images that show
    them, and examples. Each example lists its images with their labels."""

    pictures: int
    images: int
    examples: list[list[dict[str, str]]]


@dataclass(frozen=True)
class Duplicates:
    """Images that are exactly equal to another one."""

    same_bytes: int  # copies of a file, byte for byte
    same_pixels: int  # copies with other bytes, in another format for example
    within_class: Copies
    across_classes: Copies  # the same picture with different labels: at least one is wrong
    across_parts: Copies  # the same picture for training and for testing
    near: Copies  # nearly the same picture: different labels first, then different splits


@dataclass(frozen=True)
class Plan:
    """How training would use the source."""

    preset: str
    network: str
    weights: str | None
    channels: int
    stored: tuple[int, int]  # height and width of the images in memory
    size: tuple[int, int]  # height and width of the network's input
    epochs: int
    batch_size: int
    lr: float
    balance_prior: str | None
    memory: int  # bytes of the decoded images
    images: str  # where the images are kept: device, host or files
    device: str
    command: str
    audit_command: str | None


@dataclass(frozen=True)
class Timing:
    """About how many seconds an audit and training take here; None: not known."""

    device: str
    audit: float | None
    training: float | None


@dataclass(frozen=True)
class Inspection:
    """Result of `inspect`. Only images that can be read are counted."""

    source: str
    train: int
    test: int
    test_name: str
    held_out: bool  # whether the test images are held out of the training images
    classes: dict[str, int]  # images per class, for training and held out
    imbalance: float | None  # size of the largest class divided by that of the smallest
    width: Range | None
    height: Range | None
    aspect: Range | None  # width divided by height
    modes: dict[str, int]
    formats: dict[str, int]
    bytes: int | None  # of all files
    decoded: bool  # whether whole files were read, or only their headers
    unreadable: list[Unreadable]
    duplicates: Duplicates | None
    problems: list[str]  # reasons for which training would refuse the source
    plan: Plan
    timing: Timing | None = None  # None: not asked for


class Content(NamedTuple):
    """What is known about one image."""

    header: Header
    nbytes: int | None
    file_digest: bytes = b""
    pixel_digest: bytes = b""
    difference_hash: bytes = b""


class Inspected(NamedTuple):
    """One image, with its place in the source."""

    part: str
    name: str
    label: str
    content: Content


def inspect(
    source: Source,
    *,
    duplicates: bool = True,
    limit: int = 3,
    timing: bool = False,
    progress: Progress = no_progress,
    **reading: Any,
) -> Inspection:
    """Inspect a source before training on it.

    Args:
        source: as for `train`.
        duplicates: decode every image, to find broken files and duplicates. Otherwise only the
            headers of files are read.
        limit: number of files, or groups of duplicates, to list per problem.
        timing: time a few images and training steps, to estimate how long an audit and training
            take on this machine.
        progress: called with the progress.
        reading: any of `ReadOptions`.
    """
    if limit < 0:
        raise InputError(f"--limit must be 0 or more, not {limit}")
    options = ReadOptions(**reading)
    # Broken files are reported even if training would refuse them (strict).
    found = find_source(source, replace(options, strict=False), Settings.seed, progress)
    settings = choose_settings(found, request(None, None, {})).settings
    skipped: list[Skipped] = []
    if isinstance(found, ScannedSource):
        images, skipped = _inspect_files(found, duplicates, progress)
        names: Sequence[str] = found.classes
    else:
        images = _inspect_arrays(found, duplicates, progress)
        names = found.train.classes
    train = [image for image in images if image.part == "train"]
    headers = [image.content.header for image in images]
    sizes = [image.content.nbytes for image in images if image.content.nbytes is not None]
    test_name, held_out = (
        (found.test_name, found.noisy_test) if len(train) < len(images) else ("", False)
    )
    trained, counts = (
        Counter(image.label for image in some) for some in (train, images if held_out else train)
    )
    problems = _problems({name: trained[name] for name in names}, len(train), settings)
    plan = _plan(source, found, settings, options)
    return Inspection(
        source=found.name,
        train=len(train),
        test=len(images) - len(train),
        test_name=test_name,
        held_out=held_out,
        classes={name: counts[name] for name in names},
        imbalance=max(counts.values()) / min(counts.values()) if counts else None,
        width=_range(h.width for h in headers),
        height=_range(h.height for h in headers),
        aspect=_range(h.width / h.height for h in headers),
        modes=dict(Counter(h.mode for h in headers).most_common()),
        formats=dict(Counter(h.format for h in headers if h.format).most_common()),
        bytes=sum(sizes) if sizes else None,
        decoded=duplicates,
        unreadable=_by_reason(skipped, limit),
        duplicates=_find_duplicates(images, held_out, limit) if duplicates else None,
        problems=problems,
        plan=plan,
        timing=measure(found, settings, options, plan.images == "files", not problems, progress)
        if timing
        else None,
    )


def measure(
    found: Data | ScannedSource,
    settings: Settings,
    options: ReadOptions,
    from_files: bool,
    trainable: bool,
    progress: Progress = no_progress,
) -> Timing:
    """Estimate how long an audit of the source, and training on it, take."""
    count = len(found.train)
    if found.test is not None and options.test is None:  # an audit covers all splits
        count += len(found.test)
    images: Sequence[Entry] | Tensor | None
    if isinstance(found, ScannedSource):
        images, classes = found.train.paths, len(found.classes)
    else:
        pixels, classes = found.train.images_NCHW, len(found.train.classes)
        images = pixels if isinstance(pixels, Tensor) else None
    audit = training = None
    progress("timing an audit", 0, 2)
    if images is not None:
        with suppress(InputError, TrainingError):
            audit = audit_seconds(images, count, classes, settings.device)
    progress("timing a few steps of training", 1, 2)
    if trainable:
        with suppress(InputError, TrainingError):
            training = training_seconds(found, settings, options, from_files)
    progress("timing a few steps of training", 2, 2)
    return Timing(device_name(choose_device(settings.device)), audit, training)


def _inspect_files(
    source: ScannedSource, decode: bool, progress: Progress
) -> tuple[list[Inspected], list[Skipped]]:
    images: list[Inspected] = []
    skipped = list(source.skipped)
    parts: list[tuple[str, LabelledFiles | None]] = [("train", source.train), ("test", source.test)]
    for part, files in parts:
        if files is None:
            continue
        what = "inspecting images" if part == "train" else "inspecting test images"
        if part == "train" and not decode:  # scanned already
            contents = list(map(_with_size, files.paths, source.headers))
        else:
            look = partial(_decode if decode else _read_header, limits=source.limits)
            contents = for_each(files.paths, look, what, progress)
        for name, label, found in zip(files.names, files.labels, contents, strict=True):
            if isinstance(found, UnreadableError):
                skipped.append(Skipped(name, str(found)))
            else:
                images.append(Inspected(part, name, label, found))
    return images, skipped


def _decode(entry: Entry, limits: Limits) -> Content:
    with content(entry, limits) as found:
        head, image = full_pixels(found, limits=limits)
        pixels = _digest(f"{image.size}".encode(), image.tobytes())
        if not isinstance(found, bytes):
            return Content(head, None, pixels, pixels, difference_hash(image))
        return Content(head, len(found), _digest(found), pixels, difference_hash(image))


def _read_header(entry: Entry, limits: Limits) -> Content:
    return _with_size(entry, header(entry, limits))


def _with_size(entry: Entry, found: Header) -> Content:
    try:
        size = os.stat(entry).st_size if isinstance(entry, Path) else None  # noqa: PTH116, faster
    except OSError:  # it is gone by now
        size = None
    return Content(found, size)


def _inspect_arrays(data: Data, decode: bool, progress: Progress) -> list[Inspected]:
    found: list[Inspected] = []
    for part, images in (("train", data.train), ("test", data.test)):
        if images is None or not isinstance(images.images_NCHW, Tensor):
            continue
        height, width = images.size
        head = Header(width, height, "L" if images.channels == 1 else "RGB", "")
        names = images.paths or [f"{data.name}[{part}][{i}]" for i in range(len(images))]
        for i, pixels_CHW in enumerate(images.images_NCHW):
            content = Content(head, None)
            if decode:
                pixels = pixels_CHW.numpy()
                digest = _digest(pixels.tobytes())
                picture = Image.fromarray(pixels.transpose(1, 2, 0).squeeze())
                content = Content(head, None, digest, digest, difference_hash(picture))
            label = images.classes[int(images.given_N[i])]
            found.append(Inspected(part, names[i], label, content))
            if i % 1000 == 0:
                progress("inspecting images", i, len(images))
    return found


def _digest(*content: bytes) -> bytes:
    return hashlib.blake2b(b"".join(content), digest_size=16).digest()


def _range(numbers: Iterable[float]) -> Range | None:
    found = sorted(numbers)
    return Range(found[0], median(found), found[-1]) if found else None


def _by_reason(skipped: Sequence[Skipped], limit: int) -> list[Unreadable]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for entry in skipped:
        # The details in parentheses differ from file to file.
        by_reason[entry.reason.partition(" (")[0]].append(entry.path)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [Unreadable(reason, len(files), files[:limit]) for reason, files in ordered]


def _find_duplicates(images: Sequence[Inspected], held_out: bool, limit: int) -> Duplicates:
    by_pixels: dict[bytes, list[Inspected]] = defaultdict(list)
    for image in images:
        by_pixels[image.content.pixel_digest].append(image)
    groups = [group for group in by_pixels.values() if len(group) > 1]
    distinct = [len({image.content.file_digest for image in group}) for group in groups]

    def part(image: Inspected) -> str:
        return "train" if held_out else image.part

    def copies(chosen: list[list[Inspected]]) -> Copies:
        examples = [
            [
                {"image": image.name, "label": image.label, "part": part(image)}
                for image in _varied(group, limit)
            ]
            for group in chosen[:limit]
        ]
        return Copies(len(chosen), sum(map(len, chosen)), examples)

    def repeated(group: list[Inspected]) -> list[Inspected]:
        """Images that share class and split with another one of the group."""
        counts = Counter((part(image), image.label) for image in group)
        return [image for image in group if counts[part(image), image.label] > 1]

    near = [
        [images[i] for i in group]
        for group in near_groups([image.content.difference_hash for image in images])
    ]
    near = [g for g in near if len({image.content.pixel_digest for image in g}) > 1]
    near.sort(key=lambda g: (-len({i.label for i in g}), -len({part(i) for i in g})))
    return Duplicates(
        same_bytes=sum(len(group) - n for group, n in zip(groups, distinct, strict=True)),
        same_pixels=sum(n - 1 for n in distinct),
        within_class=copies([repeated(group) for group in groups if repeated(group)]),
        across_classes=copies([g for g in groups if len({image.label for image in g}) > 1]),
        across_parts=copies([g for g in groups if len({part(image) for image in g}) > 1]),
        near=copies(near),
    )


def _varied(group: list[Inspected], limit: int) -> list[Inspected]:
    """Some images of a group: one of each class and split before a second one of any."""
    firsts = {(image.label, image.part): image for image in reversed(group)}
    chosen = list(reversed(firsts.values()))
    return [*chosen, *(image for image in group if image not in chosen)][: max(limit, 2)]


def _problems(classes: dict[str, int], images: int, settings: Settings) -> list[str]:
    """Reasons for which training would refuse the source."""
    if not images:
        return ["no image can be read"]
    found = []
    try:
        check_counts(classes, "labels")
    except InputError as error:
        found.append(str(error).removeprefix("labels: "))
    if images < settings.batch_size:
        found.append(
            f"a batch of {settings.batch_size} images is larger than the training set ({images}): "
            "use a smaller --batch-size"
        )
    return found


def _plan(
    source: Source, found: Data | ScannedSource, settings: Settings, options: ReadOptions
) -> Plan:
    device = choose_device(settings.device)
    if isinstance(found, ScannedSource):
        reader, pixels = choose_reader(found, settings, options.fit)
        channels, stored, size = reader.channels, reader.size, (pixels, pixels)
        memory, keeps = found.needs(reader), found.keeps(reader, settings.images)
        train_bytes = memory * len(found.train) // sum(map(len, found.splits))
    else:
        train = found.train
        channels, stored = train.channels, train.size
        size = choose_size(stored, settings, found.image_size)
        sets: list[ImageSet] = [part for part in (train, found.test) if part is not None]
        memory, keeps = sum(part.images_NCHW.nbytes for part in sets), True
        train_bytes = train.images_NCHW.nbytes
    return Plan(
        preset=found.preset,
        network=settings.network,
        weights=settings.weights,
        channels=channels,
        stored=stored,
        size=size,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        lr=settings.lr,
        balance_prior=as_json(settings).get("balance_prior"),
        memory=memory,
        images=choose_place(train_bytes, device, settings.images) if keeps else "files",
        device=device.type,
        command=_command("train", "run", source, options),
        audit_command=_command("audit", "audit", source, options)
        if isinstance(source, str | Path)
        else None,
    )


def _command(verb: str, out: str, source: Source, options: ReadOptions) -> str:
    """The command, or the call, that trains on the source or audits it."""
    given = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if getattr(options, field.name) != field.default
        and (verb == "train" or field.name in READING)
    }
    if not isinstance(source, str | Path):
        keywords = "".join(f", {name}={value!r}" for name, value in given.items())
        return f'pseudoloss.{verb}(source, out="{out}"{keywords})'
    flags = [
        as_flag(name, shlex.quote(str(value)) if value is not True else True)
        for name, value in given.items()
    ]
    place = shlex.quote(str(source))
    return " ".join(["pseudoloss", verb, place, "--out", free_name(out), *flags])
