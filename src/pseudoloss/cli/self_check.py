"""The trainings of `pseudoloss doctor`: equal runs give equal bits on the CPU, and fast steps train
on a GPU what plain steps train."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pseudoloss.config import Settings
from pseudoloss.data import Data, ImageSet, corrupt, open_source
from pseudoloss.engine.agreement import distances, run_phases
from pseudoloss.engine.training import train
from pseudoloss.errors import first_line
from pseudoloss.files import from_safetensors
from pseudoloss.presets import request

IMAGES = 320
SETTINGS: dict[str, Any] = {
    **{"preset": "digits-id40", "epochs": 3, "warmup": 1, "seed": 3},
    **{"device": "cpu", "quiet": True},
}
STEPS = (1, 5)  # in the warm-up, and again after it
# Distance between the weights of fast and plain steps, in parts of the way that plain steps went.
# Rounding gave up to 0.003 and 0.07 of weights on an H200 (agreement-h200.json).
FARTHEST = {"float32": 0.05, "bf16": 0.3}

Progress = Callable[[str, int, int], None]


def self_check(tell: Callable[[str], None], progress: Progress) -> dict[str, Any]:
    """The results by name; `tell` gets the problems."""
    checks: dict[str, Callable[[], tuple[dict[str, Any], list[str]]]] = {"CPU": check_cpu}
    if torch.cuda.is_available():
        checks["GPU"] = check_gpu
    found: dict[str, Any] = {}
    for number, (name, check) in enumerate(checks.items()):
        progress(f"self-check of the {name}", number, len(checks))
        begun = time.monotonic()
        try:
            results, problems = check()
        except Exception as error:  # whatever is broken
            results = {f"{name}": f"failed ({type(error).__name__}: {first_line(error)})"}
            problems = [
                f"the self-check of the {name} failed ({first_line(error)}): report it with this "
                "output"
            ]
        found |= results | {f"seconds on the {name}": round(time.monotonic() - begun, 1)}
        for problem in problems:
            tell(problem)
    progress("self-check", len(checks), len(checks))
    return found


def small_digits() -> Data:
    """Some of the digits."""
    data = open_source("digits")
    assert data.test is not None
    train, test = (
        ImageSet(
            split.images_NCHW[:IMAGES],  # type: ignore[index]
            split.given_N[:IMAGES],
            split.classes,
            None if split.true_N is None else split.true_N[:IMAGES],
        )
        for split in (data.train, data.test)
    )
    return replace(data, train=train, test=test)


def check_cpu() -> tuple[dict[str, Any], list[str]]:
    """The same short training three times; the third is stopped after every epoch and resumed."""
    threads, problems = torch.get_num_threads(), []
    data = small_digits()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="pseudoloss-doctor-") as work:
            for name in ("first", "second"):
                train(data, Path(work) / name, **SETTINGS)
            resumed = Path(work) / "resumed"
            while not (resumed / "summary.json").exists():
                train(data, resumed, resume=True, minutes=1e-9, **SETTINGS)
            first, second, third = (
                checksum(Path(work) / name) for name in ("first", "second", "resumed")
            )
    finally:
        torch.set_num_threads(threads)
    if first != second:
        problems.append(
            "two equal runs on the CPU gave different results: test the memory of this machine, "
            "and report it with this output"
        )
    elif first != third:
        problems.append(
            "a run that was stopped and resumed gave other results than one that was not: report "
            "it with this output"
        )
    yes = {True: "yes", False: "NO"}
    return {
        "equal runs are equal bit for bit": yes[first == second],
        "a resumed run is equal bit for bit": yes[first == third],
        "checksum of the results": first,
    }, problems


def checksum(run: Path) -> str:
    """Of the weights and the label table of a run."""
    digest = hashlib.sha256((run / "labels.csv").read_bytes())
    tensors, _ = from_safetensors(run / "model.safetensors")
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def settings_with(**values: Any) -> Settings:
    return request("digits-id40", None, values | {"device": "cuda"}).settings("digits")


def check_gpu() -> tuple[dict[str, Any], list[str]]:
    """Captured and fast steps against plain ones, in both kinds of arithmetic."""
    data = small_digits()
    images = corrupt(data.train, "symmetric:0.4", 1)
    part = Data(data.name, images)
    found: dict[str, Any] = {}
    problems: list[str] = []
    for precision, farthest in FARTHEST.items():
        values: dict[str, Any] = {"epochs": 2, "warmup": 1, "precision": precision, "corrupt": None}
        plain, _ = run_phases(part, settings_with(accelerate="off", **values), STEPS)
        for kind, accelerate, most in (("captured", "capture", 0.0), ("fast", "auto", farthest)):
            changed = settings_with(accelerate=accelerate, **values)
            phases, notices = run_phases(part, changed, STEPS, plain)
            worst = max(value for values in distances(plain, phases).values() for value in values)
            found[f"{kind} steps, {precision}"] = f"{worst:.1e} from plain steps (at most {most:g})"
            problems += [f"{text}: report it with this output" for text in notices]
            if not worst <= most:
                problems.append(
                    f"{kind} steps in {precision} train something else than plain steps: use "
                    f"--accelerate {'off' if kind == 'captured' else 'capture'}, and report it "
                    "with this output"
                )
    return found, problems
