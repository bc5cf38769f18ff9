"""What the report needs from the folder of a run or an audit."""

import math
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd

from pseudoloss.errors import InputError, reason
from pseudoloss.files import open_npy, read_json, read_npz
from pseudoloss.labels.decisions import MIN_TRUST, THRESHOLD, best_threshold
from pseudoloss.labels.opening import LabelSet, open_labels
from pseudoloss.runs import RunFolder

SHOWN_EXAMPLES = 3  # of each class, beside a flagged image
MAX_LOSSES = 100_000  # rows of pred_probs.npy that are read
FLOOR = 1e-9


@dataclass(frozen=True)
class ClassNoise:
    """Estimated share of wrong labels among the images given one class."""

    name: str
    rate: float
    low: float | None
    high: float | None
    images: int


@dataclass(frozen=True)
class Noise:
    """Estimated share of wrong labels, with its interval where there is one."""

    rate: float | None
    low: float | None
    high: float | None
    known: bool
    reasons: tuple[str, ...]  # why the run cannot know
    by_class: tuple[ClassNoise, ...]  # the highest rate first

    @property
    def wide(self) -> bool:
        """Whether the interval says nothing: then the rate is not even a guess."""
        low, high = self.low, self.high
        return not self.known and low is not None and high is not None and high - low >= 1


@dataclass(frozen=True)
class Examples:
    """Confidently labelled images that are similar to a flagged one: rows of the label table."""

    given: tuple[int, ...]
    candidate: tuple[int, ...]


NO_EXAMPLES = Examples((), ())


@dataclass(frozen=True)
class ExampleRows:
    """examples.npz: rows of the label table, M flagged ones and K examples for each; -1: none."""

    row_M: np.ndarray
    given_MK: np.ndarray
    candidate_MK: np.ndarray

    def of(self, row: int, rows: int) -> Examples:
        """The examples of a row of a table with this number of rows."""
        places = np.flatnonzero(self.row_M == row)
        if not len(places):
            return NO_EXAMPLES

        def inside(row_K: np.ndarray) -> tuple[int, ...]:
            return tuple(int(one) for one in row_K if 0 <= one < rows)[:SHOWN_EXAMPLES]

        return Examples(inside(self.given_MK[places[0]]), inside(self.candidate_MK[places[0]]))


@dataclass(frozen=True)
class Record:
    """A run or an audit.

    Attributes:
        name: of its folder.
        labels: the label set, with config and summary.
        table: the label table with actions; its index is 0 to N - 1.
        noise: the estimated noise.
        metrics: one entry per epoch of training.
        duplicates: duplicates.csv with the row of each image in the table (-1: none), or None.
        examples: similar images with confident labels, or None.
        skipped: number of files that could not be read.
    """

    name: str
    labels: LabelSet
    table: pd.DataFrame
    noise: Noise
    metrics: list[dict[str, Any]]
    duplicates: pd.DataFrame | None
    examples: ExampleRows | None
    skipped: int

    @property
    def is_audit(self) -> bool:
        return self.labels.kind == "audit"

    @property
    def summary(self) -> dict[str, Any]:
        return self.labels.summary

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.labels.config.get("settings") or {})

    @property
    def thresholds(self) -> tuple[float, float]:
        """From which `p_noisy` a label is flagged, and from which trust it is replaced."""
        settings = self.settings
        threshold = settings.get("threshold")  # of a run of an older version: that of stage 1
        if self.is_audit:
            if threshold is None:
                threshold = best_threshold(self.labels.table["p_noisy"].to_numpy(dtype=float))
            return float(threshold), float(settings.get("min_trust", MIN_TRUST))
        if self.labels.calibrated or not isinstance(threshold, float):
            return THRESHOLD, MIN_TRUST
        return threshold, MIN_TRUST

    @property
    def notices(self) -> list[str]:
        """What the run warned about."""
        found = self.summary.get("notices") or ()
        return [str(one.get("text") if isinstance(one, dict) else one) for one in found]

    @property
    def source_name(self) -> str:
        """The last part of the source's path, or its name."""
        source = str(self.labels.config.get("source") or "")
        return PurePath(source.rstrip("/\\")).name or source or "data passed in Python"


