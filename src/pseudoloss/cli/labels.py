"""`pseudoloss labels`."""

import sys
from typing import TYPE_CHECKING, Any

from pseudoloss.cli.options import add_safe_csv
from pseudoloss.cli.parser import Parser, add_several, number, path, whole
from pseudoloss.errors import InputError, name_hint
from pseudoloss.terminal import VisibleOutput, one_line, show

if TYPE_CHECKING:
    import pandas as pd

    from pseudoloss.labels.opening import LabelSet

FORMATS = ("csv", "parquet", "json", "jsonl", "label-studio", "fiftyone", "hf")
SHOWN = 20  # rows in a terminal, without --top


def run(arguments: list[str]) -> None:
    """List the labels of a run or an audit; filter and export them.

    RUN is a run folder (of an unfinished run, the labels of its last checkpoint) or the folder of
    an audit. Actions are decided from the stored scores: keep, relabel or review. Prints a short
    table to a terminal and CSV to a pipe, or writes FILE. label-studio, fiftyone and hf write a
    folder. Nothing in RUN is changed.
    """
    parser = Parser(
        "labels",
        run,
        examples=(
            "pseudoloss labels run",
            "pseudoloss labels run --action relabel --min-trust 0.9 --out relabel.csv",
            "pseudoloss labels run --class cat --top 50 | cut -d, -f2,4,6",
            "pseudoloss labels run --action review --format label-studio --out tasks",
        ),
    )
    parser.usage = "pseudoloss labels RUN [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="path of the run folder or audit")
    add_thresholds(parser)
    add_several(parser, "--class", "NAME", "only labels of these classes (of the given label)")
    add(
        "--action",
        nargs="+",
        action="extend",
        default=[],
        choices=("keep", "relabel", "review"),
        help="only labels with these actions",
    )
    add("--top", type=whole, metavar="N", help="only the N most doubtful labels, in order of doubt")
    add("--out", type=path, metavar="FILE", help="file or folder to write, must not exist")
    add(
        "--format",
        choices=FORMATS,
        help="output format (default: by the ending of FILE, else csv)",
    )
    add_safe_csv(parser)
    args = parser.parse(arguments)
    from pseudoloss.files import as_path, refuse_existing
    from pseudoloss.labels.decisions import select
    from pseudoloss.labels.exports import (
        FOLDERS,
        as_text,
        write_folder,
        write_table,
    )
    from pseudoloss.labels.opening import open_labels
    from pseudoloss.spreadsheets import safe_for_spreadsheets

    form = _format(args.format, args.out)
    if args.safe_csv and form not in ("csv", None):
        raise InputError(f"--safe-csv is for csv, not {form}")
    if args.out is not None:
        refuse_existing(as_path(args.out, "--out"))
    elif form in FOLDERS or form == "parquet":
        raise InputError(f"--format {form}: needs --out, the {_kind(form)} to write")
    labels = open_labels(args.run)
    classes = getattr(args, "class")
    for name in classes:
        if name not in labels.classes:
            raise InputError(f"--class {name}: no such class{name_hint(name, labels.classes)}")
    decided = labels.decided(args.threshold, args.min_trust)
    chosen = select(decided, classes=classes, actions=args.action, top=args.top)
    if labels.state:
        show(labels.state, file=sys.stderr)
    if args.safe_csv:
        chosen = safe_for_spreadsheets(chosen)
    if args.out is None and form is None and sys.stdout.isatty():
        _show(labels, decided, chosen, args.top)
    elif args.out is None:
        VisibleOutput(sys.stdout).write(as_text(chosen, form or "csv"))
    elif form in FOLDERS:
        for notice in write_folder(labels, chosen, args.out, form):
            show(f"notice: {one_line(notice)}", file=sys.stderr)
        show(f"{args.out}: {len(chosen):,} labels, as {form}", file=sys.stderr)
    else:
        write_table(chosen, args.out, form or "csv")
        show(f"{args.out}: {len(chosen):,} labels", file=sys.stderr)


def add_thresholds(parser: Parser) -> None:
    """Add the options that decide actions."""
    for name, text in (
        (
            "--threshold",
            "flag a label if p_noisy is at least X (default: that of the audit; for a run 0.5)",
        ),
        (
            "--min-trust",
            "relabel a flagged label if trust is at least X and higher than the probability of the "
            "given label, else review (default: that of the audit; for a run 0.4)",
        ),
    ):
        parser.add_argument(name, type=number, metavar="X", help=text)


def _kind(form: str) -> str:
    return "file" if form == "parquet" else "folder"


def _format(asked: str | None, out: Any) -> Any:
    """The format: as asked, or by the ending of the file; None if nothing says."""
    if asked is not None or out is None:
        return asked
    ending = out.suffix.removeprefix(".").lower()
    if ending in ("csv", "parquet", "json", "jsonl"):
        return ending
    raise InputError(
        f"--out {out}: name the format with --format, or end it in .csv, .parquet, .json or .jsonl"
    )


def _show(
    labels: "LabelSet", decided: "pd.DataFrame", chosen: "pd.DataFrame", top: int | None
) -> None:
    """A short table for a terminal: issues, the most doubtful first."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pseudoloss.labels.decisions import most_doubtful

    console = Console(highlight=False)
    rows = chosen if top is not None else most_doubtful(chosen).head(SHOWN)
    table = Table(box=None, pad_edge=False, header_style="bold")
    room = max((console.width - 32) // 3, 8)  # for each name; of files, the end says most
    for name in ("image", "given", "suggested"):
        table.add_column(name, no_wrap=True, max_width=room)
    for name in ("p_noisy", "trust"):
        table.add_column(name, justify="right")
    table.add_column("action")
    for row in rows.to_dict("records"):
        name = row["path"] if isinstance(row["path"], str) else f"{row['part']} {row['index']}"
        suggested = row["suggested_label"] if isinstance(row["suggested_label"], str) else "?"
        name = name if len(name) <= room else f"…{name[1 - room :]}"
        cells = (name, row["given_label"], "" if row["action"] == "keep" else suggested)
        numbers = ("" if row[x] != row[x] else f"{row[x]:.2f}" for x in ("p_noisy", "trust"))
        table.add_row(*(escape(one_line(cell)) for cell in cells), *numbers, row["action"])
    console.print(table)
    counts = decided["action"].value_counts()
    parts = [f"{counts.get(action, 0):,} {action}" for action in ("keep", "relabel", "review")]
    console.print(f"\n{len(decided):,} labels: {', '.join(parts)}", end="")
    path = escape(one_line(labels.path))
    more = f"; {len(rows):,} of {len(chosen):,} shown" if len(rows) < len(chosen) else ""
    console.print(f"{more}. All as a table: pseudoloss labels {path} --out FILE.csv")
