"""demo.svg: test accuracy by epoch, and images whose labels PLS flags.

The SVG is written by hand and refers to nothing outside of it: images are drawn pixel by pixel, and
a light background makes it readable on any page.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from pseudoloss.data import open_source
from pseudoloss.files import write_bytes
from pseudoloss.runs import Run

WIDTH, HEIGHT = 960, 444
INK, GREY, GRID = "#1f2328", "#59636e", "#d8dee4"
COLOURS = {"ce": "#bc4c00", "pls": "#0969da"}
GREEN, RED, AMBER = "#1a7f37", "#cf222e", "#9a6700"
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

# The chart: its frame in pixels.
LEFT, RIGHT, TOP, BOTTOM = 66, 404, 104, 378
LINE_HEIGHT = 16  # between two labels at the ends of lines

# The grid of images.
COLUMNS, ROWS = 4, 3
GRID_LEFT, GRID_TOP, CELL_WIDTH, CELL_HEIGHT, IMAGE = 548, 76, 100, 112, 64


def write_picture(path: Path, runs: Mapping[str, Run], names: Mapping[str, str]) -> None:
    """Write the picture of a finished demo. `names` are what the methods are called in it."""
    images_NCHW = np.asarray(open_source("digits").train.images_NCHW)
    svg = picture(
        {method: run.metrics["accuracy"].tolist() for method, run in runs.items()},
        runs["pls"].settings.warmup_epochs,
        runs["pls"].labels,
        images_NCHW[:, 0],
        names,
    )
    write_bytes(path, svg.encode())


def picture(
    accuracies: Mapping[str, Sequence[float]],
    warmup: int,
    labels: pd.DataFrame,
    images_NHW: np.ndarray,
    names: Mapping[str, str],
) -> str:
    """The SVG.

    Args:
        accuracies: test accuracy by method and epoch, in percent.
        warmup: how many epochs of PLS are warm-up.
        labels: the label table of PLS; its rows are the images in `images_NHW`.
        images_NHW: grey images, 0 to 255.
        names: what the methods are called.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}" font-size="13">',
        "<title>pseudoloss demo: digits with wrong labels</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#ffffff" '
        f'stroke="{GRID}"/>',
        *_chart(accuracies, warmup, names, _wrong_share(labels)),
        *_gallery(labels, images_NHW),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------------- accuracy by epoch


def _chart(
    accuracies: Mapping[str, Sequence[float]],
    warmup: int,
    names: Mapping[str, str],
    wrong: float,
) -> list[str]:
    epochs = max(len(values) for values in accuracies.values())
    lowest = min(min(values) for values in accuracies.values())
    bottom = min(90, int(lowest // 10) * 10)

    def x(epoch: float) -> float:
        return LEFT + (RIGHT - LEFT) * (epoch - 1) / max(1, epochs - 1)

    def y(accuracy: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (accuracy - bottom) / (100 - bottom)

    parts = [
        _text(24, 36, "Test accuracy by epoch", size=17, weight="600"),
        _text(24, 57, f"handwritten digits, {wrong:.0%} of the training labels wrong", fill=GREY),
    ]
    for value in range(bottom, 101, 10):
        parts.append(_line(LEFT, y(value), RIGHT, y(value), GRID))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value}%", fill=GREY, anchor="end"))
    for epoch in sorted({1, *range(10, epochs + 1, 10), epochs}):
        parts.append(_text(x(epoch), BOTTOM + 20, str(epoch), fill=GREY, anchor="middle"))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 42, "epoch", fill=GREY, anchor="middle"))
    if 0 < warmup < epochs:
        end = x(warmup + 0.5)
        note = "end of warm-up: PLS starts to correct labels"
        parts.append(_line(end, TOP - 20, end, BOTTOM, GREY, dashes="4 4"))
        parts.append(_text(end + 6, TOP - 12, note, fill=GREY, size=12))
    for method, values in accuracies.items():
        points = " ".join(f"{x(i + 1):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[method]}" '
            'stroke-width="2.5" stroke-linejoin="round" stroke-linecap="round"/>'
        )
    ends = {method: y(values[-1]) for method, values in accuracies.items()}
    for method, place in _apart(ends, 2 * LINE_HEIGHT + 4).items():
        colour, last = COLOURS[method], accuracies[method][-1]
        parts.append(_text(RIGHT + 10, place + 1, names[method], fill=colour, weight="600"))
        parts.append(_text(RIGHT + 10, place + 1 + LINE_HEIGHT, f"{last:.1f}%", fill=colour))
    return parts


