"""Time of one step and of the passes without gradients: plain, captured, compiled, and all of it.

    python benchmarks/step.py [--preset NAME] [--size 32] [--images 50000] [--out FILE.json]

The images are random, since only the time counts. Times are medians over rounds in which the
variants take turns. The table also shows the throughput (operations counted on the network) and
that of a large matrix product on the same device. Without CUDA there is only the plain variant.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import machine
from pseudoloss.config import request
from pseudoloss.data import Data, arrays, open_source
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.training import private_chance
from pseudoloss.progress import SilentReporter

ROUNDS = 5
VARIANTS = {
    "plain": ("off", True),
    "captured": ("capture", True),
    "compiled": ("auto", False),
    "compiled and captured": ("auto", True),
}


class NoticeReporter(SilentReporter):
    def notice(self, text: str) -> None:
        print(f"  ({text})", flush=True)


class Uncaptured(Trainer):
    def _captured(self, call: Any, what: str) -> Any:
        return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cifar100-id50")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    data = random_images(args)
    ceiling = None
    times: dict[str, dict[str, float]] = {}
    first_call: dict[str, float] = {}
    with private_chance():
        trainers = {}
        for name, (accelerate, captured) in VARIANTS.items():
            values = {"accelerate": accelerate, "corrupt": None, "device": args.device}
            settings = request(args.preset, None, values).settings("default")
            trainer = (Trainer if captured else Uncaptured)(data, settings, NoticeReporter())
            start = time.perf_counter()
            for step in (trainer.warm_up_step, trainer.main_step):
                for _ in range(5):
                    prepare(trainer)
                    step()
            for _ in range(4):
                trainer.track(settings.epochs)
                trainer.validate()
            wait(trainer)
            first_call[name] = time.perf_counter() - start
            trainers[name] = trainer
            if trainer.device.type != "cuda":
                break
        for name, trainer in trainers.items():
            parts: dict[str, tuple[Callable[[], Any], int]] = {
                "warm-up step": (trainer.warm_up_step, args.steps),
                "step": (trainer.main_step, args.steps),
                "tracking pass": (lambda s=trainer: s.track(s.settings.epochs), 1),
                "validation": (trainer.validate, 1),
            }
            found: dict[str, list[float]] = {part: [] for part in parts}
            for _ in range(ROUNDS):
                for part, (call, calls) in parts.items():
                    found[part].append(measure(trainer, call, calls))
            times[name] = {part: median(values) for part, values in found.items()}
        any_trainer = next(iter(trainers.values()))
        if any_trainer.device.type == "cuda":
            ceiling = measure_matrix_product()
    flops = count_operations(any_trainer)
    rows = report(times, first_call, flops, ceiling)
    tflop = {part: count / 1e12 for part, count in flops.items()}
    machine.write(args.out, {"product_tflops": ceiling, "tflop": tflop, "rows": rows})


def random_images(args: argparse.Namespace) -> Data:
    random = np.random.default_rng(0)
    shape = (args.size, args.size, 3)
    test = max(1, args.images // 5)
    return open_source(
        arrays(
            random.integers(0, 256, (args.images, *shape), dtype=np.uint8),
            np.arange(args.images) % args.classes,
            test_images=random.integers(0, 256, (test, *shape), dtype=np.uint8),
            test_labels=np.arange(test) % args.classes,
        )
    )


def prepare(trainer: Trainer) -> None:
    """Prepare the first step of an epoch: a step needs the random numbers of its epoch."""
    trainer.network.train()
    trainer.step.zero_()
    for _ in zip(range(1), trainer.pixels.batches(trainer.order_SB), strict=False):
        pass


def measure(trainer: Trainer, call: Callable[[], Any], calls: int) -> float:
    """Milliseconds per call."""
    prepare(trainer)
    wait(trainer)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait(trainer)
    return (time.perf_counter() - start) / calls * 1e3


def wait(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def count_operations(trainer: Trainer) -> dict[str, int]:
    """Floating-point operations of each part; a backward pass counts as two forward passes."""
    height, width = trainer.views.size
    image = torch.zeros(1, trainer.data.train.channels, height, width, device=trainer.device)
    was, trainer.network.fused = trainer.network.fused, False
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        trainer.network.eval()
        trainer.network(image)
    trainer.network.fused = was
    forward = counter.get_total_flops()
    batch, method = trainer.settings.batch_size, trainer.method
    contrast = getattr(method, "contrast", False)
    passes = 3 * (2 if contrast else 1) + (2 if method.guess is not None else 0)
    return {
        "warm-up step": 3 * batch * forward,
        "step": passes * batch * forward,
        "tracking pass": len(trainer.data.train) * forward,
        "validation": len(trainer.data.test or ()) * forward,
    }


def measure_matrix_product(size: int = 8192) -> float:
    """TFLOP/s of a large matrix product of random numbers in bf16."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 5 * 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def report(
    times: dict[str, dict[str, float]],
    first_call: dict[str, float],
    flops: dict[str, int],
    ceiling: float | None,
) -> list[dict[str, Any]]:
    rows = []
    print(f"{'':16} {'':22} {'ms':>9} {'× plain':>8} {'TFLOP/s':>8}")
    for part in flops:
        for name, of in times.items():
            row = {
                "part": part,
                "variant": name,
                "milliseconds": of[part],
                "times_plain": times["plain"][part] / of[part],
                "tflops": flops[part] / of[part] / 1e9,
                "seconds_until_ready": first_call[name],
            }
            rows.append(row)
            print(
                f"{part:16} {name:22} {row['milliseconds']:9.3f} {row['times_plain']:8.2f} "
                f"{row['tflops']:8.1f}"
            )
    if ceiling:
        print(f"a large matrix product reaches {ceiling:.0f} TFLOP/s")
    print("ready after:", ", ".join(f"{name} {s:.1f} s" for name, s in first_call.items()))
    return rows


if __name__ == "__main__":
    main()
