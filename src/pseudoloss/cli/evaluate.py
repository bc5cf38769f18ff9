"""`pseudoloss evaluate`."""

from typing import TYPE_CHECKING

from pseudoloss.cli.options import (
    COLUMNS,
    LIMITS,
    add_best,
    add_device,
    add_read_options,
    add_safe_csv,
    given_read_options,
)
from pseudoloss.cli.parser import Parser, path
from pseudoloss.terminal import one_line, show

if TYPE_CHECKING:
    from pseudoloss.inference.evaluation import Evaluation

SHOWN = 5  # classes and confusions in the report


def run(arguments: list[str]) -> None:
    """Measure the accuracy of a trained model on labelled images.

    RUN is as for pseudoloss predict, SOURCE as for pseudoloss train. Prints accuracy, the worst
    classes, the most frequent confusions and the calibration of the probabilities.
    """
    parser = Parser(
        "evaluate",
        run,
        examples=(
            "pseudoloss evaluate run photos/",
            "pseudoloss evaluate run tested.csv --out evaluation",
            "pseudoloss evaluate run photos/ --part val --json",
        ),
    )
    parser.usage = "pseudoloss evaluate RUN SOURCE [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, exported folder or model file")
    add("source", metavar="SOURCE", help="images with correct labels")
    add(
        "--part",
        choices=("train", "val", "test"),
        help="split of SOURCE to evaluate on (default: test, else val, else all images)",
    )
    add(
        "--out",
        type=path,
        metavar="DIR",
        help="folder to write evaluation.json, classes.csv, confusion.csv and predictions.csv to; "
        "must not exist",
    )
    add("--json", action="store_true", help="print the content of evaluation.json")
    add_safe_csv(parser)
    add_best(parser)
    add_device(parser)
    add_read_options(parser, (*COLUMNS, *LIMITS))
    args = parser.parse(arguments)
    from pseudoloss.files import as_path, new_folder, refuse_existing, to_json
    from pseudoloss.inference.evaluation import evaluate
    from pseudoloss.progress import stderr_reporter
    from pseudoloss.reading import ReadOptions
    from pseudoloss.runs import open_model

    if args.out is not None:
        refuse_existing(as_path(args.out, "--out"))
    reporter = stderr_reporter()
    model = open_model(args.run, args.best, args.device, reporter.notice)
    options = ReadOptions(**given_read_options(args))
    with reporter:
        found = evaluate(model, args.source, args.part, options, reporter.progress)
    if args.out is not None:
        with new_folder(args.out) as folder:
            found.write(folder, args.safe_csv)
    show(to_json(found.summary(), indent=2) if args.json else report(found))
    if args.out is not None and not args.json:
        show(f"\nwritten: {args.out}/: evaluation.json, classes.csv, confusion.csv, …")
    elif not args.json:
        show("\nNext: add --out DIR to write all classes, confusions and predictions as tables")


def report(found: "Evaluation") -> str:
    """The evaluation as text: overall scores, worst classes, confusions, calibration."""
    tested = found.classes[found.classes["support"] > 0]
    lines = [*_overall(found, len(tested)), ""]
    worst = tested.sort_values("accuracy", kind="stable").head(SHOWN)
    width = max(len("worst classes"), *(len(str(name)) for name in worst["class"]))
    lines.append(f"  {'worst classes':{width}}  accuracy  precision  recall  images")
    lines += [
        f"  {row['class']:{width}}  {row['accuracy']:7.2f}%  {_score(row['precision']):>9}  "
        f"{_score(row['recall']):>6}  {row['support']:6,}"
        for row in worst.astype(object).to_dict("records")
    ]
    confusions = found.confusions.head(SHOWN)
    if len(confusions):
        lines += ["", "  most frequent confusions"]
        lines += [
            f"  {row['images']:6,} × {row['label']} predicted as {row['predicted_label']}"
            for row in confusions.to_dict("records")
        ]
    lines += ["", "  probability    images  mean    accuracy"]
    lines += [
        f"  {part['low']:.2f} to {part['high']:.2f}  {part['images']:7,}  "
        f"{part['confidence']:.3f}  {part['accuracy']:7.2f}%"
        for part in found.calibration["bins"]
        if part["images"]
    ]
    return "\n".join(map(one_line, lines))


def _overall(found: "Evaluation", tested: int) -> list[str]:
    images, classes = len(found.predictions), len(found.classes)
    confidence = float(found.predictions["probability"].mean())
    tendency = "overconfident" if 100 * confidence > found.accuracy else "underconfident"
    split = "all images" if found.part == "all" else found.part
    of = f"{tested} of {classes}" if tested < classes else f"{tested}"
    lines = [
        f"{found.source}, {split}: {images:,} images, {of} classes",
        f"  accuracy     {found.accuracy:.2f}% (mean over classes {found.balanced_accuracy:.2f}%)",
        f"  calibration  error {found.calibration['error']:.3f} over "
        f"{len(found.calibration['bins'])} bins; mean confidence {confidence:.1%}: {tendency}",
        f"  negative log-likelihood  {found.negative_log_likelihood:.4f}",
    ]
    if found.skipped:
        first, files = found.skipped[0], "file" if len(found.skipped) == 1 else "files"
        lines.append(
            f"  skipped      {len(found.skipped):,} {files} that cannot be read (the first: "
            f"{first.path}, {first.reason})"
        )
    return lines


def _score(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3f}"
