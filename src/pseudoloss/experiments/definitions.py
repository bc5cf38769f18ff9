"""What an experiment is made of: cells to train, and published numbers to compare them with.

This module is fast to import: it does not load torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from pseudoloss.config import Settings
from pseudoloss.errors import InputError, name_hint
from pseudoloss.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published number of a method that pseudoloss cannot train on these data.

    Attributes:
        name: `--only` matches it.
        row, column: labels of its row and column in the table.
        method: the method, also if `--method` does not know it.
        paper, paper_std: published best accuracy and its standard deviation, if any.
        doubts: what to know before comparing with it.
    """

    name: str
    row: str
    column: str
    method: str
    paper: float | None = None
    paper_std: float | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One number of a table: what to train for it, and the paper's number.

    Attributes:
        name: name of its folder; `--only` matches it.
        row, column: labels of its row and column in the table.
        source: source for `pseudoloss train`, with DIR in place of the folder.
        preset: preset for `pseudoloss train`.
        changes: settings that differ from the preset.
        pool: out-of-distribution images that replace training images: a kind of `--data`.
        paper, paper_std: published best accuracy and its standard deviation, if any.
        timed: its time counts, so it shares no run with another table.
        extra: baselines, rivals and quick trials; they run only if `--only` or `--method` names
            them.
        doubts: what to know before comparing with the published number.
    """

    name: str
    row: str
    column: str
    source: str
    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    paper: float | None = None
    paper_std: float | None = None
    extra: bool = False
    doubts: tuple[str, ...] = ()
    timed: bool = False

    @property
    def method(self) -> str:
        """The method that it trains."""
        preset = PRESETS[self.preset].get("method", Settings.method)
        return str(self.changes.get("method", preset))

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of data that `--data` must give a folder for."""
        kind, colon, _ = self.source.partition(":")
        return (*((kind,) if colon else ()), *((self.pool,) if self.pool else ()))

    @property
    def records_metrics(self) -> bool:
        """Whether its runs record the metrics that the plots need."""
        return bool(self.changes.get("compare_metrics"))


@dataclass(frozen=True)
class Experiment:
    """A table of the paper.

    Attributes:
        name: name on the command line.
        title: title of the table.
        where: which table or figure of the paper it is.
        row_header, column_header: what the rows and columns stand for, such as "noise", "method".
        cells: all cells, column by column.
        published: numbers of methods that cannot be trained.
        remarks: what to know about all published numbers of the table.
    """

    name: str
    title: str
    where: str
    row_header: str
    column_header: str
    cells: tuple[Cell, ...]
    published: tuple[Published, ...] = ()
    remarks: tuple[str, ...] = ()

    def choose(
        self, only: Sequence[str] | None = None, methods: Sequence[str] | None = None
    ) -> list[Cell]:
        """The cells of these methods whose names match a pattern; without methods and patterns, all
        cells but the extra ones."""
        found = self.choose_numbers(only, methods)
        cells = [cell for cell in found if isinstance(cell, Cell)]
        if not cells:
            names = list(dict.fromkeys(number.method for number in found))
            flag = f"--method {' '.join(names)}" if methods else f"--only {' '.join(only or ())}"
            raise InputError(
                f"{flag}: the numbers of {', '.join(names)} in {self.name} are published ones; "
                "there is no preset to train them"
            )
        return cells

    def choose_numbers(
        self, only: Sequence[str] | None = None, methods: Sequence[str] | None = None
    ) -> list[Cell | Published]:
        """As `choose`, with the numbers that are only published, if they are asked for."""
        if not only and not methods:
            return [cell for cell in self.cells if not cell.extra]
        every = by_column(_all(self))
        names, known = [number.name for number in every], {number.method for number in every}
        for pattern in only or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"--only {pattern}: no such cell of {self.name}{name_hint(pattern, names)}"
                )
        for method in methods or ():
            if method not in known:
                hint = name_hint(method, sorted(known))
                raise InputError(f"--method {method}: no such method in {self.name}{hint}")
        found = [
            number
            for number in every
            if (not only or any(fnmatchcase(number.name, pattern) for pattern in only))
            and (not methods or number.method in methods)
        ]
        if not found:
            asked = f"--only {' '.join(only or ())} --method {' '.join(methods or ())}"
            raise InputError(f"{asked}: no cell of {self.name} is both")
        return found


def _all(experiment: Experiment) -> list[Cell | Published]:
    return [*experiment.cells, *experiment.published]


Number = TypeVar("Number", Cell, Published, Cell | Published)


def by_column(numbers: Iterable[Number]) -> tuple[Number, ...]:
    """Sorted by column; the order of the rows stays."""
    numbers = list(numbers)
    columns = list(dict.fromkeys(number.column for number in numbers))
    return tuple(sorted(numbers, key=lambda number: columns.index(number.column)))
