"""The commands. Words are parsed first; torch is loaded only when a command needs it."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pseudoloss import __version__
from pseudoloss.cli.parser import Parser, as_argument, duration, number, path, peek, whole
from pseudoloss.config import (
    METHODS,
    Settings,
    as_flag,
    as_json,
    as_text,
    describe_settings,
    flag,
    setting_types,
)
from pseudoloss.errors import InputError, TrainingError, did_you_mean
from pseudoloss.experiments.commands import experiments
from pseudoloss.presets import NEEDS, PRESETS, request

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. 2 means that the input was wrong and nothing was written."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):  # a terminal without × or – still gets every line
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"pseudoloss {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise InputError(f"{words[0]}: no such command{did_you_mean(words[0], COMMANDS)}")
        COMMANDS[words[0]](words[1:])
        sys.stdout.flush()
        return 0
    except InputError as error:
        return complain(str(error), WRONG_INPUT)
    except TrainingError as error:
        return complain(str(error), FAILED)
    except KeyboardInterrupt as interrupt:
        return complain(str(interrupt) or "interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def overview() -> str:
    lines = [
        "usage: pseudoloss COMMAND ...",
        "",
        "Train image classifiers on labels that cannot be trusted, and learn which are wrong.",
        "",
        "commands:",
        *(f"  {name:11} {_first_line(command)}" for name, command in COMMANDS.items()),
        "",
        "pseudoloss COMMAND --help tells more. New here? pseudoloss demo",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ commands


def demo(words: list[str]) -> None:
    """See it work: digits with 40% wrong labels, in under a minute.

    Trains cross-entropy beside PLS on scikit-learn's handwritten digits, which need no download.
    """
    parser = Parser("demo", demo)
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="where to write; new (default: pseudoloss-demo, or that with a number behind it)",
    )
    parser.add_argument(
        "--seed",
        type=whole,
        default=1,
        metavar="N",
        help="seed of noise and training (default: 1)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with a demo that was broken off"
    )
    args = parser.parse(words)
    from pseudoloss.cli.demo import run_demo

    run_demo(args.out, args.seed, args.resume)


def train(words: list[str]) -> None:
    """Train a classifier in spite of wrong labels; find out which they are.

    SOURCE is a folder with a folder of images for each class (or with train/, val/ and test/ that
    hold those), or a table (.csv, .parquet) with the columns path and label; hf:NAME,
    hf:NAME:CONFIG or hf:FOLDER, a data set of Hugging Face's; an .npz file with arrays; or digits,
    cifar10:DIR, cifar100:DIR, cnwl:DIR:0.4, imagenet32:DIR, web-aircraft:DIR, web-bird:DIR,
    web-car:DIR.
    Everything that is learnt goes into the run folder RUN.
    """
    preset = peek(words, "--preset")
    method = peek(words, "--method") or PRESETS.get(preset or "", {}).get("method", "pls")
    args = train_parser(preset, method).parse(words)
    if args.out is None:
        raise InputError("--out is missing: name the run folder to write, such as --out run")
    known = (*setting_types(method), *READING)
    explicit = {name: value for name, value in vars(args).items() if name in known}
    from pseudoloss.engine import messages as messages
    from pseudoloss.engine.training import train as run_training

    try:
        run = run_training(
            args.source,
            args.out,
            preset=args.preset,
            config=args.config,
            resume=args.resume,
            minutes=args.minutes,
            time_budget=args.time,
            checkpoint_every=args.checkpoint_every,
            quiet=args.quiet,
            **explicit,
        )
    except KeyboardInterrupt:
        hint = f"interrupted; go on with: {messages.resume_command(args.out)}"
        raise KeyboardInterrupt(hint if args.out.exists() else "interrupted") from None
    if run.finished and not args.quiet:
        print(messages.what_next(args.out))


def inspect(words: list[str]) -> None:
    """Look at a source before training on it: what it holds, what is broken, what is there twice.

    SOURCE is as for pseudoloss train. Tells how many images there are of each class, their sizes
    and formats; files that cannot be read, and why; pictures that are there more than once, with
    two labels, or both to train and to test on; and what training would make of it.
    """
    parser = Parser("inspect", inspect)
    parser.usage = "pseudoloss inspect SOURCE [OPTION ...]"
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what to look at")
    add(
        "--duplicates",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode every image, to find broken files and duplicates; without, only the headers "
        "of files are read",
    )
    add(
        "--limit",
        type=whole,
        default=3,
        metavar="N",
        help="how many files or pictures to name of each kind (default: 3)",
    )
    add("--json", action="store_true", help="for scripts: all that was found, as JSON")
    _add_reading(parser)
    args = parser.parse(words)
    reading = {name: value for name, value in vars(args).items() if name in READING}
    from dataclasses import asdict

    from rich.console import Console

    from pseudoloss.cli import inspection
    from pseudoloss.files import to_json
    from pseudoloss.progress import TerminalReporter

    with TerminalReporter(Console(stderr=True)) as reporter:
        found = inspection.inspect(
            args.source,
            duplicates=args.duplicates,
            limit=args.limit,
            progress=reporter.progress,
            **reading,
        )
    print(to_json(asdict(found), indent=2) if args.json else inspection.report(found))


def predict(words: list[str]) -> None:
    """Say what is on images, with the model of a run.

    IMAGES are image files, folders (every file in them, and in the folders inside), or tables
    (.csv, .parquet) with a column path. Files are read as they were for training. RUN is a run
    folder, a folder that was exported as safetensors, or such a file. Writes a row an image: path,
    label, probability. Files that cannot be read are told of and left out.
    """
    parser = Parser("predict", predict)
    parser.usage = "pseudoloss predict RUN IMAGES ... [OPTION ...]"
    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder")
    add("images", nargs="+", metavar="IMAGES", help="image files, folders and tables")
    add("--out", type=path, metavar="FILE", help="write there, not to the terminal; new")
    add("--force", action="store_true", help="replace FILE if it exists")
    add(
        "--format",
        choices=("csv", "jsonl"),
        help="of the rows: a table, or JSON a line (default: as FILE ends, else csv)",
    )
    add("--probabilities", action="store_true", help="the probability of every class too")
    add(
        "--top",
        type=whole,
        default=1,
        metavar="K",
        help="name the K most likely classes (default: 1)",
    )
    _add_model(parser)
    add("--quiet", action="store_true", help="print nothing but rows and errors")
    args = parser.parse(words)
    from pseudoloss.files import refuse_existing
    from pseudoloss.inference import predictions
    from pseudoloss.paths import as_path
    from pseudoloss.progress import SilentReporter, beside_output
    from pseudoloss.runs import open_model

    if args.out is not None:
        as_path(args.out, "--out")
        if not args.force:
            refuse_existing(args.out, hint="add --force to replace it")
        if args.out.is_dir() or not args.out.parent.is_dir():
            what = "is a folder" if args.out.is_dir() else f"there is no folder {args.out.parent}"
            raise InputError(f"--out {args.out}: {what}")
    paths = predictions.find_images(args.images)
    model = open_model(args.run, args.best, args.device)
    predictions.check_top(args.top, len(model.classes))
    output = sys.stdout  # before a bar on standard error takes its place
    bar = args.out is not None or not output.isatty()
    reporter = SilentReporter() if args.quiet else beside_output(bar)
    ending = "jsonl" if args.out is not None and args.out.suffix == ".jsonl" else "csv"
    options: dict[str, Any] = {
        "form": args.format or ending,
        "top": args.top,
        "probabilities": args.probabilities,
        "reporter": reporter,
    }
    with reporter:
        if args.out is None:
            predictions.write_predictions(model, paths, output, **options)
        else:
            predictions.write_predictions_to(args.out, model, paths, **options)


def evaluate(words: list[str]) -> None:
    """Measure how right a model is on images with labels.

    SOURCE is what pseudoloss train takes. Without --part, what is for testing: the test part, else
    val, else all of it. Prints accuracy, the worst classes, what is confused with what, and
    whether the probabilities can be believed.
    """
    parser = Parser("evaluate", evaluate)
    parser.usage = "pseudoloss evaluate RUN SOURCE [OPTION ...]"
    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder")
    add("source", metavar="SOURCE", help="images with right labels")
    add("--part", choices=("train", "val", "test"), help="part of SOURCE")
    add(
        "--out",
        type=path,
        metavar="DIR",
        help="write evaluation.json, classes.csv, confusion.csv and predictions.csv there; new",
    )
    add("--json", action="store_true", help="print evaluation.json, not a table")
    _add_model(parser)
    _add_columns(parser.add_argument_group("Tables of images"))
    args = parser.parse(words)
    columns = {name: value for name, value in vars(args).items() if name.endswith("_column")}
    from pseudoloss.data import ReadOptions
    from pseudoloss.engine import messages as messages
    from pseudoloss.files import new_folder, refuse_existing, to_json
    from pseudoloss.inference.evaluation import evaluate as compare
    from pseudoloss.paths import as_path
    from pseudoloss.progress import beside_output
    from pseudoloss.runs import open_model

    if args.out is not None:
        refuse_existing(as_path(args.out, "--out"))
    model = open_model(args.run, args.best, args.device)
    with beside_output() as reporter:
        found = compare(model, args.source, args.part, ReadOptions(**columns), reporter.progress)
    if args.out is not None:
        with new_folder(args.out) as folder:
            found.write(folder)
    print(to_json(found.summary(), indent=2) if args.json else messages.evaluated(found))
    if args.out is not None and not args.json:
        print(f"\nwritten: {args.out}/: evaluation.json, classes.csv, confusion.csv, …")


def export(words: list[str]) -> None:
    """Write the model of a run in a common format, with all that using it takes.

    onnx and torchscript take pixels and give probabilities, and need no pseudoloss; safetensors
    is for pseudoloss itself. What was written is compared with the model before it is there.
    """
    parser = Parser("export", export)
    parser.usage = "pseudoloss export RUN --out DIR [OPTION ...]"
    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder")
    add("--out", type=path, metavar="DIR", help="the folder to write; new")
    add(
        "--format",
        choices=("onnx", "torchscript", "safetensors"),
        default="onnx",
        help="of the model (default: onnx)",
    )
    _add_best(parser)
    args = parser.parse(words)
    if args.out is None:
        raise InputError("--out is missing: name the folder to write, such as --out model")
    from pseudoloss.engine import messages as messages
    from pseudoloss.inference.export import export_run

    print(messages.exported(export_run(args.run, args.out, args.format, args.best)))


def presets(words: list[str]) -> None:
    """List the presets and what each of them changes; with NAME, every setting of a preset."""
    parser = Parser("presets", presets)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a preset")
    name = parser.parse(words).name
    if name is not None:
        _print_preset(name)
        return
    width = max(map(len, PRESETS))
    for name, changes in PRESETS.items():
        text = "  ".join(as_flag(key, value) for key, value in changes.items())
        text = text or "(all defaults: see pseudoloss presets default)"
        print(f"{name:{width}}  {text}{_needs(name)}")


def _print_preset(name: str) -> None:
    if name not in PRESETS:
        raise InputError(f"{name}: no such preset{did_you_mean(name, PRESETS)}")
    print(f"{name}{_needs(name)}")
    usual = as_json(Settings(method=PRESETS[name].get("method", "pls")))
    for key, value in as_json(Settings(**PRESETS[name])).items():
        mark = " " if value == usual[key] else "*"
        print(f"{mark} {flag(key):26} {as_text(value)}")
    print("* is not the default; pseudoloss train --help tells what each of them means")


def _needs(preset: str) -> str:
    return f"  (needs {NEEDS[preset]})" if preset in NEEDS else ""


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "inspect": inspect,
    "train": train,
    "predict": predict,
    "evaluate": evaluate,
    "export": export,
    "presets": presets,
    "experiments": experiments,
}


# ------------------------------------------------------------------------------------- parsing


def train_parser(preset: str | None, method: str) -> Parser:
    """Flags of the command itself, and one for every setting, with the values of the preset."""
    parser = Parser("train", train)
    parser.usage = "pseudoloss train SOURCE --out RUN [OPTION ...]"
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="what to train on; may be left out to resume")
    add("--out", type=path, metavar="RUN", help="the run folder; new, unless --resume is given")
    add("--preset", metavar="NAME", help="settings to start from (default: what fits the source)")
    add("--config", type=path, metavar="FILE", help="a TOML file of settings, or a config.json")
    add(
        "--resume",
        action="store_true",
        help="go on with the run in RUN from its last checkpoint; begin it where there is none",
    )
    add(
        "--minutes",
        type=number,
        metavar="M",
        help="stop after an epoch when M minutes are over; --resume goes on",
    )
    add(
        "--time",
        type=duration,
        metavar="TIME",
        help="choose as many epochs as fit into this time, such as 30m or 2h",
    )
    add(
        "--checkpoint-every",
        type=whole,
        default=1,
        metavar="N",
        help="epochs between two checkpoints; the last epoch always has one (default: 1)",
    )
    add("--quiet", action="store_true", help="print nothing but errors")
    _add_reading(parser)

    method = method if method in METHODS else "pls"
    values = as_json(request(preset, None, {"method": method}).settings("default"))
    types = setting_types(method)
    groups: dict[str, Any] = {}
    for name, (title, text) in describe_settings(method).items():
        group = groups.setdefault(title, parser.add_argument_group(title) if title else parser)
        shown = "" if values[name] is None else f" (default: {as_text(values[name])})"
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        options["help"] = (text + shown).replace("%", "%%")
        group.add_argument(flag(name), **options, **as_argument(types[name]))
    return parser


# How image files are read: the fields of `pseudoloss.data.ReadOptions`.
READING = ("test", "hold_out", "strict", "fit", "path_column", "label_column", "split_column")


def _add_reading(parser: Parser) -> None:
    group = parser.add_argument_group("Folders and tables of images")
    missing: dict[str, Any] = {"default": argparse.SUPPRESS}
    add = group.add_argument
    add(
        "--test",
        metavar="SOURCE",
        help="a folder or table with right labels, to test on",
        **missing,
    )
    add(
        "--hold-out",
        type=number,
        metavar="X",
        help="share of the images to test on, where SOURCE has none for that (default: 0.1)",
        **missing,
    )
    add(
        "--strict",
        action="store_true",
        help="refuse files that cannot be read, instead of leaving them out",
        **missing,
    )
    add(
        "--fit",
        choices=("crop", "stretch"),
        help="how images become squares: their centre, or all of it stretched (default: crop)",
        **missing,
    )
    _add_columns(group)


def _add_columns(group: Any) -> None:
    for name in ("path", "label", "split"):
        found = "" if name == "split" else "; of hf:NAME, found by its type"
        text = f"column of a table (default: {name}{found})"
        group.add_argument(f"--{name}-column", metavar="NAME", help=text, default=argparse.SUPPRESS)


def _add_model(parser: Parser) -> None:
    """Which of its models, and where it computes."""
    _add_best(parser)
    text = "auto, cpu, cuda, cuda:N or mps (default: auto)"
    parser.add_argument("--device", default="auto", metavar="NAME", help=text)


def _add_best(parser: Parser) -> None:
    text = "the model of the best epoch, not of the last one"
    parser.add_argument("--best", action="store_true", help=text)


def complain(text: str, code: int) -> int:
    kind = "error: " if code != INTERRUPTED else ""
    print(f"pseudoloss: {kind}{' '.join(text.split())}", file=sys.stderr)
    return code


def _first_line(command: Callable[[list[str]], None]) -> str:
    return (command.__doc__ or "").strip().splitlines()[0]
