"""What a benchmark was run on, and the file it writes."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import pseudoloss

ROOT = Path(__file__).resolve().parent.parent


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
