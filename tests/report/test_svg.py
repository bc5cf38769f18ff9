"""Text that is safe in HTML, and ticks of axes."""

import itertools
import math
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markupsafe import Markup

from pseudoloss.report.svg import axis_ticks, clean, element, percent, shorten, tick_label

numbers = st.floats(-1e12, 1e12, allow_nan=False)


@given(numbers, numbers, st.integers(2, 12), st.booleans())
@example(1.0, 400_002.0, 2, False)
@example(0.0, 0.0, 5, True)
@example(-1.0, 1.0, 2, False)
@example(1e12, 1e12, 2, True)
@example(1e12 - 1e-4, 1e12, 3, False)
@example(0.0, 5e-324, 5, False)
def test_ticks_cover_the_values(low, high, most, whole):
    ticks = axis_ticks(low, high, most, whole)
    low, high = min(low, high), max(low, high)
    assert 2 <= len(ticks) <= most + 1
    assert all(a < b for a, b in itertools.pairwise(ticks))
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    if whole:
        assert all(tick == int(tick) for tick in ticks)


@given(st.integers(0, 10**6), st.integers(2, 8))
def test_ticks_from_zero_waste_at_most_four_fifths(high, most):
    """The axis is not much longer than the data."""
    ticks = axis_ticks(0, high, most, whole=True)
    assert ticks[0] == 0
    assert ticks[-1] <= max(1, 5 * high)


@pytest.mark.parametrize(
    ("low", "high", "most", "wanted"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 0.3, 3, [0, 0.1, 0.2, 0.3]),
        (87, 98, 5, [85, 90, 95, 100]),
        (0, 889, 4, [0, 500, 1000]),
        (7, 7, 5, [6, 8, 10, 12, 14]),
    ],
)
def test_ticks_are_round(low, high, most, wanted):
    assert axis_ticks(low, high, most) == wanted


def test_labels_of_ticks():
    assert [tick_label(x) for x in (0.0, 1000.0, 0.25, -2.0)] == ["0", "1,000", "0.25", "-2"]
    assert tick_label(40.0, "%") == "40%"


@given(st.text())
def test_cleaned_text_has_nothing_that_a_page_cannot_show(text):
    found = clean(text)
    assert len(found) <= 120
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in found)
    found.encode()  # no lone surrogates
    assert clean(found) == found


@given(st.text(), st.integers(1, 50))
def test_shortened_text_keeps_its_ends(text, most):
    found = shorten(text, most)
    assert len(found) == min(len(text), most)
    if len(text) > most:
        head, _, tail = found.partition("…") if "…" not in text else (found[:0], "", "")
        assert text.startswith(head)
        assert text.endswith(tail)


@given(st.text(), st.text())
def test_elements_escape_text_and_attributes(content, title):
    events = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            events.append((tag, attributes))

        def handle_data(self, data):
            events.append(data)

    html = element("text", content, x=1.0, aria_label=title)
    assert isinstance(html, Markup)
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert events[0] == ("text", [("x", "1"), ("aria-label", clean(title, 2000))])
    assert "".join(events[1:]) == clean(content, 2000)


def test_percent():
    assert [percent(x) for x in (0.1234, 0.0, None, math.nan)] == ["12.3%", "0.0%", "–", "–"]
