"""The commands of `pseudoloss experiments`."""

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pseudoloss.cli.parser import Parser, add_several, duration, number, path, whole
from pseudoloss.config import as_flag
from pseudoloss.errors import InputError, name_hint
from pseudoloss.interrupts import renamed
from pseudoloss.terminal import show

OUT, RESULTS = Path("experiments"), Path("benchmarks/results")


def run(arguments: list[str]) -> None:
    """Repeat the paper's experiments: runs, tables and plots.

    pseudoloss experiments list      list experiments and plots
    pseudoloss experiments run       train the cells of an experiment
    pseudoloss experiments table     compare our numbers with the paper's
    pseudoloss experiments plot      draw a plot from the runs

    pseudoloss experiments COMMAND --help describes a command.
    """
    if arguments and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
        return
    parser = Parser("experiments", run)
    parser.usage = f"pseudoloss experiments {'|'.join(COMMANDS)} ..."
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    command = parser.parse(arguments).command
    if command is not None:
        hint = name_hint(command, COMMANDS)
        raise InputError(f"experiments {command}: no such command{hint}")
    parser.print_help()


def experiments_list(arguments: list[str]) -> None:
    """List the experiments and plots, or the cells of the experiment NAME."""
    parser = Parser("experiments list", experiments_list)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an experiment")
    args = parser.parse(arguments)
    from pseudoloss.experiments.catalogue import EXPERIMENTS, PLOTS, find_experiment
    from pseudoloss.experiments.published import method_title

    if args.name is not None:
        experiment = find_experiment(args.name)
        has_extra = any(cell.extra for cell in experiment.cells)
        hint = "; extra cells run only with --only or --method" if has_extra else ""
        show(f"{experiment.title} ({experiment.where}){hint}")
        for cell in experiment.cells:
            changes = " ".join(as_flag(name, value) for name, value in cell.changes.items())
            paper = "" if cell.paper is None else f"paper {cell.paper:.2f}"
            extra = "extra" if cell.extra else ""
            line = f"  {cell.name:32} {paper:12} {extra:6} --preset {cell.preset} {changes}"
            show(line.rstrip())
        others = dict.fromkeys(number.method for number in experiment.published)
        for method in others:
            numbers = [n for n in experiment.published if n.method == method]
            paper = ", ".join(f"{n.row} {n.paper:.2f}" for n in numbers if n.paper is not None)
            show(f"  published only: {method_title(method)} ({method}): {paper}")
        return
    show("experiments (list NAME shows the cells):")
    for name, experiment in EXPERIMENTS.items():
        count = len(experiment.choose(None))
        cells = f"{count} cell{'s' if count > 1 else ''}"
        show(f"  {name:16} {experiment.title} ({experiment.where}); {cells}")
    show("plots:")
    for name, title in PLOTS.items():
        show(f"  {name:18} {title}")


