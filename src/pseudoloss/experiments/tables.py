"""A table of the paper beside ours: from run folders, from committed results, or from both."""

import csv
import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pseudoloss.errors import InputError
from pseudoloss.experiments.catalogue import Cell, Experiment, other_pool, unlike, what_counts
from pseudoloss.experiments.cells import (
    accuracies,
    as_value,
    finished_run,
    folders_of,
    kind_of,
    remarks_on,
)

NOTHING = "–"


@dataclass(frozen=True)
class Result:
    """The accuracies of one run."""

    seed: int
    last: float
    best: float
    where: str
    remarks: tuple[str, ...] = ()  # what one should know of the run
    differs: str = ""  # what is not the cell's: settings, the pool


@dataclass(frozen=True)
class Committed:
    """A result file of benchmarks/run.py."""

    file: str
    source: str
    preset: str
    settings: Mapping[str, Any]  # those that count
    pool: str | None
    results: tuple[Result, ...]

    def belongs_to(self, cell: Cell) -> bool:
        return (
            kind_of(self.source) == kind_of(cell.source)
            and self.preset == cell.preset
            and self.settings == what_counts(cell.preset, cell.changes)
        )


@dataclass(frozen=True)
class Line:
    """A line of the table: a cell and the runs of it, which all differ from it in the same way or
    not at all."""

    cell: Cell
    results: tuple[Result, ...]

    @property
    def differs(self) -> str:
        """What is not the cell's."""
        return self.results[0].differs if self.results else ""

    @property
    def last(self) -> tuple[float | None, float | None]:
        return mean_and_std([result.last for result in self.results])

    @property
    def best(self) -> tuple[float | None, float | None]:
        return mean_and_std([result.best for result in self.results])

    @property
    def difference(self) -> float | None:
        """Of the best epochs, since the paper reports those."""
        ours, paper = self.best[0], self.cell.paper
        return None if ours is None or paper is None else ours - paper


def collect(
    cells: Sequence[Cell],
    out: Path | None,
    results: Path | None,
    seeds: Sequence[int] | None = None,
) -> tuple[list[Line], list[str]]:
    """The lines of the table, and what is to be said of them.

    Each seed counts once: a run folder goes before a file, a file before those behind it in the
    alphabet. Runs that differ from their cell count only where no others are, and only with those
    that differ in the same way.
    """
    lines: list[Line] = []
    notes: list[str] = []
    files = [] if results is None else list(committed(results, notes))
    for cell in cells:
        found: dict[int, Result] = {}
        candidates = [] if out is None else list(from_folders(out, cell, notes))
        for file in files:
            if file.belongs_to(cell):
                differs = other_pool(cell, file.pool)
                candidates += [replace(result, differs=differs) for result in file.results]
        candidates = [r for r in candidates if seeds is None or r.seed in seeds]
        counts = which_count(candidates)
        for result in candidates:
            if result.differs != counts:
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
            for remark in result.remarks:
                notes.append(f"{cell.name}: notice of seed {result.seed}: {remark}")
        if line.differs:
            notes.append(f"* {cell.name} was not trained as its preset says: {line.differs}")
        lines.append(line)
    return lines, notes


def which_count(results: Sequence[Result]) -> str:
    """How those differ that count: not at all or, where all do, as most of them."""
    ways = [result.differs for result in results]
    return "" if "" in ways else max(ways, key=ways.count, default="")


def from_folders(out: Path, cell: Cell, notes: list[str]) -> Iterable[Result]:
    """The finished runs of a cell."""
    for seed, folder in folders_of(out, cell).items():
        place = folder.path.parent
        if not folder.finished:
            notes.append(f"{cell.name}: seed {seed} is not finished")
            continue
        try:
            run = finished_run(folder)
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
        if kind_of(recorded.source) != kind_of(cell.source):
            notes.append(
                f"{cell.name}: seed {seed} of {place} is left out, it was trained on "
                f"{recorded.source} (not {cell.source})"
            )
            continue
        differs = [*unlike(cell, recorded.settings), other_pool(cell, recorded.settings.pool)]
        words = ", ".join(filter(None, differs))
        yield Result(seed, run.last, run.best, str(place), run.remarks, words)


def committed(folder: Path, notes: list[str]) -> Iterable[Committed]:
    """The files in `folder` that benchmarks/run.py wrote; those of others are passed over, and
    damaged ones are named."""
    if not folder.is_dir():
        raise InputError(f"--results {folder}: no such folder")
    for path in sorted(folder.glob("*.json")):
        try:
            file = result_file(path)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            notes.append(f"{path.name} is left out: it is damaged ({error!r})")
            continue
        if file is not None:
            yield file


