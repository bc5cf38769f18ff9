"""Kill runs at random moments, resume them, and compare every bit with a run that was left alone.

    python benchmarks/kills.py --kills 50 --out benchmarks/results/kills-cpu.json

Real processes train on digits with 40% wrong labels. Each gets SIGKILL or one of the signals that
ask it to stop, while it starts, trains, scores or writes; then the same command resumes it, until
the run is finished. The next run has another method.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from machine import write
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.files import read_header

SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
FLAGS = ("--network", "small-cnn", "--batch-size", "32", "--epochs", "4", "--warmup", "1")
FLAGS += ("--corrupt", "symmetric:0.4", "--device", "cpu", "--quiet")
EARLY = 0.2  # share of the kills that come while a process starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and signals")
    parser.add_argument("--minutes", type=float, default=1e9, help="kill no more after this time")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    moments, kills, runs = random.Random(args.seed), [], []  # noqa: S311
    with tempfile.TemporaryDirectory() as work:
        wholes: dict[str, tuple[Path, float, float]] = {}
        while len(kills) < args.kills and time.monotonic() < deadline:
            method = tuple(METHOD_SETTINGS)[len(runs) % len(METHOD_SETTINGS)]
            if method not in wholes:
                wholes[method] = leave_alone(Path(work), method)
            whole, starting, seconds = wholes[method]
            out = Path(work) / f"killed-{len(runs)}"
            count = len(kills)
            while not (out / "summary.json").exists():
                moment = moments.random() * starting
                if moments.random() > EARLY:
                    moment = starting + moments.random() * seconds
                if len(kills) == args.kills or time.monotonic() > deadline:
                    moment = None
                kill = kill_at(out, method, moment, moments.choice(SIGNALS))
                if kill is not None:
                    kills.append(kill)
                    print(json.dumps(kill), flush=True)
            other = differences(whole, out)
            runs.append({"method": method, "kills": len(kills) - count, "differences": other})
            print(json.dumps(runs[-1]), flush=True)
            shutil.rmtree(out)
    result = {
        "kills": len(kills),
        "by_signal": dict(Counter(kill["signal"] for kill in kills)),
        "checkpoint_after": dict(Counter(kill["checkpoint"] for kill in kills)),
        "unexpected_exit_codes": [kill for kill in kills if not kill["as_expected"]],
        "runs": runs,
        "identical_runs": sum(not run["differences"] for run in runs),
    }
    print(f"{result['identical_runs']} of {len(runs)} runs with {len(kills)} kills are identical")
    write(args.out, result)
    sys.exit(any(run["differences"] for run in runs))


def command(out: Path, method: str) -> list[str]:
    train = [sys.executable, "-m", "pseudoloss", "train", "digits", "--out", str(out), "--resume"]
    return [*train, "--method", method, *FLAGS]


def leave_alone(work: Path, method: str) -> tuple[Path, float, float]:
    """A run that nothing interrupts, the seconds until it trains, and those of the rest."""
    out, begun = work / method, time.monotonic()
    subprocess.run(command(out, method), check=True)
    wall = time.monotonic() - begun
    lines = (out / "metrics.jsonl").read_text().splitlines()
    training = sum(sum(json.loads(line)["seconds"].values()) for line in lines)
    return out, max(wall - training, 0.0), training


def kill_at(out: Path, method: str, moment: float | None, name: str) -> dict[str, Any] | None:
    """Start or resume a run and kill it after some seconds (None: never); None: it ended first."""
    process = subprocess.Popen(command(out, method), stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        number = getattr(signal, name)
        process.send_signal(number)
        _, said = process.communicate()
        expected = -number if name == "SIGKILL" else 128 + number
        is_one_line = name == "SIGKILL" or len(said.splitlines()) == 1
        # Before Python has installed any handler, a signal ends the process as always.
        as_expected = process.returncode in (expected, -number) and is_one_line
        return {
            "signal": name,
            "seconds": round(moment or 0, 2),
            "exit_code": process.returncode,
            "as_expected": as_expected or process.returncode == 0,
            "checkpoint": state_of(out),
        }
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {said}")
    return None


def state_of(out: Path) -> str:
    """What the run can be resumed from."""
    if (out / "summary.json").exists():
        return "finished"
    path = out / "checkpoint" / "last.safetensors"
    if not path.exists():
        return "none"
    return "an epoch" if read_header(path)["inside"] is None else "the middle of an epoch"


def differences(whole: Path, other: Path) -> list[str]:
    """Names of what is not the same in two runs, times aside."""
    found = []
    for name in ("model.safetensors", "best.safetensors", "labels.csv"):
        if (whole / name).read_bytes() != (other / name).read_bytes():
            found.append(name)
    one, two = (load_file(out / "checkpoint" / "last.safetensors") for out in (whole, other))
    if one.keys() != two.keys() or any(not torch.equal(one[key], two[key]) for key in one):
        found.append("last.safetensors")
    lines = [
        [json.loads(line) | {"seconds": None} for line in text.splitlines()]
        for text in ((out / "metrics.jsonl").read_text() for out in (whole, other))
    ]
    return [*found, "metrics.jsonl"] if lines[0] != lines[1] else found


if __name__ == "__main__":
    main()
