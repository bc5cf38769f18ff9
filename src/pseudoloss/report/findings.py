"""What the report says about a label table: galleries, confusions, scores against the truth.

N rows of the table, C classes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from pseudoloss.report.charts import Bin
from pseudoloss.report.reading import NO_EXAMPLES, Examples, Record
from pseudoloss.report.svg import shorten
from pseudoloss.scores import auc, calibration

MIN_IMAGES = 5  # a class with fewer images is too small to judge
MAX_PATH = 300  # characters
MIN_OUTLIER = 0.5  # an image with a higher score counts as an outlier
BINS = 10  # of a reliability diagram


@dataclass(frozen=True)
class Card:
    """An image in a gallery.

    Attributes:
        row: its row in the label table.
        given, candidate: labels; `candidate` may be missing.
        p_noisy, trust: scores.
        action: keep, relabel or review.
        file: its path, or the number of the image and its part.
        truth: "right" or "wrong", for the suggested label of a relabel; else None.
        true_label: if known.
        examples: similar images with confident labels.
    """

    row: int
    given: str
    candidate: str | None
    p_noisy: float
    trust: float
    action: str
    file: str
    truth: str | None
    true_label: str | None
    examples: Examples


@dataclass(frozen=True)
class Pair:
    """Flagged images of class `given` that look like class `candidate`."""

    given: str
    candidate: str
    images: int
    share: float  # of all images with this given label


@dataclass(frozen=True)
class Truth:
    """Scores against true labels. None where a score is not defined."""

    images: int  # whose truth is known
    noise: float
    estimate: float  # by the scores of these images
    precision: float | None
    recall: float | None
    f1: float | None
    auc: float | None
    suggestions: int
    right_suggestions: float | None
    right_before: float
    right_after: float
    calibration_error: float
    bins: list[Bin]
    trust_error: float | None
    trust_bins: list[Bin]


# -------------------------------------------------------------------------------------- galleries


def relabels(record: Record, top: int) -> list[Card]:
    """Labels to replace, the most trusted suggestions first."""
    table = record.table[record.table["action"] == "relabel"]
    ordered = table.sort_values(
        ["trust", "label_score"], ascending=[False, True], kind="stable", na_position="last"
    )
    return cards(record, ordered.index[:top])


def reviews(record: Record, top: int) -> list[Card]:
    """Images to look at, the most doubtful labels first."""
    table = record.table[record.table["action"] == "review"]
    ordered = table.sort_values(
        ["p_noisy", "label_score"], ascending=[False, True], kind="stable", na_position="last"
    )
    return cards(record, ordered.index[:top])


def outliers(record: Record, top: int) -> list[Card]:
    """Images that seem to belong to no class, the most certain first."""
    return cards(record, outlier_rows(record)[:top])


def outlier_rows(record: Record) -> pd.Index:
    """Rows of images that count as outliers, the highest score first."""
    found = record.summary.get("outliers")
    limit = found.get("min_score", MIN_OUTLIER) if isinstance(found, dict) else MIN_OUTLIER
    if "outlier_score" not in record.table:
        return pd.Index([], dtype="int64")
    score = record.table["outlier_score"].astype(float)
    return score[score >= limit].sort_values(ascending=False, kind="stable").index


def cards(record: Record, rows: Sequence[int] | pd.Index) -> list[Card]:
    """Cards of rows of the table."""
    return [_card(record, int(row)) for row in rows]


def _card(record: Record, row: int) -> Card:
    entry: dict[Any, Any] = record.table.iloc[row].to_dict()
    true_label = _text(entry.get("true_label"))
    truth = None
    if entry["action"] == "relabel" and _text(entry.get("truth")):
        truth = "right" if entry["suggested_label"] == true_label else "wrong"
    return Card(
        row=row,
        given=str(entry["given_label"]),
        candidate=_text(entry["candidate_label"]),
        p_noisy=float(entry["p_noisy"]),
        trust=float(entry["trust"]),
        action=str(entry["action"]),
        file=shorten(_text(entry["path"]) or f"image {entry['index']} ({entry['part']})", MAX_PATH),
        truth=truth,
        true_label=true_label,
        examples=record.examples.of(row, len(record.table)) if record.examples else NO_EXAMPLES,
    )


def duplicate_groups(record: Record) -> tuple[list[list[Card]], list[list[Card]]]:
    """Groups of near duplicates: those whose labels contradict each other, and those that appear
    in several splits with the same label. The largest similarity first."""
    if record.duplicates is None:
        return [], []
    contradicting, across = [], []
    found = record.duplicates[record.duplicates["row"] >= 0]
    groups = sorted(
        (-float(rows["similarity"].max()), str(group), rows)
        for group, rows in found.groupby("group", sort=False)
        if len(rows) > 1
    )
    for _, _, rows in groups:
        if rows["given_label"].nunique() > 1:
            contradicting.append(cards(record, rows["row"].tolist()))
        elif rows["part"].nunique() > 1:
            across.append(cards(record, rows["row"].tolist()))
    return contradicting, across


def _text(value: object) -> str | None:
    """The text of a cell; None if it is empty."""
    return value if isinstance(value, str) and value else None


# ------------------------------------------------------------------------------------- confusions


def pairs(table: pd.DataFrame) -> list[Pair]:
    """Given and candidate labels of flagged images, the most frequent first."""
    flagged = table[table["is_label_issue"] & table["candidate_label"].notna()]
    images = table["given_label"].value_counts()
    counts = Counter(zip(flagged["given_label"], flagged["candidate_label"], strict=True))
    found = [
        Pair(given, candidate, count, count / int(images[given]))
        for (given, candidate), count in counts.items()
    ]
    return sorted(found, key=lambda pair: (-pair.images, -pair.share, pair.given, pair.candidate))


def pair_matrix(found: Sequence[Pair], names: Sequence[str]) -> np.ndarray:
    """Counts of the pairs: one row per given label, one column per candidate."""
    place = {name: i for i, name in enumerate(names)}
    counts_CC = np.zeros((len(names), len(names)), dtype=np.int64)
    for pair in found:
        if pair.given in place and pair.candidate in place:
            counts_CC[place[pair.given], place[pair.candidate]] = pair.images
    return counts_CC


def small_classes(record: Record) -> list[tuple[str, int]]:
    """Classes with too few images to judge, and their number of images."""
    images = record.table["given_label"].value_counts()
    counted = [(name, int(images.get(name, 0))) for name in record.labels.classes]
    return [(name, count) for name, count in counted if 0 < count < MIN_IMAGES]


# ------------------------------------------------------------------------------------------ truth


def known_truth(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Whether the truth of each row is known, and whether its given label is wrong."""
    if "truth" not in table or "true_label" not in table:
        return np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    known_N = table["truth"].isin(["clean", "wrong", "out"]).to_numpy()
    return known_N, known_N & (table["truth"] != "clean").to_numpy()


