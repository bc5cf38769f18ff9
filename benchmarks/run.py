"""Whole runs of a preset, as a user would start them: accuracy, and where the time goes.

    python benchmarks/run.py cifar100:DIR --preset cifar100-id50 --seeds 1 2 \
        --work runs --out benchmarks/results/cifar100-id50.json [--minutes 9] [-- --gamma 1 ...]

Each seed is `pseudoloss train` in a process of its own; `seconds` is the wall time of that process,
start-up and compilation included, `gpu` what the driver said meanwhile, on average.
`startup_seconds` is the time to the end of the first step: what the run says of it, and what a
process needs to import the package. With --minutes a run stops in time, and the same command goes
on with it later: its seconds are then those of all its processes together. What stands behind --
goes to every run.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import machine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--work", type=Path, required=True, help="where the run folders go")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes in all")
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)

    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    importing = import_seconds()
    runs = []
    for seed in args.seeds:
        run = one_run(args, seed, extra, deadline, importing)
        if run is None:
            print(f"seed {seed}: not finished; the same command goes on with it")
            break
        runs.append(run)
        accuracy, epochs = run["accuracy"], run["epoch_seconds"]
        print(
            f"seed {seed}: last {accuracy['last']:.2f}  best {accuracy['best']:.2f}  "
            f"{run['seconds']:.0f} s in all, {run['startup_seconds']:.1f} s to the first step, "
            + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in epochs.items())
            + " an epoch",
            flush=True,
        )
    if not runs:
        return
    if len(runs) > 1:
        print(f"mean of {len(runs)}: last {mean(run['accuracy']['last'] for run in runs):.2f}")
    places = {args.source: machine.without_place(args.source), str(args.work): "RUNS"}
    machine.write(args.out, {"settings": settings_of(args, runs[0]["seed"]), "runs": runs}, places)


def settings_of(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What the runs were trained with."""
    config = json.loads((folder_of(args, seed) / "config.json").read_text())
    return machine.published(config["settings"])


def folder_of(args: argparse.Namespace, seed: int) -> Path:
    return Path(args.work / f"{args.out.stem}-seed{seed}")


def import_seconds() -> float:
    """A process that only imports what training needs; the second one, as files are in memory."""
    times = []
    for _ in range(2):
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", "import pseudoloss.engine.training"], check=True)
        times.append(time.monotonic() - start)
    return times[-1]


def one_run(
    args: argparse.Namespace,
    seed: int,
    extra: list[str],
    deadline: float | None,
    importing: float,
) -> dict[str, Any] | None:
    """Train one seed, or go on with it; None where time ran out."""
    folder = folder_of(args, seed)
    clock = folder.with_suffix(".seconds")  # wall time of its processes so far
    driver = folder.with_suffix(".gpu")  # what the driver said of the GPU, in the last of them
    before = float(clock.read_text()) if clock.exists() else 0.0
    if not (folder / "summary.json").exists():
        left = None if deadline is None else (deadline - time.monotonic()) / 60
        if left is not None and left < 0.5:
            return None
        command = [
            *(sys.executable, "-m", "pseudoloss", "train", args.source, "--out", str(folder)),
            *("--preset", args.preset, "--seed", str(seed), "--resume"),
            *([] if left is None else ["--minutes", f"{left:.2f}"]),
            *extra,
        ]
        folder.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with folder.with_suffix(".log").open("a") as log, machine.Watch(every=2) as watch:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        before += time.monotonic() - start
        clock.write_text(str(before))
        driver.write_text(json.dumps(watch.found))
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "seconds": round(before, 1),
        "accuracy": {key: summary["accuracy"][key] for key in ("last", "best", "best_epoch")},
        "detection": summary["detection"],
        "pseudo_labels": summary["pseudo_labels"],
        "noise_rate": summary["noise_rate"],
        "epochs": summary["epochs"],
        "notices": summary["notices"],
        "gpu": json.loads(driver.read_text()) if driver.exists() else {},
        "startup_seconds": round(importing + summary["startup_seconds"], 2),
        "epoch_seconds": {
            "warmup" if phase == "warm-up" else phase: round(
                median(sum(x["seconds"].values()) for x in lines if x["phase"] == phase), 3
            )
            for phase in dict.fromkeys(line["phase"] for line in lines)
        },
        "part_seconds": {
            part: round(median(line["seconds"][part] for line in lines[-20:]), 4)
            for part in ("train", "score", "validate")
        },
        "accuracy_by_epoch": [round(line["accuracy"], 2) for line in lines],
        "noisy_by_epoch": [line["noisy"] for line in lines],  # share of labels that are flagged
    }


if __name__ == "__main__":
    main()
