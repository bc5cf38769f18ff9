"""`pseudoloss demo`: an audit, cross-entropy and PLS on digits with 40% wrong labels."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pseudoloss.auditing.audit import audit
from pseudoloss.cli.demo_picture import write_picture
from pseudoloss.cli.page import add_report
from pseudoloss.config import Settings
from pseudoloss.engine.training import train
from pseudoloss.errors import InputError
from pseudoloss.files import read_checked, write_json
from pseudoloss.interrupts import renamed
from pseudoloss.presets import PRESETS
from pseudoloss.runs import RunFolder

PRESET = "digits-id40"
METHODS = {"ce": "cross-entropy", "pls": "PLS"}


def run_demo(out: Path | None, seed: int, resume: bool) -> dict[str, Any]:
    """Audit the noisy digits, train both methods on them, print a table, write the reports, draw
    demo.svg, and return the summary."""
    Settings(seed=seed)  # checks the seed before anything is printed
    folder = default_folder(resume) if out is None else out
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out {folder}: already exists; choose another folder or add --resume")
    console = Console(highlight=False)
    console.print(
        "Handwritten digits; 40% of the training labels are replaced by wrong ones. The test "
        "labels are clean.\n\n"
        "[bold]1. Audit[/bold]: find the wrong labels without training a network.\n"
    )
    options: dict[str, Any] = {"preset": PRESET, "seed": seed, "resume": resume}
    try:
        found = find_labels(folder / "audit", seed)
        console.print(f"\n{audit_line(found)}\n")
        console.print("[bold]2. Train[/bold] on the same labels, with cross-entropy and PLS.\n")
        runs = {
            method: train("digits", folder / method, method=method, **options) for method in METHODS
        }
    except KeyboardInterrupt as error:
        place = shlex.quote(str(folder))
        text = f"interrupted; resume with: pseudoloss demo --out {place} --resume"
        raise renamed(error, text) from None
    summary = {"audit": found, "methods": {method: run.summary for method, run in runs.items()}}
    write_json(folder / "summary.json", summary)
    write_picture(folder / "demo.svg", runs, METHODS)
    for name in ("audit", "pls"):
        add_report(folder / name)
    console.print()
    console.print(comparison(summary["methods"]))
    console.print(next_steps(folder), soft_wrap=True)
    return summary


def find_labels(folder: Path, seed: int) -> dict[str, Any]:
    """Audit the labels that the methods train on; the summary. A finished audit is used again."""
    if RunFolder(folder).finished:
        return read_checked(RunFolder(folder).summary)
    return audit("digits", out=folder, corrupt=PRESETS[PRESET]["corrupt"], seed=seed).summary


def audit_line(summary: dict[str, Any]) -> str:
    """How right the audit is."""
    truth = summary["truth"]
    return (
        f"The audit took {summary['seconds']:.0f} s. It finds {_percent(truth['recall'])} of the "
        f"wrong labels; {_percent(truth['precision'])} of the labels that it flags are wrong."
    )


def comparison(methods: dict[str, dict[str, Any]]) -> Table:
    """One row per method: accuracy, and how well it finds the wrong labels."""
    table = Table(title="Accuracy on clean test images, and what labels.csv flags")
    table.add_column("method")
    for name in ("last epoch", "best epoch", "wrong labels found", "flagged labels wrong"):
        table.add_column(name, justify="right")
    for method, summary in methods.items():
        accuracy, truth = summary["accuracy"], summary.get("truth") or {}
        table.add_row(
            METHODS[method],
            f"{accuracy['last']:.1f}%",
            f"{accuracy['best']:.1f}%",
            _percent(truth.get("recall")),
            _percent(truth.get("precision")),
        )
    return table


def next_steps(folder: Path) -> str:
    """The end of the output: what was written, and what to run next."""
    return (
        f"Open [bold]{folder / 'pls' / 'report.html'}[/bold] in a browser: images whose labels PLS "
        f"flags, and accuracy by epoch\n(of the audit: [bold]{folder / 'audit' / 'report.html'}"
        f"[/bold]; a picture of both methods: [bold]{folder / 'demo.svg'}[/bold]).\n\n"
        "Next, on your own images (one folder per class):\n"
        "  pseudoloss audit photos/ --out audit     which labels are wrong\n"
        "  pseudoloss review audit                  decide, image by image\n"
        "  pseudoloss apply audit --out fixed.csv   a corrected table\n"
        "  pseudoloss train fixed.csv --out run     an accurate classifier"
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
