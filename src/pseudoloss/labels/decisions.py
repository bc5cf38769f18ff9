"""What to do about each label, decided from the scores in the label table.

Scores are stored, decisions are not final: another threshold gives other actions without another
audit or training run.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pseudoloss.errors import InputError

ACTIONS = ("keep", "relabel", "review")
THRESHOLD = 0.5  # where nothing shows that `p_noisy` is calibrated: training, two mixtures
LOWEST = 0.25  # threshold that is chosen
MIN_TRUST = 0.4  # a suggestion becomes a new label from this probability of being right on


def best_threshold(p_noisy_N: np.ndarray) -> float:
    """The threshold that flags wrong labels with the highest expected F1.

    If `p_noisy` is calibrated, the k most doubtful labels are expected to hold the sum of their
    `p_noisy` of the wrong ones. Where wrong labels are easy to tell, the best threshold is nearly
    0.5; where they are not, it is lower, or most of them would not be found.
    """
    sorted_N = np.sort(p_noisy_N[~np.isnan(p_noisy_N)])[::-1]
    if not sorted_N.sum() > 0:
        return THRESHOLD
    counts_N = np.arange(1, len(sorted_N) + 1)
    f1_N = 2 * sorted_N.cumsum() / (counts_N + sorted_N.sum())
    return float(np.clip(sorted_N[f1_N.argmax()], LOWEST, THRESHOLD))


def is_trusted(
    p_noisy_N: np.ndarray, trust_N: np.ndarray, min_trust: float = MIN_TRUST
) -> np.ndarray:
    """Whether a candidate may replace the given label: it is trusted, with at least `min_trust`,
    and more probable than the given label."""
    return (trust_N >= min_trust) & (trust_N > 1 - p_noisy_N)


def decide(
    table: pd.DataFrame, threshold: float | None = None, min_trust: float = MIN_TRUST
) -> pd.DataFrame:
    """The table with `is_label_issue`, `action` and `suggested_label` decided from its scores.

    A label is an issue if `p_noisy` is at least `threshold` (None: the best one). `relabel`: the
    candidate may replace it (`is_trusted`); `review`: it may not (often the image belongs to no
    class).
    """
    if threshold is None:
        threshold = best_threshold(table["p_noisy"].to_numpy(dtype=float))
    for flag, value in (("--threshold", threshold), ("--min-trust", min_trust)):
        if not 0 <= value <= 1:
            raise InputError(f"{flag} must be from 0 to 1, not {value:g}")
    issue = (table["p_noisy"] >= threshold).to_numpy()
    p_noisy_N, trust_N = (table[name].to_numpy(dtype=float) for name in ("p_noisy", "trust"))
    trusted = (
        is_trusted(p_noisy_N, trust_N, min_trust) & table["candidate_label"].notna().to_numpy()
    )
    action = np.select([issue & trusted, issue], ["relabel", "review"], "keep")
    suggested = table["given_label"].to_numpy(dtype=object).copy()
    suggested[action == "relabel"] = table["candidate_label"].to_numpy(dtype=object)[
        action == "relabel"
    ]
    suggested[action == "review"] = np.nan
    return table.assign(suggested_label=suggested, is_label_issue=issue, action=action)


def select(
    table: pd.DataFrame,
    *,
    classes: Sequence[str] = (),
    actions: Sequence[str] = (),
    top: int | None = None,
) -> pd.DataFrame:
    """The rows with one of these given labels and one of these actions (none: all); with `top`,
    that many of them, the most doubtful first."""
    if top is not None and top < 1:
        raise InputError(f"--top must be 1 or more, not {top}")
    if classes:
        table = table[table["given_label"].isin(classes)]
    if actions:
        table = table[table["action"].isin(actions)]
    return table if top is None else most_doubtful(table).head(top)


def most_doubtful(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in order of doubt: the lowest `label_score` first, rows without one last."""
    return table.sort_values("label_score", kind="stable", na_position="last")
