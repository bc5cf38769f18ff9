"""What a source holds and what training would make of it, before a run spends time on it."""

import hashlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from pseudoloss.config import Settings, as_flag, request
from pseudoloss.data import Data, ImageSet, ReadOptions, ScannedSource, Skipped, Source, find_source
from pseudoloss.data.decoding import (
    Entry,
    Header,
    UnreadableError,
    content_of,
    full_pixels,
    header,
)
from pseudoloss.data.images import check_counts
from pseudoloss.data.scanning import LabelledFiles, Progress, for_each, no_progress
from pseudoloss.data.storage import choose_place
from pseudoloss.engine.choices import choose_device, choose_reader, choose_size
from pseudoloss.engine.fitting import choose_settings
from pseudoloss.errors import InputError

SHOWN_CLASSES = 12  # more than this many are not all named in the report


@dataclass(frozen=True)
class Span:
    """The least, the middle and the most of some numbers."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class Unreadable:
    """Files that are left out for one reason, the first of them named."""

    reason: str
    count: int
    files: list[str]


@dataclass(frozen=True)
class Copies:
    """Pictures that are there more than once: how many, as how many images, and examples of them.
    An example names its images, each with its label."""

    pictures: int
    images: int
    examples: list[list[dict[str, str]]]


@dataclass(frozen=True)
class Duplicates:
    """Images that look exactly like another one."""

    same_bytes: int  # copies, byte for byte, of a file
    same_pixels: int  # copies in other files: of another format, say
    within_class: Copies
    across_classes: Copies  # the same picture with two labels: at least one is wrong
    across_parts: Copies  # the same picture to train on and to test on


@dataclass(frozen=True)
class Plan:
    """What training would do with the source."""

    preset: str
    network: str
    weights: str | None
    channels: int
    stored: tuple[int, int]  # height and width of the images
    size: tuple[int, int]  # ... of which the network sees
    epochs: int
    batch_size: int
    lr: float
    balance_prior: str
    memory: int  # bytes that the images take
    images: str  # where they lie: device, host or files
    device: str
    command: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. Counts are of images that can be read."""

    source: str
    train: int
    test: int
    test_name: str
    held_out: bool  # whether the test images are held out of those to train on
    classes: dict[str, int]  # images to train on
    imbalance: float | None  # the largest class, as a multiple of the smallest
    width: Span | None
    height: Span | None
    aspect: Span | None  # width as a multiple of height
    modes: dict[str, int]
    formats: dict[str, int]
    bytes: int | None  # of all files
    decoded: bool  # whether files were read to their ends, or only their headers
    unreadable: list[Unreadable]
    duplicates: Duplicates | None
    problems: list[str]  # for which training would refuse the source
    plan: Plan


class Look(NamedTuple):
    """What is seen of an image."""

    header: Header
    nbytes: int | None
    content: bytes = b""  # digest of the file
    pixels: bytes = b""  # digest of the picture in it


class Seen(NamedTuple):
    """An image as duplicates are told by."""

    part: str
    name: str
    label: str
    look: Look


def inspect(
    source: Source,
    *,
    duplicates: bool = True,
    limit: int = 3,
    progress: Progress = no_progress,
    **reading: Any,
) -> Inspection:
    """Look at a source before training on it.

    Args:
        source: as for `train`.
        duplicates: decode every image, in order to find broken files and duplicates. Without, only
            the headers of files are read.
        limit: how many files, or pictures, are named of each kind.
        progress: is told how far it has come.
        reading: any of `ReadOptions`.
    """
    if limit < 0:
        raise InputError(f"--limit must be 0 or more, not {limit}")
    options = ReadOptions(**reading)
    # A report tells of broken files, however strict training will be.
    found = find_source(source, replace(options, strict=False), Settings.seed, progress)
    settings = choose_settings(found, request(None, None, {})).settings
    skipped: list[Skipped] = []
    if isinstance(found, ScannedSource):
        seen, skipped = _look_at_files(found, duplicates, progress)
        names: Sequence[str] = found.classes
    else:
        seen = _look_at_arrays(found, duplicates, progress)
        names = found.train.classes
    train = [image for image in seen if image.part == "train"]
    counts = Counter(image.label for image in train)
    classes = {name: counts[name] for name in names}
    looks = [image.look for image in seen]
    headers = [look.header for look in looks]
    sizes = [look.nbytes for look in looks if look.nbytes is not None]
    test_name, held_out = (
        (found.test_name, found.noisy_test) if len(train) < len(seen) else ("", False)
    )
    return Inspection(
        source=found.name,
        train=len(train),
        test=len(seen) - len(train),
        test_name=test_name,
        held_out=held_out,
        classes=classes,
        imbalance=max(counts.values()) / min(counts.values()) if counts else None,
        width=_span(h.width for h in headers),
        height=_span(h.height for h in headers),
        aspect=_span(h.width / h.height for h in headers),
        modes=dict(Counter(h.mode for h in headers).most_common()),
        formats=dict(Counter(h.format for h in headers if h.format).most_common()),
        bytes=sum(sizes) if sizes else None,
        decoded=duplicates,
        unreadable=_by_reason(skipped, limit),
        duplicates=_duplicates(seen, held_out, limit) if duplicates else None,
        problems=_problems(classes, len(train), settings),
        plan=_plan(source, found, settings, options),
    )