def experiments_run(arguments: list[str]) -> None:
    """Train the cells of an experiment that are not done yet.

    The run folder of a cell with a seed is OUT/EXPERIMENT/CELL/seedN. Run the same command again to
    resume interrupted cells. Several processes, also on several machines that share OUT, can run it
    at the same time.
    """
    parser = Parser("experiments run", experiments_run)
    parser.usage = "pseudoloss experiments run NAME --data KIND=DIR [OPTION ...]"
    add = parser.add_argument
    _add_name(parser)
    _add_out(parser)
    add_several(
        parser,
        "--data",
        "KIND=DIR",
        "folder of each kind of data: cifar100, cnwl, web-aircraft, web-bird, web-car, and the "
        "pools imagenet32 and places365",
    )
    text = "seeds of the noise and the training (default: 1 2 3)"
    add("--seeds", type=whole, nargs="+", default=[1, 2, 3], metavar="N", help=text)
    _add_only(parser)
    _add_method(parser)
    add_several(parser, "--set", "NAME=VALUE", "change a setting in all cells, such as epochs=2")
    add("--minutes", type=number, metavar="M", help="stop after M minutes")
    add(
        "--dry-run",
        action="store_true",
        help="only list the cells, their states and the commands that train them",
    )
    add("--quiet", action="store_true", help="print one line per cell, none per epoch")
    text = "also log metrics to tensorboard, wandb or mlflow; several with commas"
    add("--log", default="", metavar="NAMES", help=text)
    add(
        "--submit",
        choices=("slurm", "local"),
        help="start workers as jobs of SLURM, or as processes of this machine (needs submitit)",
    )
    text = "number of workers (default: 1)"
    add("--workers", type=whole, default=1, metavar="N", help=text)
    add("--partition", metavar="NAME", help="partition of SLURM")
    add("--gpus", type=whole, metavar="N", help="GPUs of each worker")
    text = "time limit of a job, such as 12h; after it, the worker is queued again and resumes"
    add("--time", type=duration, metavar="TIME", help=text)
    text = "other options of sbatch, such as account=vision mem=64G"
    add_several(parser, "--sbatch", "NAME=VALUE", text)
    args = parser.parse(arguments)
    parameters = _parameters(args)
    from pseudoloss.experiments.catalogue import find_experiment

    experiment = find_experiment(args.name)
    experiment.choose(args.only, args.method)
    from pseudoloss.experiments import cells

    places, changes = cells.read_places(args.data), cells.read_changes(args.set)
    jobs = cells.plan(
        experiment,
        args.out,
        places,
        seeds=args.seeds,
        only=args.only,
        methods=args.method,
        changes=changes,
    )
    if args.dry_run:
        cells.check_values(jobs)
        known: list[str] = []
        for job in jobs:
            others = ", ".join(f"{before} (not {wanted})" for before, wanted in job.differences())
            state = "other" if others else job.state
            why = f": other settings: {others}" if others else job.damage and f": {job.damage}"
            known.append(state)
            show(f"{state:7} {job.name}{why}\n        {job.command}")
        show(f"{len(jobs):,} run{'s' * (len(jobs) != 1)}: {_totals(known)}")
        return
    if args.submit is not None:
        from pseudoloss.cli.submission import check, open_executor, submit

        check(args.submit)
        cells.check_before_training(jobs, places, args.minutes)
        executor = open_executor(args.submit, args.out / "workers", parameters)
        submit(executor, _worker_arguments(args), args.workers, _say)
        return
    try:
        states = cells.run(
            jobs, places, minutes=args.minutes, quiet=args.quiet, log=args.log, say=_say
        )
    except KeyboardInterrupt as error:
        raise renamed(error, "interrupted; run the same command to resume") from None
    show(_totals(states.values()))
    if "done" not in states.values():
        return
    chosen = ["--out", str(args.out), *(["--only", *args.only] if args.only else [])]
    table = [experiment.name, *chosen, *(["--method", *args.method] if args.method else [])]
    table += ["--details"] if any(cell.timed for cell in experiment.cells) else []
    show("Next: pseudoloss " + shlex.join(["experiments", "table", *table]))
    plot = {"selection": "accuracy", "same-harness": "accuracy-over-time"}.get(experiment.name)
    if plot is not None:
        show("   or: pseudoloss " + shlex.join(["experiments", "plot", plot, *chosen]))


def _totals(states: Iterable[str]) -> str:
    """How many runs are in each state."""
    counts = Counter(states)
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    """What submitit gets; nothing without --submit."""
    options = {"--partition": args.partition, "--gpus": args.gpus, "--time": args.time}
    options["--sbatch"] = args.sbatch or None
    if args.submit is None:
        for name in [name for name, value in options.items() if value is not None]:
            raise InputError(f"{name}: is for --submit slurm")
        if args.workers != 1:
            raise InputError("--workers: is for --submit slurm and --submit local")
        return {}
    for name, value in (("--workers", args.workers), ("--gpus", args.gpus)):
        if value is not None and value < (name == "--workers"):
            raise InputError(f"{name} must be {int(name == '--workers')} or more, not {value}")
    parameters: dict[str, Any] = {"timeout_min": 7 * 24 * 60 if args.time is None else args.time}
    parameters["timeout_min"] = max(1, round(parameters["timeout_min"]))
    if args.gpus is not None:
        parameters["gpus_per_node"] = args.gpus
    if args.submit == "local":
        for name in [name for name in ("--partition", "--sbatch") if options[name] is not None]:
            raise InputError(f"{name}: is for --submit slurm")
    else:
        others = {}
        for text in args.sbatch:
            name, equals, value = text.partition("=")
            if not equals or not re.fullmatch(r"[a-z][a-z_-]*", name):
                raise InputError(f"--sbatch {text}: must be NAME=VALUE, such as account=vision")
            others[name.replace("-", "_")] = value
        parameters |= {"slurm_additional_parameters": others}
        parameters |= {} if args.partition is None else {"slurm_partition": args.partition}
    return parameters


