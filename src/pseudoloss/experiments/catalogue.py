"""What the paper trained, cell by cell, with every number that it published.

A cell is a preset, what it changes, and a source; `DIR` stands where the data lie. Names are data:
importing this file costs nothing. Tables and figures are those of the paper (docs/experiments.md).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pseudoloss.config import Settings, as_flag, as_json
from pseudoloss.errors import InputError, did_you_mean
from pseudoloss.presets import MAY_CHANGE_ON_RESUME, PRESETS


@dataclass(frozen=True)
class Cell:
    """One number of a table: what to train for it, and what the paper has there.

    Attributes:
        name: its folder, and what `--only` matches.
        row, column: where it stands.
        source: as `pseudoloss train` takes it, with DIR for the folder.
        pool: which images replace others (out-of-distribution noise): a name for `--data`.
        paper, paper_std: the published best accuracy and its deviation, where there is one.
        extra: only where `--only` asks for it (baselines; quick trials).
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

    @property
    def data(self) -> tuple[str, ...]:
        """What `--data` must say the place of."""
        kind, colon, _ = self.source.partition(":")
        return (*((kind,) if colon else ()), *((self.pool,) if self.pool else ()))

    @property
    def records_metrics(self) -> bool:
        """Whether its runs record what the figures need."""
        return bool(self.changes.get("compare_metrics"))


@dataclass(frozen=True)
class Experiment:
    """Rows and columns of cells. `rows` and `columns` say what these are."""

    name: str
    title: str
    where: str
    rows: str
    columns: str
    cells: tuple[Cell, ...]

    def choose(self, only: Sequence[str] | None) -> list[Cell]:
        """The cells that a pattern matches; without patterns all but the extra ones."""
        if not only:
            return [cell for cell in self.cells if not cell.extra]
        names = [cell.name for cell in self.cells]
        for pattern in only:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"--only {pattern}: no such cell of {self.name}{did_you_mean(pattern, names)}"
                )
        return [cell for cell in self.cells if any(fnmatchcase(cell.name, p) for p in only)]


METHODS = {"pls": "PLS", "ce": "cross-entropy", "mixup": "mixup"}


def _beside_baselines(
    name: str, row: str, source: str, preset: str, paper: tuple[Any, ...], pool: str | None = None
) -> list[Cell]:
    """PLS and the baselines that the paper has numbers for: `paper` is PLS, ±, CE, mixup."""
    pls, deviation, *others = paper
    cells = [
        Cell(
            f"{name}-{method}",
            row,
            METHODS[method],
            source,
            preset,
            {"method": method},
            pool,
            number,
            extra=True,
        )
        for method, number in zip(("ce", "mixup"), others, strict=False)
    ]
    first = Cell(f"{name}-pls", row, METHODS["pls"], source, preset, {}, pool, pls, deviation)
    return [first, *cells]


