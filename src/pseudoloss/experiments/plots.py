"""The paper's plots, drawn from the run folders of `selection`, and one that compares all methods.
Needs matplotlib.

A line is the mean over seeds; with several seeds, a band shows ± one standard deviation. Unfinished
runs are drawn up to their last epoch.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from pseudoloss.errors import InputError, name_hint
from pseudoloss.experiments.catalogue import PLOTS, PLOTTED, WITH, WITHOUT
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
from pseudoloss.experiments.plot_runs import (
    CellRuns,
    find_runs,
    find_series,
    group_by_row,
    seconds_until,
    with_values,
)

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
_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MANY_LINES = [(colour, style) for style in ("-", "--", ":") for colour in _COLOURS]
CORRECT, WRONG = "#9ecae1", "#fdae6b"  # of the histograms


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
    runs, notes = find_runs(out, only, PLOTTED[name])
    with matplotlib.rc_context(STYLE):
        figure = DRAWINGS[name](runs, epochs)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save(figure, file)
        except OSError as error:
            raise InputError(f"--file {file}: cannot be written ({error.strerror})") from None
    return notes


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


def accuracy_over_time(runs: list[CellRuns], epochs: Sequence[int] | None) -> "Figure":
    """Accuracy after every epoch, over the mean time of training up to there."""
    groups = group_by_row(with_values(runs, ["seconds.train"]))
    figure = new_figure(3.6 * len(groups))
    axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    ends = []
    for (row, some), axis in zip(groups.items(), axes, strict=True):
        labels = []
        for one, (colour, style) in zip(some, MANY_LINES, strict=False):
            numbers, values = find_series(one, "accuracy")
            seconds = seconds_until(one)
            times = [seconds[number] for number in numbers]
            means = draw_seeds(axis, times, values, colour, style)
            labels.append(EndLabel(times[-1], means[-1], one.cell.column, colour))
        axis.set_xscale("log")
        axis.set_xlabel("seconds of training, with scoring and validation")
        axis.set_ylabel("test accuracy (%)")
        axis.set_title(row)
        ends.append((axis, labels))
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
    "accuracy-over-time": accuracy_over_time,
}
