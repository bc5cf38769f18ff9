"""The charts of the report, as inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from pseudoloss.report.svg import (
    axis_ticks,
    chart,
    element,
    line,
    percent,
    rect,
    shorten,
    text,
    tick_label,
)

WIDTH, HEIGHT = 460, 276
LEFT, RIGHT, TOP, BOTTOM = 54, 438, 38, 224  # the frame of the data
FEW = 20  # a bin with fewer images is drawn as an empty circle
LONGEST = 16  # characters of a class name in a matrix
CELL = 30  # of a matrix, in pixels
LETTER = 7.4  # about the width of a letter, in pixels
MIN_CUT = 5  # bars are cut off if the next one has at least so many images
MAX_DOTS = 40  # a longer line has no dots


@dataclass(frozen=True)
class Line:
    """A line through points (x, y). `style` is a CSS class, line-1 to line-6."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars:
    """One colour of a histogram: its counts in bins of equal width. `style` is a CSS class."""

    name: str
    style: str
    counts: np.ndarray


@dataclass(frozen=True)
class Bin:
    """Images with similar predicted probabilities."""

    predicted: float  # mean
    observed: float  # share of them for which it was true
    images: int


class _Frame:
    """The area of the data: positions of values, grid, labels."""

    def __init__(self, x_range: tuple[float, float], y_ticks: Sequence[float]) -> None:
        self.x_low, self.x_high = x_range
        self.y_ticks = y_ticks

    def x(self, value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    def axes(
        self,
        x_ticks: Sequence[float],
        x_label: str,
        y_label: str,
        x_unit: str = "",
        y_unit: str = "",
    ) -> list[Markup]:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(line(LEFT, y, RIGHT, y, "grid"))
            parts.append(text(LEFT - 8, y + 4, tick_label(value, y_unit), anchor="end"))
        parts += [
            text(self.x(value), BOTTOM + 21, tick_label(value, x_unit), anchor="middle")
            for value in x_ticks
        ]
        parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 44, x_label, anchor="middle"))
        parts.append(text(0, 12, y_label))
        return parts

    def mark(self, value: float, label: str) -> list[Markup]:
        """A dashed vertical line, with a label on the side that has more room."""
        x = self.x(value)
        right = x < (LEFT + RIGHT) / 2
        side = (x + 5, "start") if right else (x - 5, "end")
        return [
            line(x, TOP - 14, x, BOTTOM, "mark"),
            text(side[0], TOP - 5, label, "label halo", side[1]),
        ]


# ------------------------------------------------------------------------------------ histograms


