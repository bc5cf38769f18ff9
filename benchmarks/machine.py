"""What a benchmark was run on."""

import os
import platform
import subprocess
import sys
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


def commit() -> str:
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
        sys.exit("not a git checkout: set PSEUDOLOSS_COMMIT to the commit that is being measured")
