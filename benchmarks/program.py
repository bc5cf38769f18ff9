"""Trials of PLS with additions on folds of the training images: docs/lab-notes.md has the rules.

    python benchmarks/program.py list [--trials 0 1] [--base ARM+ARM]
    python benchmarks/program.py run cifar100-train:DIR --trials 0 1 2 --work RUNS \\
        --jobs 2 --minutes 9.5 [-- --images device ...]
    python benchmarks/program.py show

`run` trains what is missing and writes a JSON file for every run to --out, for failed ones too;
repeat it until nothing is left. Finished runs are skipped, and unfinished ones resume in --work.
The arguments after `--` go to all runs. Sources with test images are refused.

- `--trials`: numbers of trials; all without it.
- `--base ARM+ARM`: what was accepted so far; every arm has these settings too.
- `--folds`: other folds than those of the trial, to extend or to confirm.
- `--stack ARM+ARM`: for trial 12, the full length.
- `--measure average`: compare the averaged weights.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
from pseudoloss.config import as_flag
from pseudoloss.data import ReadOptions, find_source
from trials import HOLD_OUT, STACK, TRIALS, Run, Trial, check_arm, compare, join, stack_trial

OUT = machine.ROOT / "benchmarks" / "results" / "program"
TRAINING_IMAGES = ("cifar10-train", "cifar100-train")  # sources whose test file is never opened
LEAST_MINUTES = 0.5  # that a run is started with
LINES = 20  # of the output of a failed run


def main() -> None:
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args = parse(given[:end])
    for arm in (args.base, args.stack or "reference"):
        check_arm(arm)
    trials = chosen(args)
    if args.command == "show":
        print(table(trials, read_results(args.out), args))
        return
    left = missing_runs(trials, read_results(args.out), args)
    if args.command == "list":
        for run in left:
            print(f"{run.name:40} about {run.seconds / 60:.1f} min")
        total = sum(run.seconds for run in left) / 60
        print(f"{len(left)} runs, about {total:.0f} minutes, one after another")
        return
    check_source(args.source)
    unfinished = train_all(left, args, given[end + 1 :])
    print(table(trials, read_results(args.out), args))
    print(f"{unfinished} runs are left; repeat the command" if unfinished else "all runs are done")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "run", "show"):
        command = commands.add_parser(name)
        command.add_argument("--trials", nargs="+", choices=[*TRIALS, STACK], metavar="NUMBER")
        command.add_argument("--base", default="reference")
        command.add_argument("--stack")
        command.add_argument("--folds", type=int, nargs="+")
        command.add_argument("--measure", choices=["weights", "average"], default="weights")
        command.add_argument("--out", type=Path, default=OUT)
        if name == "run":
            command.add_argument("source")
            command.add_argument("--work", type=Path, required=True)
            command.add_argument("--jobs", type=int, default=1)
            command.add_argument("--minutes", type=float)
            command.add_argument(
                "--whole", action="store_true", help="start no run that may not end in the time"
            )
        if name != "show":
            command.add_argument("--again", action="store_true", help="failed runs too")
    return parser.parse_args(arguments)


def chosen(args: argparse.Namespace) -> dict[str, Trial]:
    """The trials that the arguments name."""
    stacked = {STACK: stack_trial(args.stack)} if args.stack else {}
    known = TRIALS | stacked
    numbers = args.trials or list(known)
    if STACK in numbers and not args.stack:
        sys.exit(f"trial {STACK} needs --stack ARM+ARM, what was accepted")
    return {number: known[number] for number in numbers}


def check_source(source: str) -> None:
    """Refuse sources with test images."""
    if source.partition(":")[0] in TRAINING_IMAGES:
        return
    found = find_source(source, ReadOptions())
    if getattr(found, "test", None) is not None:
        sys.exit(f"{source}: has test images, which must not decide anything; use cifar100-train")


def missing_runs(
    trials: dict[str, Trial], results: dict[str, Any], args: argparse.Namespace
) -> list[Run]:
    """The runs of the trials without a result, each once."""
    every = [
        run for t in trials.values() for pair in t.pairs(args.base, args.folds) for run in pair
    ]
    done = {name for name, r in results.items() if not (args.again and "failed" in r)}
    return [run for run in dict.fromkeys(every) if run.name not in done]


def read_results(out: Path) -> dict[str, Any]:
    """Results by the name of the run. A run that failed may have been finished later."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("*.json")):
        result = json.loads(path.read_text())
        name = result["run"]["name"]
        if name not in found or "failed" in found[name]:
            found[name] = result
    return found


