"""Read files of older versions: settings and metrics under their current names."""

from collections.abc import Mapping
from typing import Any, get_args

from pseudoloss.config import setting_types

RENAMED_SETTINGS = {"guess_norm": "pseudo_label_norm", "guess_mode": "pseudo_label_mode"}
RENAMED_VALUES = {
    ("weighting", "apart"): "separate",
    ("weighting", "together"): "interpolated",
    ("weighting", "own"): "first",
}
RENAMED_METRICS = {"guesses": "pseudo_labels"}


def upgrade_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a result file or run folder under their current names."""
    known = setting_types()
    upgraded = {}
    for name, value in values.items():
        current = RENAMED_SETTINGS.get(name, name)
        current = current if current in known else name
        renamed = RENAMED_VALUES.get((current, value), value)
        upgraded[current] = renamed if renamed in get_args(known.get(current)) else value
    return upgraded


def upgrade_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl or a summary.json under its current keys."""
    return {
        RENAMED_METRICS.get(key, key): upgrade_metrics(value)
        if key == "metrics" and value
        else value
        for key, value in values.items()
    }
