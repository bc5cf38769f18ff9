"""Presets: named sets of settings; and what a user asks for on top of one.

`table.py` has the presets, `rivals.py` those of other methods, `requests.py` puts a run's settings
together.
"""

from pseudoloss.presets.requests import (
    LABEL_FILES,
    MAY_CHANGE_ON_RESUME,
    NO_SETTINGS,
    Request,
    fit_to_data,
    read_config,
    request,
    same_for_a_run,
)
from pseudoloss.presets.table import HUMAN, NEEDS, PRESETS

__all__ = [
    "HUMAN",
    "LABEL_FILES",
    "MAY_CHANGE_ON_RESUME",
    "NEEDS",
    "NO_SETTINGS",
    "PRESETS",
    "Request",
    "fit_to_data",
    "read_config",
    "request",
    "same_for_a_run",
]
