"""Golden runs: a refactoring must not change a single bit of what training on the CPU produces.

    python benchmarks/golden.py                 # compare with benchmarks/results/golden-cpu.json
    python benchmarks/golden.py --record        # write the file anew
    python benchmarks/golden.py pls ce          # only some of the runs

Each run is a short `pseudoloss train` on digits or on a folder of small images. Three hashes are
kept of it: of the values in labels.csv, of the values in metrics.jsonl without times, and of the
weights. Names of columns and keys are left out, so renaming one does not change a hash. Bits depend
on the processor and on the version of torch; the file names both.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

from pseudoloss.cli import main as pseudoloss

FILE = Path(__file__).parent / "results" / "golden-cpu.json"
SHORT = ("--preset", "digits-id40", "--epochs", "4", "--warmup", "2", "--seed", "3")
ACTIONS = {"keep": 0, "relabel": 1, "look": 2, "review": 2}

# Arguments of each run, beside SHORT.
RUNS: dict[str, tuple[str, ...]] = {
    "pls": (),
    "ce": ("--method", "ce"),
    "mixup": ("--method", "mixup"),
    "elr": ("--method", "elr"),
    "co-teaching": ("--method", "co-teaching"),
    **{
        f"noise-metric-{name}": ("--noise-metric", name, "--pad", "1")
        for name in ("loss", "capped-loss", "agreement", "disagreement", "js", "kl")
    },
    **{
        f"trust-metric-{name}": ("--trust-metric", name)
        for name in ("confidence", "entropy", "threshold")
    },
    "no-correct": ("--no-correct",),
    "no-contrast": ("--no-contrast",),
    "no-trust-in-classification": ("--no-trust-in-classification",),
    "no-trust-in-contrast": ("--no-trust-in-contrast",),
    "no-mixup": ("--no-mixup",),
    "no-balance": ("--balance", "0"),
    "balance-prior-given": ("--balance-prior", "given"),
    "threshold-on-clean": ("--threshold-on", "clean", "--threshold", "0.5"),
    "norm-max": ("--pseudo-label-norm", "max"),
    "mode-eval": ("--pseudo-label-mode", "eval"),
    "weighting-interpolated": ("--weighting", "interpolated"),
    "weighting-first": ("--weighting", "first"),
    "contrast-class-own": ("--contrast-class", "own"),
    "accumulate": ("--accumulate", "2"),
    "compare-metrics": ("--compare-metrics",),
    "flip-and-pad": ("--flip", "--pad", "1"),
    "all-warm-up": ("--warmup", "4"),
    "images-on-host": ("--images", "host"),
    "timm": ("--network", "resnet10t", "--epochs", "2", "--warmup", "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="runs to make (default: all)")
    parser.add_argument("--record", action="store_true", help="write the file anew")
    args = parser.parse_args()
    torch.set_num_threads(2)  # the number of threads changes how sums are rounded
    every = {**RUNS, "folder": (), "resumed": ()}
    names = args.names or list(every)
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            found[name] = hashes(make(name, Path(work)))
            print(name, *found[name].values(), flush=True)
    here = {"torch": torch.__version__, "processor": processor()}
    if args.record:
        before = json.loads(FILE.read_text())["runs"] if args.names and FILE.exists() else {}
        FILE.write_text(json.dumps({"machine": here, "runs": before | found}, indent=1) + "\n")
        return
    recorded = json.loads(FILE.read_text())
    if recorded["machine"] != here:
        print(f"note: recorded on {recorded['machine']}, this is {here}")
    changed = []
    for name, new in found.items():
        old = recorded["runs"].get(name)
        if new != old:
            kinds = ", ".join(kind for kind in new if new[kind] != old[kind]) if old else "is new"
            changed.append(f"{name}: {kinds}")
    print("\n".join(["changed:", *changed]) if changed else f"{len(found)} runs, no bit changed")
    sys.exit(bool(changed))


def make(name: str, work: Path) -> Path:
    """Train a run; its folder."""
    out = work / name
    if name == "folder":
        flags = ("--epochs", "3", "--warmup", "1", "--seed", "3", "--network", "small-cnn")
        train(str(image_folder(work / "images")), out, *flags)
    elif name == "resumed":  # stops after every epoch
        train("digits", out, *SHORT, "--minutes", "1e-9")
        while not (out / "summary.json").exists():
            train("digits", out, *SHORT, "--minutes", "1e-9", "--resume")
    else:
        train("digits", out, *SHORT, *RUNS[name])
    return out


def train(source: str, out: Path, *flags: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pseudoloss(["train", source, "--out", str(out), "--device", "cpu", *flags])
    if code:
        raise SystemExit(f"{out.name}: exit code {code}\n{said.getvalue()}")


def image_folder(path: Path) -> Path:
    """300 digits as PNG files, every fifth in a wrong folder, and one broken file."""
    digits = load_digits()
    for i in range(300):
        label = (digits.target[i] + (i % 5 == 0)) % 10
        pixels = np.kron(digits.images[i] * 15.9, np.ones((2, 2))).astype(np.uint8)
        file = path / f"class-{label}" / f"{i:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    (path / "class-0" / "broken.png").write_bytes(b"no image")
    return path


def hashes(run: Path) -> dict[str, str]:
    with (run / "labels.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    labels = [[ACTIONS.get(value, value.replace(str(run.parent), "")) for value in r] for r in rows]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    weights = hashlib.sha256()
    with safe_open(run / "model.safetensors", "np") as file:
        for key in sorted(file.keys()):
            weights.update(key.encode() + file.get_tensor(key).tobytes())
    return {
        "labels": short(labels),
        "metrics": short([values(line) for line in lines]),
        "weights": weights.hexdigest()[:16],
    }


def values(entry: Any) -> Any:
    """A JSON value without the names in it."""
    if isinstance(entry, dict):
        return [values(part) for part in entry.values()]
    return [values(part) for part in entry] if isinstance(entry, list) else entry


def short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor()


if __name__ == "__main__":
    main()