def _by_column(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Column after column, each with its rows in order."""
    cells = list(cells)
    columns = list(dict.fromkeys(cell.column for cell in cells))
    return tuple(sorted(cells, key=lambda cell: columns.index(cell.column)))


# PLS, its standard deviation, CE, mixup
_ID = {
    0: (78.85, 0.21, 76.99, 79.29),
    20: (80.03, 0.15, 62.60, 71.55),
    50: (76.48, 0.25, 46.59, 61.12),
    80: (63.33, 0.38, 23.46, 37.66),
}


def _id_cells() -> Iterable[Cell]:
    """PLS at 80% is there twice: with the stage 1 of the preset, which is ours, and the paper's."""
    for rate, paper in _ID.items():
        row = f"r_in = {rate / 100}"
        pls, *baselines = _beside_baselines(
            f"id{rate}", row, "cifar100:DIR", f"cifar100-id{rate}", paper
        )
        if rate == 80:
            yield replace(pls, row=f"{row}, stage 1 by the capped loss")
            row = f"{row}, stage 1 as released"
            yield replace(pls, name=f"{pls.name}-loss", row=row, changes={"noise_metric": "loss"})
        else:
            yield pls
        yield from baselines


ID_NOISE = Experiment(
    "id-noise",
    "In-distribution noise on CIFAR-100",
    "Table 2",
    "noise",
    "method",
    _by_column(_id_cells()),
)

# (pool, r_out, r_in): PLS, its standard deviation, CE, mixup
_OOD = {
    ("inet", 20, 20): (76.29, 0.28, 63.68, 66.71),
    ("inet", 40, 20): (72.06, 0.19, 58.94, 59.54),
    ("inet", 60, 20): (57.78, 0.26, 46.02, 42.87),
    ("inet", 40, 40): (56.92, 0.49, 41.39, 38.37),
    ("places", 20, 20): (76.35, 0.05, 59.88, 66.31),
    ("places", 40, 20): (71.65, 0.61, 53.46, 59.75),
    ("places", 60, 20): (57.31, 0.31, 39.55, 39.17),
    ("places", 40, 40): (55.61, 0.55, 32.06, 34.36),
}
_POOLS = {"inet": ("imagenet32", "ImageNet32"), "places": ("places365", "Places365")}
OOD_NOISE = Experiment(
    "ood-noise",
    "In- and out-of-distribution noise on CIFAR-100",
    "Table 3",
    "noise",
    "method",
    _by_column(
        cell
        for (pool, outer, inner), paper in _OOD.items()
        for cell in _beside_baselines(
            f"{pool}-{outer}-{inner}",
            f"{_POOLS[pool][1]}, r_out = {outer / 100}, r_in = {inner / 100}",
            "cifar100:DIR",
            f"cifar100-{pool}-{outer}-{inner}",
            paper,
            _POOLS[pool][0],
        )
    ),
)

# PLS, its standard deviation, CE, mixup
_CNWL = {
    20: (63.10, 0.14, 47.36, 49.10),
    40: (60.02, 0.15, 42.70, 46.40),
    60: (54.41, 0.49, 37.30, 40.58),
    80: (46.51, 0.20, 29.76, 33.58),
}
CNWL = Experiment(
    "cnwl",
    "Controlled web noise: mini-ImageNet at 32 pixels",
    "Table 5",
    "noise",
    "method",
    _by_column(
        cell
        for rate, paper in _CNWL.items()
        for cell in _beside_baselines(
            f"cnwl-{rate}", f"{rate}% web noise", f"cnwl:DIR:{rate / 100}", f"cnwl-{rate}", paper
        )
    ),
)

# PLS, no deviation, CE
_WEB = {
    "aircraft": (87.58, None, 60.80),
    "bird": (79.00, None, 64.40),
    "car": (86.27, None, 60.60),
}
WEB_FG = Experiment(
    "web-fg",
    "Fine-grained web sets",
    "Table 4",
    "set",
    "method",
    _by_column(
        cell
        for kind, paper in _WEB.items()
        for cell in _beside_baselines(kind, f"Web-{kind}", f"web-{kind}:DIR", f"web-{kind}", paper)
    ),
)

# In the columns of _ABLATION_DATA. The first row's numbers are those of mixup in Tables 3 and 5.
_NO_TRUST = {"trust_in_classification": False, "trust_in_contrast": False}
_ABLATION: dict[str, tuple[str, dict[str, Any], tuple[float, float, float]]] = {
    "none": ("nothing (mixup)", {"method": "mixup"}, (66.31, 59.54, 46.40)),
    "correct": ("correct", {"contrast": False, **_NO_TRUST}, (74.53, 69.17, 55.08)),
    "correct-w": ("correct, w", {"contrast": False}, (75.57, 69.53, 55.72)),
    "correct-cont": ("correct, cont", _NO_TRUST, (76.21, 70.10, 58.62)),
    "correct-cont-w": ("correct, cont, w", {}, (77.43, 72.21, 59.90)),
    "correct-cont-wclassif": (
        "correct, cont, w in l_classif only",
        {"trust_in_contrast": False},
        (77.84, 69.09, 57.76),
    ),
}
# The paper's caption says r_in = r_out = 0.2 of the second; its header and text say this.
_ABLATION_DATA = {
    "id40": ("r_in = 0.4", "cifar100:DIR", "cifar100-id40", None),
    "inet-40-20": (
        "r_in = 0.2, r_out = 0.4",
        "cifar100:DIR",
        "cifar100-inet-40-20",
        "imagenet32",
    ),
    "cnwl-40": ("CNWL 40%", "cnwl:DIR:0.4", "cnwl-40", None),
}
ABLATION = Experiment(
    "ablation",
    "Ablation: correction, contrastive loss, selection by the pseudo-loss",
    "Table 1",
    "parts",
    "data",
    tuple(
        Cell(f"{place}-{name}", row, column, source, preset, changes, pool, paper[index])
        for index, (place, (column, source, preset, pool)) in enumerate(_ABLATION_DATA.items())
        for name, (row, changes, paper) in _ABLATION.items()
    ),
)


def _on_id40(
    name: str, title: str, where: str, rows: str, cells: Mapping[str, tuple[dict[str, Any], float]]
) -> Experiment:
    """One column: PLS on CIFAR-100 with r_in = 0.4."""
    return Experiment(
        name,
        title,
        where,
        rows,
        "data",
        tuple(
            Cell(
                row.replace(" = ", "-").replace(" > ", "-"),
                row,
                "r_in = 0.4",
                "cifar100:DIR",
                "cifar100-id40",
                changes,
                paper=paper,
            )
            for row, (changes, paper) in cells.items()
        ),
    )


_MU = {0.1: 77.86, 0.15: 78.65, 0.2: 78.45, 0.25: 78.78, 0.3: 78.45, 0.5: 77.74}
MU = _on_id40(
    "mu",
    "Temperature μ of the contrastive loss",
    "supplement, first table",
    "temperature",
    {f"mu = {value}": ({"mu": value}, paper) for value, paper in _MU.items()},
)

_GAMMA = {0.5: 76.39, 1: 78.54, 1.5: 78.43, 2: 78.33, 2.5: 78.45, 3: 77.99}
GAMMA = _on_id40(
    "gamma",
    "Exponent γ that sharpens a guess",
    "supplement, first table",
    "exponent",
    {f"gamma = {value}": ({"gamma": value}, paper) for value, paper in _GAMMA.items()},
)

_CONFIDENCE = {0.8: 77.40, 0.9: 77.38, 0.95: 77.18, 0.98: 77.19, 0.99: 77.05}
THRESHOLDS = _on_id40(
    "thresholds",
    "Thresholds on the confidence of a guess against the pseudo-loss",
    "supplement, second table",
    "selection",
    {
        f"confidence > {value}": ({"trust_metric": "threshold", "trust_threshold": value}, paper)
        for value, paper in _CONFIDENCE.items()
    }
    | {"pseudo-loss": ({}, 78.45)},
)

WITH, WITHOUT = "with selection", "without selection"
_SELECTION_DATA = {
    "id40": ("CIFAR-100, r_in = 0.4", "cifar100:DIR", "cifar100-id40", False),
    "cnwl-40": ("CNWL 40%", "cnwl:DIR:0.4", "cnwl-40", False),
    "digits": ("digits, 40% noise", "digits", "digits-id40", True),
}
SELECTION = Experiment(
    "selection",
    "With and without selection by the pseudo-loss: the runs behind the figures",
    "Figures 2 to 4",
    "data",
    "selection",
    _by_column(
        Cell(
            f"{place}-{'with' if column == WITH else 'without'}",
            row,
            column,
            source,
            preset,
            {"compare_metrics": True, **({} if column == WITH else _NO_TRUST)},
            extra=extra,
        )
        for place, (row, source, preset, extra) in _SELECTION_DATA.items()
        for column in (WITH, WITHOUT)
    ),
)

DIGITS = Experiment(
    "digits",
    "Handwritten digits, 40% wrong labels: to try these commands, nothing to download",
    "not in the paper",
    "noise",
    "method",
    tuple(
        Cell(
            f"digits-{method}",
            "40% wrong labels",
            title,
            "digits",
            "digits-id40",
            {} if method == "pls" else {"method": method},
        )
        for method, title in METHODS.items()
    ),
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        ID_NOISE,
        OOD_NOISE,
        CNWL,
        WEB_FG,
        ABLATION,
        MU,
        GAMMA,
        THRESHOLDS,
        SELECTION,
        DIGITS,
    )
}

