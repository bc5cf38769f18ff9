"""Charts: what they show is what they were given, inside the frame."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pseudoloss.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Bars,
    Bin,
    Line,
    compact,
    height_limit,
    histogram,
    line_chart,
    matrix,
    rate_bar,
    reliability,
)
from report_pages import Page

counts = st.lists(st.integers(0, 10**6), min_size=5, max_size=5)


def rectangles(page, style):
    found = [a for tag, a in page.elements if tag == "rect" and a.get("class") == style]
    return [{key: float(a[key]) for key in ("x", "y", "width", "height")} for a in found]


@given(counts, counts)
def test_bars_stay_inside_the_frame_and_do_not_overlap(first, second):
    groups = [Bars("a", "one", np.array(first)), Bars("b", "two", np.array(second))]
    page = Page(histogram(groups, 0, 1, x_label="x", label="a chart"))
    bars = rectangles(page, "one") + rectangles(page, "two")
    assert len(bars) == sum(count > 0 for count in first + second)
    for bar in bars:
        assert LEFT <= bar["x"] <= bar["x"] + bar["width"] <= RIGHT
        assert bar["y"] >= TOP - 0.01
        assert bar["y"] + bar["height"] <= BOTTOM + 0.02
    assert page.all("svg")[0]["viewbox"] == f"0 0 {WIDTH} {HEIGHT}"


def test_heights_are_proportional_to_counts():
    page = Page(histogram([Bars("a", "one", np.array([1, 2, 4]))], 0, 3, x_label="x", label="c"))
    heights = [bar["height"] for bar in rectangles(page, "one")]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.02)
    assert heights[2] == pytest.approx(4 * heights[0], abs=0.04)


def test_a_far_taller_bar_is_cut_and_shows_its_count():
    page = Page(
        histogram([Bars("a", "one", np.array([9000, 20, 10]))], 0, 3, x_label="x", label="c")
    )
    assert "9,000" in page.texts
    heights = [bar["height"] for bar in rectangles(page, "one")]
    assert heights[0] == pytest.approx(BOTTOM - TOP, abs=0.02)
    assert heights[1] > 0.3 * heights[0]


@pytest.mark.parametrize(
    ("totals", "wanted"),
    [([], (1, False)), ([0, 0], (1, False)), ([10, 9], (10, False)), ([900, 1], (900, False)),
     ([900, 100, 10], (140, True)), ([900, 890, 10, 9], (14, True))],
)  # fmt: skip
def test_height_limit(totals, wanted):
    assert height_limit(np.array(totals)) == pytest.approx(wanted)


@given(st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=60), min_size=1, max_size=3))
def test_lines_stay_inside_the_frame(series):
    lines = [
        Line(f"run {i}", f"line-{i + 1}", [(float(x + 1), y) for x, y in enumerate(ys)])
        for i, ys in enumerate(series)
    ]
    page = Page(line_chart(lines, x_label="epoch", y_label="y", label="c", limits=(0, 100)))
    assert len(page.all("polyline")) == len(lines)
    for one, line in zip(page.all("polyline"), lines, strict=True):
        points = [tuple(map(float, point.split(","))) for point in one["points"].split()]
        assert len(points) == len(line.points)
        for x, y in points:
            assert LEFT - 0.1 <= x <= RIGHT + 0.1
            assert TOP - 0.1 <= y <= BOTTOM + 0.1


def test_labels_below_lines_do_not_overlap():
    for epochs in range(1, 200):
        points = [(float(x), 50.0) for x in range(1, epochs + 1)]
        html = line_chart([Line("a", "line-1", points)], x_label="e", y_label="", label="c")
        below = re.findall(rf'<text x="([\d.]+)" y="{BOTTOM + 21}"[^>]*>([\d,]+)<', html)
        places = sorted((float(x), 7 * len(text)) for x, text in below)
        assert {"1", f"{epochs}"} <= {text for _, text in below}
        for (a, width_a), (b, width_b) in itertools.pairwise(places):
            assert b - a >= (width_a + width_b) / 2, epochs


def test_the_mark_is_at_its_place():
    points = [(1.0, 10.0), (11.0, 20.0)]
    html = line_chart(
        [Line("a", "line-1", points)], x_label="e", y_label="", label="c", mark=(6, "here")
    )
    mark = next(a for a in Page(html).all("line") if a["class"] == "mark")
    assert float(mark["x1"]) == float(mark["x2"]) == (LEFT + RIGHT) / 2


def test_points_of_a_reliability_diagram():
    bins = [Bin(0.0, 0.0, 500), Bin(1.0, 1.0, 3)]
    page = Page(reliability(bins, x_label="p", y_label="o", label="c"))
    first, second = page.all("circle")
    assert (first["cx"], first["cy"], first["class"]) == (f"{LEFT}", f"{BOTTOM}", "point")
    assert (second["cx"], second["cy"], second["class"]) == (f"{RIGHT}", f"{TOP}", "point few")
    assert float(first["r"]) > float(second["r"])


def test_a_matrix_shows_counts_and_escapes_names():
    names = ("<b>", "a very long name of a class", '"')
    page = Page(matrix(np.array([[9, 2, 0], [0, 9, 12345], [1, 0, 9]]), names,
                       rows="given", columns="looks like", label="c"))  # fmt: skip
    assert [text for text in page.texts if text in ("2", "12k", "1", "9")] == ["2", "12k", "1"]
    assert "<b> → a very long name of a class: 2" in page.texts
    assert "b" not in {tag for tag, _ in page.elements}


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, "0"), (999, "999"), (1234, "1.2k"), (9960, "10k"), (2_100_000, "2.1M"), (10**9, "1.0G")],
)
def test_compact_counts(count, wanted):
    assert compact(count) == wanted


def test_a_bar_of_a_rate():
    page = Page(rate_bar(0.1, 0.05, 0.9, scale=0.4, overall=0.2))
    assert page.all("rect")[0]["width"] == "25.00%"
    span, *_, overall = page.all("line")
    assert (span["x1"], span["x2"]) == ("12.50%", "100.00%")
    assert overall["x1"] == "50.00%"
