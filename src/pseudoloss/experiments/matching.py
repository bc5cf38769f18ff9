"""Which runs belong to which cells: their settings, their pools, and cells that share runs."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pseudoloss.config import Settings, as_flag, as_json, upgrade_settings
from pseudoloss.experiments.catalogue import EXPERIMENTS
from pseudoloss.experiments.definitions import Cell, Experiment
from pseudoloss.presets import MAY_CHANGE_ON_RESUME, request

IRRELEVANT = (*MAY_CHANGE_ON_RESUME, "seed", "pool", "compare_metrics")
"""Settings that do not change the accuracy of a cell, or that are compared in another way."""


def relevant_settings(settings: Settings) -> dict[str, Any]:
    """The settings that decide the accuracy of a run."""
    return {name: value for name, value in as_json(settings).items() if name not in IRRELEVANT}


def preset_settings(preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The relevant settings of a preset with changes."""
    return dict(_preset_settings(preset, tuple(changes.items())))


@cache
def _preset_settings(preset: str, changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return relevant_settings(request(preset, None, dict(changes)).settings(preset))


def recorded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The relevant settings of a result file, which may come from an older version."""
    return relevant_settings(Settings(**upgrade_settings(values)))


def setting_differences(cell: Cell, settings: Settings) -> list[str]:
    """The relevant settings of a run that are not those of its cell, as flags."""
    wanted = preset_settings(cell.preset, cell.changes)
    return [
        f"{as_flag(name, value)} (not {as_flag(name, wanted[name])})"
        for name, value in relevant_settings(settings).items()
        if name in wanted and value != wanted[name]
    ]


# The start of folder names that do not tell which data set a folder holds: train, val_256, ...
GENERIC_NAME = "(train|training|val|validation|test|data|images|batches|npz|standard|large|256)+"


def pool_difference(cell: Cell, pool: str | None) -> str:
    """How the pool of a run differs from that of its cell; empty if it does not.

    The run may come from another machine, so only the name counts: that of the file or folder, or,
    if a folder has a generic name, that of its parent (places365/train).
    """
    if cell.pool is None or pool is None:
        return ""
    names = (re.sub("[^a-z0-9]", "", part.lower()) for part in reversed(Path(pool).parts))
    specific = (re.sub(f"^{GENERIC_NAME}", "", name) for name in names)
    if next(filter(None, specific), "").startswith(cell.pool):
        return ""
    return f"--pool {Path(pool).name} (not {cell.pool})"


def training_cell(cell: Cell) -> tuple[Experiment, Cell]:
    """The experiment and cell in whose folder a cell is trained.

    Cells of several experiments with the same settings are trained once: in the first of these
    experiments, or in the one that also records the metrics for the plots.
    """
    candidates = [
        (experiment, candidate)
        for experiment in EXPERIMENTS.values()
        for candidate in experiment.cells
        if _can_replace(candidate, cell)
    ]
    return max(candidates, key=lambda found: found[1].records_metrics)


def _can_replace(candidate: Cell, cell: Cell) -> bool:
    """Whether the runs of a candidate count as runs of a cell. Quick trials keep their own runs."""
    records_more = candidate.records_metrics and not candidate.extra
    return (
        candidate.timed == cell.timed
        and (records_more or candidate.records_metrics == cell.records_metrics)
        and (candidate.source, candidate.pool) == (cell.source, cell.pool)
        and candidate.preset == cell.preset
        and preset_settings(candidate.preset, candidate.changes)
        == preset_settings(cell.preset, cell.changes)
    )
