"""`pseudoloss demo`: cross-entropy and PLS on digits with 40% wrong labels."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pseudoloss.cli.demo_picture import write_picture
from pseudoloss.config import Settings
from pseudoloss.engine.training import train
from pseudoloss.errors import InputError
from pseudoloss.files import write_json

METHODS = {"ce": "cross-entropy", "pls": "PLS"}


def run_demo(out: Path | None, seed: int, resume: bool) -> dict[str, Any]:
    """Train both methods on the same noisy digits, print a table, draw demo.svg, and return the
    summary."""
    Settings(seed=seed)  # checks the seed before anything is printed
    folder = default_folder(resume) if out is None else out
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out {folder}: already exists; choose another folder or add --resume")
    console = Console(highlight=False)
    console.print(
        "Handwritten digits; 40% of the training labels are replaced by wrong ones. Both methods "
        "train on\nthe same labels. The test labels are clean.\n"
    )
    options: dict[str, Any] = {"preset": "digits-id40", "seed": seed, "resume": resume}
    try:
        runs = {
            method: train("digits", folder / method, method=method, **options) for method in METHODS
        }
    except KeyboardInterrupt:
        place = shlex.quote(str(folder))
        raise KeyboardInterrupt(
            f"interrupted; resume with: pseudoloss demo --out {place} --resume"
        ) from None
    summary = {"methods": {method: run.summary for method, run in runs.items()}}
    write_json(folder / "summary.json", summary)
    write_picture(folder / "demo.svg", runs, METHODS)
    console.print()
    console.print(comparison(summary["methods"]))
    console.print(next_steps(folder), soft_wrap=True)
    return summary


def comparison(methods: dict[str, dict[str, Any]]) -> Table:
    """One row per method: accuracy, and how well it finds the wrong labels."""
    table = Table(title="Accuracy on clean test images")
    table.add_column("method")
    for name in ("last epoch", "best epoch", "wrong labels found", "flagged labels wrong"):
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


def next_steps(folder: Path) -> str:
    """The end of the output: what was written, and what to run next."""
    return (
        f"Open [bold]{folder / 'demo.svg'}[/bold] in a browser: accuracy by epoch, and images that "
        "PLS flags.\n"
        f"All labels, one row per image: [bold]{folder / 'pls' / 'labels.csv'}[/bold]\n\n"
        "Next, on your own images (one folder per class):\n"
        "  pseudoloss inspect photos/\n"
        "  pseudoloss train photos/ --out run"
    )


def default_folder(resume: bool) -> Path:
    """The first of pseudoloss-demo, pseudoloss-demo-2, … that does not exist; to resume, the last
    one that does."""
    existing, folder, number = None, Path("pseudoloss-demo"), 2
    while folder.exists():
        existing, folder = folder, Path(f"pseudoloss-demo-{number}")
        number += 1
    return existing if resume and existing is not None else folder


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
