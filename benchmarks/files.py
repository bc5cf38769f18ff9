"""Training on photographs from their files, compared with the usual DataLoader.

    python benchmarks/files.py [--photos N] [--network NAME] [--batch-size B] [--workers W]
        [--quick] [--out FILE.json]

Writes synthetic photographs of several sizes as JPEG files. All variants train PLS on them with the
same network, losses and updates. They differ in how the three views of an image are made:

- loader: the usual loop. torchvision's ImageFolder with PIL and torchvision's transforms, one image
  at a time in worker processes, and plain calls.
- files: `pseudoloss train --images files`. Decoded in worker processes, views on the device.
- memory: the default if the decoded images fit into memory. Decoded once for all epochs.
- full: like files, with --accelerate full (only on a GPU).

The results are images per second in an epoch after the warm-up, the best of a few, and the share of
the time in which the GPU was busy, from its driver. "views only" makes the views of an epoch and
trains nothing.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import machine
from pseudoloss.config import Settings
from pseudoloss.data import Data, ReadOptions, find_source
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.randomness import isolated_torch
from pseudoloss.engine.steps import forward
from pseudoloss.engine.trainer import Prepared, Trainer
from pseudoloss.methods.base import NET, Batch, Mix, ViewBatch
from pseudoloss.nn.views import (
    CROP_AREA,
    CROP_RATIO,
    GREY_PROBABILITY,
    HUE,
    JITTER,
    JITTER_PROBABILITY,
)
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter

SIZES = ((640, 480), (800, 600), (1024, 768), (1280, 960), (768, 1024), (500, 375))
CLASSES = 10


def make_photo(folder: Path, number: int) -> None:
    """Write large shapes with some grain; the file is as large as that of a real photograph."""
    random = np.random.default_rng(number)
    width, height = SIZES[number % len(SIZES)]
    shapes = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = random.normal(0, 6, (height, width, 1))
    image = Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))
    place = folder / f"class{number % CLASSES}"
    place.mkdir(parents=True, exist_ok=True)
    image.save(place / f"{number:06}.jpg", quality=88)


def make_photos(folder: Path, count: int) -> None:
    with ProcessPoolExecutor() as processes:
        list(processes.map(partial(make_photo, folder), range(count), chunksize=16))


def read(folder: Path, settings: Settings) -> Data:
    scanned = find_source(str(folder), ReadOptions(hold_out=0))  # like ImageFolder
    assert not isinstance(scanned, Data)
    reader, size = choose_reader(scanned, settings, "crop")
    return scanned.read(reader, size, settings.images, strict=True)[0]


def measure(epoch: Any, images: int, device: torch.device, turns: int) -> dict[str, Any]:
    """Images per second, and how busy the GPU was; the first turn is not counted."""
    best, share = 0.0, None
    for turn in range(turns + 1):
        with machine.GPUMonitor(every=0.25) as monitor:
            start = time.perf_counter()
            epoch(turn)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        if turn and images / seconds > best:
            best, share = images / seconds, monitor.means.get("busy")
    return {"images_per_second": round(best, 1), "gpu_busy": share}


def ours(folder: Path, settings: Settings, turns: int, train: bool = True) -> dict[str, Any]:
    with isolated_torch(), Trainer(read(folder, settings), settings, SilentReporter()) as trainer:
        device, (step, feed, _) = trainer.device, main_step(trainer)

        def epoch(turn: int) -> None:
            if train:
                trainer.train_epoch(settings.warmup_epochs + turn)
                return
            random = torch.Generator(device).manual_seed(turn)
            for _ in feed.batches(step, trainer.state, random):
                for part in range(feed.parts):
                    step.show(trainer.views, feed.batch(part))
                feed.step += 1

        images = feed.steps(trainer.state) * settings.batch_size
        return measure(epoch, images, device, turns)


def main_step(trainer: Trainer) -> Prepared:
    """The step after the warm-up."""
    number, _ = trainer.phase_of(trainer.settings.warmup_epochs)
    (prepared,) = trainer.steps[number]
    return prepared


class ThreeViews:
    """The three views of one image, by torchvision."""

    def __init__(self, trainer: Trainer) -> None:
        views = trainer.views
        stored = trainer.data.train.size[0]
        numbers = [T.ToTensor(), T.Normalize(views.mean_C.tolist(), views.std_C.tolist())]
        mirror = T.RandomHorizontalFlip()
        self.weak = T.Compose([T.Resize(stored), T.RandomCrop(views.size), mirror, *numbers])
        self.strong = T.Compose(
            [
                T.RandomResizedCrop(views.size, CROP_AREA, CROP_RATIO, T.InterpolationMode.BICUBIC),
                mirror,
                T.RandomApply([T.ColorJitter(JITTER, JITTER, JITTER, HUE)], JITTER_PROBABILITY),
                T.RandomGrayscale(GREY_PROBABILITY),
                *numbers,
            ]
        )

    def __call__(self, image: Image.Image) -> tuple[Tensor, Tensor, Tensor]:
        return self.weak(image), self.weak(image), self.strong(image)


class WithIndex(ImageFolder):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__(index)[0], index


def loader(
    folder: Path, settings: Settings, workers: int, turns: int, train: bool = True
) -> dict[str, Any]:
    """The usual loop: a DataLoader that makes three views, and plain calls."""
    plain = replace(settings, accelerate="off", images="host")
    with isolated_torch(), Trainer(read(folder, plain), plain, SilentReporter()) as trainer:
        device, (step, _, _) = trainer.device, main_step(trainer)
        network, optimiser = trainer.networks[NET], trainer.optimisers[NET]
        batches: DataLoader[Any] = DataLoader(
            WithIndex(str(folder), ThreeViews(trainer)),
            batch_size=settings.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )

        def epoch(turn: int) -> None:
            network.train()
            for views, index_B in batches:
                first, second, strong = (
                    view.to(device, non_blocking=True, memory_format=torch.channels_last)
                    for view in views
                )
                if not train:
                    continue
                index_B = index_B.to(device, non_blocking=True)
                partner_B = torch.randperm(len(index_B), device=device)
                mix = Mix(partner_B, step.lambdas[0](torch.rand((), device=device)))
                # The loss does not look at the images and random numbers of the batch.
                batch = Batch(index_B, first, trainer.given_N[index_B], (mix,), index_B[:, None])
                shown = ViewBatch([first, second], [mix.of(first), strong])
                outputs = {NET: forward(network, shown)}
                optimiser.zero_grad(set_to_none=True)
                step.loss(outputs, batch, trainer.state).backward()
                optimiser.step()

        return measure(epoch, len(batches) * settings.batch_size, device, turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=int, default=4096)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="worker processes of the usual loop"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few photographs, tiny network")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.photos, args.network, args.batch_size, args.turns = 24, "small-cnn", 8, 1
    values = {
        "network": args.network,
        "batch_size": args.batch_size,
        "weights": None,
        "image_size": 32 if args.quick else 224,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        make_photos(folder, args.photos)
        size = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        settings = request("finetune", None, values).settings("default")
        files: dict[str, Any] = {"images": "files"}
        variants = {"files": files, "memory": {"images": "auto"}}
        if torch.cuda.is_available():
            variants["full"] = files | {"accelerate": "full"}
        rows = {}
        for train in (False, True):
            suffix = "" if train else ", views only"
            baseline = loader(folder, settings, args.workers, args.turns, train)
            rows[f"loader{suffix}"] = baseline
            print(f"loader{suffix}: {baseline}", flush=True)
            for name, changes in variants.items() if train else (("files", files),):
                row = ours(folder, replace(settings, **changes), args.turns, train)
                ratio = row["images_per_second"] / baseline["images_per_second"]
                rows[f"{name}{suffix}"] = row | {"ratio": round(ratio, 2)}
                print(f"{name}{suffix}: {rows[f'{name}{suffix}']}", flush=True)
    found = {
        "photos": args.photos,
        "bytes_per_photo": size // args.photos,
        "image_size": values["image_size"],
        "workers": args.workers,
        "rows": rows,
    }
    machine.write(args.out, found)


if __name__ == "__main__":
    main()