def _look_at_files(
    listing: ScannedSource, decode: bool, progress: Progress
) -> tuple[list[Seen], list[Skipped]]:
    seen: list[Seen] = []
    skipped = list(listing.skipped)
    parts: list[tuple[str, LabelledFiles | None]] = [
        ("train", listing.train),
        ("test", listing.test),
    ]
    for part, listed in parts:
        if listed is None:
            continue
        what = "looking at images" if part == "train" else "looking at test images"
        looks = for_each(listed.paths, _look if decode else _glance, what, progress)
        for name, label, look in zip(listed.names, listed.labels, looks, strict=True):
            if isinstance(look, UnreadableError):
                skipped.append(Skipped(name, str(look)))
            else:
                seen.append(Seen(part, name, label, look))
    return seen, skipped


def _look(entry: Entry) -> Look:
    """All of an image."""
    content = content_of(entry)
    head, image = full_pixels(content)
    pixels = _digest(f"{image.size}".encode(), image.tobytes())
    if not isinstance(content, bytes):
        return Look(head, None, pixels, pixels)
    return Look(head, len(content), _digest(content), pixels)


def _glance(entry: Entry) -> Look:
    """What the header of an image says."""
    return Look(header(entry), entry.stat().st_size if isinstance(entry, Path) else None)


def _look_at_arrays(data: Data, decode: bool, progress: Progress) -> list[Seen]:
    seen: list[Seen] = []
    for part, images in (("train", data.train), ("test", data.test)):
        if images is None or not isinstance(images.images_NCHW, Tensor):
            continue
        height, width = images.size
        head = Header(width, height, "L" if images.channels == 1 else "RGB", "")
        names = images.paths or [f"{data.name}[{part}][{i}]" for i in range(len(images))]
        for i, pixels_CHW in enumerate(images.images_NCHW):
            digest = _digest(pixels_CHW.numpy().tobytes()) if decode else b""
            label = images.classes[int(images.given_N[i])]
            seen.append(Seen(part, names[i], label, Look(head, None, digest, digest)))
            if i % 1000 == 0:
                progress("looking at images", i, len(images))
    return seen


def _digest(*content: bytes) -> bytes:
    return hashlib.blake2b(b"".join(content), digest_size=16).digest()


def _span(numbers: Iterable[float]) -> Span | None:
    found = sorted(numbers)
    return Span(found[0], median(found), found[-1]) if found else None


def _by_reason(skipped: Sequence[Skipped], limit: int) -> list[Unreadable]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for entry in skipped:
        # What stands behind it in brackets differs from file to file.
        by_reason[entry.reason.partition(" (")[0]].append(entry.path)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [Unreadable(reason, len(files), files[:limit]) for reason, files in ordered]


