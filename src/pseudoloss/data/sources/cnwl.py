"""CNWL: mini-ImageNet with controlled web noise (red noise), at 32 pixels."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pseudoloss.data.decoding import Reader
from pseudoloss.data.images import in_order
from pseudoloss.data.scanning import FileSource, LabelledFiles, Recipe, name_of
from pseudoloss.data.sources.folder import images_below
from pseudoloss.errors import InputError, reason
from pseudoloss.files import at_home, read_json
from pseudoloss.presets import PRESETS

READER = Reader(3, (32, 32), "published-crop")
MEAN, STD = (0.4728, 0.4487, 0.4031), (0.2744, 0.2663, 0.2806)
ANNOTATIONS = "mini-imagenet-annotations.json"
LAYOUT = f"training/red_noise_nl_RATIO/CLASS/*.jpg, validation/CLASS/*.jpg and {ANNOTATIONS}"
CLASSES = 100  # of mini-ImageNet, in both splits
TOLERANCE = 0.05  # on the share of web images in the folder name; beyond it, images are missing
OWNERS = "its owners publish it at https://google.github.io/controlled-noisy-web-labels"


def cnwl(place: str) -> FileSource:
    """mini-ImageNet with 100 classes and the given share of web images: "DIR:0.4".

    The true labels are known. A file whose name begins with n is an ImageNet image with a correct
    label. For web images the annotations say whether the label is correct; if not, the image counts
    as out-of-distribution, as in the paper's table of settings.
    """
    spec = f"cnwl:{place}"
    folder, _, ratio = place.rpartition(":")
    root = at_home(folder)
    try:
        share = float(ratio)
    except ValueError:
        share = -1
    if not folder or not 0 <= share <= 1:
        raise InputError(f"source {spec}: name the folder and the noise ratio, as in cnwl:DIR:0.4")
    training = root / "training"
    chosen = _subset(training, share)
    validation = root / "validation"
    for path in (training, chosen, validation, root / ANNOTATIONS):
        if not path.exists():
            raise InputError(
                f"{spec}: {path} is missing; {root} should hold {LAYOUT}{_present(training)}; "
                f"{OWNERS}"
            )
    notes = _annotations(root / ANNOTATIONS, spec)
    train, test = (_by_class(path, root, spec) for path in (chosen, validation))
    for split, other in ((train, validation), (test, chosen)):
        missing = [name for name in in_order(split.labels) if not (other / name).is_dir()]
        if missing:
            raise InputError(f"{spec}: {other / missing[0]}/ is missing; {OWNERS}")
    for path, split in ((chosen, train), (validation, test)):
        _check_classes(split, path, spec)
    _check_share(train, share, chosen, spec)
    train = replace(train, true_labels=_true_labels(train, notes, spec))
    preset = f"cnwl-{100 * share:.0f}"
    recipe = Recipe(READER, MEAN, STD, preset if preset in PRESETS else "cnwl-40")
    return FileSource(f"cnwl-{share:g}", {"train": train, "test": test}, recipe)


def _subset(training: Path, share: float) -> Path:
    names = [f"red_noise_nl_{text}" for text in (f"{share:g}", f"{share:.1f}")]
    found = [training / name for name in names if (training / name).is_dir()]
    return found[0] if found else training / names[-1]


def _present(training: Path) -> str:
    ratios = sorted(path.name.rpartition("_")[2] for path in training.glob("red_noise_nl_*"))
    return f" (existing values of RATIO: {', '.join(ratios)})" if ratios else ""


def _by_class(folder: Path, root: Path, spec: str) -> LabelledFiles:
    """The images in a folder with one folder per class."""
    paths: list[Path] = []
    labels: list[str] = []
    for name in in_order(path.name for path in folder.iterdir() if path.is_dir()):
        inside = images_below(folder / name)
        if not inside:
            raise InputError(f"{spec}: {folder / name}/ holds no images; {OWNERS}")
        paths += inside
        labels += [name] * len(inside)
    if not paths:
        raise InputError(f"{spec}: {folder}/ holds no class folders; {OWNERS}")
    return LabelledFiles(tuple(paths), tuple(name_of(path, root) for path in paths), tuple(labels))


def _check_classes(split: LabelledFiles, folder: Path, spec: str) -> None:
    """Refuse a split in which classes are missing or one is much smaller than the others."""
    counts = Counter(split.labels)
    if len(counts) != CLASSES:
        raise InputError(
            f"{spec}: {folder}/ holds {len(counts)} class folders, not the {CLASSES} of "
            f"mini-ImageNet; {OWNERS}"
        )
    usual = median(counts.values())
    name, fewest = min(counts.items(), key=lambda item: item[1])
    if fewest < usual / 2:
        raise InputError(
            f"{spec}: {folder / name}/ holds {fewest} images, the other classes about "
            f"{usual:g}: some are missing; {OWNERS}"
        )


def _check_share(train: LabelledFiles, share: float, folder: Path, spec: str) -> None:
    """Refuse a share of web images other than the one in the folder name."""
    web = sum(map(_from_web, train.names)) / len(train.names)
    if abs(web - share) >= TOLERANCE:
        raise InputError(
            f"{spec}: {web:.0%} of the images in {folder}/ are web images (their names do not "
            f"begin with n), not {share:.0%}: some are missing; {OWNERS}"
        )


def _from_web(name: str) -> bool:
    """Names of ImageNet images begin with n."""
    return not Path(name).name.startswith("n")


def _annotations(path: Path, spec: str) -> dict[str, list[tuple[str, bool]]]:
    """For every web image: a class, and whether the image shows it."""
    notes: dict[str, list[tuple[str, bool]]] = {}
    try:
        content: Any = read_json(path)
        for group in content["data"]:
            for note in group:
                about = str(note.get("image/class/label", ""))
                is_clean = bool(int(note["image/class/label/is_clean"]))
                notes.setdefault(str(note["image/id"]), []).append((about, is_clean))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{spec}: {path} is not the annotation file ({reason(error)}); {OWNERS}"
        ) from None
    return notes


def _true_labels(
    train: LabelledFiles, notes: dict[str, list[tuple[str, bool]]], spec: str
) -> tuple[str | None, ...]:
    found: list[str | None] = []
    for name, label in zip(train.names, train.labels, strict=True):
        entries = notes.get(Path(name).stem) if _from_web(name) else [(label, True)]
        if entries is None:
            raise InputError(f"{spec}: {name} has no entry in {ANNOTATIONS}; {OWNERS}")
        is_clean = dict(entries).get(label, entries[0][1])
        found.append(label if is_clean else None)
    return tuple(found)