def _worker_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of a worker: those of the command, without where workers are started."""
    found = [args.name, "--out", str(args.out), "--seeds", *map(str, args.seeds)]
    several = {"--data": args.data, "--only": args.only, "--method": args.method, "--set": args.set}
    for name, values in several.items():
        found += [name, *values] if values else []
    if args.minutes is not None:
        found += ["--minutes", str(args.minutes)]
    found += ["--log", args.log] if args.log else []
    return [*found, "--quiet"] if args.quiet else found


def experiments_table(arguments: list[str]) -> None:
    """Compare our numbers with the paper's: mean ± standard deviation over seeds, and difference.

    Our numbers come from the run folders in OUT and from result files of benchmarks/run.py. Without
    --out and --results, both experiments/ and benchmarks/results/ are read if they exist.
    """
    parser = Parser("experiments table", experiments_table)
    parser.usage = "pseudoloss experiments table NAME [OPTION ...]"
    add = parser.add_argument
    _add_name(parser)
    add("--out", type=path, metavar="OUT", help="folder of the runs")
    add("--results", type=path, metavar="DIR", help="folder of result files")
    add("--seeds", type=whole, nargs="+", metavar="N", help="count only these seeds (default: all)")
    _add_only(parser)
    _add_method(parser)
    add(
        "--format",
        choices=("text", "markdown", "csv"),
        default="text",
        help="format of the table (default: text)",
    )
    text = "also seconds, peak memory of the GPU, and how well wrong labels are found (AUC, F1)"
    add("--details", action="store_true", help=text)
    add("--file", type=path, metavar="FILE", help="write the table to this new file")
    add("--force", action="store_true", help="replace FILE if it exists")
    args = parser.parse(arguments)
    from pseudoloss.experiments.catalogue import find_experiment

    experiment = find_experiment(args.name)
    chosen = experiment.choose_numbers(args.only, args.method)
    from pseudoloss.experiments import tables
    from pseudoloss.files import check_replaceable, write_bytes

    if args.file is not None:
        check_replaceable(args.file, args.force, "--file")
    out, results = args.out, args.results
    if out is None and results is None:
        out, results = OUT, RESULTS if RESULTS.is_dir() else None
    elif out is not None and not out.is_dir():
        raise InputError(f"--out {out}: no such folder")
    lines, notes = tables.collect(chosen, out, results, args.seeds)
    extra = 0
    if not args.only and not args.method:
        extra = len(experiment.cells) + len(experiment.published) - len(chosen)
    if extra:
        what = "baselines, other methods, trials"
        notes.append(f"{extra} extra cells ({what}) are not shown; --only '*' shows all")
    if not any(line.results for line in lines):
        places = " and ".join(str(place) for place in (out, results) if place is not None)
        seeds = f" with --seeds {' '.join(map(str, args.seeds))}" if args.seeds else ""
        hidden = [cell for cell in experiment.cells if extra and cell not in chosen]
        hidden_lines, _ = tables.collect(hidden, out, results, args.seeds)
        found = any(line.results for line in hidden_lines)
        hint = "; there are runs of extra cells, which --only '*' shows" if found else ""
        message = f"no finished runs of {experiment.name} found in {places}{seeds}{hint}"
        show(f"pseudoloss: {message}", file=sys.stderr)
    text = tables.FORMATS[args.format](experiment, lines, notes, args.details)
    if args.file is None:
        show(text, end="")
        return
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.file, text.encode())
    except OSError as error:
        raise InputError(f"--file {args.file}: cannot be written ({error.strerror})") from None


def experiments_plot(arguments: list[str]) -> None:
    """Draw a plot of the paper from the runs of `selection`, or compare all methods.

    NAME is noise-detection, pseudo-labels, accuracy, bias or, from the runs of `same-harness` and
    `digits`, accuracy-over-time. Needs matplotlib.
    """
    parser = Parser("experiments plot", experiments_plot)
    parser.usage = "pseudoloss experiments plot NAME [OPTION ...]"
    add = parser.add_argument
    add("name", metavar="NAME", help="a plot; see pseudoloss experiments list")
    _add_out(parser)
    add("--file", type=path, metavar="FILE", help="new .svg or .png file (default: NAME.svg)")
    add("--force", action="store_true", help="replace FILE if it exists")
    _add_only(parser)
    add(
        "--epochs",
        type=whole,
        nargs=2,
        metavar="N",
        help="epochs of the two histograms of pseudo-labels (default: one third of the way and the "
        "last)",
    )
    args = parser.parse(arguments)
    from pseudoloss.experiments.catalogue import PLOTS

    if args.name not in PLOTS:
        raise InputError(f"{args.name}: no such plot{name_hint(args.name, PLOTS)}")
    from pseudoloss.experiments.plots import draw
    from pseudoloss.files import check_replaceable

    file = args.file or Path(f"{args.name}.svg")
    check_replaceable(file, args.force, "--file")
    for note in draw(args.name, args.out, file, args.only, args.epochs):
        show(note)
    show(f"written: {file}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "list": experiments_list,
    "run": experiments_run,
    "table": experiments_table,
    "plot": experiments_plot,
}


def _add_name(parser: Parser) -> None:
    text = "an experiment; see pseudoloss experiments list"
    parser.add_argument("name", metavar="NAME", help=text)


def _add_out(parser: Parser) -> None:
    text = f"folder of the runs (default: {OUT})"
    parser.add_argument("--out", type=path, default=OUT, metavar="OUT", help=text)


def _add_only(parser: Parser) -> None:
    text = "only cells whose name matches, such as 'id50-*'; '*' matches all, also the extra ones"
    add_several(parser, "--only", "PATTERN", text)


def _add_method(parser: Parser) -> None:
    text = "only cells of these methods, such as divide-mix; also extra cells"
    add_several(parser, "--method", "METHOD", text)


def _say(text: str) -> None:
    show(text, flush=True)
