"""Pieces of the charts: text that is safe in HTML, axes, and SVG elements.

Charts are inline SVG. Colours are CSS classes of the page, so that they follow light and dark mode.
"""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

MAX_NAME = 120  # longer names of classes and files are shortened in the middle
NICE = (1, 2, 5)  # steps between ticks, times a power of ten
_DIRECTIONS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}


def clean(text: str, most: int = MAX_NAME) -> str:
    """`text` without control characters (also those that change the direction of writing) and
    lone surrogates; � takes their place. Shortened in the middle to `most` characters."""
    text = shorten(text, most)
    return "".join("�" if _is_unsafe(character) else character for character in text)


def _is_unsafe(character: str) -> bool:
    code = ord(character)
    return (
        code in _DIRECTIONS
        or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        or code & 0xFFFE == 0xFFFE  # not characters
    )


def shorten(text: str, most: int) -> str:
    """`text`, with … in the middle if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as percent; – if there is none."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.{digits}f}%"


# ---------------------------------------------------------------------------------------- axes


def axis_ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Ticks of an axis that covers low to high: multiples of 1, 2 or 5 times a power of ten, with
    at most `most` intervals (at least 2). With `whole`, only whole numbers.

    For finite numbers up to 1e12 in size. The first tick is at most `low` and the last at least
    `high`, up to rounding; there are always two or more.
    """
    most = max(most, 2)
    low, high = min(low, high), max(low, high)
    if not high - low > 1e-9 * max(1.0, abs(low), abs(high)):
        high = low + max(1.0, abs(low))  # a single value
    exponent = math.floor(math.log10((high - low) / most))
    if whole:
        exponent = max(exponent, 0)
    while True:
        for nice in NICE:
            first = math.floor(_quotient(low, nice, exponent) + 1e-9)
            last = math.ceil(_quotient(high, nice, exponent) - 1e-9)
            if last - first <= most:
                return [
                    _multiple(k, nice, exponent) for k in range(first, max(last, first + 1) + 1)
                ]
        exponent += 1


def _quotient(value: float, nice: int, exponent: int) -> float:
    power = float(10 ** abs(exponent))
    scaled = value / power if exponent >= 0 else value * power
    return scaled / nice


def _multiple(k: int, nice: int, exponent: int) -> float:
    """k times the step, rounded once: 0.3, not 0.30000000000000004."""
    if exponent >= 0:
        return float(k * nice * 10**exponent)
    return float(k * nice / 10**-exponent)


def tick_label(value: float, unit: str = "") -> str:
    """A number on an axis: 1,000, 0.25, 40%."""
    text = f"{value:,.0f}" if value == int(value) and abs(value) < 1e13 else f"{value:.6g}"
    return text + unit


# ------------------------------------------------------------------------------------ elements


def element(name: str, content: str | Markup = "", **attributes: Any) -> Markup:
    """An SVG element. Text and attributes are escaped; `Markup` is not. `class_` is written as
    class, and _ in a name as -."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = content if isinstance(content, Markup) else Markup(_escaped(content))  # noqa: S704
    return Markup(f"<{name}{shown}>{inner}</{name}>")  # noqa: S704


def _attribute(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return _escaped(str(value))


def _escaped(text: str) -> str:
    return escape(clean(text, 2000))


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def chart(
    width: float, height: float, label: str, parts: Sequence[Markup], class_: str = "chart"
) -> Markup:
    """An inline SVG with a description for screen readers."""
    return element(
        "svg",
        join(parts),
        class_=class_,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        style=f"max-width:{width:g}px",
    )


def text(
    x: float, y: float, content: str, class_: str = "label", anchor: str | None = None, **more: Any
) -> Markup:
    return element(
        "text", content, x=float(x), y=float(y), class_=class_, text_anchor=anchor, **more
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Markup:
    return element(
        "rect",
        element("title", title) if title else "",
        x=float(x),
        y=float(y),
        width=float(max(width, 0)),
        height=float(max(height, 0)),
        class_=class_,
    )
