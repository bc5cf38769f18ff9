"""What the number in a setting may be. A limit is part of the annotation of the setting:
`mu: Annotated[float, within(0.001, 1000)] = 0.2`."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """A test, and how an error says it."""

    holds: Callable[[Any], bool]
    text: str


@cache  # the same limit is the same object, for settings that methods share
def within(low: float, high: float) -> Limit:
    return Limit(lambda value: low <= value <= high, f"{low} to {high}")


@cache
def above(low: float, high: float) -> Limit:
    return Limit(lambda value: low < value <= high, f"above {low} and at most {high}")


def at_least(low: float) -> Limit:
    return Limit(lambda value: value >= low, f"{low} or more")


SHARE = Limit(lambda value: 0 <= value < 1, "at least 0 and below 1")
BETWEEN_0_AND_1 = Limit(lambda value: 0 < value < 1, "between 0 and 1")
ALPHA = above(0, 1000)  # of λ ~ Beta(α, α)
A_NAME = Limit(lambda value: value.strip() != "", "the name of a network")
