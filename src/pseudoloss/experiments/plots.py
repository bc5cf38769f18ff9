"""The paper's plots, drawn from the run folders of `selection`. Needs matplotlib.

A line is the mean over seeds; with several seeds, a band shows ± one standard deviation. Unfinished
runs are drawn up to their last epoch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from pseudoloss.errors import InputError, name_hint
from pseudoloss.experiments.catalogue import PLOTS, SELECTION, WITH, WITHOUT
from pseudoloss.experiments.cells import find_run_folders, source_kind
from pseudoloss.experiments.definitions import Cell
from pseudoloss.experiments.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    WIDTH,
    EndLabel,
    draw_seeds,
    label_ends,
    label_epochs,
    mark_warmup,
    save,
)
from pseudoloss.experiments.matching import setting_differences
from pseudoloss.experiments.old_files import upgrade_metrics
from pseudoloss.files import read_json
from pseudoloss.runs import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

# Path in a line of metrics.jsonl: name and colour of the line.
NOISE_METRICS = {
    "metrics.noise.loss": ("small loss", BLACK),
    "metrics.noise.agreement": ("neighbour agreement", GREEN),
    "metrics.noise.disagreement": ("neighbour disagreement", ORANGE),
    "metrics.noise.js": ("JS divergence of the label", PURPLE),
    "metrics.noise.kl": ("KL divergence of views", SKY),
}
TRUST_METRICS = {
    "metrics.pseudo_labels.pseudo-loss": ("pseudo-loss", BLACK),
    "metrics.pseudo_labels.confidence": ("confidence", ORANGE),
    "metrics.pseudo_labels.entropy": ("entropy", GREEN),
}
BIAS = {
    "bias.learned": "Wrong pseudo-labels that are trained on",
    "bias.fitted": "Wrong pseudo-labels that are predicted",
}
SELECTION_COLOURS = {WITH: BLUE, WITHOUT: VERMILION}
CORRECT, WRONG = "#9ecae1", "#fdae6b"  # of the histograms


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


def draw(
    name: str,
    out: Path,
    file: Path,
    only: Sequence[str] | None = None,
    epochs: Sequence[int] | None = None,
) -> list[str]:
    """Draw a plot into a file, whose suffix is the format. Returns notes about the runs."""
    if name not in PLOTS:
        raise InputError(f"{name}: no such plot{name_hint(name, PLOTS)}")
    if file.suffix not in SUFFIXES:
        raise InputError(f"--file {file}: must end in {' or '.join(SUFFIXES)}")
    if epochs is not None and name != "pseudo-labels":
        raise InputError(f"--epochs is for pseudo-labels, not for {name}")
    try:
        import matplotlib
    except ImportError:
        raise InputError("plots need matplotlib: pip install matplotlib") from None
    runs, notes = find_runs(out, only)
    with matplotlib.rc_context(STYLE):
        figure = DRAWINGS[name](runs, epochs)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save(figure, file)
        except OSError as error:
            raise InputError(f"--file {file}: cannot be written ({error.strerror})") from None
    return notes


# ------------------------------------------------------------------------------------- read runs


def find_runs(out: Path, only: Sequence[str] | None) -> tuple[list[CellRuns], list[str]]:
    """The runs of `selection` that have at least one epoch, and notes about them.

    The runs of a cell all have the same settings: those of the cell or, if there are no such runs,
    the most frequent other ones.
    """
    found, notes = [], []
    for cell in SELECTION.choose(only) if only else SELECTION.cells:
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
            "pseudoloss experiments run selection"
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


# ------------------------------------------------------------------------------------ the plots


def new_figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def draw_metrics(
    axis: "Axes", runs: CellRuns, metrics: dict[str, tuple[str, str]]
) -> list[EndLabel]:
    """One line per metric."""
    labels = []
    for path, (name, colour) in metrics.items():
        epochs, values = find_series(runs, path)
        if epochs:
            means = draw_seeds(axis, epochs, values, colour)
            labels.append(EndLabel(epochs[-1], means[-1], name, colour))
    label_epochs(axis, runs.last_epoch)
    return labels


def draw_selection(axis: "Axes", runs: list[CellRuns], path: str) -> list[EndLabel]:
    """One line with and one without selection."""
    labels = []
    for one in runs:
        epochs, values = find_series(one, path)
        if epochs:
            colour = SELECTION_COLOURS[one.cell.column]
            means = draw_seeds(axis, epochs, values, colour)
            labels.append(EndLabel(epochs[-1], means[-1], one.cell.column, colour))
    label_epochs(axis, max(one.last_epoch for one in runs))
    return labels


def noise_detection(runs: list[CellRuns], epochs: Sequence[int] | None) -> "Figure":
    """Columns with and without selection. The y axis shows the values after the warm-up; it is
    split in two if a wide gap separates the lines."""
    runs = with_values(runs, list(NOISE_METRICS))
    columns = [column for column in SELECTION_COLOURS if any(r.cell.column == column for r in runs)]
    strips = []
    for row, some in group_by_row(runs).items():
        ranges = ranges_after_warmup(some)
        for number, (low, high) in enumerate(split_ranges(list(ranges.values()))):
            inside = [path for path, (start, end) in ranges.items() if low <= start and end <= high]
            strips.append((row, number, (low, high), inside))
    heights = [1.0 if number else 3.0 for _, number, *_ in strips]
    figure = new_figure(0.5 + 0.85 * sum(heights))
    axes = figure.subplots(len(strips), len(columns), squeeze=False, height_ratios=heights)
    ends = []
    for (row, number, limits, paths), line_of_axes in zip(strips, axes, strict=True):
        metrics = {path: NOISE_METRICS[path] for path in paths}
        for column, axis in zip(columns, line_of_axes, strict=True):
            some = [r for r in runs if (r.cell.row, r.cell.column) == (row, column)]
            labels = [label for one in some for label in draw_metrics(axis, one, metrics)]
            axis.set_ylim(*limits)
            axis.locator_params(axis="y", nbins=3 if number else 6)
            if number == 0:
                axis.set_title(f"{row}, {column}")
            for one in some:
                mark_warmup(axis, one.warmup, label=number == 0)
            if column == columns[-1]:
                ends.append((axis, labels))
        if number == 0:
            line_of_axes[0].set_ylabel("AUC of detecting noisy labels")
    for (_, number, *_), line_of_axes in zip(strips[1:], axes, strict=False):
        if number:  # the axis below continues this one
            for axis in line_of_axes:
                axis.set_xlabel("")
                axis.tick_params(labelbottom=False)
    label_ends(figure, ends)
    return figure


def ranges_after_warmup(runs: list[CellRuns]) -> dict[str, tuple[float, float]]:
    """The range of every metric after the warm-up; of all epochs if there are no others."""
    ranges = {}
    for path in NOISE_METRICS:
        found = [(one.warmup, *find_series(one, path)) for one in runs]
        points = [
            (epoch > warmup, mean(some))
            for warmup, epochs, values in found
            for epoch, some in zip(epochs, values, strict=True)
        ]
        values = [y for is_after, y in points if is_after] or [y for _, y in points]
        if values:
            ranges[path] = min(values), max(values)
    return ranges


def split_ranges(ranges: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Limits of the y axis that cover all ranges: one pair or, if there is a gap of more than 40%
    of the height, two, the upper one first."""
    ranges = sorted(ranges)
    low, high = ranges[0][0], max(top for _, top in ranges)
    tops = [max(top for _, top in ranges[:i]) for i in range(1, len(ranges))]
    gaps = [bottom - top for top, (bottom, _) in zip(tops, ranges[1:], strict=True)]
    limits = [(low, high)]
    if gaps and max(gaps) > 0.4 * (high - low):
        cut = gaps.index(max(gaps))
        limits = [(ranges[cut + 1][0], high), (low, tops[cut])]
    return [(a - 0.06 * (b - a or 0.1), b + 0.06 * (b - a or 0.1)) for a, b in limits]


