"""WebDataset shards: tar archives in which the files of a sample have one name and follow each
other, such as `000017.jpg` and `000017.cls`.

The shards are listed once, and the list of each is kept in the cache folder. After that, images are
read by their offset, in any order.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pseudoloss.data.decoding import Item, UnreadableError, printable
from pseudoloss.data.loops import Progress, for_each, no_progress
from pseudoloss.data.scanning import FileSource, LabelledFiles, Skipped, name_of
from pseudoloss.data.sources.folder import IMAGE_SUFFIXES, SPLIT_NAMES, split_names
from pseudoloss.data.tar_files import (
    Archive,
    CompressedError,
    Member,
    members,
    open_archive,
    open_member,
    read_member,
)
from pseudoloss.errors import InputError, reason
from pseudoloss.files import at_home, cache_folder, write_bytes
from pseudoloss.reading import ReadOptions

IMAGES = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
LABELS = ("label", "cls")  # keys of a .json file
CLASS_FILES = ("classes.txt", "classes.json")
LARGEST_IMAGE = 2**28  # bytes
LARGEST_LABEL_FILE = 2**20
LONGEST_LABEL = 200
MOST_SHARDS = 1_000_000
LIST_VERSION = 1  # of the lists in the cache folder


class Sample(NamedTuple):
    """An image in a shard."""

    name: str
    offset: int
    size: int
    label: str | None


class ShardList(NamedTuple):
    """What a shard holds, and what in it cannot be used."""

    archive: Archive
    samples: list[Sample]
    problems: list[Skipped]


@dataclass(frozen=True, eq=False)
class ShardImages(Sequence[Item]):
    """N images in shards. An image takes a few bytes here until it is asked for."""

    archives: tuple[Archive, ...]
    shard_N: np.ndarray
    offset_N: np.ndarray
    size_N: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        place = (self.archives[self.shard_N[i]], int(self.offset_N[i]), int(self.size_N[i]))
        return Item(
            partial(read_member, *place), stream=partial(open_member, *place), name=self.names[i]
        )

    def select(self, chosen: Sequence[int]) -> "ShardImages":
        rows = np.asarray(chosen, dtype=np.int64)
        return ShardImages(
            self.archives,
            self.shard_N[rows],
            self.offset_N[rows],
            self.size_N[rows],
            tuple(self.names[i] for i in chosen),
        )


# ----------------------------------------------------------------------------------- the source


def webdataset(
    place: str, options: ReadOptions | None = None, progress: Progress = no_progress
) -> FileSource:
    """The labelled images of `wds:PLACE`: a folder of shards, a shard, or a pattern of names."""
    spec = f"wds:{place}"
    splits: dict[str, LabelledFiles] = {}
    key = (options or ReadOptions()).label_column
    classes = _class_names(place, spec)
    found = _split_lists(place, spec, key, progress)
    root = _root([shard for lists in found.values() for shard in lists])
    for split, lists in found.items():
        images, labels, skipped = _joined(lists, root)
        unlabelled = [name for name, label in zip(images.names, labels, strict=True) if not label]
        skipped += [Skipped(name, _no_label(key)) for name in unlabelled]
        kept = [i for i, label in enumerate(labels) if label]
        images = images.select(kept)
        splits[split] = LabelledFiles(
            images,
            images.names,
            tuple(
                _class_of(labels[i] or "", classes, f"{spec}: {name}")
                for i, name in zip(kept, images.names, strict=True)
            ),
            skipped=tuple(skipped),
        )
    if not any(map(len, splits.values())):
        first = next((entry for split in splits.values() for entry in split.skipped), None)
        why = f" ({first.path}: {first.reason})" if first else ""
        raise InputError(f"{spec}: has no labelled images{why}")
    return FileSource(spec, splits)


def unlabelled_images(place: str) -> ShardImages:
    """All images of `wds:PLACE`, with or without a label."""
    spec = f"wds:{place}"
    found = _split_lists(place, spec, ReadOptions.label_column, no_progress)
    lists = [shard for split in found.values() for shard in split]
    images, _, _ = _joined(lists, _root(lists))
    if not len(images):
        raise InputError(f"{spec}: has no images")
    return images


def find_shards(place: str, spec: str) -> dict[str, list[Path]]:
    """The shards of each split, in the order of their names."""
    if not place:
        raise InputError(f"{spec}: name shards, as in wds:FOLDER or wds:FOLDER/{{000..009}}.tar")
    if re.match(r"[a-z0-9]+://|pipe:", place):
        raise InputError(f"{spec}: only shards on a disk can be read; copy them to a folder")
    root = at_home(place)
    if root.is_dir():
        found = _in_folder(root)
        inner = {path.name: _in_folder(path) for path in sorted(root.iterdir()) if path.is_dir()}
        inside = split_names([name for name in inner if inner[name]], spec)
        if inside and found:
            raise InputError(f"{spec}: has shards beside the folder {next(iter(inside.values()))}/")
        if inside:
            return {split: inner[name] for split, name in inside.items()}
        if not found:
            raise InputError(f"{spec}: holds no .tar files")
    else:
        found = sorted(map(at_home, expand_braces(place, spec)))
        missing = [path for path in found if not path.exists()]
        if missing:
            raise InputError(
                f"{spec}: {len(missing):,} of {len(found):,} shards are missing (the first: "
                f"{printable(missing[0])})"
            )
    return _by_split(found, spec)


def _in_folder(folder: Path) -> list[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({reason(error)})") from None
    return [p for p in inside if p.suffix.lower() == ".tar" and not p.name.startswith(".")]


def _by_split(shards: list[Path], spec: str) -> dict[str, list[Path]]:
    """Splits by a word in the names: train-0001.tar, val-0001.tar. If all names mean the same split
    or none does, it is the split "train"."""
    words = {path: re.split(r"[-_. ]", path.name.lower()) for path in shards}
    split_of = {
        path: next((SPLIT_NAMES[word] for word in words[path] if word in SPLIT_NAMES), "")
        for path in shards
    }
    names = set(split_of.values())
    if len(names) == 1:
        return {"train": shards}
    if "" in names:
        named, other = (next(p for p in shards if bool(split_of[p]) is x) for x in (True, False))
        raise InputError(
            f"{spec}: {named.name} belongs to a split by its name, but {other.name} does not; "
            "name the shards, as in wds:FOLDER/train-{0000..0009}.tar"
        )
    return {split: [path for path in shards if split_of[path] == split] for split in sorted(names)}


def expand_braces(text: str, spec: str) -> list[str]:
    """All names of a pattern: {000..009} are numbers, {a,b} alternatives."""
    parts: list[list[str]] = []
    for piece in re.split(r"(\{[^{}]*\})", text):
        numbers = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", piece)
        if numbers:
            first, last = numbers.groups()
            step = 1 if int(first) <= int(last) else -1
            width = len(first) if first.startswith("0") or last.startswith("0") else 0
            if abs(int(last) - int(first)) >= MOST_SHARDS:
                raise InputError(f"{spec}: {piece} are more than {MOST_SHARDS:,} shards")
            span = range(int(first), int(last) + step, step)
            parts.append([f"{number:0{max(width, len(last) if width else 0)}}" for number in span])
        elif piece.startswith("{") and piece.endswith("}") and "," in piece:
            parts.append(piece[1:-1].split(","))
        else:
            parts.append([piece])
    if np.prod([float(len(part)) for part in parts]) > MOST_SHARDS:
        raise InputError(f"{spec}: its pattern means more than {MOST_SHARDS:,} shards")
    return list(dict.fromkeys("".join(chosen) for chosen in itertools.product(*parts)))


def absolute_place(place: str) -> str:
    """The place with an absolute path. A pattern keeps its braces."""
    return os.path.abspath(at_home(place))  # noqa: PTH100, resolves no links


# ----------------------------------------------------------------------------------- the samples


def _split_lists(place: str, spec: str, key: str, progress: Progress) -> dict[str, list[ShardList]]:
    """The lists of all shards, by split. A shard that cannot be read has an empty list."""
    lists = {}
    for split, paths in find_shards(place, spec).items():
        found = for_each(paths, partial(_list_of, key=key), "shards", progress)
        for i, (path, result) in enumerate(zip(paths, found, strict=True)):
            if isinstance(result, CompressedError):
                raise InputError(
                    f"{spec}: {printable(path)} is {result}; uncompress it: images are read from "
                    "any place in a shard"
                )
            if isinstance(result, UnreadableError):
                problem = Skipped(printable(path.name), str(result))
                found[i] = ShardList(Archive(path, 0, 0), [], [problem])
        lists[split] = found
    return lists


def _root(lists: Sequence[ShardList]) -> Path:
    """The folder that all shards are in."""
    return Path(os.path.commonpath([shard.archive.path.parent for shard in lists]))


def _joined(
    lists: Sequence[ShardList], root: Path
) -> tuple[ShardImages, list[str | None], list[Skipped]]:
    """The images of all shards, their labels, and what is skipped. An image is called
    SHARD/NAME."""
    shard_N, offset_N, size_N, names, labels, skipped = [], [], [], [], [], []
    for number, (archive, samples, problems) in enumerate(lists):
        shard = name_of(archive.path, root)
        for name, offset, size, label in samples:
            shard_N.append(number)
            offset_N.append(offset)
            size_N.append(size)
            names.append(f"{shard}/{name}")
            labels.append(label)
        skipped += [
            Skipped(f"{shard}/{name}" if archive.size and name else shard, why)
            for name, why in ((entry.path, entry.reason) for entry in problems)
        ]
    images = ShardImages(
        tuple(shard.archive for shard in lists),
        np.array(shard_N, dtype=np.int32),
        np.array(offset_N, dtype=np.int64),
        np.array(size_N, dtype=np.int64),
        tuple(names),
    )
    return images, labels, skipped


def _list_of(path: Path, key: str) -> ShardList:
    """What a shard holds: from the cache folder if it is there."""
    archive = open_archive(path)
    facts = f"{LIST_VERSION} {path.absolute()} {archive.size} {archive.modified} {key}"
    name = hashlib.sha256(os.fsencode(facts)).hexdigest()[:32]
    cached = cache_folder("shards") / f"{name}.json"
    try:
        found = json.loads(cached.read_text(encoding="utf-8"))
        samples = [_checked(Sample(*row), archive) for row in found["samples"]]
        return ShardList(archive, samples, [Skipped(*row) for row in found["problems"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged
    found = _list_shard(archive, key)
    problems = [(entry.path, entry.reason) for entry in found.problems]
    content = json.dumps({"samples": found.samples, "problems": problems})
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(cached, content.encode())
    except OSError:
        pass  # no place for a cache, or another process has just written the same
    return found


def _checked(sample: Sample, archive: Archive) -> Sample:
    name, offset, size, label = sample
    good = isinstance(name, str) and (label is None or isinstance(label, str))
    if not good or not 0 <= offset <= offset + size <= archive.size:
        raise ValueError
    return sample


def _list_shard(archive: Archive, key: str) -> ShardList:
    samples: list[Sample] = []
    problems: list[Skipped] = []
    used: set[str] = set()
    for group in _groups(archive, problems):
        found = _sample(archive, group, key)
        if isinstance(found, Sample) and found.name in used:
            found = Skipped(found.name, "the shard has this name twice")
        if isinstance(found, Sample):
            used.add(found.name)
            samples.append(found)
        else:
            problems.append(found)
    return ShardList(archive, samples, problems)


def _groups(archive: Archive, problems: list[Skipped]) -> Iterator[dict[str, Member]]:
    """The files of each sample, by extension. The rule is that of the webdataset library: a sample
    is called what comes before the first dot of the file name."""
    key: str | None = None
    group: dict[str, Member] = {}
    try:
        for member in members(archive):
            if re.match(r"__[^/]*__($|/)", member.name):  # for notes about the shard
                continue
            parts = re.fullmatch(r"((?:.*/|)[^.]+)\.([^/]*)", member.name, re.DOTALL)
            why = member.problem or _unsafe(member.name)
            if why or parts is None:
                problems.append(Skipped(_shown(member.name), why or "has no extension"))
                continue
            if parts[1] != key:
                if group:
                    yield group
                key, group = parts[1], {}
            group.setdefault(parts[2].lower(), member)
    except CompressedError:
        raise
    except UnreadableError as error:
        if group or key is not None or problems:
            problems.append(Skipped("", str(error)))
        else:
            raise
    if group:
        yield group


def _unsafe(name: str) -> str:
    """Why a name is not that of a file inside the archive, if it is not."""
    if name.startswith("/") or ".." in name.split("/"):
        return "its name leads out of the archive"
    return ""


def _sample(archive: Archive, group: dict[str, Member], key: str) -> Sample | Skipped:
    first = next(iter(group.values()))
    image = next((group[ending] for ending in IMAGES if ending in group), None)
    if image is None:
        return Skipped(_shown(first.name), "has no image")
    name = _shown(image.name)
    if image.size > LARGEST_IMAGE:
        return Skipped(name, f"larger than {LARGEST_IMAGE >> 20} MiB")
    if image.size == 0:
        return Skipped(name, "empty file")
    try:
        label = _label(archive, group, key)
    except UnreadableError as error:
        return Skipped(name, str(error))
    return Sample(name, image.offset, image.size, label)


def _label(archive: Archive, group: dict[str, Member], key: str) -> str | None:
    """The label of a sample as text; None if it has none. With --label-column, .json decides."""
    is_usual = key == ReadOptions.label_column
    if is_usual and "cls" in group:
        return _one_line(_text(archive, group["cls"]))
    if "json" not in group:
        return None
    try:
        content: Any = json.loads(_text(archive, group["json"]))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"its .json cannot be read ({reason(error)})") from None
    if not isinstance(content, dict):
        raise UnreadableError("its .json is not an object with a label")
    value = next((content[k] for k in (LABELS if is_usual else (key,)) if k in content), None)
    if value is not None and not isinstance(value, str | int):
        raise UnreadableError("its label is neither a whole number nor text")
    return None if value is None else _one_line(str(value))


def _one_line(label: str) -> str | None:
    label = label.strip()
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise UnreadableError(f"its label is not one line of at most {LONGEST_LABEL} characters")
    return label or None


def _text(archive: Archive, member: Member) -> str:
    if member.size > LARGEST_LABEL_FILE:
        raise UnreadableError(f"its label file has {member.size:,} bytes")
    try:
        return read_member(archive, member.offset, member.size).decode()
    except UnicodeDecodeError:
        raise UnreadableError("its label is not text in UTF-8") from None


def _no_label(key: str) -> str:
    if key == ReadOptions.label_column:
        return "has no label: neither a .cls file nor a label in .json"
    return f"has no label: no {key} in .json"


def _shown(name: str) -> str:
    return printable(name.removeprefix("./"))


# ------------------------------------------------------------------------------------- class names


def _class_names(place: str, spec: str) -> list[str] | None:
    """The names of the classes by number: classes.txt (one per line) or classes.json (a list, or an
    object with numbers as keys) beside the shards."""
    root = at_home(place)
    folder = root if root.is_dir() else root.parent
    path = next((folder / name for name in CLASS_FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    where = f"{spec}: {path}"
    try:
        if path.stat().st_size > LARGEST_LABEL_FILE:
            raise InputError(f"{where}: is too large for a list of classes")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            names: Any = [line.strip() for line in text.splitlines()]
        else:
            names = json.loads(text)
            if isinstance(names, dict):
                names = [names[str(number)] for number in range(len(names))]
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise InputError(f"{where}: is no list of class names ({reason(error)})") from None
    if not isinstance(names, list) or not all(isinstance(n, str) and n.strip() for n in names):
        raise InputError(f"{where}: must be a list of class names, one for each number from 0")
    if len(set(names)) < len(names):
        raise InputError(f"{where}: two classes have the same name")
    return names


def _class_of(label: str, names: list[str] | None, where: str) -> str:
    if names is None or not label.isdecimal():
        return label
    if len(label) > 9 or int(label) >= len(names):
        raise InputError(
            f"{where}: its label is {label:.20}, and there are {len(names)} class names"
        )
    return names[int(label)]
