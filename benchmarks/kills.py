"""Kill runs at random moments, resume them, and compare every bit with a run that was left alone.

    python benchmarks/kills.py --kills 50 --jobs 2 --out benchmarks/results/kills-cpu.json

Real processes train on digits with 40% wrong labels. Each gets SIGKILL or one of the signals that
ask it to stop, while it starts, trains, scores or writes; then the same command resumes it, until
the run is finished. The next run has another method. Half of the kills are of one of two processes
under torchrun.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from machine import write
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.files import read_header

SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
FLAGS = ("--network", "small-cnn", "--batch-size", "32", "--epochs", "8", "--warmup", "1")
FLAGS += ("--corrupt", "symmetric:0.4", "--device", "cpu", "--quiet")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
EARLY = 0.2  # share of the kills that come while a process starts
MOST_SECONDS = 900  # for a process, from its start or its signal to its end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--of-two", type=int, help="kills under torchrun (default: half of them)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and signals")
    parser.add_argument("--minutes", type=float, default=1e9, help="kill no more after this time")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    of_two = args.kills // 2 if args.of_two is None else args.of_two
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(args.jobs) as threads:
        deadline = time.monotonic() + 60 * args.minutes
        plan = Plan({2: of_two, 1: args.kills - of_two}, deadline)
        work_on = [threads.submit(kill_runs, Path(work), plan, args.seed) for _ in range(args.jobs)]
        runs = [run for some in work_on for run in some.result()]
    runs.sort(key=lambda run: (-run["processes"], list(METHOD_SETTINGS).index(run["method"])))
    kills = [kill for run in runs for kill in run["kills"]]
    result = {
        "kills": len(kills),
        "after_the_end": sum(kill["checkpoint"] == "finished" for kill in kills),
        "identical_runs": sum(not run["differences"] for run in runs),
        "by_signal": dict(Counter(kill["signal"] for kill in kills)),
        "by_process": dict(Counter(kill["process"] for kill in kills)),
        "checkpoint_after": dict(Counter(kill["checkpoint"] for kill in kills)),
        "unexpected": [kill for kill in kills if not kill["as_expected"]],
        "runs": runs,
    }
    print(f"{result['identical_runs']} of {len(runs)} runs with {len(kills)} kills are identical")
    write(args.out, result)
    sys.exit(any(run["differences"] for run in runs) or bool(result["unexpected"]))


class Plan:
    """Which kills are left to do, by the number of processes of a run. Shared by threads."""

    def __init__(self, left: dict[int, int], deadline: float) -> None:
        self.left, self.deadline, self.runs = left, deadline, 0
        self.wholes: dict[tuple[str, int], tuple[Path, float, float]] = {}
        self.lock, self.training = threading.Lock(), defaultdict(threading.Lock)

    def next_run(self) -> tuple[int, str, int] | None:
        """Number, method and processes of the next run; None if no kill is left."""
        with self.lock:
            processes = next((n for n, left in self.left.items() if left > 0), None)
            if processes is None or time.monotonic() > self.deadline:
                return None
            number, self.runs = self.runs, self.runs + 1
        return number, tuple(METHOD_SETTINGS)[number % len(METHOD_SETTINGS)], processes

    def take(self, processes: int) -> bool:
        """Whether one more kill of such a run is left. It is given back if the run ended first."""
        with self.lock:
            if self.left[processes] <= 0 or time.monotonic() > self.deadline:
                return False
            self.left[processes] -= 1
        return True

    def give_back(self, processes: int) -> None:
        with self.lock:
            self.left[processes] += 1

    def whole(self, work: Path, method: str, processes: int) -> tuple[Path, float, float]:
        """The run that nothing interrupts; the first that needs it trains it."""
        with self.lock:
            own = self.training[method, processes]
        with own:
            if (method, processes) not in self.wholes:
                self.wholes[method, processes] = leave_alone(work, method, processes)
            return self.wholes[method, processes]


def kill_runs(work: Path, plan: Plan, seed: int) -> list[dict[str, Any]]:
    """Kill and resume one run after the other, until no kill is left."""
    runs = []
    while (following := plan.next_run()) is not None:
        number, method, processes = following
        whole, starting, seconds = plan.whole(work, method, processes)
        out, kills = work / f"killed-{number}", []
        rng = random.Random(f"{seed} {number}")  # noqa: S311
        while not (out / "summary.json").exists():
            moment = rng.random() * starting
            if rng.random() > EARLY:
                moment = starting + rng.random() * seconds
            name, rank = rng.choice(SIGNALS), rng.randrange(processes)
            if not plan.take(processes):
                moment = None
            kill = kill_at(out, method, processes, moment, name, rank)
            if kill is not None:
                kills.append(kill)
                print(json.dumps(kill), flush=True)
            elif moment is not None:
                plan.give_back(processes)
        run = {"method": method, "processes": processes, "kills": kills}
        runs.append(run | {"differences": differences(whole, out)})
        print(json.dumps(runs[-1] | {"kills": len(kills)}), flush=True)
        shutil.rmtree(out)
    return runs


def command(out: Path, method: str, processes: int) -> list[str]:
    launcher = TORCHRUN if processes > 1 else ()
    train = [sys.executable, "-m", *launcher, "pseudoloss", "train", "digits", "--out", str(out)]
    return [*train, "--resume", "--method", method, *FLAGS]


def start(out: Path, method: str, processes: int, log: Any) -> "subprocess.Popen[bytes]":
    """Threads decide bits: one per process, as torchrun sets it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = command(out, method, processes)
    return subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)


