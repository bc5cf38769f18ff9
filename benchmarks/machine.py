"""Hardware, versions and commit of a benchmark, and the result file that it writes."""

import json
import os
import platform
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import pseudoloss
from pseudoloss.data.sources import WITH_NOISE_RATIO
from pseudoloss.experiments.matching import IRRELEVANT
from pseudoloss.presets import LABEL_FILES

ROOT = Path(__file__).resolve().parent.parent
# Fields of nvidia-smi, and their names in result files.
GPU_FIELDS = {
    "utilization.gpu": "busy",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "clock_limit_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
}


def versions() -> dict[str, str]:
    return {
        "pseudoloss": pseudoloss.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def hardware() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu_cores": os.cpu_count(), "machine": platform.machine()}


def commit() -> str | None:
    """The commit of the checkout, or PSEUDOLOSS_COMMIT if it is set."""
    given = os.environ.get("PSEUDOLOSS_COMMIT")
    if given:
        return given
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class GPUMonitor:
    """Load, clock and power of the GPU, read from the driver every few seconds.

    A GPU at its power limit lowers its clock, so a run takes longer than its steps alone.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self.samples: list[list[float]] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._read_samples, daemon=True)

    def __enter__(self) -> "GPUMonitor":
        if torch.cuda.is_available():
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()

    @property
    def means(self) -> dict[str, float]:
        """Mean of every field; empty without a GPU or if the driver gave no values."""
        means = (round(mean(values), 3) for values in zip(*self.samples, strict=True))
        return dict(zip(GPU_FIELDS.values(), means, strict=False))

    def _read_samples(self) -> None:
        query = f"--query-gpu={','.join(GPU_FIELDS)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        while not self.stopped.wait(self.every):
            try:
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                busy, *others = map(float, output.splitlines()[0].split(","))  # the first GPU
            except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
                return  # the driver does not give these values
            self.samples.append([busy / 100, *others])


def without_place(source: str) -> str:
    """A source with DIR in place of its folder: cnwl:DIR:0.2."""
    kind, colon, place = source.partition(":")
    ratio = place.rpartition(":")[2] if kind in WITH_NOISE_RATIO else ""
    return f"{kind}{colon and ':DIR'}{ratio and f':{ratio}'}"


def published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the accuracy of a run, without folders of this machine. They are
    written because a preset may change later."""
    kept = {name: value for name, value in settings.items() if name not in IRRELEVANT}
    kind, _, file = str(kept["corrupt"]).partition(":")
    if kind in LABEL_FILES:
        kept["corrupt"] = f"{kind}:{Path(file).name}"
    return kept


COMMIT = commit()  # read at the start: the checkout may change during the measurement


def write(
    out: Path | None, result: Mapping[str, Any], folders: Mapping[str, str] | None = None
) -> None:
    """Write a result file with command, commit, hardware and versions.

    Args:
        out: the file; None writes nothing.
        result: the rest of its content.
        folders: arguments of the command that name folders of this machine, and what to write
            instead of them.
    """
    if out is None:
        return
    if COMMIT is None:
        sys.exit("not a git checkout: set PSEUDOLOSS_COMMIT to the commit that is measured")
    replaced = {str(out): f"benchmarks/results/{out.name}"} | dict(folders or {})
    arguments = [replaced.get(argument, argument) for argument in sys.argv[1:]]
    content = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "commit": COMMIT,
        "hardware": hardware(),
        "versions": versions(),
        **result,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")
