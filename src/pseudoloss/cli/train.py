"""`pseudoloss train`."""

import argparse
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from pseudoloss import distributed
from pseudoloss.cli.options import add_read_options, with_default
from pseudoloss.cli.page import add_report
from pseudoloss.cli.parser import Parser, argument_for, duration, number, path, peek, whole
from pseudoloss.config import (
    METHOD_SETTINGS,
    Settings,
    all_setting_types,
    as_json,
    describe_settings,
    flag,
    setting_types,
)
from pseudoloss.errors import InputError
from pseudoloss.files import free_name
from pseudoloss.interrupts import renamed
from pseudoloss.presets import PRESETS, request
from pseudoloss.reading import READ_OPTIONS
from pseudoloss.terminal import show

METAVARS = {
    "network": "NAME",
    "weights": "WEIGHTS",
    "schedule": "SCHEDULE",
    "corrupt": "NOISE",
    "pool": "PATH",
    "device": "NAME",
}


def run(arguments: list[str]) -> None:
    """Train a classifier on images with noisy labels.

    Writes a run folder: the model, the metrics, and labels.csv with one row per image, which says
    whether its label is flagged as noisy and which label is suggested instead.

    SOURCE is one of
      FOLDER            one folder of images per class, or train/, val/ and test/ with such folders
      TABLE             a .csv, .tsv or .parquet file with the columns path and label
      FILE.npz          NumPy arrays: images, labels
      hf:NAME           a Hugging Face dataset; also hf:NAME:CONFIG and hf:FOLDER
      wds:SHARDS        WebDataset shards: wds:FOLDER or wds:FOLDER/train-{000..009}.tar
      digits            scikit-learn's handwritten digits
      cifar10:DIR, cifar100:DIR, imagenet32:DIR, cnwl:DIR:0.4,
      web-aircraft:DIR, web-bird:DIR, web-car:DIR
                        published datasets, from their original files in DIR
      cifar10-train:DIR, cifar100-train:DIR
                        their training images alone

    Every setting is an option. The help shows the settings of one method, pls by default:
    pseudoloss train --method elr --help shows those of elr. The defaults shown are those of
    --preset default; your own images get a preset and settings that fit them, which
    pseudoloss inspect SOURCE shows.
    """
    args = train_parser(peek(arguments, "--preset"), peek(arguments, "--method")).parse(arguments)
    if args.out is None:
        raise InputError("--out is missing: name the run folder to write, such as --out run")
    known = {*READ_OPTIONS, *all_setting_types()}
    explicit = {name: value for name, value in vars(args).items() if name in known}
    from pseudoloss.engine.training import train
    from pseudoloss.runs import RunFolder, resume_command

    try:
        run = train(
            args.source,
            args.out,
            preset=args.preset,
            config=args.config,
            resume=args.resume,
            minutes=args.minutes,
            time_budget=args.time,
            checkpoint_every=args.checkpoint_every,
            quiet=args.quiet,
            log=args.log,
            **explicit,
        )
    except KeyboardInterrupt as error:
        folder = RunFolder(args.out)
        if folder.finished:
            raise renamed(error, f"interrupted; the run in {args.out} is finished") from None
        if folder.config.exists():
            text = f"interrupted; resume with: {resume_command(args.out)}"
            raise renamed(error, text) from None
        raise
    if run.finished and distributed.is_main():
        add_report(args.out)
        if not args.quiet:
            kinds = {notice["kind"] for notice in run.summary["notices"]}
            known = run.summary["estimated_noise"].get("known", True)
            show(next_steps(args.out, learned_nothing="end" in kinds, noise_known=known))