def leave_alone(work: Path, method: str, processes: int) -> tuple[Path, float, float]:
    """A run that nothing interrupts, the seconds until it trains, and those of the rest."""
    out, begun = work / f"{method}-{processes}", time.monotonic()
    with tempfile.TemporaryFile() as log:
        if start(out, method, processes, log).wait(timeout=MOST_SECONDS):
            log.seek(0)
            raise SystemExit(log.read().decode())
    wall = time.monotonic() - begun
    lines = (out / "metrics.jsonl").read_text().splitlines()
    training = sum(sum(json.loads(line)["seconds"].values()) for line in lines)
    return out, max(wall - training, 0.0), training


def kill_at(
    out: Path, method: str, processes: int, moment: float | None, name: str, rank: int
) -> dict[str, Any] | None:
    """Start or resume a run and send a signal to one of its processes after some seconds (None:
    never). Returns None if the run ended first."""
    with tempfile.TemporaryFile() as log:
        process = start(out, method, processes, log)
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=MOST_SECONDS if moment is None else moment)
            if code:
                log.seek(0)
                raise SystemExit(f"exit code {code}: {log.read().decode()}")
            return None
        if moment is None:
            process.kill()
            raise SystemExit(f"{out}: hangs")
        target = process.pid if processes == 1 else worker(process, rank)
        number = getattr(signal, name)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(target, number)
        code = process.wait(timeout=MOST_SECONDS)
        log.seek(0)
        said = log.read().decode()
    kill = {
        "signal": name,
        "process": f"{rank + 1} of {processes}",
        "seconds": round(moment, 2),
        "exit_code": code,
        "as_expected": as_expected(code, number, said, processes),
        "epochs": epochs_of(out),
        "checkpoint": state_of(out),
    }
    return kill if kill["as_expected"] else kill | {"output": said[-3000:]}


def worker(launcher: "subprocess.Popen[bytes]", rank: int) -> int:
    """The process of this rank, as soon as torchrun has started it."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    variable = f"RANK={rank}".encode()
    while launcher.poll() is None:
        with suppress(OSError):  # any of them may end meanwhile
            for child in children.read_text().split():
                if variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    return int(child)
        time.sleep(0.02)
    return launcher.pid


def as_expected(code: int, number: int, said: str, processes: int) -> bool:
    """Whether a signal ended a run as it should. One that comes after the end changes nothing, and
    one that comes before Python has installed any handler ends the process as always."""
    if code == 0:
        return True
    if processes > 1:  # torchrun has a code and a traceback of its own
        return code == 1 and said.count("Traceback (most recent call last)") <= 1
    if number == signal.SIGKILL:
        return code == -number
    return code == -number or (code == 128 + number and len(said.splitlines()) == 1)


def epochs_of(out: Path) -> int:
    """How many epochs are finished."""
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


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