def _duplicates(seen: Sequence[Seen], held_out: bool, limit: int) -> Duplicates:
    by_pixels: dict[bytes, list[Seen]] = defaultdict(list)
    for image in seen:
        by_pixels[image.look.pixels].append(image)
    groups = [group for group in by_pixels.values() if len(group) > 1]
    distinct = [len({image.look.content for image in group}) for group in groups]

    def part(image: Seen) -> str:
        return "train" if held_out else image.part

    def among(chosen: list[list[Seen]]) -> Copies:
        examples = [
            [
                {"image": image.name, "label": image.label, "part": part(image)}
                for image in _most_telling(group, limit)
            ]
            for group in chosen[:limit]
        ]
        return Copies(len(chosen), sum(map(len, chosen)), examples)

    def alike(group: list[Seen]) -> list[Seen]:
        """Those that share class and part with another."""
        counts = Counter((part(image), image.label) for image in group)
        return [image for image in group if counts[part(image), image.label] > 1]

    return Duplicates(
        same_bytes=sum(len(group) - n for group, n in zip(groups, distinct, strict=True)),
        same_pixels=sum(n - 1 for n in distinct),
        within_class=among([alike(group) for group in groups if alike(group)]),
        across_classes=among([g for g in groups if len({image.label for image in g}) > 1]),
        across_parts=among([g for g in groups if len({part(image) for image in g}) > 1]),
    )


def _most_telling(group: list[Seen], limit: int) -> list[Seen]:
    """Some images of a group: of each class and part one, before there is a second of any."""
    firsts = {(image.label, image.part): image for image in reversed(group)}
    chosen = list(reversed(firsts.values()))
    return [*chosen, *(image for image in group if image not in chosen)][: max(limit, 2)]


def _problems(classes: dict[str, int], images: int, settings: Settings) -> list[str]:
    """Why training would refuse the source."""
    if not images:
        return ["no image can be read"]
    found = []
    try:
        check_counts(classes, "labels")
    except InputError as error:
        found.append(str(error))
    if images < settings.batch_size:
        found.append(
            f"a batch of {settings.batch_size} is more than the {_number(images, 'image')} to "
            "train on: give a smaller --batch-size"
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
        share = memory * len(found.train) // sum(map(len, found.splits))
    else:
        train = found.train
        channels, stored = train.channels, train.size
        size = choose_size(stored, settings, found.image_size)
        sets: list[ImageSet] = [part for part in (train, found.test) if part is not None]
        memory, keeps = sum(part.images_NCHW.nbytes for part in sets), True
        share = train.images_NCHW.nbytes
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
        balance_prior=settings.balance_prior,
        memory=memory,
        images=choose_place(share, device, settings.images) if keeps else "files",
        device=device.type,
        command=_command(source, options),
    )


def _command(source: Source, options: ReadOptions) -> str:
    given = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if getattr(options, field.name) != field.default
    }
    if not isinstance(source, str | Path):
        words = "".join(f", {name}={value!r}" for name, value in given.items())
        return f'pseudoloss.train(source, out="run"{words})'
    flags = [
        as_flag(name, shlex.quote(str(value)) if value is not True else True)
        for name, value in given.items()
    ]
    return " ".join(["pseudoloss train", shlex.quote(str(source)), "--out run", *flags])


# -------------------------------------------------------------------------------------- the report


def report(found: Inspection) -> str:
    """What was found, to be read."""
    images = _number(found.train + found.test, "image")
    classes = "1 class" if len(found.classes) == 1 else f"{len(found.classes):,} classes"
    lines = [f"{_line(found.source)}: {images}, {classes}"]
    lines += [f"  {title:11}{text}" for title, text in _about_images(found)]
    lines += [f"  {title:11}{text}" for title, text in _about_files(found)]
    if found.duplicates is not None:
        lines += [f"  {title:11}{text}" for title, text in _about_duplicates(found.duplicates)]
    lines += ["", "Training would use"]
    lines += [f"  {title:11}{text}" for title, text in _about_plan(found)]
    lines.append("")
    lines += [f"Training would refuse this: {_line(problem)}" for problem in found.problems]
    if not found.problems:
        lines.append(f"Next: {found.plan.command}")
    return "\n".join(lines)


Lines = list[tuple[str, str]]


