"""The paper's experiments as data: what to train for every number that it published.

A table consists of cells. A cell is a preset, the settings that it changes, and a source in which
`DIR` stands for the folder of the data. Table and figure numbers are those of the paper
(docs/experiments.md). This module is fast to import: it does not load torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.errors import InputError, name_hint
from pseudoloss.experiments import published
from pseudoloss.experiments.definitions import Cell, Experiment, Published, by_column
from pseudoloss.experiments.published import Numbers, method_title
from pseudoloss.presets import PRESETS

BASELINES = ("ce", "mixup")  # on the preset of PLS


def methods_with_preset(base: str) -> list[str]:
    """The methods that have a preset of their own for a row of a table: cifar100-id50-elr is that
    of elr for cifar100-id50."""
    return [
        str(values["method"])
        for name, values in PRESETS.items()
        if "method" in values and name == f"{base}-{values['method']}"
    ]


def _numbers_of_row(
    paper: Numbers, name: str, row: str, source: str, preset: str, pool: str | None = None
) -> list[Cell | Published]:
    """A number of every method: PLS; baselines with the preset of PLS; every method with a preset
    of its own, which an experiment finds without an entry here; and the published rest."""
    own = methods_with_preset(preset)
    found: list[Cell | Published] = []
    for method in dict.fromkeys(("pls", *BASELINES, *paper.methods, *own)):
        number = Published(
            name=f"{name}-{method}",
            row=row,
            column=method_title(method),
            method=method,
            paper=paper.accuracy(method, name),
            paper_std=paper.deviation(method, name),
            doubts=paper.about(method, name),
        )
        if method == "pls":
            found.append(_cell(number, source, preset, pool))
        elif method in own:
            found.append(_cell(number, source, f"{preset}-{method}", pool, extra=True))
        elif method in BASELINES:
            if number.paper is not None:
                found.append(_cell(number, source, preset, pool, {"method": method}, True))
        else:
            found.append(number)
    return found


def _cell(
    number: Published,
    source: str,
    preset: str,
    pool: str | None,
    changes: Mapping[str, Any] | None = None,
    extra: bool = False,
) -> Cell:
    """The cell that trains for a published number."""
    return Cell(
        number.name,
        number.row,
        number.column,
        source,
        preset,
        changes or {},
        pool,
        number.paper,
        number.paper_std,
        extra,
        number.doubts,
    )


def _table(
    name: str,
    title: str,
    where: str,
    row_header: str,
    paper: Numbers,
    numbers: Iterable[Cell | Published],
) -> Experiment:
    """A table with a column for each method."""
    numbers = list(numbers)
    return Experiment(
        name,
        title,
        where,
        row_header,
        "method",
        by_column(number for number in numbers if isinstance(number, Cell)),
        by_column(number for number in numbers if isinstance(number, Published)),
        paper.remarks,
    )


def _id_numbers() -> Iterable[Cell | Published]:
    """At 80% there are two cells of PLS: the preset, with our stage 1, and the released stage 1."""
    for name in published.ID_NOISE.rows:
        row = f"r_in = {int(name.removeprefix('id')) / 100}"
        for number in _numbers_of_row(
            published.ID_NOISE, name, row, "cifar100:DIR", f"cifar100-{name}"
        ):
            if number.name == "id80-pls" and isinstance(number, Cell):
                yield replace(number, row=f"{row}, stage 1 on the capped loss")
                changes = {"noise_metric": "loss"}
                released = f"{row}, stage 1 as released"
                yield replace(number, name="id80-pls-loss", row=released, changes=changes)
            else:
                yield number


ID_NOISE = _table(
    "id-noise",
    "In-distribution noise on CIFAR-100",
    "Table 2",
    "noise",
    published.ID_NOISE,
    _id_numbers(),
)

_POOLS = {"inet": ("imagenet32", "ImageNet32"), "places": ("places365", "Places365")}


def _ood_numbers() -> Iterable[Cell | Published]:
    for name in published.OOD_NOISE.rows:
        pool, outer, inner = name.split("-")
        kind, title = _POOLS[pool]
        row = f"{title}, r_out = {int(outer) / 100}, r_in = {int(inner) / 100}"
        preset = f"cifar100-{name}"
        yield from _numbers_of_row(published.OOD_NOISE, name, row, "cifar100:DIR", preset, kind)


OOD_NOISE = _table(
    "ood-noise",
    "In- and out-of-distribution noise on CIFAR-100",
    "Table 3",
    "noise",
    published.OOD_NOISE,
    _ood_numbers(),
)


def _cnwl_numbers() -> Iterable[Cell | Published]:
    for name in published.CNWL.rows:
        rate = int(name.removeprefix("cnwl-"))
        source = f"cnwl:DIR:{rate / 100}"
        yield from _numbers_of_row(published.CNWL, name, f"{rate}% web noise", source, name)


CNWL = _table(
    "cnwl",
    "Controlled web noise: mini-ImageNet at 32 pixels",
    "Table 5",
    "noise",
    published.CNWL,
    _cnwl_numbers(),
)


def _web_numbers() -> Iterable[Cell | Published]:
    for kind in published.WEB_FG.rows:
        preset = f"web-{kind}"
        yield from _numbers_of_row(published.WEB_FG, kind, f"Web-{kind}", f"{preset}:DIR", preset)


WEB_FG = _table(
    "web-fg",
    "Fine-grained web sets",
    "Table 4",
    "data set",
    published.WEB_FG,
    _web_numbers(),
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
    by_column(
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

# Settings of methods whose defaults are for 100 classes, or that must be told the noise rate.
_FOR_DIGITS: dict[str, dict[str, Any]] = {
    "co-teaching": {"forget_rate": 0.4},
    "dsos": {"warmup": 15},
    "jo-src": {"label_smoothing": 0.1},
    "rrl": {"keep_threshold": 0.4},
}
DIGITS = Experiment(
    "digits",
    "Handwritten digits, 40% wrong labels: a quick trial without downloads",
    "not in the paper",
    "noise",
    "method",
    tuple(
        Cell(
            f"digits-{method}",
            "digits, 40% wrong labels",
            method_title(method),
            "digits",
            "digits-id40",
            ({} if method == "pls" else {"method": method}) | _FOR_DIGITS.get(method, {}),
            extra=method not in ("pls", *BASELINES),
        )
        for method in METHOD_SETTINGS
    ),
)

# What a method must know of the noise, and what its design asks for: the share of the warm-up, and
# the dimensions of the projection. Everything else is as it is by default.
_NEEDED: dict[str, dict[str, Any]] = {
    "co-teaching": {"forget_rate": 0.4},
    "dsos": {"warmup": 100},
    "dynamic-bootstrapping": {"warmup": 70},
    "rrl": {"projection": 50},
}
SAME_HARNESS = Experiment(
    "same-harness",
    "All methods with the same network, views and schedule",
    "not in the paper",
    "noise",
    "method",
    tuple(
        Cell(
            f"id40-{method}",
            "CIFAR-100, r_in = 0.4",
            method_title(method),
            "cifar100:DIR",
            "cifar100-id40",
            {"method": method} | _NEEDED.get(method, {}),
            timed=True,
        )
        for method in METHOD_SETTINGS
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
        SAME_HARNESS,
        DIGITS,
    )
}

PLOTS = {
    "noise-detection": "AUC of five metrics for detecting noisy labels, per epoch (Figure 2)",
    "pseudo-labels": "AUC of three metrics for finding correct pseudo-labels, per epoch, and "
    "histograms of the pseudo-loss (Figure 3)",
    "accuracy": "accuracy on the test images, per epoch (Figure 4)",
    "bias": "confirmation bias, per epoch (Figure 3)",
    "accuracy-over-time": "accuracy on the test images over the seconds of training, all methods",
}
"""Name and description of every plot."""

PLOTTED = dict.fromkeys(PLOTS, (SELECTION,)) | {"accuracy-over-time": (SAME_HARNESS, DIGITS)}
"""The experiments whose runs a plot shows."""


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in EXPERIMENTS:
        raise InputError(f"{name}: no such experiment{name_hint(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
