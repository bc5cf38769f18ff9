"""The commands of `pseudoloss experiments`."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from pseudoloss.cli.parser import Parser, add_several, number, path, whole
from pseudoloss.config import as_flag
from pseudoloss.errors import InputError, did_you_mean

OUT, RESULTS = Path("experiments"), Path("benchmarks/results")
SEEDS = "seeds of noise and training (default: 1 2 3)"


def experiments(words: list[str]) -> None:
    """Repeat the paper's experiments: their runs, tables and figures.

    pseudoloss experiments list      what there is
    pseudoloss experiments run       train the cells of an experiment
    pseudoloss experiments table     the paper's numbers beside ours
    pseudoloss experiments figure    draw a figure from the runs

    Each has a --help of its own.
    """
    if words and words[0] in COMMANDS:
        COMMANDS[words[0]](words[1:])
        return
    parser = Parser("experiments", experiments)
    parser.usage = f"pseudoloss experiments {'|'.join(COMMANDS)} ..."
    parser.add_argument("what", nargs="?", help=argparse.SUPPRESS)
    what = parser.parse(words).what
    if what is not None:
        hint = did_you_mean(what, COMMANDS)
        raise InputError(f"experiments {what}: no such command{hint}")
    parser.print_help()


def experiments_list(words: list[str]) -> None:
    """List the experiments and figures; with NAME, the cells of an experiment."""
    parser = Parser("experiments list", experiments_list)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an experiment")
    args = parser.parse(words)
    from pseudoloss.experiments.catalogue import EXPERIMENTS, FIGURES, experiment_of

    if args.name is not None:
        experiment = experiment_of(args.name)
        has_extra = any(cell.extra for cell in experiment.cells)
        hint = "; extra cells run only with --only" if has_extra else ""
        print(f"{experiment.title} ({experiment.where}){hint}")
        for cell in experiment.cells:
            changes = " ".join(as_flag(name, value) for name, value in cell.changes.items())
            paper = "" if cell.paper is None else f"paper {cell.paper:.2f}"
            extra = "extra" if cell.extra else ""
            line = f"  {cell.name:32} {paper:12} {extra:6} --preset {cell.preset} {changes}"
            print(line.rstrip())
        return
    print("experiments (list NAME shows the cells):")
    for name, experiment in EXPERIMENTS.items():
        count = len(experiment.choose(None))
        cells = f"{count} cell{'s' if count > 1 else ''}"
        print(f"  {name:16} {experiment.title} ({experiment.where}); {cells}")
    print("figures, from the runs of selection:")
    for name, title in FIGURES.items():
        print(f"  {name:16} {title}")


def experiments_run(words: list[str]) -> None:
    """Train the cells of an experiment that are not done yet.

    A cell (a setting) with a seed is a run folder, OUT/EXPERIMENT/CELL/seedN. The same command goes
    on with what was broken off, and may run several times at once, on all machines that share OUT.
    """
    parser = Parser("experiments run", experiments_run)
    parser.usage = "pseudoloss experiments run NAME --data KIND=DIR [OPTION ...]"
    add = parser.add_argument
    add("name", metavar="NAME", help="an experiment; see pseudoloss experiments list")
    _add_out(parser)
    add_several(
        parser,
        "--data",
        "KIND=DIR",
        "where data lie: cifar100, cnwl, web-aircraft, web-bird, web-car, and the pools imagenet32 "
        "and places365",
    )
    add("--seeds", type=whole, nargs="+", default=[1, 2, 3], metavar="N", help=SEEDS)
    _add_only(parser)
    add_several(
        parser, "--set", "NAME=VALUE", "another value of a setting in all cells, such as epochs=2"
    )
    add("--minutes", type=number, metavar="M", help="stop when M minutes are over")
    add(
        "--dry-run",
        action="store_true",
        help="only list the cells, their state, and the command that trains each",
    )
    add("--quiet", action="store_true", help="a line a cell, none an epoch")
    args = parser.parse(words)
    from pseudoloss.experiments.catalogue import experiment_of

    experiment = experiment_of(args.name)
    experiment.choose(args.only)
    from pseudoloss.experiments import cells

    places, changes = cells.read_places(args.data), cells.read_changes(args.set)
    jobs = cells.plan(
        experiment, args.out, places, seeds=args.seeds, only=args.only, changes=changes
    )
    if args.dry_run:
        cells.check_settings(jobs)
        for job in jobs:
            others = ", ".join(f"{before} (not {wanted})" for before, wanted in job.differences())
            state = "other" if others else job.state
            why = f": other settings: {others}" if others else job.damage and f": {job.damage}"
            print(f"{state:5} {job.name}{why}\n      {job.command}")
        return
    try:
        states = cells.run(jobs, places, minutes=args.minutes, quiet=args.quiet, say=_say)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on") from None
    counts = {state: list(states.values()).count(state) for state in dict.fromkeys(states.values())}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if "done" not in counts:
        return
    chosen = ["--out", str(args.out), *(["--only", *args.only] if args.only else [])]
    print("Next: pseudoloss " + shlex.join(["experiments", "table", experiment.name, *chosen]))
    if experiment.name == "selection":
        print("   or: pseudoloss " + shlex.join(["experiments", "figure", "accuracy", *chosen]))


def experiments_table(words: list[str]) -> None:
    """The paper's numbers beside ours: mean ± standard deviation over seeds, and the difference.

    Ours come from the run folders in OUT and from result files of benchmarks/run.py. Where neither
    is named, from experiments/ and benchmarks/results/, as far as they are there.
    """
    parser = Parser("experiments table", experiments_table)
    parser.usage = "pseudoloss experiments table NAME [OPTION ...]"
    add = parser.add_argument
    add("name", metavar="NAME", help="an experiment; see pseudoloss experiments list")
    add("--out", type=path, metavar="OUT", help="the folder of the runs")
    add("--results", type=path, metavar="DIR", help="a folder of result files")
    add("--seeds", type=whole, nargs="+", metavar="N", help="seeds that count (default: all)")
    _add_only(parser)
    add(
        "--format",
        choices=("text", "markdown", "csv"),
        default="text",
        help="of the table (default: text)",
    )
    add("--file", type=path, metavar="FILE", help="write it there, not to the terminal; new")
    add("--force", action="store_true", help="replace FILE if it exists")
    args = parser.parse(words)
    from pseudoloss.experiments.catalogue import experiment_of

    experiment = experiment_of(args.name)
    chosen = experiment.choose(args.only)
    from pseudoloss.experiments import tables
    from pseudoloss.files import refuse_existing, write_bytes

    if args.file is not None and not args.force:
        refuse_existing(args.file, "--file", "add --force to replace it")
    out, results = args.out, args.results
    if out is None and results is None:
        out, results = OUT, RESULTS if RESULTS.is_dir() else None
    elif out is not None and not out.is_dir():
        raise InputError(f"--out {out}: no such folder")
    lines, notes = tables.collect(chosen, out, results, args.seeds)
    extra = 0 if args.only else len(experiment.cells) - len(chosen)
    if extra:
        notes.append(f"{extra} extra cells (baselines, trials) are not shown; --only '*' shows all")
    if not any(line.results for line in lines):
        places = " and ".join(str(place) for place in (out, results) if place is not None)
        seeds = f" with --seeds {' '.join(map(str, args.seeds))}" if args.seeds else ""
        hidden = [cell for cell in experiment.cells if extra and cell not in chosen]
        others, _ = tables.collect(hidden, out, results, args.seeds)
        found = any(line.results for line in others)
        hint = "; there are some of the extra cells, which --only '*' shows" if found else ""
        nothing = f"no finished runs of {experiment.name} were found in {places}{seeds}{hint}"
        print(f"pseudoloss: {nothing}", file=sys.stderr)
    text = tables.FORMATS[args.format](experiment, lines, notes)
    if args.file is None:
        print(text, end="")
        return
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.file, text.encode())
    except OSError as error:
        raise InputError(f"--file {args.file}: cannot be written ({error.strerror})") from None


def experiments_figure(words: list[str]) -> None:
    """Draw a figure of the paper from the runs of `selection`.

    NAME is noise-retrieval, guess-retrieval, accuracy or bias. Wants matplotlib.
    """
    parser = Parser("experiments figure", experiments_figure)
    parser.usage = "pseudoloss experiments figure NAME [OPTION ...]"
    add = parser.add_argument
    add("name", metavar="NAME", help="a figure")
    _add_out(parser)
    add("--file", type=path, metavar="FILE", help=".svg or .png; new (default: NAME.svg)")
    add("--force", action="store_true", help="replace FILE if it exists")
    _add_only(parser)
    add(
        "--epochs",
        type=whole,
        nargs=2,
        metavar="N",
        help="epochs of the histograms of guess-retrieval (default: a third of the way; the last)",
    )
    args = parser.parse(words)
    from pseudoloss.experiments.catalogue import FIGURES

    if args.name not in FIGURES:
        raise InputError(f"{args.name}: no such figure{did_you_mean(args.name, FIGURES)}")
    from pseudoloss.experiments.figures import draw
    from pseudoloss.files import refuse_existing

    file = args.file or Path(f"{args.name}.svg")
    if not args.force:
        refuse_existing(file, "--file", "add --force to replace it")
    for note in draw(args.name, args.out, file, args.only, args.epochs):
        print(note)
    print(f"written: {file}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "list": experiments_list,
    "run": experiments_run,
    "table": experiments_table,
    "figure": experiments_figure,
}


def _add_out(parser: Parser) -> None:
    text = f"the folder of the runs (default: {OUT})"
    parser.add_argument("--out", type=path, default=OUT, metavar="OUT", help=text)


def _add_only(parser: Parser) -> None:
    text = "cells whose name matches, such as 'id50-*'; '*' is all, the extra ones too"
    add_several(parser, "--only", "PATTERN", text)


def _say(text: str) -> None:
    print(text, flush=True)