def accuracy(runs: list[CellRuns], epochs: Sequence[int] | None) -> "Figure":
    """All epochs on the left; the last quarter of them, enlarged, on the right."""
    groups = group_by_row(with_values(runs, ["accuracy"]))
    figure = new_figure(2.9 * len(groups))
    axes = figure.subplots(len(groups), 2, squeeze=False)
    ends = []
    for (row, some), (left, right) in zip(groups.items(), axes, strict=True):
        draw_selection(left, some, "accuracy")
        mark_warmup(left, some[0].warmup)
        left.set_title(row)
        left.set_ylabel("test accuracy (%)")
        labels = draw_selection(right, some, "accuracy")
        last = max(one.last_epoch for one in some)
        first = last - max(1, last // 4)
        shown = [
            mean(values)
            for one in some
            for epoch, values in zip(*find_series(one, "accuracy"), strict=True)
            if epoch >= first
        ]
        space = 0.08 * (max(shown) - min(shown)) or 0.5
        right.set_ylim(min(shown) - space, max(shown) + space)
        right.set_xlim(first, last)
        right.set_title(f"epochs {max(1, first)} to {last}")
        low, high = right.get_ylim()
        left.indicate_inset((first, low, last - first, high - low), edgecolor=GREY, alpha=1)
        ends.append((right, labels))
    label_ends(figure, ends)
    return figure


def bias(runs: list[CellRuns], epochs: Sequence[int] | None) -> "Figure":
    """Wrong pseudo-labels that are trained on, and wrong ones that the network predicts."""
    groups = group_by_row(with_values(runs, list(BIAS)))
    figure = new_figure(2.9 * len(groups))
    axes = figure.subplots(len(groups), 2, squeeze=False)
    ends = []
    for (row, some), both in zip(groups.items(), axes, strict=True):
        for axis, (path, title) in zip(both, BIAS.items(), strict=True):
            labels = draw_selection(axis, some, path)
            axis.margins(y=0.08)
            mark_warmup(axis, some[0].warmup)
            axis.set_title(title)
            ends.append((axis, labels))
        both[0].set_ylabel(f"{row}\nshare of flagged images")
    label_ends(figure, ends)
    return figure


def pseudo_labels(runs: list[CellRuns], epochs: Sequence[int] | None) -> "Figure":
    """The metrics of one data set above; histograms of the pseudo-loss at two epochs below, as in
    the paper of a run without selection if there is one."""
    runs = with_values(runs, list(TRUST_METRICS))
    some = next(iter(group_by_row(runs).values()))
    some.sort(key=lambda one: one.cell.column != WITHOUT)
    seed, run = next(iter(some[0].by_seed.items()))
    recorded = {row["epoch"]: row["pseudo_loss"] for row in run.rows if row.get("pseudo_loss")}
    chosen = choose_epochs(list(recorded), epochs)
    figure = new_figure(5.2)
    grid = figure.add_gridspec(2, 2)
    ends = []
    for column, one in enumerate(some):
        axis = figure.add_subplot(grid[0, column] if len(some) > 1 else grid[0, :])
        labels = draw_metrics(axis, one, TRUST_METRICS)
        axis.locator_params(axis="y", nbins=6)
        if column == 0:
            axis.set_ylabel("AUC of correct pseudo-labels")
        axis.set_title(f"{one.cell.row}, {one.cell.column}")
        mark_warmup(axis, one.warmup)
        ends.append((axis, labels))
    for column, epoch in enumerate(chosen):
        axis = figure.add_subplot(grid[1, column])
        draw_histogram(axis, recorded[epoch])
        axis.set_title(f"{some[0].cell.column}, epoch {epoch}, seed {seed}")
        axis.set_xlabel("pseudo-loss")
        if column == 0:
            axis.set_ylabel("flagged images")
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    label_ends(figure, ends)
    return figure


def choose_epochs(known: list[int], asked: Sequence[int] | None) -> list[int]:
    """The epochs of the histograms: those asked for, or one third of the way and the last."""
    if not known:
        raise InputError("no epoch has a histogram of the pseudo-loss yet")
    for epoch in asked or ():
        if epoch not in known:
            raise InputError(
                f"--epochs {epoch}: has no histogram; choose from {known[0]} to {known[-1]}"
            )
    return list(dict.fromkeys(asked or (known[(len(known) - 1) // 3], known[-1])))


def draw_histogram(axis: "Axes", pseudo_loss: dict[str, Any]) -> None:
    """Stacked counts of correct and wrong pseudo-labels, and the two modes of the mixture."""
    counts, modes = pseudo_loss["histogram"], pseudo_loss.get("modes")
    edges, correct, wrong = counts["edges"], counts["right"], counts["wrong"]
    both = [a + b for a, b in zip(correct, wrong, strict=True)]
    axis.stairs(correct, edges, fill=True, color=CORRECT, label="correct")
    axis.stairs(both, edges, baseline=correct, fill=True, color=WRONG, label="wrong")
    top = max(both)
    if modes:
        area = sum(both) * (edges[1] - edges[0])
        xs = [edges[0] + (edges[-1] - edges[0]) * step / 200 for step in range(201)]
        for name, style, *mode in zip(
            ("low mode", "high mode"),
            ("-", ":"),
            *(modes[key] for key in ("means", "variances", "weights")),
            strict=True,
        ):
            ys = [area * normal(x, *mode) for x in xs]
            axis.plot(xs, ys, color=BLACK, ls=style, lw=1.1, label=name)
            top = max(top, min(max(ys), 1.5 * max(both)))
    axis.set_ylim(0, 1.05 * top)


def normal(x: float, mean: float, variance: float, weight: float) -> float:
    """The density of a mode of the mixture at x."""
    variance = max(variance, 1e-12)
    bell = math.exp(-((x - mean) ** 2) / (2 * variance))
    return weight * bell / math.sqrt(2 * math.pi * variance)


DRAWINGS: dict[str, Callable[[list[CellRuns], Sequence[int] | None], "Figure"]] = {
    "noise-detection": noise_detection,
    "pseudo-labels": pseudo_labels,
    "accuracy": accuracy,
    "bias": bias,
}
