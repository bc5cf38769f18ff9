"""The paper's experiments as data: what to train for every number that it published.

A table consists of cells. A cell is a preset, the settings that it changes, and a source in which
`DIR` stands for the folder of the data. Table and figure numbers are those of the paper
(docs/experiments.md). This module is fast to import: it does not load torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from pseudoloss.errors import InputError, name_hint


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
        extra: baselines and quick trials; they run only if `--only` matches them.
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
    """

    name: str
    title: str
    where: str
    row_header: str
    column_header: str
    cells: tuple[Cell, ...]

    def choose(self, only: Sequence[str] | None) -> list[Cell]:
        """The cells whose names match a pattern; without patterns, all cells but the extra ones."""
        if not only:
            return [cell for cell in self.cells if not cell.extra]
        names = [cell.name for cell in self.cells]
        for pattern in only:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"--only {pattern}: no such cell of {self.name}{name_hint(pattern, names)}"
                )
        return [cell for cell in self.cells if any(fnmatchcase(cell.name, p) for p in only)]


METHOD_TITLES = {"pls": "PLS", "ce": "cross-entropy", "mixup": "mixup"}


def _pls_and_baselines(
    name: str, row: str, source: str, preset: str, paper: tuple[Any, ...], pool: str | None = None
) -> list[Cell]:
    """PLS and the baselines. `paper` holds the numbers of PLS, its std, CE and mixup."""
    pls, pls_std, *baselines = paper
    cells = [
        Cell(
            f"{name}-{method}",
            row,
            METHOD_TITLES[method],
            source,
            preset,
            {"method": method},
            pool,
            accuracy,
            extra=True,
        )
        for method, accuracy in zip(("ce", "mixup"), baselines, strict=False)
    ]
    title = METHOD_TITLES["pls"]
    return [Cell(f"{name}-pls", row, title, source, preset, {}, pool, pls, pls_std), *cells]


def _by_column(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """The cells sorted by column; the order of the rows stays."""
    cells = list(cells)
    columns = list(dict.fromkeys(cell.column for cell in cells))
    return tuple(sorted(cells, key=lambda cell: columns.index(cell.column)))


# noise rate in percent: PLS, its std, CE, mixup
_ID = {
    0: (78.85, 0.21, 76.99, 79.29),
    20: (80.03, 0.15, 62.60, 71.55),
    50: (76.48, 0.25, 46.59, 61.12),
    80: (63.33, 0.38, 23.46, 37.66),
}


def _id_cells() -> Iterable[Cell]:
    """At 80% there are two cells of PLS: the preset, with our stage 1, and the released stage 1."""
    for rate, paper in _ID.items():
        row = f"r_in = {rate / 100}"
        pls, *baselines = _pls_and_baselines(
            f"id{rate}", row, "cifar100:DIR", f"cifar100-id{rate}", paper
        )
        if rate == 80:
            yield replace(pls, row=f"{row}, stage 1 on the capped loss")
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

# (pool, r_out, r_in): PLS, its std, CE, mixup
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
        for cell in _pls_and_baselines(
            f"{pool}-{outer}-{inner}",
            f"{_POOLS[pool][1]}, r_out = {outer / 100}, r_in = {inner / 100}",
            "cifar100:DIR",
            f"cifar100-{pool}-{outer}-{inner}",
            paper,
            _POOLS[pool][0],
        )
    ),
)

# noise rate in percent: PLS, its std, CE, mixup
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
        for cell in _pls_and_baselines(
            f"cnwl-{rate}", f"{rate}% web noise", f"cnwl:DIR:{rate / 100}", f"cnwl-{rate}", paper
        )
    ),
)

# data set: PLS, no std, CE
_WEB = {
    "aircraft": (87.58, None, 60.80),
    "bird": (79.00, None, 64.40),
    "car": (86.27, None, 60.60),
}
WEB_FG = Experiment(
    "web-fg",
    "Fine-grained web sets",
    "Table 4",
    "data set",
    "method",
    _by_column(
        cell
        for kind, paper in _WEB.items()
        for cell in _pls_and_baselines(kind, f"Web-{kind}", f"web-{kind}:DIR", f"web-{kind}", paper)
    ),
)

# Row, settings, and the paper's numbers in the order of _ABLATION_DATA. Those of the first row are
# the ones of mixup in Tables 3 and 5.
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
# The paper's caption gives r_in = r_out = 0.2 for the second column; its header and its text give
# r_in = 0.2, r_out = 0.4.
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
    "components",
    "data",
    tuple(
        Cell(f"{data}-{name}", row, column, source, preset, changes, pool, paper[index])
        for index, (data, (column, source, preset, pool)) in enumerate(_ABLATION_DATA.items())
        for name, (row, changes, paper) in _ABLATION.items()
    ),
)


def _on_id40(
    name: str,
    title: str,
    where: str,
    row_header: str,
    cells: Mapping[str, tuple[dict[str, Any], float]],
) -> Experiment:
    """A table with one column: PLS on CIFAR-100 with r_in = 0.4."""
    return Experiment(
        name,
        title,
        where,
        row_header,
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
    "Exponent γ that sharpens a pseudo-label",
    "supplement, first table",
    "exponent",
    {f"gamma = {value}": ({"gamma": value}, paper) for value, paper in _GAMMA.items()},
)

_CONFIDENCE = {0.8: 77.40, 0.9: 77.38, 0.95: 77.18, 0.98: 77.19, 0.99: 77.05}
THRESHOLDS = _on_id40(
    "thresholds",
    "Confidence thresholds compared with the pseudo-loss",
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
    "With and without selection by the pseudo-loss: the runs for the plots",
    "Figures 2 to 4",
    "data",
    "selection",
    _by_column(
        Cell(
            f"{data}-{'with' if column == WITH else 'without'}",
            row,
            column,
            source,
            preset,
            {"compare_metrics": True, **({} if column == WITH else _NO_TRUST)},
            extra=extra,
        )
        for data, (row, source, preset, extra) in _SELECTION_DATA.items()
        for column in (WITH, WITHOUT)
    ),
)

DIGITS = Experiment(
    "digits",
    "Handwritten digits, 40% wrong labels: a quick trial without downloads",
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
        for method, title in METHOD_TITLES.items()
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

PLOTS = {
    "noise-detection": "AUC of five metrics for detecting noisy labels, per epoch (Figure 2)",
    "pseudo-labels": "AUC of three metrics for finding correct pseudo-labels, per epoch, and "
    "histograms of the pseudo-loss (Figure 3)",
    "accuracy": "accuracy on the test images, per epoch (Figure 4)",
    "bias": "confirmation bias, per epoch (Figure 3)",
}
"""Name and description of every plot. All are drawn from the runs of `selection`."""


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in EXPERIMENTS:
        raise InputError(f"{name}: no such experiment{name_hint(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
