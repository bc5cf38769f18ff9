"""Read metrics of older versions under their current names."""

from collections.abc import Mapping
from typing import Any

RENAMED_METRICS = {"guesses": "pseudo_labels"}


def upgrade_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl or a summary.json under its current keys."""
    return {
        RENAMED_METRICS.get(key, key): upgrade_metrics(value)
        if key == "metrics" and value
        else value
        for key, value in values.items()
    }
