"""What people decided about labels: decisions.jsonl, as the review page writes it.

One JSON object per line. The last line about an image counts; "undo" removes its decision.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoloss.errors import InputError, reason
from pseudoloss.files import open_regular, without_checksum

DECISIONS = ("keep", "relabel", "junk", "skip", "undo")


@dataclass(frozen=True)
class Decision:
    """What somebody decided about the label of one image.

    Attributes:
        index: column `index` of the label table.
        part: column `part`; together they name the image.
        path: its path, if it has one.
        decision: one of DECISIONS. `undo` removes the decision before it.
        label: the new label (`relabel`).
        given_label: the label that was judged.
        time: when, in UTC.
        by: who, if they gave a name.
    """

    index: int
    part: str
    path: str | None
    decision: str
    label: str | None
    given_label: str
    time: str
    by: str | None = None


@dataclass(frozen=True)
class NumberedDecision(Decision):
    """A decision and its line in the file, from 1."""

    line: int = 0


def parse_line(line: str | bytes) -> Decision | None:
    """The decision in a line, or None if it has none: a line may be cut short by a kill, or changed
    by a faulty disk. Lines of other programs have no checksum."""
    try:
        values = without_checksum(json.loads(line))
        found = Decision(
            index=values["index"],
            part=values["part"],
            path=values.get("path"),
            decision=values["decision"],
            label=values.get("label"),
            given_label=values["given_label"],
            time=values.get("time", ""),
            by=values.get("by"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if _is_sound(found) else None


def _is_sound(found: Decision) -> bool:
    texts: tuple[Any, ...] = (found.part, found.given_label, found.time)
    optional: tuple[Any, ...] = (found.path, found.label, found.by)
    return (
        type(found.index) is int
        and found.decision in DECISIONS
        and all(isinstance(text, str) for text in texts)
        and all(text is None or isinstance(text, str) for text in optional)
        and (found.decision != "relabel" or found.label is not None)
    )


def read_decisions(path: Path) -> tuple[dict[tuple[int, str], NumberedDecision], int]:
    """The decisions by `index` and `part`, and the number of lines that hold none."""
    found: dict[tuple[int, str], NumberedDecision] = {}
    damaged = 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                parsed = parse_line(line)
                if parsed is None:
                    damaged += bool(line.strip())
                elif parsed.decision == "undo":
                    found.pop((parsed.index, parsed.part), None)
                else:
                    found[parsed.index, parsed.part] = NumberedDecision(**vars(parsed), line=number)
    except OSError as error:
        raise InputError(f"--decisions {path}: cannot be read ({reason(error)})") from None
    return found, damaged
