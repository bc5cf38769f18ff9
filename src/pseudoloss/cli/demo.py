"""`pseudoloss demo`: cross-entropy beside PLS on digits with 40% wrong labels."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pseudoloss.config import Settings
from pseudoloss.engine.training import train
from pseudoloss.errors import InputError
from pseudoloss.files import write_json

METHODS = {"ce": "cross-entropy", "pls": "PLS"}


def run_demo(out: Path | None, seed: int, resume: bool) -> dict[str, Any]:
    """Train both methods on the same noisy digits, print a table, return the summary."""
    Settings(seed=seed)  # refuses what is no seed, before anything is printed
    folder = default_folder(resume) if out is None else out
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out {folder}: exists already; choose another folder or add --resume")
    console = Console(highlight=False)
    console.print(
        "Handwritten digits, 40% of the training labels made wrong. Both methods train on the same "
        "labels;\nthe test labels are right.\n"
    )
    options: dict[str, Any] = {"preset": "digits-id40", "seed": seed, "resume": resume}
    try:
        runs = {
            method: train("digits", folder / method, method=method, **options) for method in METHODS
        }
    except KeyboardInterrupt:
        place = shlex.quote(str(folder))
        raise KeyboardInterrupt(
            f"interrupted; go on with: pseudoloss demo --out {place} --resume"
        ) from None
    summary = {"methods": {method: run.summary for method, run in runs.items()}}
    write_json(folder / "summary.json", summary)
    console.print()
    console.print(comparison(summary["methods"]))
    console.print(
        f"Look next at [bold]{folder / 'pls' / 'labels.csv'}[/bold]: "
        "for every image, is its label wrong, and what would be right?\n"
        "Then train on your own images:\n"
        "  pseudoloss train photos/ --out run      (a folder a class; see docs/tutorial.md)\n"
        "  pseudoloss train --help",
        soft_wrap=True,
    )
    return summary


def comparison(methods: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Accuracy on the test images")
    table.add_column("method")
    for name in ("last epoch", "best epoch", "wrong labels found", "of those flagged, wrong"):
        table.add_column(name, justify="right")
    for method, summary in methods.items():
        accuracy, detection = summary["accuracy"], summary["detection"]
        table.add_row(
            METHODS[method],
            f"{accuracy['last']:.1f}%",
            f"{accuracy['best']:.1f}%",
            _percent(detection["recall"]),
            _percent(detection["precision"]),
        )
    return table


def default_folder(resume: bool) -> Path:
    """The first of pseudoloss-demo, pseudoloss-demo-2, … that is not taken; to resume, the one
    before it."""
    taken, folder, number = None, Path("pseudoloss-demo"), 2
    while folder.exists():
        taken, folder = folder, Path(f"pseudoloss-demo-{number}")
        number += 1
    return taken if resume and taken is not None else folder


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
