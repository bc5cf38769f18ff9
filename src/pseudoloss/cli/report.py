"""`pseudoloss report`."""

import shlex
from pathlib import Path

from pseudoloss.cli.parser import Parser, path, whole
from pseudoloss.errors import InputError
from pseudoloss.terminal import show


def run(arguments: list[str]) -> None:
    """Write what a run or an audit found as one HTML file; compare several.

    RUN is a run folder (of an unfinished run, the labels of its last checkpoint) or the folder of
    an audit. The file opens offline: images to correct, estimated noise, confusions, scores,
    training. With several RUNs, it compares them. An existing report is replaced.
    """
    parser = Parser(
        "report",
        run,
        examples=(
            "pseudoloss report run --open",
            "pseudoloss report run --top 100 --out report.html",
            "pseudoloss report audit run --out compare.html",
        ),
    )
    parser.usage = "pseudoloss report RUN [RUN ...] [options]"
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="path of a run folder or audit")
    add(
        "--out",
        type=path,
        metavar="FILE",
        help="file to write (default: report.html in RUN; of several, report-compare.html in the "
        "current folder)",
    )
    add(
        "--top",
        type=whole,
        default=24,
        metavar="N",
        help="images in each gallery (default: 24)",
    )
    add("--open", action="store_true", help="open the report in a browser")
    args = parser.parse(arguments)
    from pseudoloss.files import as_path

    runs = [as_path(text, "run") for text in args.runs]
    if args.out is not None and not as_path(args.out, "--out").parent.is_dir():
        raise InputError(f"--out {args.out}: there is no folder {args.out.parent}")
    from pseudoloss.report.comparing import COMPARE_NAME, write_comparison
    from pseudoloss.report.page import write_report

    if len(runs) == 1:
        file = write_report(runs[0], args.out, args.top)
    else:
        file = write_comparison(runs, args.out or Path(COMPARE_NAME), args.top)
    size = file.stat().st_size
    show(f"written: {file} ({f'{size / 1e6:.1f} MB' if size >= 1e5 else f'{size / 1e3:.0f} kB'})")
    if args.open:
        open_in_browser(file)
    elif len(runs) == 1:
        show(f"Next: open it in a browser: pseudoloss report {shlex.quote(args.runs[0])} --open")


def open_in_browser(file: Path) -> None:
    """Open a file in the browser of the user, if there is one."""
    import webbrowser

    address = file.resolve().as_uri()
    if not webbrowser.open(address):
        show(f"no browser found; open {address}")
