"""A folder of badly labelled images: one command, and how good its label table is.

    python benchmarks/folder.py cifar100:DIR [--work DIR] [--quick] [--out FILE.json] [-- FLAGS]

Writes 6,000 real images of ten classes of CIFAR-100 as files of mixed size, format and mode, one
folder per class: 5,000 in train/, of which 30% are in a wrong folder, and 1,000 in test/. Twenty
more files are broken: empty, truncated, or text. Then it runs `pseudoloss train FOLDER --out RUN`
with the arguments after `--`, and measures how well the label table finds the images in wrong
folders.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

import machine
import pseudoloss as pl
from pseudoloss.data import ImageSet, open_source
from pseudoloss.scores import auc

CLASSES = (
    *("apple", "bicycle", "bottle", "castle", "keyboard"),
    *("lion", "orange", "rocket", "sunflower", "train"),
)
SIDES = (24, 28, 32, 40, 48, 64, 96)
WRONG = 0.3
BROKEN = 20

Picture = Image.Image


def sixteen_bits(image: Picture) -> Picture:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def with_palette(image: Picture) -> Picture:
    return image.convert("P", palette=Image.Palette.ADAPTIVE)


# Suffix, conversion, relative frequency.
FORMS: tuple[tuple[str, Callable[[Picture], Picture], int], ...] = (
    ("jpg", lambda image: image, 4),
    ("png", lambda image: image, 1),
    ("png", lambda image: image.convert("L"), 1),
    ("png", lambda image: image.convert("RGBA"), 1),
    ("png", sixteen_bits, 1),
    ("jpg", lambda image: image.convert("CMYK"), 1),
    ("gif", with_palette, 1),
    ("webp", lambda image: image, 1),
    ("bmp", lambda image: image, 1),
    ("tiff", lambda image: image, 1),
)


def write_image(pixels_HWC: np.ndarray, stem: Path, random: np.random.Generator) -> Path:
    """Write an image in a random format and size."""
    frequency = np.array([count for *_, count in FORMS])
    suffix, change, _ = FORMS[random.choice(len(FORMS), p=frequency / frequency.sum())]
    side = int(random.choice(SIDES))
    longer = side + int(random.choice((0, 0, 4, 16)))
    size = (side, longer) if random.random() < 0.5 else (longer, side)
    image = Image.fromarray(pixels_HWC).resize(size, Image.Resampling.BICUBIC)
    path = stem.with_suffix(f".{suffix}")
    change(image).save(path, **({"quality": 92} if suffix in ("jpg", "webp") else {}))
    return path


def write_images(images: ImageSet, folder: Path, wrong: float, most: int) -> dict[str, str]:
    """Write images into the folders of their classes, some into a wrong one. Returns the true class
    of each path."""
    random = np.random.default_rng(len(images))
    true = {images.classes.index(name): name for name in CLASSES}
    pixels_NHWC = images.images_NCHW.numpy().transpose(0, 2, 3, 1)  # type: ignore[union-attr]
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    chosen = [i for i, label in enumerate(images.given_N.tolist()) if label in true][:most]
    truth = {}
    for i in chosen:
        right = true[int(images.given_N[i])]
        others = [name for name in CLASSES if name != right]
        name = str(random.choice(others)) if random.random() < wrong else right
        path = write_image(pixels_NHWC[i], folder / name / f"{i:05}", random)
        truth[str(path.relative_to(folder.parent))] = right
    return truth


def write_broken(folder: Path) -> None:
    """Write files that are empty, truncated or not images."""
    for i in range(BROKEN):
        inside = folder / CLASSES[i % len(CLASSES)]
        whole = max(
            inside.glob("*.png" if i % 2 else "*.jpg"), key=lambda path: path.stat().st_size
        )
        content = (b"", b"not an image", whole.read_bytes()[:200], whole.read_bytes()[:-60])[i % 4]
        (inside / f"broken{i}{whole.suffix}").write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--work", type=Path, help="new folder that keeps the images and the run")
    parser.add_argument("--quick", action="store_true", help="only a tenth of the images")
    parser.add_argument("--out", type=Path)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args, extra = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    data = open_source(args.source)
    assert data.test is not None
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        photos, run_folder = work / "photos", work / "run"
        share = 10 if args.quick else 1
        truth = write_images(data.train, photos / "train", WRONG, 5000 // share)
        write_images(data.test, photos / "test", 0.0, 1000 // share)
        write_broken(photos / "train")
        start = time.monotonic()
        command = [sys.executable, "-m", "pseudoloss", "train", str(photos)]
        subprocess.run([*command, "--out", str(run_folder), *extra], check=True)
        seconds = time.monotonic() - start
        found = measure(pl.load(run_folder), truth)
        skipped = pd.read_csv(run_folder / "skipped.csv")
    found["skipped"] = skipped["reason"].value_counts().to_dict()
    found["seconds"] = round(seconds, 1)
    for name, value in found.items():
        print(f"{name}: {value}")
    machine.write(args.out, found, {args.source: "cifar100:DIR", str(args.work): "WORK"})


def measure(run: pl.Run, truth: dict[str, str]) -> dict[str, Any]:
    table = run.labels
    right = table["path"].map(truth)
    wrong = torch.tensor((right != table["given_label"]).to_numpy())
    issue = torch.tensor(table["is_label_issue"].to_numpy())
    relabelled = table["action"] == "relabel"
    return {
        "images": len(table),
        "wrong": round(wrong.float().mean().item(), 4),
        "auc": auc(1 - torch.tensor(table["label_score"].to_numpy()), wrong),
        "estimated": run.summary["estimated_noise"]["rate"],
        "issues": {
            "precision": (wrong & issue).sum().item() / max(int(issue.sum()), 1),
            "recall": (wrong & issue).sum().item() / max(int(wrong.sum()), 1),
        },
        "suggestions_right": float(
            (table["suggested_label"] == right)[relabelled].mean() if relabelled.any() else 0
        ),
        "accuracy": run.summary["accuracy"],
        "network": run.settings.network,
        "epochs": run.settings.epochs,
    }


if __name__ == "__main__":
    main()
