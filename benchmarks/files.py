"""Training on photographs: ours, from their files, against the usual DataLoader.

    python benchmarks/files.py [--photos N] [--network NAME] [--batch-size B] [--workers W]
        [--quick] [--out FILE.json]

Photographs of several sizes are made up and written as JPEG files. Both sides train PLS on them
with the same network, losses and updates; what differs is how three views of an image come about:

- loader: torchvision's ImageFolder, an image at a time through PIL and torchvision's transforms, in
  worker processes, and plain calls. The usual loop.
- files: `pseudoloss train --images files`: decoded once in worker processes, views on the device.
- memory: the default where decoded images fit into memory: decoded once for all epochs.
- full: as files, with --accelerate full (a GPU only).

Numbers are images a second of an epoch behind the warm-up, the best of a few, and the share of the
time in which the GPU was busy, as its driver counts it. "views only" makes the views of an epoch
and trains nothing.
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
from pseudoloss.config import Settings, request
from pseudoloss.data import Data, ReadOptions, find_source
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.trainer import Trainer, see
from pseudoloss.engine.training import private_chance
from pseudoloss.methods import Batch, ViewBatch
from pseudoloss.methods.mixup import mix
from pseudoloss.nn.views import (
    CROP_AREA,
    CROP_RATIO,
    GREY_PROBABILITY,
    HUE,
    JITTER,
    JITTER_PROBABILITY,
)
from pseudoloss.progress import SilentReporter

SIZES = ((640, 480), (800, 600), (1024, 768), (1280, 960), (768, 1024), (500, 375))
CLASSES = 10


def make_photo(folder: Path, number: int) -> None:
    """Large shapes and some grain: as large a file as a photograph of its size."""
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
    listing = find_source(str(folder), ReadOptions(hold_out=0))  # ImageFolder holds none out
    assert not isinstance(listing, Data)
    reader, seen = choose_reader(listing, settings, "crop")
    return listing.read(reader, seen, settings.images, strict=True)[0]


def timed(epoch: Any, images: int, device: torch.device, turns: int) -> dict[str, Any]:
    """Images a second, and how busy the GPU was; the first turn does not count."""
    best, share = 0.0, None
    for turn in range(turns + 1):
        with machine.Watch(every=0.25) as watch:
            start = time.perf_counter()
            epoch(turn)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        if turn and images / seconds > best:
            best, share = images / seconds, watch.found.get("busy")
    return {"images_a_second": round(best, 1), "gpu_busy": share}


def ours(folder: Path, settings: Settings, turns: int, train: bool = True) -> dict[str, Any]:
    with private_chance(), Trainer(read(folder, settings), settings, SilentReporter()) as trainer:
        device = trainer.device

        def epoch(turn: int) -> None:
            if train:
                trainer.train_epoch(settings.warmup_epochs + turn)
                return
            chance = torch.Generator(device).manual_seed(turn)
            order_N = torch.randperm(len(trainer.pixels), generator=chance, device=device)
            trainer.order_SB.copy_(order_N[: trainer.order_SB.numel()].view_as(trainer.order_SB))
            trainer.step.zero_()
            trainer._draw(chance)
            for _ in trainer.pixels.batches(trainer.order_SB):
                trainer.method.show(trainer.views, trainer._batch(0))
                trainer.step += 1

        return timed(epoch, trainer.steps * settings.batch_size, device, turns)


class ThreeViews:
    """What torchvision makes of one image."""

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


def usual(
    folder: Path, settings: Settings, workers: int, turns: int, train: bool = True
) -> dict[str, Any]:
    """The usual loop: a loader that makes three views, and plain calls."""
    plain = replace(settings, accelerate="off", images="host")
    with private_chance(), Trainer(read(folder, plain), plain, SilentReporter()) as trainer:
        device, method = trainer.device, trainer.method
        loader: DataLoader[Any] = DataLoader(
            WithIndex(str(folder), ThreeViews(trainer)),
            batch_size=settings.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )

        def epoch(turn: int) -> None:
            trainer.network.train()
            for views, index_B in loader:
                first, second, strong = (
                    view.to(device, non_blocking=True, memory_format=torch.channels_last)
                    for view in views
                )
                if not train:
                    continue
                index_B = index_B.to(device, non_blocking=True)
                partner_B = torch.randperm(len(index_B), device=device)
                lam = torch.rand((), device=device)
                given_B = trainer.given_N[index_B]
                batch = Batch(index_B, first, given_B, partner_B, lam, index_B[:, None])
                shown = ViewBatch([first, second], [mix(first, partner_B, lam), strong])
                seen = see(trainer.network, shown)
                trainer.optimiser.zero_grad(set_to_none=True)
                method.loss(seen, batch, trainer.memory).backward()
                trainer.optimiser.step()

        return timed(epoch, len(loader) * settings.batch_size, device, turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=int, default=4096)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="of the usual loader")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few photographs, tiny network")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.photos, args.network, args.batch_size, args.turns = 80, "resnet10t", 8, 1
    values = {
        "network": args.network,
        "batch_size": args.batch_size,
        "weights": None,
        "image_size": 64 if args.quick else 224,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        make_photos(folder, args.photos)
        size = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        settings = request("finetune", None, values).settings("default")
        files: dict[str, Any] = {"images": "files"}
        kinds = {"files": files, "memory": {"images": "auto"}}
        if torch.cuda.is_available():
            kinds["full"] = files | {"accelerate": "full"}
        rows = {}
        for train in (False, True):
            what = "" if train else ", views only"
            rows[f"loader{what}"] = usual(folder, settings, args.workers, args.turns, train)
            usually = rows[f"loader{what}"]["images_a_second"]
            print(f"loader{what}: {rows[f'loader{what}']}", flush=True)
            for name, changes in kinds.items() if train else (("files", files),):
                row = ours(folder, replace(settings, **changes), args.turns, train)
                rows[f"{name}{what}"] = row | {"ratio": round(row["images_a_second"] / usually, 2)}
                print(f"{name}{what}: {rows[f'{name}{what}']}", flush=True)
    found = {
        "photos": args.photos,
        "bytes_a_photo": size // args.photos,
        "image_size": values["image_size"],
        "workers": args.workers,
        "rows": rows,
    }
    machine.write(args.out, found)


if __name__ == "__main__":
    main()