def next_steps(folder: Path, learned_nothing: bool, noise_known: bool = True) -> str:
    """What to do with a finished run."""
    place = shlex.quote(str(folder))
    if learned_nothing:
        return (
            "Next: train with other settings (see the notice above), or find wrong labels without\n"
            f"  training: pseudoloss audit SOURCE --out {free_name('audit')}"
        )
    call = f"pl.load({str(folder)!r}).model.predict(images)"
    decide = f"decide on labels: pseudoloss review {place}"
    if not noise_known:  # then neither are the wrong labels
        decide = f"audit the labels: pseudoloss audit SOURCE --out {free_name('audit')}"
    return (
        f"Next: open {folder}/report.html in a browser, or {folder}/labels.csv\n"
        f"  or {decide}\n"
        f"  or classify images:  pseudoloss predict {place} photo.jpg folder/\n"
        f"  or use it in Python: import pseudoloss as pl; {call}"
    )


def train_parser(preset: str | None = None, method: str | None = None) -> Parser:
    """Options of the command and one option per setting. The help shows the settings of `method`,
    with the values of `preset` as defaults. Settings of other methods are parsed too: the method
    may come from a file, and `request` explains what does not belong to it."""
    parser = Parser(
        "train",
        run,
        examples=(
            "pseudoloss train photos/ --out run",
            "pseudoloss train labels.csv --out run --time 2h",
            "pseudoloss train digits --out run --corrupt symmetric:0.4 --method ce",
            "pseudoloss train --out run --resume",
        ),
    )
    parser.usage = "pseudoloss train SOURCE --out RUN [options]"
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="images to train on; optional with --resume")
    add(
        "--out",
        type=path,
        metavar="RUN",
        help="path of the run folder; must not exist unless --resume is given",
    )
    add(
        "--preset",
        metavar="NAME",
        help="settings to start from; see pseudoloss presets (default: chosen to fit SOURCE)",
    )
    add(
        "--config",
        type=path,
        metavar="FILE",
        help="settings from a TOML file or from the config.json of a run; options override them",
    )
    add(
        "--resume",
        action="store_true",
        help="resume the run in RUN from its last checkpoint; start it if there is none",
    )
    add(
        "--minutes",
        type=number,
        metavar="M",
        help="stop before an epoch that would not end within M minutes; continue with --resume",
    )
    add(
        "--time",
        type=duration,
        metavar="TIME",
        help="choose the number of epochs that fits into this time, such as 30m or 2h",
    )
    add(
        "--checkpoint-every",
        type=whole,
        default=1,
        metavar="N",
        help="number of epochs between checkpoints; the last epoch always has one (default: 1)",
    )
    add("--quiet", action="store_true", help="print only errors")
    add(
        "--log",
        default="",
        metavar="NAMES",
        help="also log metrics to tensorboard, wandb or mlflow; several with commas",
    )
    add_read_options(parser)
    _add_settings(parser, preset, method)
    return parser


class Setting(NamedTuple):
    """A setting as the command line shows it."""

    type: Any
    group: str
    help: str


def settings_of(method: str) -> dict[str, Setting]:
    """The settings of a method by name: the shared ones, then its own."""
    types = setting_types(method)
    return {
        name: Setting(types[name], group, text)
        for name, (group, text) in describe_settings(method).items()
    }


def _add_settings(parser: Parser, preset: str | None, method: str | None) -> None:
    """One option per setting. Those of other methods do not appear in the help."""
    usual = PRESETS.get(preset or "", {}).get("method", Settings.method)
    chosen = method if method in METHOD_SETTINGS else usual
    defaults = as_json(request(preset, None, {"method": chosen}).settings("default"))
    defaults["method"] = usual
    groups: dict[str, Any] = {}
    shown = settings_of(chosen)
    for name, (hint, title, text) in shown.items():
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            help=with_default(text, defaults[name]),
            **_argument(name, hint),
        )
    others = {
        name: hint for other in METHOD_SETTINGS for name, hint in setting_types(other).items()
    }
    for name, hint in others.items():
        if name not in shown:
            parser.add_argument(
                flag(name),
                dest=name,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **_argument(name, hint),
            )


def _argument(name: str, hint: Any) -> dict[str, Any]:
    return argument_for(hint) | ({"metavar": METAVARS[name]} if name in METAVARS else {})
