"""What a process group costs on one GPU: a step without one, and with NCCL and one process.

    python benchmarks/processes.py --out FILE.json              # without
    torchrun --nproc-per-node 1 benchmarks/processes.py --out FILE.json --sync-norm

The images are random. The times are medians over rounds of steps; losses after the first steps show
that the same is computed. With --sync-norm batch norm takes the path of several processes.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from pseudoloss import distributed
from pseudoloss.config import Settings
from pseudoloss.data import arrays
from pseudoloss.engine.randomness import generator, isolated_torch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.files import write_json
from pseudoloss.nn.sync_norm import synchronise_norms
from pseudoloss.progress import SilentReporter

STEPS, ROUNDS = 40, 5


class Noting(SilentReporter):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def measure(method: str, sync_norm: bool, images: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
    data = arrays(pixels, np.arange(images) % 100)
    reporter = Noting()
    settings = Settings(method=method, epochs=4, warmup=1, lr=0.02)
    with Trainer(data, settings, reporter) as trainer:
        if sync_norm:
            for network in trainer.networks.values():
                network.synced = True
                synchronise_norms(network)
        prepared = trainer.steps[1][0]
        steps = trainer.run_steps(prepared, generator(trainer.device, 1, "epoch", 1))
        for _ in range(10):
            next(steps)
        first = trainer.tally.loss_sum.item() / 10
        times = []
        for _ in range(ROUNDS):
            wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                next(steps)
            wait()
            times.append((time.perf_counter() - start) / STEPS)
        start = time.perf_counter()
        trainer.score(1)
        trainer.validate()
        for _ in range(3):
            wait()
            start = time.perf_counter()
            trainer.score(1)
            wait()
        return {
            "seconds_per_step": statistics.median(times),
            "seconds_per_scoring": time.perf_counter() - start,
            "mean_loss_of_first_steps": first,
            "notices": reporter.notices,
        }


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sync-norm", action="store_true")
    parser.add_argument("--images", type=int, default=60_000)
    args = parser.parse_args()
    with distributed.session("auto"), isolated_torch():
        found = {
            "processes": distributed.size() if distributed.active() else None,
            "sync_norm": args.sync_norm,
            "versions": machine.versions(),
            "hardware": machine.hardware(),
            "commit": machine.commit(),
            "methods": {
                method: measure(method, args.sync_norm, args.images)
                for method in ("ce", "pls", "co-teaching")
            },
        }
    print(found)
    if args.out:
        write_json(args.out, found)


if __name__ == "__main__":
    main()