FIGURES = {
    "noise-retrieval": "AUC of five metrics that look for noisy labels, per epoch (Figure 2)",
    "guess-retrieval": "AUC of three metrics that look for right guesses, per epoch, and the "
    "pseudo-loss at two epochs (Figure 3)",
    "accuracy": "accuracy on the test images, per epoch (Figure 4)",
    "bias": "confirmation bias, per epoch (Figure 3)",
}
"""All from the runs of `selection`."""


def experiment_of(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise InputError(f"{name}: no such experiment{did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]


# Settings that change nothing in the numbers of a table.
NO_MATTER = (*MAY_CHANGE_ON_RESUME, "seed", "pool", "compare_metrics")


def what_counts(preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that makes the numbers of a run, with its value."""
    values = as_json(Settings()) | PRESETS.get(preset, {}) | dict(changes)
    return {name: value for name, value in values.items() if name not in NO_MATTER}


def unlike(cell: Cell, settings: Settings) -> list[str]:
    """In what the settings of a run differ from those of a cell, where that makes its numbers."""
    wanted = what_counts(cell.preset, cell.changes)
    return [
        f"{as_flag(name, value)} (not {as_flag(name, wanted.get(name))})"
        for name, value in what_counts("", vars(settings)).items()
        if value != wanted.get(name)
    ]


# What says nothing of whose images a folder holds: train, val_256, data_large.
A_PART = "(train|training|val|validation|test|data|images|batches|npz|standard|large|256)+"


def other_pool(cell: Cell, pool: str | None) -> str:
    """How a pool differs from the cell's. It may have lain on another machine, so its name decides:
    that of the file or folder or, of a folder that is named as a part of something, what it is a
    part of (places365/train)."""
    if cell.pool is None or pool is None:
        return ""
    names = (re.sub("[^a-z0-9]", "", part.lower()) for part in reversed(Path(pool).parts))
    named = next(filter(None, (re.sub(f"^{A_PART}", "", name) for name in names)), "")
    if named.startswith(cell.pool):
        return ""
    return f"--pool {Path(pool).name} (not {cell.pool})"


def home(cell: Cell) -> tuple[Experiment, Cell]:
    """Where a cell is trained. What several experiments share is trained once: in the first of
    them, or in the one whose figures need more to be recorded."""
    serving = [
        (experiment, candidate)
        for experiment in EXPERIMENTS.values()
        for candidate in experiment.cells
        if _serves(candidate, cell)
    ]
    return max(serving, key=lambda found: found[1].records_metrics)


def _serves(candidate: Cell, cell: Cell) -> bool:
    """Whether the runs of one cell are also those of another. A quick trial serves itself."""
    more = candidate.records_metrics and not candidate.extra
    return (more or candidate.records_metrics == cell.records_metrics) and (
        _what_trains(candidate) == _what_trains(cell)
    )


def _what_trains(cell: Cell) -> tuple[Any, ...]:
    return cell.source, cell.preset, cell.pool, what_counts(cell.preset, cell.changes)
