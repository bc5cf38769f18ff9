"""What a benchmark was run on, and the file it writes."""

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
from pseudoloss.experiments.catalogue import NO_MATTER
from pseudoloss.presets import LABEL_FILES

ROOT = Path(__file__).resolve().parent.parent
# What the driver is asked for, and what it is called here.
OF_GPU = {
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
    """The commit of the checkout, or PSEUDOLOSS_COMMIT where there is no repository."""
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


class Watch:
    """What the driver says of the GPU while this is open, asked `every` so many seconds.

    A GPU at its power limit lowers its clock, and a run takes longer than its steps do alone.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self.samples: list[list[float]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        if torch.cuda.is_available():
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()

    @property
    def found(self) -> dict[str, float]:
        """Means, by the names in OF_GPU; empty where there is no GPU, or nothing was learnt."""
        means = (round(mean(values), 3) for values in zip(*self.samples, strict=True))
        return dict(zip(OF_GPU.values(), means, strict=False))

    def _look(self) -> None:
        query = f"--query-gpu={','.join(OF_GPU)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        while not self.over.wait(self.every):
            try:
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                busy, *others = map(float, said.splitlines()[0].split(","))  # the first GPU
            except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
                return  # a driver that cannot say it
            self.samples.append([busy / 100, *others])


def without_place(source: str) -> str:
    """A source as one may publish it: cnwl:DIR:0.2."""
    kind, colon, place = source.partition(":")
    ratio = place.rpartition(":")[2] if kind in WITH_NOISE_RATIO else ""
    return f"{kind}{colon and ':DIR'}{ratio and f':{ratio}'}"


def published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was trained with, as far as it makes its numbers, without places of this machine:
    a preset may mean something else one day."""
    kept = {name: value for name, value in settings.items() if name not in NO_MATTER}
    kind, _, file = str(kept["corrupt"]).partition(":")
    if kind in LABEL_FILES:
        kept["corrupt"] = f"{kind}:{Path(file).name}"
    return kept


COMMIT = commit()  # that of the beginning: a checkout may move on while it is being measured


def write(
    out: Path | None, found: Mapping[str, Any], places: Mapping[str, str] | None = None
) -> None:
    """Write what was found, with command, commit, hardware and versions, where that was asked for.

    Args:
        out: the file.
        found: the rest of it.
        places: words of the command that name folders of this machine, and what is written instead.
    """
    if out is None:
        return
    if COMMIT is None:
        sys.exit("not a git checkout: set PSEUDOLOSS_COMMIT to the commit that is being measured")
    known = {str(out): f"benchmarks/results/{out.name}"} | dict(places or {})
    words = [known.get(word, word) for word in sys.argv[1:]]
    result = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "commit": COMMIT,
        "hardware": hardware(),
        "versions": versions(),
        **found,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