def _apart(places: Mapping[str, float], distance: float) -> dict[str, float]:
    """The places of labels, moved down where they would overlap."""
    moved: dict[str, float] = {}
    previous = -distance
    for name in sorted(places, key=lambda name: places[name]):
        previous = max(places[name], previous + distance)
        moved[name] = previous
    return moved


# ------------------------------------------------------------------------------ flagged images


def _gallery(labels: pd.DataFrame, images_NHW: np.ndarray) -> list[str]:
    """The first flagged images, in the order of the data set: nothing is picked by hand."""
    flagged = labels[labels["is_label_issue"]]
    relabelled = labels[labels["action"] == "relabel"]
    right = int((relabelled["suggested_label"] == relabelled["true_label"]).sum())
    shown = flagged.head(COLUMNS * ROWS)
    parts = [
        _text(GRID_LEFT - 18, 36, "Labels that PLS flags as noisy", size=17, weight="600"),
        _text(
            GRID_LEFT - 18,
            57,
            f"the first {len(shown)} of {len(flagged):,} flagged images in {len(labels):,}",
            fill=GREY,
        ),
    ]
    for place, row in enumerate(shown.index):
        left = GRID_LEFT + CELL_WIDTH * (place % COLUMNS)
        top = GRID_TOP + CELL_HEIGHT * (place // COLUMNS)
        parts += _cell(left, top, images_NHW[row], labels.loc[row])
    y = HEIGHT - 16
    if len(relabelled):
        note = f"suggestion right ({right:,} of {len(relabelled):,})"
        parts += [_mark(GRID_LEFT - 14, y - 4, True), _text(GRID_LEFT, y, note, fill=GREY)]
    parts.append(_text(GRID_LEFT + 204, y, "review: no trusted suggestion", fill=AMBER))
    return parts


def _cell(left: float, top: float, image_HW: np.ndarray, row: pd.Series) -> list[str]:
    """An image, its given label, and what PLS suggests; a mark says whether that is right."""
    centre = left + IMAGE / 2
    parts = [
        _image(left, top, image_HW),
        _text(centre, top + IMAGE + 16, f"given {row['given_label']}", anchor="middle"),
    ]
    y = top + IMAGE + 32
    if row["action"] != "relabel":
        return [*parts, _text(centre, y, "review", fill=AMBER, anchor="middle")]
    right = bool(row["suggested_label"] == row["true_label"])
    text, colour = f"suggested {row['suggested_label']}", GREEN if right else RED
    return [
        *parts,
        _text(centre - 8, y, text, fill=colour, anchor="middle"),
        _mark(centre + 38, y - 4, right),
    ]


def _image(left: float, top: float, image_HW: np.ndarray) -> str:
    """A grey image, dark on light, as one path for each shade."""
    height, width = image_HW.shape
    paths = []
    for shade in np.unique(image_HW):
        if shade > 0:  # the background is one rectangle
            level = 255 - int(shade)
            squares = "".join(
                f"M{column} {row}h1v1h-1z" for row, column in np.argwhere(image_HW == shade)
            )
            paths.append(f'<path fill="#{level:02x}{level:02x}{level:02x}" d="{squares}"/>')
    scale = f"{IMAGE / width:g} {IMAGE / height:g}"
    return (
        f'<rect x="{left - 0.5:g}" y="{top - 0.5:g}" width="{IMAGE + 1}" height="{IMAGE + 1}" '
        f'fill="#ffffff" stroke="{GRID}"/>'
        f'<g shape-rendering="crispEdges" transform="translate({left:g} {top:g}) scale({scale})">'
        f"{''.join(paths)}</g>"
    )


def _mark(x: float, y: float, right: bool) -> str:
    """A tick or a cross around a point. Drawn, since not every font has them."""
    shape = "M-5 0l3.5 4l6.5 -8" if right else "M-4 -4l8 8m0 -8l-8 8"
    return (
        f'<path transform="translate({x:g} {y:g})" d="{shape}" fill="none" '
        f'stroke="{GREEN if right else RED}" stroke-width="2" stroke-linecap="round"/>'
    )


def _wrong_share(labels: pd.DataFrame) -> float:
    return float((labels["given_label"] != labels["true_label"]).mean())


# -------------------------------------------------------------------------------------- shapes


def _text(
    x: float,
    y: float,
    text: str,
    *,
    fill: str = INK,
    size: int | None = None,
    weight: str | None = None,
    anchor: str | None = None,
) -> str:
    optional = {"font-size": size, "font-weight": weight, "text-anchor": anchor}
    more = "".join(f' {name}="{value}"' for name, value in optional.items() if value is not None)
    return f'<text x="{x:g}" y="{y:.1f}" fill="{fill}"{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, dashes: str = "none") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-dasharray="{dashes}"/>'
    )
