"""`pseudoloss predict`."""

import sys
from typing import Any

from pseudoloss.cli.options import (
    LIMITS,
    add_best,
    add_device,
    add_read_options,
    add_safe_csv,
    given_read_options,
)
from pseudoloss.cli.parser import Parser, path, whole
from pseudoloss.errors import InputError
from pseudoloss.terminal import VisibleOutput


def run(arguments: list[str]) -> None:
    """Classify images with a trained model.

    RUN is a run folder, a folder written by pseudoloss export --format safetensors, or a
    .safetensors file. IMAGES are image files, folders (searched recursively), tables (.csv, .tsv,
    .parquet) with a column path, and WebDataset shards (wds:FOLDER). Images are preprocessed as in
    training. Prints one row per image: path, label, probability. If IMAGES is one folder or table,
    paths are relative to it, as in the label table of a run. Files that cannot be read are reported
    and skipped.
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
    add("run", metavar="RUN", help="run folder, exported folder or model file")
    add("images", nargs="+", metavar="IMAGES", help="image files, folders, tables and shards")
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
    add_safe_csv(parser)
    add_best(parser)
    add_device(parser)
    add_read_options(parser, LIMITS)
    add("--quiet", action="store_true", help="print only rows and errors")
    args = parser.parse(arguments)
    from pseudoloss.data.scanning import limits_of
    from pseudoloss.files import as_path, check_replaceable
    from pseudoloss.inference import predictions
    from pseudoloss.progress import SilentReporter, stderr_reporter
    from pseudoloss.reading import ReadOptions
    from pseudoloss.runs import open_model

    if args.out is not None:
        as_path(args.out, "--out")
        check_replaceable(args.out, args.force)
        if not args.out.parent.is_dir():
            raise InputError(f"--out {args.out}: no such folder: {args.out.parent}")
    reading = ReadOptions(**given_read_options(args))
    images = predictions.find_images(args.images, reading)
    output = VisibleOutput(sys.stdout)  # before a progress bar on standard error replaces it
    show_bar = args.out is not None or not output.is_terminal
    reporter = SilentReporter() if args.quiet else stderr_reporter(show_bar)
    model = open_model(args.run, args.best, args.device, reporter.notice)
    predictions.check_top(args.top, len(model.classes))
    ending = "jsonl" if args.out is not None and args.out.suffix == ".jsonl" else "csv"
    form = args.format or ending
    if args.safe_csv and form != "csv":
        raise InputError(f"--safe-csv is for csv, not {form}")
    options: dict[str, Any] = {
        "form": form,
        "safe_csv": args.safe_csv,
        "top": args.top,
        "probabilities": args.probabilities,
        "limits": limits_of(reading),
        "reporter": reporter,
    }
    with reporter:
        if args.out is None:
            predictions.write_predictions(model, images, output, **options)
        else:
            rows = predictions.write_predictions_to(args.out, model, images, **options)
            reporter.say(f"{args.out}: {rows:,} prediction{'s' * (rows != 1)}")