def result_file(path: Path) -> Committed | None:
    """What benchmarks/run.py wrote, or None where the file is another program's."""
    content = json.loads(path.read_text(encoding="utf-8"))
    command = content.get("command") if isinstance(content, dict) else None
    if not isinstance(command, str) or "run.py " not in command:
        return None
    words = shlex.split(command)
    ours = words.index("--") if "--" in words else len(words)
    preset = words[words.index("--preset", 0, ours) + 1]
    programs = [place for place, word in enumerate(words) if word.endswith("run.py")]
    source = words[programs[0] + 1]
    behind = flags(words[ours + 1 :])
    results = tuple(
        Result(
            int(run["seed"]),
            *accuracies(run),
            path.name,
            remarks_on(run),
        )
        for run in content["runs"]
    )
    # Where a file says what was trained: its preset may have meant something else then.
    settings = what_counts(preset, content.get("settings", behind))
    pool = None if behind.get("pool") is None else str(behind["pool"])
    return Committed(path.name, source, preset, settings, pool, results)


def flags(words: Sequence[str]) -> dict[str, Any]:
    """Settings from the words of a command: --mu 0.1, --mu=0.1, --contrast, --no-contrast."""
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = "=", rest.pop(0)
        name = name.removeprefix("--").replace("-", "_")
        if equals:
            values[name] = as_value(name, text)
        else:
            values[name.removeprefix("no_")] = not name.startswith("no_")
    return values


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation, where there are enough values."""
    return (
        mean(values) if values else None,
        stdev(values) if len(values) > 1 else None,
    )


# ----------------------------------------------------------------------------------- how it looks


def header(experiment: Experiment, lines: Sequence[Line]) -> list[str]:
    several = len({line.cell.column for line in lines}) > 1
    first = [experiment.rows, *([experiment.columns] if several else [])]
    return [*first, "paper, best", "ours, last", "ours, best", "n", "best - paper"]


def words(line: Line, several: bool) -> list[str]:
    """A line of the table as text."""
    cell = line.cell
    mark = "*" if line.differs else ""
    return [
        cell.row + mark,
        *([cell.column] if several else []),
        accuracy(cell.paper, cell.paper_std),
        accuracy(*line.last),
        accuracy(*line.best),
        str(len(line.results)) if line.results else NOTHING,
        NOTHING if line.difference is None else f"{line.difference:+.2f}",
    ]


def accuracy(value: float | None, deviation: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


def as_text(experiment: Experiment, lines: Sequence[Line], notes: Sequence[str]) -> str:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = header(experiment, lines)
    several = len(names) > 6
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 1 + several else "right", no_wrap=True)
    blocks = len({line.cell.row for line in lines}) > 1
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        ends = blocks and following is not None and following.cell.column != line.cell.column
        table.add_row(*map(escape, words(line, several)), end_section=ends)
    file = io.StringIO()
    Console(file=file, width=200, highlight=False).print(table)
    body = "\n".join(text.rstrip() for text in file.getvalue().strip("\n").splitlines())
    return "\n".join([title(experiment), body, *notes]) + "\n"


def as_markdown(experiment: Experiment, lines: Sequence[Line], notes: Sequence[str]) -> str:
    names = header(experiment, lines)
    several = len(names) > 6
    marks = ["---", *(["---"] if several else []), *["---:"] * 5]
    rows = [names, marks, *(words(line, several) for line in lines)]
    body = ["| " + " | ".join(text.replace("*", "\\*") for text in row) + " |" for row in rows]
    remarks = ["", *(f"- {note}".replace("*", "\\*") for note in notes)] if notes else []
    return "\n".join([f"**{title(experiment)}**", "", *body, *remarks]) + "\n"


def as_csv(experiment: Experiment, lines: Sequence[Line], notes: Sequence[str]) -> str:
    """Numbers as they are; the notes are left to the other forms."""
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
                line.differs,
            ]
        )
    return file.getvalue()


CSV_COLUMNS = (
    *("experiment", "cell", "row", "column", "paper", "paper_std"),
    *("last", "last_std", "best", "best_std", "n", "difference", "differs"),
)
FORMATS = {"text": as_text, "markdown": as_markdown, "csv": as_csv}


def title(experiment: Experiment) -> str:
    where = experiment.where
    return f"{experiment.title} ({where if where.startswith('not') else f'paper: {where}'})"
