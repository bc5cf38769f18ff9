"""Whole runs of a preset, started like a user starts them: accuracy, and where the time goes.

    python benchmarks/run.py cifar100:DIR --preset cifar100-id50 --seeds 1 2 \
        --work runs --out benchmarks/results/cifar100-id50.json [--minutes 9] [-- --gamma 1 ...]

Each seed is one process of `pseudoloss train`; the arguments after `--` go to all of them
(`-- --method elr`). In the result file:

- `seconds`: wall time of the process, including start-up and compilation;
- `startup_seconds`: time to the end of the first step, including the imports;
- `epoch_seconds`: median time of one epoch, by phase;
- `all_epochs_seconds`: time of all epochs; the rest of `seconds` is start-up, files and the label
  table;
- `part_seconds`: median time of the parts of one epoch, over the last 20 epochs;
- `gpu`: means of the values that the driver reports during the run.

With --minutes a run stops in time; run the same command again to resume it. Its seconds are then
the sum over all its processes.
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
from pseudoloss.experiments.old_files import upgrade_metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--work", type=Path, required=True, help="folder for the run folders")
    parser.add_argument("--out", type=Path, required=True, help="result file (.json)")
    parser.add_argument("--minutes", type=float, help="stop after this time, all runs together")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args, extra = parser.parse_args(arguments[:end]), arguments[end + 1 :]

    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    import_time = measure_imports()
    runs = []
    for seed in args.seeds:
        run = train_seed(args, seed, extra, deadline, import_time)
        if run is None:
            print(f"seed {seed}: not finished; run the same command to resume")
            break
        runs.append(run)
        accuracy, epochs = run["accuracy"], run["epoch_seconds"]
        print(
            f"seed {seed}: last {accuracy['last']:.2f}  best {accuracy['best']:.2f}  "
            f"{run['seconds']:.0f} s in total, {run['startup_seconds']:.1f} s to the first step, "
            + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in epochs.items())
            + " per epoch",
            flush=True,
        )
    if not runs:
        return
    if len(runs) > 1:
        print(f"mean of {len(runs)}: last {mean(run['accuracy']['last'] for run in runs):.2f}")
    folders = {args.source: machine.without_place(args.source), str(args.work): "RUNS"}
    settings = read_settings(args, runs[0]["seed"])
    machine.write(args.out, {"settings": settings, "runs": runs}, folders)


def run_path(args: argparse.Namespace, seed: int) -> Path:
    return Path(args.work / f"{args.out.stem}-seed{seed}")


def read_settings(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The settings of a run."""
    config = json.loads((run_path(args, seed) / "config.json").read_text())
    return machine.published(config["settings"])


def measure_imports() -> float:
    """Seconds for importing all that training needs; of the second of two processes, which reads
    the files from memory."""
    times = []
    for _ in range(2):
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", "import pseudoloss.engine.training"], check=True)
        times.append(time.monotonic() - start)
    return times[-1]


def train_seed(
    args: argparse.Namespace,
    seed: int,
    extra: list[str],
    deadline: float | None,
    import_time: float,
) -> dict[str, Any] | None:
    """Train or resume one seed and read its results; None if there is not enough time."""
    folder = run_path(args, seed)
    clock = folder.with_suffix(".seconds")  # wall time of its processes so far
    driver = folder.with_suffix(".gpu")  # values of the GPU during the last process
    seconds = float(clock.read_text()) if clock.exists() else 0.0
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
        with folder.with_suffix(".log").open("a") as log, machine.GPUMonitor(every=2) as monitor:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        seconds += time.monotonic() - start
        clock.write_text(str(seconds))
        driver.write_text(json.dumps(monitor.means))
    if not (folder / "summary.json").exists():
        return None
    result = read_run(folder, import_time)
    gpu = json.loads(driver.read_text()) if driver.exists() else {}
    return {"seed": seed, "seconds": round(seconds, 1), **result, "gpu": gpu}


def read_run(folder: Path, import_time: float) -> dict[str, Any]:
    """The results of a finished run, which may be one of an older version."""
    summary = upgrade_metrics(json.loads((folder / "summary.json").read_text()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    phases = dict.fromkeys(line["phase"] for line in lines)
    return {
        "accuracy": {key: summary["accuracy"][key] for key in ("last", "best", "best_epoch")},
        "detection": summary.get("detection"),
        "pseudo_labels": summary.get("pseudo_labels"),
        "noise_rate": summary["noise_rate"],
        "epochs": summary["epochs"],
        "notices": summary["notices"],
        "startup_seconds": round(import_time + summary["startup_seconds"], 2),
        "all_epochs_seconds": round(sum(sum(line["seconds"].values()) for line in lines), 1),
        "epoch_seconds": {
            "warmup" if phase == "warm-up" else phase: round(
                median(sum(line["seconds"].values()) for line in lines if line["phase"] == phase), 3
            )
            for phase in phases
        },
        "part_seconds": {
            part: round(median(line["seconds"][part] for line in lines[-20:]), 4)
            for part in lines[-1]["seconds"]
        },
        "accuracy_by_epoch": [round(line["accuracy"], 2) for line in lines],
        "noisy_by_epoch": [line.get("noisy") for line in lines],  # share of flagged labels
    }


if __name__ == "__main__":
    main()
