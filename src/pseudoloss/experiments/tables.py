"""Compare the paper's numbers with ours, from run folders and from committed result files."""

import csv
import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pseudoloss.config import upgrade_settings
from pseudoloss.errors import InputError
from pseudoloss.experiments.cells import (
    find_run_folders,
    parse_value,
    read_accuracies,
    read_details,
    read_finished,
    read_notices,
    source_kind,
)
from pseudoloss.experiments.definitions import Cell, Experiment, Published
from pseudoloss.experiments.matching import (
    pool_difference,
    preset_settings,
    recorded_settings,
    setting_differences,
)
from pseudoloss.files import read_json

NO_VALUE = "–"
DETAILS = {
    "seconds": ("seconds", ".0f"),
    "memory": ("memory (GiB)", ".2f"),
    "auc": ("AUC", ".3f"),
    "f1": ("F1", ".3f"),
}
"""Columns of `--details`: their title and format."""


@dataclass(frozen=True)
class Result:
    """The accuracies of one run.

    Attributes:
        seed: its seed.
        last, best: accuracy after the last and in the best epoch.
        where: name of its file, or folder of its cell.
        notices: notices that the run gave.
        differs: how its settings and pool differ from those of the cell; empty if they do not.
        details: what else it says, by the keys of `DETAILS`.
    """

    seed: int
    last: float
    best: float
    where: str
    notices: tuple[str, ...] = ()
    differs: str = ""
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultFile:
    """A result file of benchmarks/run.py."""

    source: str
    preset: str
    settings: Mapping[str, Any]  # the relevant ones
    pool: str | None
    results: tuple[Result, ...]

    def belongs_to(self, cell: Cell) -> bool:
        return (
            source_kind(self.source) == source_kind(cell.source)
            and self.preset == cell.preset
            and self.settings == preset_settings(cell.preset, cell.changes)
        )


@dataclass(frozen=True)
class Line:
    """A line of the table: a cell and its runs, which all differ from it in the same way or not at
    all; or a number that is only published, without runs."""

    cell: Cell | Published
    results: tuple[Result, ...]

    @property
    def differs(self) -> str:
        """How the runs differ from the cell; empty if they do not."""
        return self.results[0].differs if self.results else ""

    @property
    def last(self) -> tuple[float | None, float | None]:
        return mean_and_std([result.last for result in self.results])

    @property
    def best(self) -> tuple[float | None, float | None]:
        return mean_and_std([result.best for result in self.results])

    def detail(self, name: str) -> float | None:
        """The mean over the runs that say it."""
        return mean_and_std([r.details[name] for r in self.results if name in r.details])[0]

    @property
    def difference(self) -> float | None:
        """Our best accuracy minus the paper's, which is the best one too."""
        ours, paper = self.best[0], self.cell.paper
        return None if ours is None or paper is None else ours - paper


def collect(
    cells: Sequence[Cell | Published],
    out: Path | None,
    results: Path | None,
    seeds: Sequence[int] | None = None,
) -> tuple[list[Line], list[str]]:
    """The lines of the table, and notes about them.

    Each seed counts once: first from a run folder, then from the first file in alphabetical order.
    Runs that differ from their cell count only if there are no others, and only together with runs
    that differ in the same way.
    """
    lines: list[Line] = []
    notes: list[str] = []
    files = [] if results is None else list(read_result_files(results, notes))
    for cell in cells:
        if isinstance(cell, Published):
            lines.append(Line(cell, ()))
            continue
        found: dict[int, Result] = {}
        candidates = [] if out is None else list(read_run_folders(out, cell, notes))
        for file in files:
            if file.belongs_to(cell):
                differs = pool_difference(cell, file.pool)
                candidates += [replace(result, differs=differs) for result in file.results]
        candidates = [r for r in candidates if seeds is None or r.seed in seeds]
        counted = choose_difference(candidates)
        for result in candidates:
            if result.differs != counted:
                notes.append(
                    f"{cell.name}: seed {result.seed} of {result.where} is left out, it was "
                    f"trained with {result.differs}"
                )
                continue
            if result.seed in found:
                notes.append(
                    f"{cell.name}: seed {result.seed} of {result.where} is left out, "
                    f"it is in {found[result.seed].where}"
                )
            found.setdefault(result.seed, result)
        line = Line(cell, tuple(found[seed] for seed in sorted(found)))
        if line.results:
            where = ", ".join(dict.fromkeys(result.where for result in line.results))
            numbers = " ".join(str(result.seed) for result in line.results)
            plural = "s" if len(line.results) > 1 else ""
            notes.append(f"{cell.name}: seed{plural} {numbers} of {where}")
        for result in line.results:
            for notice in result.notices:
                notes.append(f"{cell.name}: notice of seed {result.seed}: {notice}")
        if line.differs:
            notes.append(f"* {cell.name} was trained with other settings: {line.differs}")
        lines.append(line)
    return lines, notes


