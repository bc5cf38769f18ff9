"""Small texts of the report."""

import math
from typing import Any

from pseudoloss.report.svg import percent, shorten


def tile(label: str, value: str, note: str = "") -> dict[str, str]:
    """A number with its label, for the top of a section."""
    return {"label": label, "value": value, "note": note}


def between(low: float | None, high: float | None) -> str:
    """An interval of shares; empty if there is none."""
    if low is None or high is None:
        return ""
    return f"{100 * low:.1f} to {percent(high)}"


def plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def value_text(value: Any) -> str:
    """A setting as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shorten(f"{value:g}" if isinstance(value, float) else str(value), 300)


def duration(seconds: Any) -> str | None:
    """A time such as 6 s, 1:05 min or 2:00:00 h; None if it is not known."""
    if not isinstance(seconds, float | int) or not math.isfinite(seconds):
        return None
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
