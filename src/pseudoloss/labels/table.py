"""The label table: what is known about every label, one row per image."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from pseudoloss.data import OUT, ImageSet
from pseudoloss.files import write_atomically
from pseudoloss.labels.decisions import ACTIONS as ACTIONS
from pseudoloss.labels.decisions import THRESHOLD, decide

TRAIN, HELD_OUT = "train", "held-out"  # values of the column `part`
DIGITS = ".6g"  # of numbers in labels.csv
TRUTH = ("true_label", "truth")  # columns


class LabelScores(NamedTuple):
    """What is known about the labels of N images; classes are indices."""

    predicted_N: np.ndarray  # class
    candidate_N: np.ndarray  # the most likely class other than the given one
    label_score_N: np.ndarray  # the lowest are the most doubtful
    p_noisy_N: np.ndarray  # probability that the given label is wrong
    trust_N: np.ndarray  # probability that the candidate is right


def label_table(
    images: ImageSet, scores: LabelScores, held_out: tuple[ImageSet, LabelScores] | None = None
) -> pd.DataFrame:
    """One row per image; columns that cleanlab has too bear its names. Where some true labels are
    known, two more columns hold them.

    Args:
        images: the training images.
        scores: of their labels.
        held_out: images of the same source that were not trained on, and the scores of theirs.
    """
    rows = [_rows(TRAIN, images, scores)]
    if held_out is not None:
        rows.append(_rows(HELD_OUT, *held_out))
    table = pd.concat(rows, ignore_index=True)
    for name in TRUTH:  # empty for a part of unknown truth
        if name in table:
            table[name] = table[name].astype(object)
    return table


def _rows(part: str, images: ImageSet, scores: LabelScores) -> pd.DataFrame:
    return score_rows(
        part,
        images.classes,
        index=images.in_source_N.numpy(),
        paths=images.paths,
        given=images.given_N.numpy(),
        predicted=scores.predicted_N,
        candidate=scores.candidate_N,
        label_score=scores.label_score_N,
        p_noisy=scores.p_noisy_N,
        trust=scores.trust_N,
        true=None if images.true_N is None else images.true_N.numpy(),
    )


def score_rows(
    part: str,
    classes: Sequence[str],
    *,
    index: np.ndarray,
    paths: Sequence[str] | None,
    given: np.ndarray,
    predicted: np.ndarray,
    candidate: np.ndarray,
    label_score: np.ndarray,
    p_noisy: np.ndarray,
    trust: np.ndarray,
    true: np.ndarray | None = None,
) -> pd.DataFrame:
    """Rows of the label table from scores, one per image; actions are decided with the threshold of
    training. Labels are class indices; `true` is OUT for an image that belongs to no class."""
    names = np.array(classes, dtype=object)
    rows = pd.DataFrame(
        {
            "index": index,
            "path": np.array([np.nan] * len(given) if paths is None else paths, dtype=object),
            "part": part,
            "given_label": names[given],
            "predicted_label": names[predicted],
            "suggested_label": names[given],
            "is_label_issue": False,
            "label_score": label_score,
            "p_noisy": as_stored(p_noisy),
            "candidate_label": names[candidate],
            "trust": as_stored(trust),
            "action": "keep",
        }
    )
    rows = decide(rows, THRESHOLD)
    if true is not None:
        rows["true_label"] = np.where(true == OUT, np.nan, names[true])
        kind = np.select([true == OUT, true != given], ["out", "wrong"], "clean")
        rows["truth"] = kind.astype(object)
    return rows


def as_stored(values_N: np.ndarray) -> np.ndarray:
    """Rounded as in labels.csv, so that actions decided from the file are the same."""
    return np.array([float(f"{value:{DIGITS}}") for value in values_N.tolist()])


def write_csv(table: pd.DataFrame, folder: Path) -> None:
    """labels.csv."""
    write_atomically(
        folder / "labels.csv",
        lambda draft: table.to_csv(draft, index=False, float_format=f"%{DIGITS}"),
    )


def write_labels(table: pd.DataFrame, folder: Path) -> None:
    """labels.csv and, where pyarrow is installed, labels.parquet."""
    write_csv(table, folder)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return
    write_atomically(folder / "labels.parquet", lambda draft: table.to_parquet(draft, index=False))


def read_labels(folder: Path) -> pd.DataFrame:
    """The label table of a run folder; labels and paths are text, as they were written."""
    text = ["path", "part", "given_label", "predicted_label", "suggested_label", "candidate_label"]
    text += ["action", *TRUTH]
    numbers = ["label_score", "p_noisy", "trust"]
    table = pd.read_csv(
        folder / "labels.csv",
        dtype=dict.fromkeys(text, object) | dict.fromkeys(numbers, float),
        keep_default_na=False,
        na_values={
            name: [""]
            for name in (
                "path",
                "suggested_label",
                "candidate_label",
                "trust",
                "label_score",
                "outlier_score",
                "duplicate_group",
                *TRUTH,
            )
        },
    )
    table["action"] = table["action"].replace("look", "review")  # its name in version 0.1
    return table
