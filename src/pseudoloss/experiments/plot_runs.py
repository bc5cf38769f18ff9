"""The runs behind a plot: what their metrics.jsonl says, by cell and seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from pseudoloss.errors import InputError
from pseudoloss.experiments.cells import find_run_folders, source_kind
from pseudoloss.experiments.definitions import Cell, Experiment
from pseudoloss.experiments.matching import setting_differences
from pseudoloss.experiments.old_files import upgrade_metrics
from pseudoloss.files import read_json
from pseudoloss.runs import RunFolder


@dataclass(frozen=True)
class Run:
    """The lines of metrics.jsonl, and the number of warm-up epochs."""

    rows: list[dict[str, Any]]
    warmup: int


@dataclass(frozen=True)
class CellRuns:
    """The runs of a cell by seed."""

    cell: Cell
    by_seed: dict[int, Run]

    @property
    def warmup(self) -> int:
        return next(iter(self.by_seed.values())).warmup

    @property
    def last_epoch(self) -> int:
        return max(len(run.rows) for run in self.by_seed.values())


def find_runs(
    out: Path, only: Sequence[str] | None, experiments: Sequence[Experiment]
) -> tuple[list[CellRuns], list[str]]:
    """The runs of these experiments that have at least one epoch, and notes about them.

    The runs of a cell all have the same settings: those of the cell or, if there are no such runs,
    the most frequent other ones.
    """
    found, notes = [], []
    first = experiments[0]
    cells = tuple(cell for experiment in experiments for cell in experiment.cells)
    for cell in replace(first, cells=cells).choose(only) if only else cells:
        by_difference: dict[str, dict[int, Run]] = {}
        for seed, folder in find_run_folders(out, cell).items():
            try:
                run, differs = read_run(folder, cell, seed)
            except (InputError, OSError, ValueError, KeyError, TypeError) as error:
                notes.append(f"{cell.name}: seed {seed} is left out: {error}")
                continue
            if not run.rows:
                continue
            by_difference.setdefault(differs, {})[seed] = run
            if not folder.finished:
                epoch = len(run.rows)
                notes.append(f"{cell.name}: seed {seed} is not finished, epoch {epoch} so far")
        if not by_difference:
            continue
        chosen = max(by_difference, key=lambda differs: (not differs, len(by_difference[differs])))
        found.append(CellRuns(cell, by_difference[chosen]))
        for differs, runs in by_difference.items():
            seeds = " ".join(map(str, runs))
            left_out = " and left out" if differs != chosen else ""
            if differs:
                notes.append(f"{cell.name}: seed {seeds}: trained with {differs}{left_out}")
    if not found:
        details = "".join(f"; {note}" for note in notes)
        raise InputError(
            f"--out {out}: has no runs to draw{details}; train them: "
            f"pseudoloss experiments run {first.name}"
        )
    return found, notes


def read_run(folder: RunFolder, cell: Cell, seed: int) -> tuple[Run, str]:
    """The epochs of a run, and how its settings differ from those of the cell."""
    rows, recorded = [upgrade_metrics(row) for row in folder.metrics()], folder.recorded()
    if recorded is None:
        if not rows:
            return Run([], 0), ""
        raise ValueError("config.json is missing")
    if folder.finished:
        epochs = read_json(folder.summary)["epochs"]
        if epochs != len(rows):
            raise ValueError(f"metrics.jsonl has {len(rows)} of {epochs} epochs")
    if source_kind(recorded.source) != source_kind(cell.source):
        raise ValueError(f"it was trained on {recorded.source}, not on {cell.source}")
    if recorded.settings.seed != seed:
        raise ValueError(f"it was trained with --seed {recorded.settings.seed}")
    differs = ", ".join(setting_differences(cell, recorded.settings))
    return Run(rows, recorded.settings.warmup_epochs), differs


def find_value(row: dict[str, Any], path: str) -> Any:
    """The value at a path such as `metrics.noise.loss`; None if there is none."""
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def find_series(runs: CellRuns, path: str) -> tuple[list[int], list[list[float]]]:
    """The epochs that have a value, and the values of all seeds at each of them."""
    by_epoch: dict[int, list[float]] = {}
    for run in runs.by_seed.values():
        for row in run.rows:
            value = find_value(row, path)
            if value is not None:
                by_epoch.setdefault(row["epoch"], []).append(float(value))
    epochs = sorted(by_epoch)
    return epochs, [by_epoch[epoch] for epoch in epochs]


def with_values(runs: list[CellRuns], paths: Sequence[str]) -> list[CellRuns]:
    """The runs that have values at one of the paths; an InputError if there are none."""
    found = [one for one in runs if any(find_series(one, path)[0] for path in paths)]
    if not found:
        raise InputError(
            f"no run has {paths[0]} in its metrics.jsonl; was it trained with --compare-metrics?"
        )
    return found


def group_by_row(runs: list[CellRuns]) -> dict[str, list[CellRuns]]:
    """The runs of each data set."""
    rows = dict.fromkeys(one.cell.row for one in runs)
    return {row: [one for one in runs if one.cell.row == row] for row in rows}


def seconds_until(runs: CellRuns) -> dict[int, float]:
    """The time until the end of every epoch, the mean over seeds."""
    found: dict[int, list[float]] = {}
    for run in runs.by_seed.values():
        total = 0.0
        for row in run.rows:
            total += sum(row["seconds"].values())
            found.setdefault(row["epoch"], []).append(total)
    return {epoch: mean(totals) for epoch, totals in found.items()}
