"""CNWL: mini-ImageNet with controlled noise from the web (red noise), at 32 pixels."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pseudoloss.config import PRESETS
from pseudoloss.data.decode import decode, find_images, in_order, stretched
from pseudoloss.data.images import OUT, Data, ImageSet
from pseudoloss.errors import InputError

SIZE = 32
ANNOTATIONS = "mini-imagenet-annotations.json"
LAYOUT = f"training/red_noise_nl_RATIO/CLASS/*.jpg, validation/CLASS/*.jpg and {ANNOTATIONS}"
OWNERS = "its owners publish it at https://google.github.io/controlled-noisy-web-labels"


def cnwl(place: str) -> Data:
    """mini-ImageNet of 100 classes, a share of its images from the web: "DIR:0.4".

    The truth is known: a file whose name begins with n is an image of ImageNet, and its label is
    right. Of the others the annotations say whether the label is right; where it is not, the image
    counts as out-of-distribution, as in the paper's table of settings.
    """
    spec = f"cnwl:{place}"
    folder, _, ratio = place.rpartition(":")
    root = Path(folder).expanduser()
    try:
        share = float(ratio)
    except ValueError:
        share = -1
    if not folder or not 0 <= share <= 1:
        raise InputError(f"source {spec}: say where and how noisy, as cnwl:DIR:0.4")
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
    train_paths, test_paths = (_by_class(path, spec) for path in (chosen, validation))
    classes = in_order(train_paths | test_paths)
    for one, other in ((train_paths, validation), (test_paths, chosen)):
        lone = [name for name in one if not (other / name).is_dir()]
        if lone:
            raise InputError(f"{spec}: {other / lone[0]}/ is missing; {OWNERS}")

    def image_set(by_class: dict[str, list[Path]], is_train: bool) -> ImageSet:
        paths = [path for name in classes for path in by_class[name]]
        labels = [label for label, name in enumerate(classes) for _ in by_class[name]]
        given_N = torch.tensor(labels)
        true_N = _truth(paths, given_N, notes, spec) if is_train else None
        pixels = decode(paths, stretched((SIZE, SIZE)), (SIZE, SIZE), 3, spec)
        names = tuple(str(path.relative_to(root)) for path in paths)
        return ImageSet(pixels, given_N, tuple(classes), true_N, names)

    preset = f"cnwl-{100 * share:.0f}"
    return Data(
        name=f"cnwl-{share:g}",
        train=image_set(train_paths, True),
        test=image_set(test_paths, False),
        mean=(0.4728, 0.4487, 0.4031),
        std=(0.2744, 0.2663, 0.2806),
        preset=preset if preset in PRESETS else "cnwl-40",
    )


def _subset(training: Path, share: float) -> Path:
    names = [f"red_noise_nl_{text}" for text in (f"{share:g}", f"{share:.1f}")]
    found = [training / name for name in names if (training / name).is_dir()]
    return found[0] if found else training / names[-1]


def _present(training: Path) -> str:
    ratios = sorted(path.name.rpartition("_")[2] for path in training.glob("red_noise_nl_*"))
    return f" (RATIO there: {', '.join(ratios)})" if ratios else ""


def _by_class(folder: Path, spec: str) -> dict[str, list[Path]]:
    found = {path.name: find_images(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    for name, paths in found.items():
        if not paths:
            raise InputError(f"{spec}: {folder / name}/ holds no images; {OWNERS}")
    if not found:
        raise InputError(f"{spec}: {folder}/ holds no folders of classes; {OWNERS}")
    return found


def _annotations(path: Path, spec: str) -> dict[str, list[tuple[str, bool]]]:
    """Of every image from the web: a class, and whether it shows it."""
    notes: dict[str, list[tuple[str, bool]]] = {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        for group in content["data"]:
            for note in group:
                about = str(note.get("image/class/label", ""))
                is_clean = bool(int(note["image/class/label/is_clean"]))
                notes.setdefault(str(note["image/id"]), []).append((about, is_clean))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{spec}: {path} is not the file of annotations ({reason})") from None
    return notes


def _truth(
    paths: list[Path], given_N: Tensor, notes: dict[str, list[tuple[str, bool]]], spec: str
) -> Tensor:
    true_N = given_N.clone()
    for i, path in enumerate(paths):
        if path.name.startswith("n"):
            continue
        if path.stem not in notes:
            raise InputError(f"{spec}: {path} has no entry in {ANNOTATIONS}")
        entries = notes[path.stem]
        is_clean = dict(entries).get(path.parent.name, entries[0][1])
        if not is_clean:
            true_N[i] = OUT
    return true_N