# ----------------------------------------------------------------------------------------- training


def train_all(runs: Sequence[Run], args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Train, several at a time; the number of runs that are not finished."""
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    waiting, active, finished = deque(runs), [], 0
    while waiting or active:
        left = None if deadline is None else (deadline - time.monotonic()) / 60
        if left is not None and left < LEAST_MINUTES:
            waiting.clear()
        while len(active) < args.jobs:
            run = next_run(waiting, [training.run for training in active])
            if run is None:
                break
            if args.whole and left is not None and left < args.jobs * run.seconds / 60:
                waiting.clear()
                break
            active.append(Training(run, args, extra, left))
        for training in [t for t in active if t.process.poll() is not None]:
            active.remove(training)
            training.end()
            first = training.first_done
            if first is not None:  # the labels of the second round are known now
                waiting.appendleft(first)
            finished += training.written
        if active:
            time.sleep(0.05)
    return len(runs) - finished


def next_run(waiting: deque[Run], active: Sequence[Run]) -> Run | None:
    """Take a run whose first round is not trained, or about to be, by another one."""
    for run in waiting:
        if run not in active and run.first not in (*waiting, *active):
            waiting.remove(run)
            return run
    return None


class Training:
    """A process of `pseudoloss train`."""

    def __init__(
        self, run: Run, args: argparse.Namespace, extra: Sequence[str], minutes: float | None
    ) -> None:
        self.asked, self.args = run, args
        first = run.first
        ready = first is None or (args.work / first.name / "summary.json").exists()
        self.run = run if ready or first is None else first  # the first round comes first
        self.folder = args.work / self.run.name
        self.log, self.clock = self.folder.with_suffix(".log"), self.folder.with_suffix(".seconds")
        args.work.mkdir(parents=True, exist_ok=True)
        settings = self.run.settings
        if self.run.first is not None:
            settings["corrupt"] = f"labels:{corrected(args.work, self.run)}"
        given = [(name, value) for name, value in settings.items() if value is not None]
        flags = [word for item in given for word in as_flag(*item).split(" ", 1)]
        limit = [] if minutes is None else ["--minutes", f"{minutes:.2f}"]
        self.command = [
            *(sys.executable, "-m", "pseudoloss", "train", args.source, "--out", str(self.folder)),
            *("--preset", "default", "--seed", str(self.run.fold), "--hold-out", str(HOLD_OUT)),
            *("--resume", *flags, *limit, *extra),
        ]
        print(f"{self.run.name} …", flush=True)
        self.started = time.monotonic()
        self.process = start(self.command, self.log)

    @property
    def first_done(self) -> Run | None:
        """The run that was asked for, if its first round is finished now."""
        done = (self.folder / "summary.json").exists()
        return self.asked if self.run != self.asked and done else None

    def end(self) -> None:
        """Write the result, if there is one."""
        before = float(self.clock.read_text()) if self.clock.exists() else 0.0
        seconds = before + time.monotonic() - self.started
        self.clock.write_text(str(seconds))
        code, result = self.process.returncode, None
        name = self.run.name
        if code:
            name += f".failed-{len(list(self.args.out.glob(f'{name}.failed-*.json'))) + 1}"
            result = {"failed": {"code": code, "output": self._end_of_log()}}
        elif (self.folder / "summary.json").exists():
            result = read_run(self.folder) | {"seconds": round(seconds, 1)}
            first = self.run.first
            if first is not None:
                clock = (self.args.work / first.name).with_suffix(".seconds")
                result["seconds_of_the_first_round"] = round(float(clock.read_text()), 1)
        self.written = result is not None and self.run == self.asked
        path = self.args.out / f"{name}.json"
        if result is None or path.exists():
            print(f"{name}: not finished" if result is None else f"{name}: done before", flush=True)
            return
        described = {"name": self.run.name, **vars(self.run)}
        machine.write(path, {"run": described} | result, self._folders())
        said = "failed" if code else f"{result['accuracy']['weights']:.2f}"
        print(f"{name}: {said} ({seconds:.0f} s)", flush=True)

    def _folders(self) -> dict[str, str]:
        source = self.args.source
        return {
            source: machine.without_place(source) if ":" in source else Path(source).name,
            str(self.args.work): "RUNS",
            str(self.args.out): "benchmarks/results/program",
        }

    def _end_of_log(self) -> list[str]:
        text = self.log.read_text(errors="replace")
        place = self.args.source.partition(":")[2] or "DIR"
        text = text.replace(str(self.args.work), "RUNS").replace(place, "DIR")
        return text.splitlines()[-LINES:]


def start(command: Sequence[str], log: Path) -> Any:
    with log.open("a") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def corrected(work: Path, run: Run) -> Path:
    """A table of the labels of the training images as the first round corrects them. Held-out
    images are not in it, and keep the true labels."""
    assert run.first is not None
    path = work / f"{run.name}.csv"
    with (work / run.first.name / "labels.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "train"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "label"])
        for row in rows:
            kind = "suggested_label" if row["action"] == "relabel" else "given_label"
            writer.writerow([row["index"], row[kind]])
    return path


def read_run(folder: Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    settings = json.loads((folder / "config.json").read_text())["settings"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    each = [accuracies(line) for line in lines]
    phases = dict.fromkeys(line["phase"] for line in lines)
    return {
        "settings": machine.published(settings),
        "accuracy": each[-1],
        "right_on_wrong": lines[-1].get("method", {}).get("right_on_wrong"),
        "detection": summary["detection"],
        "pseudo_labels": summary["pseudo_labels"],
        "noise_rate": summary["noise_rate"],
        "images": summary["images"],
        "held_out": summary["held_out"],
        "notices": summary["notices"],
        "startup_seconds": round(summary["startup_seconds"], 1),
        "epoch_seconds": {
            phase: round(
                median(sum(line["seconds"].values()) for line in lines if line["phase"] == phase), 3
            )
            for phase in phases
        },
        "accuracy_by_epoch": {
            kind: [None if one[kind] is None else round(one[kind], 2) for one in each]
            for kind in each[0]
        },
        "noisy_by_epoch": [line["noisy"] for line in lines],
        "auc_by_epoch": [(line["detection"] or {}).get("auc") for line in lines],
        "method_by_epoch": [line.get("method") for line in lines],
    }


def accuracies(line: dict[str, Any]) -> dict[str, float | None]:
    """Accuracy of the weights and of their average after an epoch."""
    others = line.get("other_accuracies", {})
    if "net" in others:  # the average predicts
        return {"weights": others["net"], "average": line["accuracy"]}
    return {"weights": line["accuracy"], "average": others.get("ema")}


# ----------------------------------------------------------------------------------------- verdicts


def table(trials: dict[str, Trial], results: dict[str, Any], args: argparse.Namespace) -> str:
    """A line for each trial."""
    lines = [f"{'trial':6}{'arm, compared with':34}{'mean':>7} ± s.e.  by level; verdict"]
    for number, trial in trials.items():
        found, verdict = compare(trial, results, args.base, args.measure, args.folds)
        against = "its weights" if trial.own else join(args.base, trial.against)
        title = f"{join(args.base, trial.arm)}, {against}"
        numbers = f"{'–':>7}         "
        if found is not None:
            levels = ", ".join(
                f"{level}: {sum(ds) / len(ds):+.2f}" for level, ds in found.differences.items()
            )
            numbers = f"{found.mean:>+7.2f} ± {found.error:.2f}  {levels}; "
        lines.append(f"{number:6}{title:34}{numbers}{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