def against_truth(table: pd.DataFrame) -> Truth | None:
    """How right the table is, over the rows whose truth is known; None if there are none."""
    known_N, wrong_N = known_truth(table)
    if not known_N.any():
        return None
    rows, wrong = table[known_N], wrong_N[known_N]
    flagged = rows["is_label_issue"].to_numpy(dtype=bool)
    found = int((flagged & wrong).sum())
    precision = found / int(flagged.sum()) if flagged.any() else None
    recall = found / int(wrong.sum()) if wrong.any() else None
    total = int(flagged.sum()) + int(wrong.sum())
    relabel = (rows["action"] == "relabel").to_numpy()
    true_label = rows["true_label"].to_numpy(dtype=object)
    suggested_right = (rows["suggested_label"].to_numpy(dtype=object) == true_label) & relabel
    candidate_right = rows["candidate_label"].to_numpy(dtype=object) == true_label
    error, bins = reliability_bins(rows["p_noisy"].to_numpy(dtype=float), wrong)
    trust = rows["trust"].to_numpy(dtype=float)
    judged = flagged & ~np.isnan(trust)
    trust_error, trust_bins = reliability_bins(trust[judged], candidate_right[judged])
    score = torch.tensor(rows["label_score"].to_numpy(dtype=float))
    return Truth(
        images=len(rows),
        noise=float(wrong.mean()),
        estimate=float(rows["p_noisy"].mean()),
        precision=precision,
        recall=recall,
        f1=2 * found / total if total else None,
        auc=auc(-score, torch.tensor(wrong)),
        suggestions=int(relabel.sum()),
        right_suggestions=float(suggested_right.sum() / relabel.sum()) if relabel.any() else None,
        right_before=float(1 - wrong.mean()),
        right_after=float(np.where(relabel, suggested_right, ~wrong).mean()),
        calibration_error=error or 0.0,
        bins=bins,
        trust_error=trust_error,
        trust_bins=trust_bins,
    )


def reliability_bins(
    predicted_N: np.ndarray, happened_N: np.ndarray
) -> tuple[float | None, list[Bin]]:
    """The expected calibration error, and the bins of the reliability diagram that have images."""
    if not len(predicted_N):
        return None, []
    found = calibration(torch.tensor(predicted_N), torch.tensor(happened_N), BINS)
    bins = [
        Bin(part["confidence"], part["accuracy"] / 100, part["images"])
        for part in found["bins"]
        if part["confidence"] is not None and part["accuracy"] is not None
    ]
    return found["error"], bins
