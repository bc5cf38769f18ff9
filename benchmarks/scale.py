"""What grows with the number of images and classes: memory per image, and the two-mode mixture.

    python benchmarks/scale.py --values 10000000 100000000 --out benchmarks/results/scale-cpu.json

The mixture is fitted to random losses. Memory for each image is that of the state of a method for
some images, divided by their number. docs/scale.md computes with both.
"""

import argparse
import resource
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch

import machine
from pseudoloss import methods
from pseudoloss.config import Settings
from pseudoloss.files import write_json
from pseudoloss.methods.base import tensors_of
from pseudoloss.methods.mixture import fit_two_modes

CLASSES = (100, 1_000, 10_000)


def state_bytes(method: str, classes: int, images: int) -> float:
    """Bytes of the state for each image. A large dataset keeps less of each, so the state is that
    of many images, on a device without memory."""
    given_N = torch.zeros(images, dtype=torch.long, device="meta")
    settings = Settings(method=method, epochs=2, warmup=1)
    built = methods.build(settings, torch.zeros(2, dtype=torch.long), classes, False)
    state = built.start(given_N, classes)
    return sum(tensor.nbytes for tensor in tensors_of(state).values()) / images


def path_bytes(count: int = 100_000) -> float:
    """Bytes of Python objects for each image file: its path, its name in tables and its label."""
    tracemalloc.start()
    root = Path("/data/train")
    kept = [
        (root / f"class{i % 100:05}" / f"image_{i:09}.jpg", f"train/class{i % 100:05}/{i:09}.jpg")
        for i in range(count)
    ]
    for path, _ in kept:
        str(path)  # is kept by the path
    found = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    return found


def fit(count: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    values_N = torch.empty(count)
    for part in values_N.split(2**22):
        noise = torch.randn(len(part), generator=random)
        wrong = torch.rand(len(part), generator=random) < 0.3
        part.copy_(torch.where(wrong, 5 + noise, 0.5 + 0.3 * noise).clamp(min=0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    mixture = fit_two_modes(values_N)
    seconds = time.perf_counter() - start
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "values": count,
        "seconds": seconds,
        "gib_beside_the_values": more / 2**20,
        "means": mixture.means.tolist(),
        "weights": mixture.weights.tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, nargs="+", default=[10_000_000])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {
        "versions": machine.versions(),
        "hardware": machine.hardware() | {"threads": torch.get_num_threads()},
        "commit": machine.commit(),
        "state_bytes_per_image": {
            method: {str(C): state_bytes(method, C, 10**8) for C in CLASSES}
            for method in ("ce", "co-teaching", "pls", "elr")
        },
        "path_bytes_per_image": path_bytes(),
        "mixture": [fit(count) for count in args.values],
    }
    print(found)
    if args.out:
        write_json(args.out, found)


if __name__ == "__main__":
    main()
