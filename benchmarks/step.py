"""Time of one step and of the passes without gradients: plain, captured, compiled, and all of it.

    python benchmarks/step.py [--preset NAME] [--size 32] [--images 50000]
        [--variants plain "compiled and captured"] [--out FILE.json]

The images are random, since only the time counts. Times are medians over rounds in which the
variants take turns. The table also shows the throughput (operations counted on the network) and
that of a large matrix product on the same device. Without CUDA there is only the plain variant.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import machine
from pseudoloss.data import Data, arrays, open_source
from pseudoloss.engine import steps as steps_module
from pseudoloss.engine import trainer as trainer_module
from pseudoloss.engine.randomness import isolated_torch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter

ROUNDS = 5
LR = 1e-4  # weights hardly change, and with them the power and the time that arithmetic takes
VARIANTS = {
    "plain": ("off", True),
    "captured": ("capture", True),
    "compiled": ("auto", False),
    "compiled and captured": ("auto", True),
}


class Loud(SilentReporter):
    def notice(self, text: str) -> None:
        print(f"  ({text})", flush=True)


@contextmanager
def uncaptured() -> Iterator[None]:
    """Trainers that are built in here run their calls one kernel at a time."""
    modules = (steps_module, trainer_module)
    before = [module.capture for module in modules]
    for module in modules:
        module.capture = lambda call, on_failure: call
    try:
        yield
    finally:
        for module, capture in zip(modules, before, strict=True):
            module.capture = capture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cifar100-id50")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    data = random_images(args)
    ceiling = None
    times: dict[str, dict[str, float]] = {}
    first_call: dict[str, float] = {}
    with isolated_torch():
        trainers = {}
        for name in args.variants:
            accelerate, captured = VARIANTS[name]
            values = {"accelerate": accelerate, "corrupt": None, "device": args.device}
            settings = request(args.preset, None, values).settings("default")
            with nullcontext() if captured else uncaptured():
                trainer = Trainer(data, settings, Loud())
                trainer.lr.fill_(LR)
                start = time.perf_counter()
                for phase in range(len(trainer.phases)):
                    for _ in range(5):
                        ready(trainer, phase)
                        call_of(trainer, phase)()
                for _ in range(4):
                    trainer.score(settings.epochs - 1)
                    trainer.validate()
            wait(trainer)
            first_call[name] = time.perf_counter() - start
            trainers[name] = trainer
            if trainer.device.type != "cuda":
                break
        for name, trainer in trainers.items():
            parts: dict[str, tuple[Callable[[], Any], int]] = {
                "warm-up step": (call_of(trainer, 0), args.steps),
                "step": (call_of(trainer, 1), args.steps),
                "scoring": (lambda t=trainer: t.score(t.settings.epochs - 1), 1),
                "validation": (trainer.validate, 1),
            }
            found: dict[str, list[float]] = {part: [] for part in parts}
            for _ in range(ROUNDS):
                for part, (call, calls) in parts.items():
                    found[part].append(timed(trainer, call, calls))
            times[name] = {part: median(values) for part, values in found.items()}
        any_trainer = next(iter(trainers.values()))
        if any_trainer.device.type == "cuda":
            ceiling = product_ceiling()
    for name, trainer in trainers.items():
        for network in trainer.networks.values():
            if not all(bool(p.isfinite().all()) for p in network.parameters()):
                raise SystemExit(f"{name}: weights are not finite, so the times do not count")
    flops = arithmetic(any_trainer)
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


def call_of(trainer: Trainer, phase: int) -> Callable[[], Any]:
    """The step of a phase."""
    return trainer.steps[phase][0][2]


def ready(trainer: Trainer, phase: int = 0) -> None:
    """A step needs the order and random numbers of an epoch; here always those of step 1."""
    step, feed, _ = trainer.steps[phase][0]
    for network in trainer.networks.values():
        network.train()
    random = torch.Generator(trainer.device).manual_seed(0)
    for _ in feed.batches(step, trainer.state, random, limit=1):
        pass


def timed(trainer: Trainer, call: Callable[[], Any], calls: int) -> float:
    """Milliseconds of a call."""
    ready(trainer)
    wait(trainer)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait(trainer)
    return (time.perf_counter() - start) / calls * 1e3


def wait(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def arithmetic(trainer: Trainer) -> dict[str, int]:
    """Floating-point operations of each part: a backward pass is two forward passes."""
    height, width = trainer.views.size
    image = torch.zeros(1, trainer.data.train.channels, height, width, device=trainer.device)
    network = next(iter(trainer.networks.values()))
    was, network.fused = network.fused, False
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()
        network(image)
    network.fused = was
    forward, batch = counter.get_total_flops(), trainer.settings.batch_size
    warm_up, main = (phase.steps[0].cost for phase in trainer.phases)
    return {
        "warm-up step": warm_up * batch * forward,
        "step": main * batch * forward,
        "scoring": len(trainer.data.train) * forward,
        "validation": len(trainer.data.test or ()) * forward,
    }


def product_ceiling(size: int = 8192) -> float:
    """TFLOP/s of a large bf16 matrix product of random numbers."""
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
    first = next(iter(times))
    print(f"{'':16} {'':22} {'ms':>9} {f'× {first}':>8} {'TFLOP/s':>8}")
    for part in flops:
        for name, of in times.items():
            row = {
                "part": part,
                "variant": name,
                "milliseconds": of[part],
                f"times_{first}": times[first][part] / of[part],
                "tflops": flops[part] / of[part] / 1e9,
                "seconds_until_ready": first_call[name],
            }
            rows.append(row)
            print(
                f"{part:16} {name:22} {row['milliseconds']:9.3f} {row[f'times_{first}']:8.2f} "
                f"{row['tflops']:8.1f}"
            )
    if ceiling:
        print(f"a large matrix product reaches {ceiling:.0f} TFLOP/s here")
    print("ready after:", ", ".join(f"{name} {s:.1f} s" for name, s in first_call.items()))
    return rows


if __name__ == "__main__":
    main()
