"""`pseudoloss predict`."""

import sys
from typing import Any

from pseudoloss.cli.options import add_best, add_device
from pseudoloss.cli.parser import Parser, path, whole
from pseudoloss.errors import InputError


def run(arguments: list[str]) -> None:
    """Classify images with a trained model.

    RUN is a run folder, a folder written by pseudoloss export --format safetensors, or a
    .safetensors file. IMAGES are image files, folders (searched recursively) and tables (.csv,
    .tsv, .parquet) with a column path. Images are preprocessed as in training. Prints one row per
    image: path, label, probability. If IMAGES is one folder or table, paths are relative to it, as
    in the label table of a run. Files that cannot be read are reported and skipped.
    """
    parser = Parser(
        "predict",
        run,
        examples=(
            "pseudoloss predict run photo.jpg",
            "pseudoloss predict run new-images/ --out predictions.csv",
            "pseudoloss predict run new-images/ --top 3 --format jsonl | less",
        ),
    )
    parser.usage = "pseudoloss predict RUN IMAGES ... [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="path of the run folder")
    add("images", nargs="+", metavar="IMAGES", help="image files, folders and tables")
    add(
        "--out",
        type=path,
        metavar="FILE",
        help="file to write, must not exist (default: print to standard output)",
    )
    add("--force", action="store_true", help="overwrite FILE if it exists")
    add(
        "--format",
        choices=("csv", "jsonl"),
        help="output format (default: jsonl if FILE ends in .jsonl, else csv)",
    )
    add("--probabilities", action="store_true", help="add the probability of every class")
    add(
        "--top",
        type=whole,
        default=1,
        metavar="K",
        help="number of most likely classes to list (default: 1)",
    )
    add_best(parser)
    add_device(parser)
    add("--quiet", action="store_true", help="print only rows and errors")
    args = parser.parse(arguments)
    from pseudoloss.files import as_path, refuse_existing
    from pseudoloss.inference import predictions
    from pseudoloss.progress import SilentReporter, stderr_reporter
    from pseudoloss.runs import open_model

    if args.out is not None:
        as_path(args.out, "--out")
        if not args.force:
            refuse_existing(args.out, hint="add --force to overwrite it")
        if args.out.is_dir() or not args.out.parent.is_dir():
            reason = "is a folder" if args.out.is_dir() else f"no such folder: {args.out.parent}"
            raise InputError(f"--out {args.out}: {reason}")
    images = predictions.find_images(args.images)
    output = sys.stdout  # before a progress bar on standard error replaces it
    show_bar = args.out is not None or not output.isatty()
    reporter = SilentReporter() if args.quiet else stderr_reporter(show_bar)
    model = open_model(args.run, args.best, args.device, reporter.notice)
    predictions.check_top(args.top, len(model.classes))
    ending = "jsonl" if args.out is not None and args.out.suffix == ".jsonl" else "csv"
    options: dict[str, Any] = {
        "form": args.format or ending,
        "top": args.top,
        "probabilities": args.probabilities,
        "reporter": reporter,
    }
    with reporter:
        if args.out is None:
            predictions.write_predictions(model, images, output, **options)
        else:
            rows = predictions.write_predictions_to(args.out, model, images, **options)
            reporter.say(f"{args.out}: {rows:,} prediction{'s' * (rows != 1)}")
