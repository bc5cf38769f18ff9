"""The label table as arrays, in order of doubt, for a page that asks for a few rows at a time.

Shapes: N rows in the order of the label table ("positions"), R the same rows in order of doubt
("ranks"), the most doubtful first.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from pseudoloss.labels.decisions import ACTIONS
from pseudoloss.labels.table import read_labels

NO_CLASS = -1
CATEGORIES = ["part", "given_label", "predicted_label", "candidate_label", "action"]
COLUMNS = ["index", "path", "label_score", "p_noisy", "trust", "truth", *CATEGORIES]


@dataclass(frozen=True)
class ReviewTable:
    """What the page shows about every image. Labels are indices into `classes`.

    Attributes:
        classes: names of all classes.
        parts: values of the column `part`.
        position_R: rows of the label table.
        index_R: column `index`.
        part_R: index into `parts`.
        given_R: the given label.
        suggested_R: the most likely other label, or NO_CLASS.
        action_R: index into ACTIONS.
        p_noisy_R, trust_R, label_score_R: scores; NaN where there are none.
        paths_N: by position; None where the source has no names.
    """

    classes: list[str]
    parts: list[str]
    position_R: np.ndarray
    index_R: np.ndarray
    part_R: np.ndarray
    given_R: np.ndarray
    suggested_R: np.ndarray
    action_R: np.ndarray
    p_noisy_R: np.ndarray
    trust_R: np.ndarray
    label_score_R: np.ndarray
    paths_N: np.ndarray

    def __len__(self) -> int:
        return len(self.position_R)

    def path(self, rank: int) -> str | None:
        value = self.paths_N[self.position_R[rank]]
        return str(value) if isinstance(value, str) else None

    def ranks_N(self) -> np.ndarray:
        """The rank of every position."""
        rank_N = np.empty(len(self), dtype=np.int64)
        rank_N[self.position_R] = np.arange(len(self))
        return rank_N

    def fingerprint(self, name: str) -> str:
        """Identifies these rows and labels, and `name`, so that decisions meant for another table
        are recognised."""
        digest = hashlib.sha256(name.encode(errors="surrogateescape"))
        for array in (self.position_R, self.index_R, self.part_R, self.given_R):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update("\0".join([*self.parts, *self.classes]).encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]


def read_quickly(folder: Path) -> pd.DataFrame:
    """The label table of a run folder, from labels.parquet if possible: with 1,000,000 rows the
    table is ready in a third of the time, as labels are stored as codes there. Those columns are
    categories."""
    csv, parquet = folder / "labels.csv", folder / "labels.parquet"
    try:
        import pyarrow.parquet as pq

        if parquet.stat().st_mtime_ns < csv.stat().st_mtime_ns:  # somebody has changed the CSV
            return read_labels(folder)
        names = set(pq.read_schema(parquet).names)
        if "candidate_label" in names:  # otherwise of an older version
            wanted = [name for name in COLUMNS if name in names]
            table: pd.DataFrame = pq.read_table(
                parquet, columns=wanted, read_dictionary=CATEGORIES
            ).to_pandas()
            return table
    except (ImportError, OSError, ValueError):
        pass
    return read_labels(folder)


def review_table(table: pd.DataFrame, classes: Sequence[str] = ()) -> ReviewTable:
    """The rows of a label table in order of doubt: by `label_score`, ties by `p_noisy`.

    Args:
        table: the label table. Older tables have no `candidate_label`; there the suggestion is
            `suggested_label` or `predicted_label`, where that differs from the given label.
        classes: names of all classes, in their order; others in the table are appended.
    """
    columns = {"given": _categories(table["given_label"])}
    for name in ("candidate_label", "suggested_label", "predicted_label"):
        if name in table:
            columns[name] = _categories(table[name])
    names = list(dict.fromkeys([str(name) for name in classes]))
    known = set(names)
    extra = {str(name) for column in columns.values() for name in column.categories} - known
    names += sorted(extra)
    code_of = {name: code for code, name in enumerate(names)}
    codes = {name: _codes(column, code_of) for name, column in columns.items()}

    given_N = codes.pop("given")
    suggested_N = np.full(len(table), NO_CLASS, dtype=np.int32)
    for code_N in codes.values():  # the first column that names another class
        free = (suggested_N == NO_CLASS) & (code_N != given_N)
        suggested_N[free] = code_N[free]

    part = _categories(table["part"])
    action = pd.Categorical(table["action"], categories=list(ACTIONS))
    score_N, p_noisy_N, trust_N = (
        table[name].to_numpy(dtype=np.float32) for name in ("label_score", "p_noisy", "trust")
    )
    order = np.lexsort((-p_noisy_N, score_N))  # NaN is last
    return ReviewTable(
        classes=names,
        parts=[str(name) for name in part.categories],
        position_R=order.astype(np.int64),
        index_R=table["index"].to_numpy(dtype=np.int64)[order],
        part_R=part.codes.astype(np.int16)[order],
        given_R=given_N[order],
        suggested_R=suggested_N[order],
        action_R=np.maximum(action.codes, 0).astype(np.uint8)[order],
        p_noisy_R=p_noisy_N[order],
        trust_R=trust_N[order],
        label_score_R=score_N[order],
        paths_N=table["path"].to_numpy(dtype=object),
    )


def _categories(column: pd.Series) -> pd.Categorical:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return pd.Categorical(column)
    codes, names = pd.factorize(column.to_numpy(dtype=object), use_na_sentinel=True)
    return pd.Categorical.from_codes(codes, categories=pd.Index(names, dtype=object))


def _codes(column: pd.Categorical, code_of: dict[str, int]) -> np.ndarray:
    """Codes under the common numbering of all classes; NO_CLASS where there is no label."""
    lookup = np.array([code_of[str(name)] for name in column.categories] + [NO_CLASS], np.int32)
    return np.asarray(lookup[column.codes])  # the code of a missing value is -1: the last entry
