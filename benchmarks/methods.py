"""What an epoch of every method costs beside one of PLS: seconds and memory.

    python benchmarks/methods.py [--methods pls divide-mix ...] [--images 50000] [--out FILE.json]

Each method has the network, batch size and optimiser of its preset for CIFAR-100. The images are
random, since only the time counts, and half of the labels count as wrong in every way in which a
method can divide them. The times are medians over rounds of steps, times the steps of an epoch;
an epoch ends with the scoring of all images and the validation. Each method has a process of its
own, so that memory is that of one method. Notices say what could not be captured.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import machine
from pseudoloss.config import METHOD_SETTINGS, Settings
from pseudoloss.data import Data, arrays, open_source
from pseudoloss.engine.randomness import generator, isolated_torch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.methods.base import tensors_of
from pseudoloss.nn.devices import peak_memory
from pseudoloss.presets import PRESETS, request
from pseudoloss.progress import SilentReporter

ROUNDS = 5
LR = 1e-4  # weights hardly change
ROWS = ("cifar100-id50", "cifar100-inet-40-20")  # of the paper, in this order of preference


class Noting(SilentReporter):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def settings_of(method: str, device: str) -> tuple[str, Settings]:
    """The preset of a method, and its settings without noise."""
    names = [f"{row}-{method}" for row in ROWS]
    preset = next((name for name in names if name in PRESETS), ROWS[0])
    values = {"method": method, "corrupt": None, "pool": None, "device": device}
    return preset, request(preset, None, values).settings("default")


def random_images(count: int) -> Data:
    random = np.random.default_rng(0)
    test = max(count // 5, 1)
    return open_source(
        arrays(
            random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8),
            np.arange(count) % 100,
            test_images=random.integers(0, 256, (test, 32, 32, 3), dtype=np.uint8),
            test_labels=np.arange(test) % 100,
        )
    )


def flag_half(trainer: Trainer) -> None:
    """Every mask of the images is true for a random half of them."""
    random = torch.Generator(trainer.device).manual_seed(0)
    half_N = torch.rand(len(trainer.given_N), generator=random, device=trainer.device) < 0.5
    for tensor in tensors_of(trainer.state).values():
        if tensor.dtype == torch.bool and tensor.shape[-1:] == half_N.shape:
            tensor.copy_(half_N.expand_as(tensor))


def wait(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def seconds_of_steps(trainer: Trainer, epoch: int, count: int) -> tuple[float, int]:
    """Seconds of all steps of an epoch, from the first ones; and how many there are."""
    seconds, total = 0.0, 0
    for prepared in trainer.steps[trainer.phase_of(epoch)[0]]:
        steps = prepared.feed.steps(trainer.state)
        random = generator(trainer.device, 1, "epoch", epoch)
        times: list[float] = []
        each = max(1, min(count, steps // (ROUNDS + 1)))
        running = trainer.run_steps(prepared, random, limit=each * (ROUNDS + 1))
        for number in range(ROUNDS + 1):
            wait(trainer)
            start = time.perf_counter()
            taken = sum(1 for _, _ in zip(range(each), running, strict=False))
            wait(trainer)
            if number and taken:  # the first round compiles and captures
                times.append((time.perf_counter() - start) / taken)
        seconds += median(times or [0.0]) * steps
        total += steps
    return seconds, total


def measure(method: str, images: int, device: str, steps: int) -> dict[str, Any]:
    with isolated_torch():
        return measure_trainer(method, random_images(images), device, steps)


def measure_trainer(method: str, data: Data, device: str, steps: int) -> dict[str, Any]:
    preset, settings = settings_of(method, device)
    reporter = Noting()
    start = time.perf_counter()
    with Trainer(data, settings, reporter) as trainer:
        trainer.lr.fill_(LR)
        last_of_warm_up, last = max(settings.warmup_epochs - 1, 0), settings.epochs - 1
        found: dict[str, Any] = {"preset": preset, "batch_size": settings.batch_size}
        for name, epoch in (("warm-up", last_of_warm_up), ("main", last)):
            trainer.method.begin_epoch(trainer.state, epoch)
            flag_half(trainer)
            seconds, count = seconds_of_steps(trainer, epoch, steps)
            found[name] = {"train_seconds": seconds, "steps": count}
            if trainer.method.scores_after(epoch):
                for _ in range(4):  # plain calls first
                    trainer.score(epoch)
                found[name]["score_seconds"] = timed(trainer, lambda e=epoch: trainer.score(e))
        for _ in range(4):
            trainer.validate()
        found["validate_seconds"] = timed(trainer, trainer.validate)
        main = found["main"]
        found["epoch_seconds"] = (
            main["train_seconds"] + main.get("score_seconds", 0.0) + found["validate_seconds"]
        )
        memory = peak_memory(trainer.device)
        found["peak_memory_gib"] = None if memory is None else memory / 2**30
        found["seconds_in_all"] = time.perf_counter() - start
        weights = [p for network in trainer.networks.values() for p in network.parameters()]
        found["finite"] = all(bool(p.isfinite().all()) for p in weights)
    return found | {"notices": reporter.notices}


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def timed(trainer: Trainer, call: Any) -> float:
    times = []
    for _ in range(ROUNDS):
        wait(trainer)
        start = time.perf_counter()
        call()
        wait(trainer)
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = list(METHOD_SETTINGS)
    parser.add_argument("--methods", nargs="+", choices=every, default=every)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for method in args.methods:
        given = (method, args.images, args.device, args.steps)
        one = found[method] = in_own_process(measure, *given)
        memory = one["peak_memory_gib"]
        print(
            f"{method:22} {one['epoch_seconds']:8.2f} s per epoch "
            f"({one['main']['steps']} steps; warm-up {one['warm-up']['train_seconds']:.2f} s)"
            + ("" if memory is None else f"  {memory:.1f} GiB")
            + ("" if one["finite"] else "  NOT FINITE: the time does not count")
            + "".join(f"\n  ({text})" for text in one["notices"]),
            flush=True,
        )
        machine.write(args.out, {"images": args.images, "methods": found})


if __name__ == "__main__":
    main()