def choose_difference(results: Sequence[Result]) -> str:
    """Which runs count: those that do not differ from the cell or, if all do, the most frequent
    difference."""
    differences = [result.differs for result in results]
    return "" if "" in differences else max(differences, key=differences.count, default="")


def read_run_folders(out: Path, cell: Cell, notes: list[str]) -> Iterable[Result]:
    """The finished runs of a cell."""
    for seed, folder in find_run_folders(out, cell).items():
        place = folder.path.parent
        if not folder.finished:
            notes.append(f"{cell.name}: seed {seed} is not finished")
            continue
        try:
            run = read_finished(folder)
        except InputError as error:
            notes.append(f"{cell.name}: seed {seed} is left out, its folder is damaged ({error})")
            continue
        recorded = run.recorded
        if recorded.settings.seed != seed:
            notes.append(
                f"{cell.name}: seed {seed} of {place} is left out, it was trained with --seed "
                f"{recorded.settings.seed}"
            )
            continue
        if source_kind(recorded.source) != source_kind(cell.source):
            notes.append(
                f"{cell.name}: seed {seed} of {place} is left out, it was trained on "
                f"{recorded.source} (not {cell.source})"
            )
            continue
        differences = [
            *setting_differences(cell, recorded.settings),
            pool_difference(cell, recorded.settings.pool),
        ]
        differs = ", ".join(filter(None, differences))
        yield Result(seed, run.last, run.best, str(place), run.notices, differs, run.details)


def read_result_files(folder: Path, notes: list[str]) -> Iterable[ResultFile]:
    """The result files of benchmarks/run.py in a folder; a note names each damaged file."""
    if not folder.is_dir():
        raise InputError(f"--results {folder}: no such folder")
    for path in sorted(folder.glob("*.json")):
        try:
            file = read_result_file(path)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            notes.append(f"{path.name} is left out: it is damaged ({error!r})")
            continue
        if file is not None:
            yield file


def read_result_file(path: Path) -> ResultFile | None:
    """A result file of benchmarks/run.py; None if another program wrote the file."""
    content = read_json(path)
    command = content.get("command") if isinstance(content, dict) else None
    if not isinstance(command, str) or "run.py " not in command:
        return None
    arguments = shlex.split(command)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    preset = arguments[arguments.index("--preset", 0, end) + 1]
    programs = [i for i, argument in enumerate(arguments) if argument.endswith("run.py")]
    source = arguments[programs[0] + 1]
    changes = parse_flags(arguments[end + 1 :])
    results = tuple(
        Result(
            int(run["seed"]),
            *read_accuracies(run),
            path.name,
            read_notices(run),
            details=_without_costs(read_details(run)),
        )
        for run in content["runs"]
    )
    if "settings" in content:  # the preset may have changed since
        settings = recorded_settings(content["settings"])
    else:
        settings = preset_settings(preset, upgrade_settings(changes))
    pool = None if changes.get("pool") is None else str(changes["pool"])
    return ResultFile(source, preset, settings, pool, results)


def _without_costs(details: Mapping[str, float]) -> dict[str, float]:
    """Times of result files are of whole processes, and some of them shared their GPU."""
    return {name: value for name, value in details.items() if name in ("auc", "f1")}


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Settings from the flags of a command: --mu 0.1, --mu=0.1, --contrast, --no-contrast."""
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = "=", rest.pop(0)
        name = name.removeprefix("--").replace("-", "_")
        if equals:
            values[name] = parse_value(name, text)
        else:
            values[name.removeprefix("no_")] = not name.startswith("no_")
    return values


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None if there are too few values."""
    return (
        mean(values) if values else None,
        stdev(values) if len(values) > 1 else None,
    )


# ---------------------------------------------------------------------------------------- formats


def header(experiment: Experiment, lines: Sequence[Line]) -> list[str]:
    """The names of the columns that are texts, then those of all others."""
    several = len({line.cell.column for line in lines}) > 1
    return [experiment.row_header, *([experiment.column_header] if several else [])]


def is_published(lines: Sequence[Line]) -> bool:
    """Whether there are numbers of the paper to compare with."""
    return any(line.cell.paper is not None for line in lines)


def number_columns(lines: Sequence[Line], details: bool) -> list[str]:
    """The names of the other columns."""
    more = [name for name, _ in DETAILS.values()] if details else []
    if not is_published(lines):
        return ["ours, last", "ours, best", "n", *more]
    return ["paper, best", "ours, last", "ours, best", "n", "best - paper", *more]


