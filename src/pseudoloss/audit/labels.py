"""The label table: what is known about every label, one row per image."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pseudoloss.data import OUT, ImageSet
from pseudoloss.files import write_atomically
from pseudoloss.methods.base import Verdict

ACTIONS = ("keep", "relabel", "review")
TRAIN, HELD_OUT = "train", "held-out"  # values of the column `part`
TRUTH = ("true_label", "truth")  # columns
TRUSTED = 0.5  # a suggestion becomes a new label from this trust on


def label_table(
    images: ImageSet, verdict: Verdict, held_out: tuple[ImageSet, Verdict] | None = None
) -> pd.DataFrame:
    """One row per image; columns that cleanlab has too bear its names. Where some true labels are
    known, two more columns hold them.

    `action` is what we suggest: `keep` the label; `relabel` it (flagged, and the suggestion is
    trusted); or `review` the image (flagged, and no suggestion is trusted: it is often
    out-of-distribution). A flagged label that a trusted suggestion confirms is kept: no issue.

    Args:
        images: the training images.
        verdict: what the method says about their labels.
        held_out: images of the same source that were not trained on, and the verdict on them.
    """
    rows = [_rows(TRAIN, images, verdict)]
    if held_out is not None:
        rows.append(_rows(HELD_OUT, *held_out))
    table = pd.concat(rows, ignore_index=True)
    known = images.true_N is not None or (held_out is not None and held_out[0].true_N is not None)
    return table if known else table.drop(columns=list(TRUTH))


def _rows(part: str, images: ImageSet, verdict: Verdict) -> pd.DataFrame:
    names = np.array(images.classes, dtype=object)
    given = images.given_N.numpy()
    noisy = verdict.noisy_N.cpu().numpy()
    suggestion, trust = given, np.full(len(images), np.nan)
    if verdict.suggested_N is not None and verdict.trust_N is not None:
        suggestion, trust = verdict.suggested_N.cpu().numpy(), verdict.trust_N.cpu().numpy()
    trusted = trust >= TRUSTED  # False where there is none
    issue = noisy & ~(trusted & (suggestion == given))
    action = np.select([issue & trusted, issue], ["relabel", "review"], "keep")
    suggested = names[np.where(action == "relabel", suggestion, given)]
    suggested[action == "review"] = np.nan
    true_label, truth = _truth(images, names, given)
    return pd.DataFrame(
        {
            "index": images.in_source_N.numpy(),
            "path": np.array(images.paths or [np.nan] * len(images), dtype=object),
            "part": part,
            "given_label": names[given],
            "predicted_label": names[verdict.predicted_N.cpu().numpy()],
            "suggested_label": suggested,
            "is_label_issue": issue,
            "label_score": np.exp(-verdict.loss_N.cpu().numpy()),
            "p_noisy": verdict.p_noisy_N.cpu().numpy(),
            "trust": trust,
            "action": action,
            "true_label": true_label,
            "truth": truth,
        }
    )


def _truth(images: ImageSet, names: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True labels, and whether the given ones are clean, wrong or out-of-distribution; NaN where
    that is not known."""
    unknown = np.full(len(images), np.nan, dtype=object)
    if images.true_N is None:
        return unknown, unknown
    true = images.true_N.numpy()
    label = np.where(true == OUT, np.nan, names[true])
    kind = np.select([true == OUT, true != given], ["out", "wrong"], "clean")
    return label, kind.astype(object)


def estimated_noise(table: pd.DataFrame) -> dict[str, Any]:
    """The share of training labels that are an issue: of all, and of each class."""
    table = table[table["part"] == TRAIN]
    by_class = table.groupby("given_label", sort=False)["is_label_issue"].mean()
    return {
        "rate": float(table["is_label_issue"].mean()),
        "by_class": {str(name): float(by_class[name]) for name in sorted(by_class.index)},
    }


def write_labels(table: pd.DataFrame, folder: Path) -> None:
    """labels.csv and, where pyarrow is installed, labels.parquet."""
    write_atomically(
        folder / "labels.csv",
        lambda draft: table.to_csv(draft, index=False, float_format="%.6g"),
    )
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return
    write_atomically(folder / "labels.parquet", lambda draft: table.to_parquet(draft, index=False))


def read_labels(folder: Path) -> pd.DataFrame:
    """The label table of a run folder; labels and paths are text, as they were written."""
    text = ["path", "part", "given_label", "predicted_label", "suggested_label", "action", *TRUTH]
    numbers = ["label_score", "p_noisy", "trust"]
    table = pd.read_csv(
        folder / "labels.csv",
        dtype=dict.fromkeys(text, object) | dict.fromkeys(numbers, float),
        keep_default_na=False,
        na_values={
            name: [""] for name in ("path", "suggested_label", "trust", "label_score", *TRUTH)
        },
    )
    table["action"] = table["action"].replace("look", "review")  # its name in version 0.1
    return table
