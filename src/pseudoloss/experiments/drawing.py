"""Shared look of all plots: style, colours, labels at the ends of lines, small SVG files.

Needs matplotlib, which is imported only when something is drawn.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from pseudoloss.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

# Colours of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
PURPLE, SKY, BLACK, GREY = "#cc79a7", "#56b4e9", "#222222", "#777777"

WIDTH = 8.6  # of a plot, in inches: readable at the width of a README
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "path.simplify_threshold": 0.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "pseudoloss",
    "savefig.dpi": 160,
}


class EndLabel(NamedTuple):
    """A label to the right of the last point of a line."""

    x: float
    y: float
    text: str
    colour: str


def draw_seeds(
    axis: "Axes",
    xs: Sequence[float],
    values: Sequence[Sequence[float]],
    colour: str,
    style: str = "-",
) -> list[float]:
    """Draw the mean over seeds, and a band of ± one standard deviation if there are several seeds.

    Args:
        axis: where to draw.
        xs: for example the epochs.
        values: the values of all seeds at each x.
        colour: of the line and the band.
        style: of the line.

    Returns:
        The means.
    """
    means = [mean(some) for some in values]
    marker = "o" if len(means) == 1 else ""  # a line through one point is invisible
    axis.plot(xs, means, color=colour, ls=style, marker=marker)
    if max(map(len, values)) > 1:
        stds = [stdev(some) if len(some) > 1 else 0.0 for some in values]
        low = [m - s for m, s in zip(means, stds, strict=True)]
        high = [m + s for m, s in zip(means, stds, strict=True)]
        axis.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
    return means


def mark_warmup(axis: "Axes", epochs: int, label: bool = True) -> None:
    """A thin line at the end of the warm-up, with a label to its left, or to its right if the
    warm-up is short. Call it when the limits of the x axis are set; nothing is drawn outside them.
    """
    low, high = axis.get_xlim()
    if not low < epochs + 0.5 < high:
        return
    axis.axvline(epochs + 0.5, color=GREY, lw=0.8, ls=(0, (2, 2)))
    if not label:
        return
    is_short = epochs + 0.5 - low < 0.06 * (high - low)
    axis.annotate(
        "end of warm-up",
        (epochs + 0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(2 if is_short else -2, 0),
        textcoords="offset points",
        rotation="vertical",
        ha="left" if is_short else "right",
        va="top",
        color=GREY,
        fontsize=7.5,
    )


def label_epochs(axis: "Axes", last: int) -> None:
    """An x axis from epoch 0 to the last one."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("epoch")
    axis.set_xlim(0, last)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def label_ends(
    figure: "Figure", lines: Sequence[tuple["Axes", Sequence[EndLabel]]], fontsize: float = 8
) -> None:
    """Write the name of every line beside its end, without overlap. Call it last, when all limits
    are set; labels of lines that end outside the limits are left out."""
    texts: list[tuple[Axes, list[EndLabel], list[Annotation]]] = []
    for axis, labels in lines:
        low, high = sorted(axis.get_ylim())
        inside = [label for label in labels if low <= label.y <= high]
        texts.append((axis, inside, [_write_label(axis, label, fontsize) for label in inside]))
    figure.draw_without_rendering()  # sets the sizes of the axes
    points = 72 / figure.dpi
    for axis, labels, annotations in texts:
        ends = [points * axis.transData.transform((label.x, label.y))[1] for label in labels]
        for text, end, moved in zip(annotations, ends, spread(ends, 1.2 * fontsize), strict=True):
            text.xyann = (4, moved - end)


def _write_label(axis: "Axes", label: EndLabel, fontsize: float) -> "Annotation":
    return axis.annotate(
        label.text,
        (label.x, label.y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=label.colour,
        fontsize=fontsize,
    )


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart, as little as possible, until neighbours differ by at least `gap`."""
    groups: list[list[int]] = []  # of indices into values; neighbours in a group differ by gap

    def bounds(group: list[int]) -> tuple[float, float]:
        middle, half = mean(values[i] for i in group), gap * (len(group) - 1) / 2
        return middle - half, middle + half

    for index in sorted(range(len(values)), key=values.__getitem__):
        groups.append([index])
        while len(groups) > 1 and bounds(groups[-1])[0] < bounds(groups[-2])[1] + gap:
            last = groups.pop()
            groups[-1] += last
    moved = list(values)
    for group in groups:
        for number, index in enumerate(group):
            moved[index] = bounds(group)[0] + gap * number
    return moved


def save(figure: "Figure", file: Path) -> None:
    """Write a plot; the suffix of the file is the format. Equal plots give equal files."""

    def write(draft: Path) -> None:
        if file.suffix != ".svg":
            figure.savefig(draft, format=file.suffix[1:])
            return
        figure.savefig(draft, format="svg", metadata={"Date": None})
        draft.write_text(shrink_svg(draft.read_text(encoding="utf-8")), encoding="utf-8")

    write_atomically(file, write)


def shrink_svg(text: str) -> str:
    """Drop metadata, comments, indentation and groups without attributes; round coordinates to
    tenths of a point."""
    text = re.sub(r"<(metadata>.*?</metadata>|!--.*?-->)", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", lambda tag: _shrink_tag(tag[0]), text)
    text = re.sub(r"\n\s+", "\n", text)
    groups = 1
    while groups:  # from the inside out
        text, groups = re.subn(r"<g>\n((?:(?!</?g\b).)*)</g>\n", r"\1", text, flags=re.DOTALL)
    return text


def _shrink_tag(tag: str) -> str:
    tag = re.sub(r"\s*\n\s*", " ", tag)
    tag = re.sub(r'<g id="[^"]*"', "<g", tag)
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag)
    return re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", tag)