def _about_images(found: Inspection) -> Lines:
    test = "none to test on"
    if found.test:
        how = "held out of them to test on" if found.held_out else f"to test on ({found.test_name})"
        test = f"{found.test:,} {how}"
    lines = [("images", f"{found.train:,} to train on, {test}")]
    counts = found.classes
    if counts:
        least, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
        text = f"{_number(counts[least], 'image')} in each"
        if counts[least] < counts[most]:
            few = f"{_number(counts[least], 'image')} ({_line(least)})"
            text = f"from {few} to {counts[most]:,} ({_line(most)})"
            if counts[least]:
                text += f", {counts[most] / counts[least]:.1f} times as many"
        lines.append(("classes", text))
        if len(counts) <= SHOWN_CLASSES:
            lines.append(("", ", ".join(f"{_line(name)} {n:,}" for name, n in counts.items())))
    if found.width and found.height and found.aspect:
        w, h, a = found.width, found.height, found.aspect
        if (w.least, h.least) == (w.most, h.most):
            lines.append(("size", f"all {w.least:g}×{h.least:g} pixels"))
        else:
            lines.append(
                (
                    "size",
                    f"width {_range(w)}, height {_range(h)} pixels; width to height {_range(a)}",
                )
            )
    lines.append(("colours", _counted(found.modes)))
    return lines


def _about_files(found: Inspection) -> Lines:
    lines = []
    if found.formats:
        lines.append(("formats", _counted(found.formats)))
    if found.bytes is not None:
        lines.append(("on disk", _bytes(found.bytes)))
    if found.unreadable:
        count = sum(group.count for group in found.unreadable)
        lines.append(("left out", f"{_number(count, 'file')}, which training will not use"))
        for group in found.unreadable:
            files = [_line(name) for name in group.files]
            more = ", …" if group.count > len(files) else ""
            named = f": {', '.join(files)}{more}" if files else ""
            lines.append(("", f"{group.count:,} × {group.reason}{named}"))
    if not found.decoded:
        lines.append(
            ("not done", "without --duplicates, files were not read to their ends, nor compared")
        )
    return lines


def _about_duplicates(found: Duplicates) -> Lines:
    if not found.same_bytes + found.same_pixels:
        return [("duplicates", "none")]
    copies = f"{found.same_bytes:,} {'copy' if found.same_bytes == 1 else 'copies'}"
    others = f"{found.same_pixels:,} of the same pixels in other bytes"
    lines = [("duplicates", f"{copies} of the same bytes, {others}")]
    kinds = (
        (found.across_classes, "with different labels, of which at least one is wrong"),
        (found.across_parts, "to train on and to test on: accuracy would be too good"),
        (found.within_class, "more than once in one class"),
    )
    for kind, what in kinds:
        if kind.pictures:
            lines.append(("", f"{_number(kind.pictures, 'picture')} {what}"))
            lines += [("", f"  {' = '.join(map(_named, group))}") for group in kind.examples]
    return lines


def _about_plan(found: Inspection) -> Lines:
    plan = found.plan
    start = {
        None: "from scratch",
        "pretrained": "with its published weights, which timm downloads",
    }.get(plan.weights, f"with {plan.weights}")
    colours = "grey" if plan.channels == 1 else "RGB"
    stored = f"{plan.stored[0]}×{plan.stored[1]} {colours}"
    crops = "" if plan.stored == plan.size else f", of which it sees {plan.size[0]}×{plan.size[1]}"
    uneven = "; class shares as the labels have them" if plan.balance_prior == "given" else ""
    where = {
        "device": "in memory" if plan.device == "cpu" else "in the memory of the GPU",
        "host": "in the host's memory, copied as they are needed",
        "files": "in their files, decoded in every epoch",
    }[plan.images]
    epochs = _number(plan.epochs, "epoch")
    steps = f"{epochs} in batches of {plan.batch_size}, learning rate {plan.lr:g}"
    return [
        ("preset", plan.preset),
        ("network", f"{plan.network} {start}"),
        ("pixels", f"{stored}{crops}"),
        ("steps", f"{steps}{uneven}"),
        ("memory", f"{_bytes(plan.memory)} of images, {where}"),
    ]


def _named(image: dict[str, str]) -> str:
    part = f", {image['part']}" if image["part"] != "train" else ""
    return f"{_line(image['image'])} ({_line(image['label'])}{part})"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _range(span: Span) -> str:
    return f"{span.least:.3g} to {span.most:.4g} (median {span.median:.3g})"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return _number(count, "byte")


def _line(name: str) -> str:
    """A name that stays on its line."""
    return " ".join(name.split())