def doubts(lines: Sequence[Line]) -> list[str]:
    """What to know about the published numbers, which refer to it by its position."""
    return list(dict.fromkeys(text for line in lines for text in line.cell.doubts))


def all_notes(experiment: Experiment, lines: Sequence[Line], notes: Sequence[str]) -> list[str]:
    """About the published numbers, then about ours."""
    numbered = [f"[{number}] published: {text}" for number, text in enumerate(doubts(lines), 1)]
    others = any(line.cell.paper is not None and line.cell.method != "pls" for line in lines)
    return [*numbered, *(experiment.remarks if others else ()), *notes]


def format_line(
    line: Line, several: bool, compared: bool, footnotes: Sequence[str], details: bool
) -> list[str]:
    """The entries of a line."""
    cell = line.cell
    mark = "*" if line.differs else ""
    paper = format_accuracy(cell.paper, cell.paper_std)
    if cell.doubts:
        marks = [str(footnotes.index(text) + 1) for text in cell.doubts]
        paper += f" [{', '.join(marks)}]"
    count = str(len(line.results)) if line.results else NO_VALUE
    difference = NO_VALUE if line.difference is None else f"{line.difference:+.2f}"
    found = [(line.detail(name), form) for name, (_, form) in DETAILS.items() if details]
    return [
        cell.row + mark,
        *([cell.column] if several else []),
        *([paper] if compared else []),
        format_accuracy(*line.last),
        format_accuracy(*line.best),
        "published" if isinstance(cell, Published) else count,
        *([difference] if compared else []),
        *(NO_VALUE if value is None else f"{value:{form}}" for value, form in found),
    ]


def format_accuracy(value: float | None, std: float | None) -> str:
    if value is None:
        return NO_VALUE
    return f"{value:.2f}" if std is None else f"{value:.2f} ± {std:.2f}"


def as_text(
    experiment: Experiment, lines: Sequence[Line], notes: Sequence[str], details: bool = False
) -> str:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    texts = header(experiment, lines)
    several, compared = len(texts) > 1, is_published(lines)
    for name in texts:
        table.add_column(name, justify="left", no_wrap=True)
    for name in number_columns(lines, details):
        table.add_column(name, justify="right", no_wrap=True)
    blocks = len({line.cell.row for line in lines}) > 1
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        ends = blocks and following is not None and following.cell.column != line.cell.column
        entries = map(escape, format_line(line, several, compared, doubts(lines), details))
        table.add_row(*entries, end_section=ends)
    file = io.StringIO()
    Console(file=file, width=200, highlight=False).print(table)
    body = "\n".join(text.rstrip() for text in file.getvalue().strip("\n").splitlines())
    return "\n".join([title(experiment), body, *all_notes(experiment, lines, notes)]) + "\n"


def as_markdown(
    experiment: Experiment, lines: Sequence[Line], notes: Sequence[str], details: bool = False
) -> str:
    texts, numbers = header(experiment, lines), number_columns(lines, details)
    marks = [*["---"] * len(texts), *["---:"] * len(numbers)]
    footnotes, several, compared = doubts(lines), len(texts) > 1, is_published(lines)
    entries = [format_line(line, several, compared, footnotes, details) for line in lines]
    rows = [[*texts, *numbers], marks, *entries]
    notes = all_notes(experiment, lines, notes)
    body = ["| " + " | ".join(text.replace("*", "\\*") for text in row) + " |" for row in rows]
    listed = ["", *(f"- {note}".replace("*", "\\*") for note in notes)] if notes else []
    return "\n".join([f"**{title(experiment)}**", "", *body, *listed]) + "\n"


def as_csv(
    experiment: Experiment, lines: Sequence[Line], notes: Sequence[str], details: bool = False
) -> str:
    """Unrounded numbers, without notes; always with the details."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for line in lines:
        cell = line.cell
        numbers = (cell.paper, cell.paper_std, *line.last, *line.best)
        writer.writerow(
            [
                *(experiment.name, cell.name, cell.row, cell.column),
                *("" if number is None else round(number, 4) for number in numbers),
                len(line.results),
                "" if line.difference is None else round(line.difference, 4),
                *("" if value is None else round(value, 4) for value in map(line.detail, DETAILS)),
                line.differs,
                "; ".join(cell.doubts),
            ]
        )
    return file.getvalue()


CSV_COLUMNS = (
    *("experiment", "cell", "row", "column", "paper", "paper_std"),
    *("last", "last_std", "best", "best_std", "n", "difference", *DETAILS, "differs", "doubts"),
)
FORMATS = {"text": as_text, "markdown": as_markdown, "csv": as_csv}


def title(experiment: Experiment) -> str:
    where = experiment.where
    return f"{experiment.title} ({where if where.startswith('not') else f'paper: {where}'})"
