"""`pseudoloss inspect`."""

import argparse

from pseudoloss.cli.options import add_read_options, given_read_options
from pseudoloss.cli.parser import Parser, whole
from pseudoloss.terminal import show


def run(arguments: list[str]) -> None:
    """Check a source before training: counts, broken files, duplicates, likely settings.

    SOURCE is as for pseudoloss train. Prints the number of images per class, image sizes and
    formats; files that cannot be read, and why; images that occur more than once, with different
    labels, or both for training and for testing; the settings that training would use; and about
    how long an audit and training take here. Broken files are not an error.
    """
    parser = Parser(
        "inspect",
        run,
        examples=("pseudoloss inspect photos/", "pseudoloss inspect labels.csv --json"),
    )
    parser.usage = "pseudoloss inspect SOURCE [options]"
    add = parser.add_argument
    add("source", metavar="SOURCE", help="images to inspect")
    add(
        "--duplicates",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode every image to find broken files and duplicates; off: read only file headers "
        "(default: on)",
    )
    add(
        "--limit",
        type=whole,
        default=3,
        metavar="N",
        help="number of files to list per problem (default: 3)",
    )
    add(
        "--timing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time a few images and training steps, to say how long an audit and training take "
        "here (default: on)",
    )
    add("--json", action="store_true", help="print everything as JSON")
    add_read_options(parser)
    args = parser.parse(arguments)
    from dataclasses import asdict

    from pseudoloss.cli.inspection import inspect
    from pseudoloss.cli.inspection_report import report
    from pseudoloss.files import to_json
    from pseudoloss.progress import stderr_reporter

    with stderr_reporter() as reporter:
        found = inspect(
            args.source,
            duplicates=args.duplicates,
            limit=args.limit,
            timing=args.timing,
            progress=reporter.progress,
            **given_read_options(args),
        )
    show(to_json(asdict(found), indent=2) if args.json else report(found))