def histogram(
    groups: Sequence[Bars],
    low: float,
    high: float,
    *,
    x_label: str,
    label: str,
    unit: str = "",
    mark: tuple[float, str] | None = None,
) -> Markup:
    """Stacked bars of counts, in equal bins from low to high. `label` describes the chart.

    One or two bars that are far taller than all others are cut off and show their count, so that
    the others stay visible.
    """
    counts_GK = np.array([group.counts for group in groups], dtype=float)
    total_K = counts_GK.sum(0)
    limit, cut = height_limit(total_K)
    frame = _Frame((low, high), axis_ticks(0, limit, 4, whole=True))
    highest = frame.y_ticks[-1]
    x_ticks = [x for x in axis_ticks(low, high, 5) if low <= x <= high]
    parts = frame.axes(x_ticks, x_label, "images", x_unit=unit)
    step = (high - low) / len(total_K)
    for k, total in enumerate(total_K.tolist()):
        left, right = frame.x(low + k * step) + 0.75, frame.x(low + (k + 1) * step) - 0.75
        scale = min(1.0, highest / total) if total else 1.0  # a bar that is cut keeps its shares
        base = 0.0
        for group, count in zip(groups, counts_GK[:, k].tolist(), strict=True):
            if count:
                y = frame.y(scale * (base + count))
                title = f"{group.name}: {count:,.0f} of {total:,.0f}"
                height = max(frame.y(scale * base) - y, 1.0 if not base else 0.0)
                parts.append(
                    rect(left, min(y, BOTTOM - 1), right - left, height, group.style, title)
                )
            base += count
        if cut and total > highest:
            first_half = k < len(total_K) / 2
            x = right + 4 if first_half else left - 4
            anchor = "start" if first_half else "end"
            parts.append(line(left - 2, TOP + 12, right + 2, TOP + 7, "gap"))
            parts.append(text(x, TOP + 16, f"{total:,.0f}", "label halo", anchor))
    parts.append(line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"))
    if mark is not None and low <= mark[0] <= high:
        parts += frame.mark(*mark)
    return chart(WIDTH, HEIGHT, label, parts)


def height_limit(total_K: np.ndarray) -> tuple[float, bool]:
    """The height to show, and whether bars are cut off: one or two, if they are more than three
    times as tall as all others."""
    ordered = np.sort(total_K)[::-1].tolist()
    for taller in (1, 2):
        next_one = ordered[taller] if len(ordered) > taller else 0
        if next_one >= MIN_CUT and ordered[taller - 1] > 3 * next_one:
            return 1.4 * next_one, True
    return max([1.0, *ordered]), False


# ----------------------------------------------------------------------------------------- lines


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    label: str,
    unit: str = "",
    mark: tuple[float, str] | None = None,
    limits: tuple[float, float] = (-1e12, 1e12),
) -> Markup:
    """Lines over whole numbers, such as epochs. `limits` are the values that y cannot leave."""
    xs = [x for one in lines for x, _ in one.points]
    ys = [y for one in lines for _, y in one.points]
    x_low, x_high = (min(xs), max(xs)) if len(set(xs)) > 1 else (xs[0] - 1, xs[0] + 1)
    y_ticks = [y for y in axis_ticks(min(ys), max(ys), 5) if limits[0] <= y <= limits[1]]
    frame = _Frame((x_low, x_high), y_ticks if len(y_ticks) > 1 else limits)
    parts = frame.axes(_end_ticks(min(xs), max(xs)), x_label, y_label, y_unit=unit)
    if mark is not None and x_low <= mark[0] <= x_high:
        parts += frame.mark(*mark)
    for one in lines:
        places = [(frame.x(x), frame.y(y)) for x, y in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(element("polyline", points=path, class_=f"line {one.style}"))
        for (x, y), (at, value) in zip(places, one.points, strict=True):
            if len(places) <= MAX_DOTS:
                title = element("title", f"{one.name}: {x_label} {at:g}, {value:.2f}{unit}")
                parts.append(element("circle", title, cx=x, cy=y, r=2.5, class_=f"dot {one.style}"))
    return chart(WIDTH, HEIGHT, label, parts)


def _end_ticks(low: float, high: float) -> list[float]:
    """Whole ticks with both ends among them, and none so near to an end that labels overlap."""
    inner = axis_ticks(low, high, 6, whole=True)
    room = 0.08 * (high - low)
    return sorted({low, high, *(x for x in inner if low + room < x < high - room)})


# ------------------------------------------------------------------------------------ reliability


def reliability(bins: Sequence[Bin], *, x_label: str, y_label: str, label: str) -> Markup:
    """Observed share over predicted probability: on the diagonal, probabilities are right. The
    area of a circle grows with its number of images; those with few images are empty."""
    ticks = [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    frame = _Frame((0, 100), ticks)
    parts = frame.axes(ticks, x_label, y_label, "%", "%")
    parts.append(line(frame.x(0), frame.y(0), frame.x(100), frame.y(100), "mark"))
    most = max((one.images for one in bins), default=1)
    for one in bins:
        x, y = frame.x(100 * one.predicted), frame.y(100 * one.observed)
        radius = 3 + 5 * (one.images / most) ** 0.5
        title = (
            f"predicted {percent(one.predicted)}, observed {percent(one.observed)}, "
            f"{one.images:,} images"
        )
        style = "point few" if one.images < FEW else "point"
        parts.append(element("circle", element("title", title), cx=x, cy=y, r=radius, class_=style))
    return chart(WIDTH, HEIGHT, label, parts)


# ----------------------------------------------------------------------------------------- matrix


def matrix(
    counts_RC: np.ndarray, names: Sequence[str], *, rows: str, columns: str, label: str
) -> Markup:
    """Counts by two classes, as a heatmap. The diagonal is left blank."""
    n = len(names)
    longest = max(len(shorten(name, LONGEST)) for name in names)
    turned = longest > 3
    left = max(60.0, 14 + LETTER * longest)
    top = 30 + (LETTER * longest * 0.77 if turned else 16)
    most = max(1, int(counts_RC.max(initial=0)))
    parts = [text(left - 8, 12, f"{rows} ↓", anchor="end"), text(left, 12, f"{columns} →")]
    for i, name in enumerate(names):
        middle = top + (i + 0.5) * CELL + 4
        parts.append(_name(name, x=left - 8, y=middle, text_anchor="end"))
        x = left + (i + 0.5) * CELL
        if turned:
            parts.append(_name(name, transform=f"translate({x + 4:.1f} {top - 6:.1f}) rotate(-50)"))
        else:
            parts.append(_name(name, x=x, y=top - 6, text_anchor="middle"))
    for i in range(n):
        for j in range(n):
            x, y, count = left + j * CELL, top + i * CELL, int(counts_RC[i, j])
            if i == j:
                parts.append(rect(x + 1, y + 1, CELL - 2, CELL - 2, "cell same"))
                continue
            level = 0 if not count else min(5, 1 + int(4.999 * count / most))
            title = f"{names[i]} → {names[j]}: {count:,}"
            parts.append(rect(x + 1, y + 1, CELL - 2, CELL - 2, f"cell level-{level}", title))
            if count:
                style = "count strong" if level >= 4 else "count"
                parts.append(text(x + CELL / 2, y + CELL / 2 + 4, compact(count), style, "middle"))
    margin = LETTER * longest * 0.64 if turned else 4  # the last turned label
    return chart(left + n * CELL + margin, top + n * CELL + 4, label, parts, "chart matrix")


def _name(name: str, **place: str | float) -> Markup:
    title = element("title", name)
    shown = element("tspan", shorten(name, LONGEST))
    return element("text", title + shown, class_="label", **place)


def compact(count: int) -> str:
    """A count in at most four characters: 999, 1.2k, 35k, 2.1M."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1000, "k")):
        if count >= size:
            value = count / size
            return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    return str(count)


# ------------------------------------------------------------------------------------ small bars


def rate_bar(
    rate: float,
    low: float | None,
    high: float | None,
    scale: float,
    overall: float | None = None,
    style: str = "bar",
) -> Markup:
    """A bar for a table: a rate with its interval, on an axis from 0 to `scale`. A thin line marks
    the overall rate. Its numbers stand beside it, so it is hidden from screen readers."""

    def place(value: float) -> str:
        return f"{min(100.0, max(0.0, 100 * value / scale)):.2f}%"

    parts = [element("rect", x="0", y="4", width=place(rate), height="8", class_=style)]
    if low is not None and high is not None:
        parts.append(element("line", x1=place(low), x2=place(high), y1="8", y2="8", class_="span"))
        parts += [
            element("line", x1=place(end), x2=place(end), y1="5", y2="11", class_="span")
            for end in (low, high)
        ]
    if overall is not None:
        x = place(overall)
        parts.append(element("line", x1=x, x2=x, y1="0", y2="16", class_="overall"))
    return element("svg", Markup("").join(parts), class_="rate", aria_hidden="true")
