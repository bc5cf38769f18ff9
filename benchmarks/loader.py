"""Views of a step: our batched views compared with a DataLoader with PIL and torchvision.

    python benchmarks/loader.py [--workers N] [--quick] [--out FILE.json]

A step of PLS needs three views of each image: two weak and one strong. Ours are made from a uint8
tensor, one batch at a time, on the CPU and, if there is one, on the GPU (compiled and captured, as
in training). The usual loop sends one PIL image at a time through torchvision's transforms, in
worker processes. Both take turns; the results are images per second, medians over turns.

The last rows are a whole epoch of PLS on digits, on the CPU. Network, losses and update are the
same; only the source of the views differs. The loader has its own order of images, so the training
is meaningless, and only the time counts. Worker processes and torch's threads can slow each other
down, so the loader is also measured with one thread. Ours uses as many threads as training does.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

import machine
from pseudoloss.data import corrupt, open_source
from pseudoloss.engine.capture import capture, compiled, first_try
from pseudoloss.engine.randomness import isolated_torch
from pseudoloss.engine.steps import make_step
from pseudoloss.engine.trainer import Trainer
from pseudoloss.nn.views import (
    CROP_AREA,
    CROP_RATIO,
    GREY_PROBABILITY,
    HUE,
    JITTER,
    JITTER_PROBABILITY,
    STRONG_DRAWS,
    WEAK_DRAWS,
    Views,
)
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter

Three = tuple[Tensor, Tensor, Tensor]


class ThreeViews(Dataset[Three]):
    """The three views of an image, by torchvision."""

    def __init__(self, images_NCHW: Tensor, views: Views) -> None:
        self.images = images_NCHW.permute(0, 2, 3, 1).numpy()
        mirror = T.RandomHorizontalFlip(0.5 if views.flip else 0)
        numbers = [T.ToTensor(), T.Normalize(views.mean_C.tolist(), views.std_C.tolist())]
        self.weak = T.Compose([T.RandomCrop(views.size, padding=views.pad), mirror, *numbers])
        self.strong = T.Compose(
            [
                T.RandomResizedCrop(views.size, CROP_AREA, CROP_RATIO, T.InterpolationMode.BICUBIC),
                mirror,
                T.RandomApply([T.ColorJitter(JITTER, JITTER, JITTER, HUE)], JITTER_PROBABILITY),
                T.RandomGrayscale(GREY_PROBABILITY),
                *numbers,
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Three:
        pixels = self.images[index]
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        return self.weak(image), self.weak(image), self.strong(image)


def loader(images_NCHW: Tensor, views: Views, batch: int, workers: int, pin: bool) -> Any:
    return DataLoader(
        ThreeViews(images_NCHW, views),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin,
    )


def three_views(views: Views, images_BCHW: Tensor, draws_BK: Tensor) -> Three:
    first, second, strong = draws_BK.split([WEAK_DRAWS, WEAK_DRAWS, STRONG_DRAWS], dim=1)
    return (
        views.weak(images_BCHW, first),
        views.weak(images_BCHW, second),
        views.strong(images_BCHW, strong),
    )


def notice(reason: str) -> None:
    print(f"not compiled or not captured: {reason}", file=sys.stderr)


def batched(images_NCHW: Tensor, views: Views, batch: int) -> Callable[[], None]:
    """A pass over all images with our views."""
    images_NCHW = images_NCHW.to(views.mean_C.device)
    device, N = images_NCHW.device, len(images_NCHW)
    index_B = torch.zeros(batch, dtype=torch.long, device=device)
    draws_BK = torch.zeros(batch, 2 * WEAK_DRAWS + STRONG_DRAWS, device=device)

    def step(make: Callable[[Views, Tensor, Tensor], Three]) -> Three:
        return make(views, images_NCHW[index_B], draws_BK)

    call: Callable[[], Three] = partial(step, three_views)
    if device.type == "cuda":
        call = capture(first_try(partial(step, compiled(three_views)), call, notice), notice)

    def run() -> None:
        order_N = torch.randperm(N, device=device)
        for i in range(N // batch):
            index_B.copy_(order_N[i * batch : (i + 1) * batch])
            draws_BK.uniform_()
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def one_by_one(images_NCHW: Tensor, views: Views, batch: int, workers: int) -> Callable[[], None]:
    """A pass over all images with a DataLoader, including the copy to the device."""
    device = views.mean_C.device
    batches = loader(images_NCHW, views, batch, workers, pin=device.type == "cuda")

    def run() -> None:
        for made in batches:
            for view in made:
                view.to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


class LoaderViews:
    """A replacement for `Views` in a step: returns the views of a loader, one after the other."""

    def __init__(self, batches: Any) -> None:
        self.made = (view for batch in batches for view in batch)

    def weak(self, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
        return next(self.made)

    strong = weak


def epochs(workers: int, quick: bool) -> tuple[Callable[[], None], Callable[[int], None], int]:
    """An epoch of PLS on digits with our views, the same with a loader and a number of threads, and
    the number of images in it."""
    data = open_source("digits")
    settings = request("digits-id40", None, {"device": "cpu"}).settings(data.preset)
    train = corrupt(data.train, settings.corrupt or "", settings.seed)
    if quick:
        keep = slice(0, 2 * settings.batch_size)
        train = type(train)(train.images_NCHW[keep], train.given_N[keep], train.classes)
    trainer = Trainer(type(data)(data.name, train), settings, SilentReporter())
    batches = loader(train.images_NCHW, trainer.views, settings.batch_size, workers, pin=False)
    epoch, threads = settings.warmup_epochs, torch.get_num_threads()
    phase, _ = trainer.phase_of(epoch)
    ((step, feed, our_call),) = trainer.steps[phase]

    def ours() -> None:
        trainer.steps[phase] = [(step, feed, our_call)]
        trainer.train_epoch(epoch)

    def with_loader(count: int) -> None:
        call = make_step(
            step,
            feed,
            trainer.networks,
            trainer.optimisers,
            trainer.method.ema,
            LoaderViews(batches),  # type: ignore[arg-type]
            trainer.state,
            trainer.tally,
            trainer.accelerate,
            notice,
            lambda: None,
        )
        trainer.steps[phase] = [(step, feed, call)]
        torch.set_num_threads(count)
        trainer.train_epoch(epoch)
        torch.set_num_threads(threads)

    return ours, with_loader, feed.steps(trainer.state) * settings.batch_size


def take_turns(
    name: str, ours: Callable[[], None], other: Callable[[], None], images: int, turns: int
) -> dict[str, Any]:
    """Measure both in turns; the first turn, which starts workers and captures, is not counted."""
    seconds: dict[str, list[float]] = {"ours": [], "dataloader": []}
    for turn in range(turns + 1):
        for side, run in (("ours", ours), ("dataloader", other)):
            start = time.perf_counter()
            run()
            if turn:
                seconds[side].append(time.perf_counter() - start)
    rates = {side: images / median(times) for side, times in seconds.items()}
    ratio = rates["ours"] / rates["dataloader"]
    print(f"{name:42} {rates['ours']:12,.0f} {rates['dataloader']:12,.0f} {ratio:8.1f}", flush=True)
    return {
        "name": name,
        "images": images,
        "images_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "ratio": round(ratio, 2),
        "seconds": {side: [round(x, 4) for x in times] for side, times in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        "--workers",
        type=int,
        default=cores,
        help="worker processes of the loader (default: all cores)",
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of each, after the first")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="result file (.json)")
    args = parser.parse_args()
    turns = 1 if args.quick else args.turns

    random = np.random.default_rng(0)
    count = 512 if args.quick else 4096
    colour = torch.from_numpy(random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))
    digits = open_source("digits").train.images_NCHW[:count]
    # Images, and batch size, padding and flip of the presets.
    sets = {"32×32 colour": (colour, 256, 4, True), "8×8 grey": (digits, 32, 0, False)}
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

    print(f"{'images per second':42} {'ours':>12} {'DataLoader':>12} {'ratio':>8}")
    rows = []
    with isolated_torch():
        torch.manual_seed(0)
        for device in devices:
            for name, (images, B, pad, flip) in sets.items():
                C, *size = images.shape[1:]
                half, quarter = (torch.full((C,), x, device=device) for x in (0.5, 0.25))
                views = Views(half, quarter, (size[0], size[1]), pad, flip)
                ours = batched(images, views, B)
                other = one_by_one(images, views, B, args.workers)
                made = len(images) // B * B
                rows.append(take_turns(f"views, {name}, {device}", ours, other, made, turns))
        all_threads = torch.get_num_threads()  # training on small images uses only one
        ours, with_loader, made = epochs(args.workers, args.quick)
        for count in dict.fromkeys((all_threads, 1)):
            threads = f"{count} thread{'s' if count > 1 else ''}"
            name = f"epoch of digits, cpu, loader with {threads}"
            rows.append(take_turns(name, ours, partial(with_loader, count), made, turns))
    found = {
        "versions": machine.versions()
        | {"torchvision": torchvision.__version__, "pillow": PIL.__version__},
        "workers": args.workers,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    machine.write(args.out, found)


if __name__ == "__main__":
    main()