def read_record(folder: str | Path) -> Record:
    """Read the folder of a run, finished or with a label table already, or of an audit."""
    labels = open_labels(folder)
    path = labels.path
    try:
        table = labels.decided().reset_index(drop=True)
        return Record(
            name=path.resolve().name,
            labels=labels,
            table=table,
            noise=_noise(_estimate(labels), table),
            metrics=RunFolder(path).metrics(),
            duplicates=_duplicates(path / "duplicates.csv", table),
            examples=_examples(path / "examples.npz"),
            skipped=_count_lines(path / "skipped.csv"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: cannot be read ({reason(error)})") from None


def given_losses(record: Record) -> np.ndarray:
    """The loss of given labels: of out-of-fold predictions (audit; of at most `MAX_LOSSES` rows,
    NaN for the others), or from the label score (train)."""
    table = record.table
    path = record.labels.path / "pred_probs.npy"
    if not record.is_audit:
        return np.asarray(-np.log(table["label_score"].clip(lower=FLOOR).to_numpy(dtype=float)))
    losses_N = np.full(len(table), np.nan)
    if path.exists():
        probs_NC = open_npy(path)
        column = {name: i for i, name in enumerate(record.labels.classes)}
        given_N = table["given_label"].map(column).fillna(-1).to_numpy(dtype=np.int64)
        if probs_NC.shape == (len(table), len(column)):
            rows = np.arange(0, len(table), max(1, math.ceil(len(table) / MAX_LOSSES)))
            rows = rows[given_N[rows] >= 0]
            losses_N[rows] = -np.log(np.maximum(probs_NC[rows, given_N[rows]], FLOOR))
    return losses_N


# ----------------------------------------------------------------------------------------- files


def _estimate(labels: LabelSet) -> Any:
    """`estimated_noise` of the summary; of an unfinished run, of the record beside its table."""
    path = labels.path / "labels.json"
    if labels.finished or not path.exists():
        return labels.summary.get("estimated_noise")
    return read_json(path).get("estimated_noise")


def _noise(estimate: Any, table: pd.DataFrame) -> Noise:
    """The estimate in the summary; for a run without one, the share of flagged labels."""
    images = table["given_label"].value_counts()
    if not isinstance(estimate, dict):
        rates = table.groupby("given_label")["is_label_issue"].mean()
        rate = float(table["is_label_issue"].mean()) if len(table) else None
        estimate = {"rate": rate, "by_class": rates.to_dict()}
    classes = []
    for name, value in (estimate.get("by_class") or {}).items():
        entry = value if isinstance(value, dict) else {"rate": value}
        rate = _number(entry.get("rate"))
        count = int(entry.get("images", images.get(name, 0)))
        if rate is not None and count:
            low, high = _number(entry.get("low")), _number(entry.get("high"))
            classes.append(ClassNoise(str(name), rate, low, high, count))
    classes.sort(key=lambda one: (-one.rate, -one.images, one.name))
    return Noise(
        rate=_number(estimate.get("rate")),
        low=_number(estimate.get("low")),
        high=_number(estimate.get("high")),
        known=bool(estimate.get("known", True)),
        reasons=tuple(str(text) for text in estimate.get("reasons") or ()),
        by_class=tuple(classes),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _duplicates(path: Path, table: pd.DataFrame) -> pd.DataFrame | None:
    """duplicates.csv, with the column `row`: the position of each image in the label table."""
    if not path.exists():
        return None
    text = dict.fromkeys(("path", "part", "given_label"), object)
    found = pd.read_csv(path, dtype=text, keep_default_na=False)
    position = {key: row for row, key in enumerate(zip(table["part"], table["index"], strict=True))}
    keys = zip(found["part"], found["index"], strict=True)
    return found.assign(row=[position.get(key, -1) for key in keys])


def _examples(path: Path) -> ExampleRows | None:
    if not path.exists():
        return None
    arrays = read_npz(path)
    row_M, given_MK, candidate_MK = (
        arrays[name].astype(np.int64) for name in ("row_M", "given_MK", "candidate_MK")
    )
    if not row_M.shape == given_MK.shape[:1] == candidate_MK.shape[:1]:
        raise ValueError("the arrays in examples.npz have different lengths")
    return ExampleRows(row_M, given_MK, candidate_MK)


def _count_lines(path: Path) -> int:
    return len(pd.read_csv(path)) if path.exists() else 0
