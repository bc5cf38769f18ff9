"""Open the label table of a run or an audit, with what is needed to use it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_integer_dtype

from pseudoloss.data.images import in_order
from pseudoloss.errors import InputError, reason
from pseudoloss.files import as_path, read_checked
from pseudoloss.labels.decisions import THRESHOLD, decide
from pseudoloss.labels.table import read_labels

NEEDED = ("index", "part", "given_label", "predicted_label", "label_score", "p_noisy", "trust")


@dataclass(frozen=True)
class LabelSet:
    """The label table of a run or an audit.

    Attributes:
        path: the folder.
        table: the table (docs/run-folder.md), with `candidate_label` and `path` also for runs of
            versions that did not write them.
        kind: "train" or "audit".
        epoch: the epoch that the table is of; None for an audit.
        finished: whether the run is finished.
        classes: the names of the classes, in their order.
        source: what was trained on or audited, with an absolute path; None if the data were passed
            in Python.
        config: the content of config.json.
        summary: the content of summary.json; empty if the run is not finished.
        calibrated: whether the table has scores for which `decide` is meant. In version 0.2 and
            before, actions were decided in training, from scores that are not probabilities.
    """

    path: Path
    table: pd.DataFrame
    kind: Literal["train", "audit"]
    epoch: int | None
    finished: bool
    classes: tuple[str, ...]
    source: str | None
    config: dict[str, Any]
    summary: dict[str, Any]
    calibrated: bool = True

    @property
    def reading(self) -> dict[str, Any]:
        """The options with which the source was read."""
        return dict(self.config.get("reading") or {})

    @property
    def state(self) -> str:
        """What to tell the user about a table that is not final; empty if it is."""
        if self.finished:
            return ""
        epoch = "of an unknown epoch" if self.epoch is None else f"as of epoch {self.epoch}"
        return f"{self.path}: not finished; the labels are {epoch}"

    def decided(
        self, threshold: float | None = None, min_trust: float | None = None
    ) -> pd.DataFrame:
        """The table with actions decided again; without arguments, with the thresholds of the audit
        or, for a run, with the default ones.

        A run of an older version keeps the issues it flagged unless there is a threshold, and all
        its actions if there is no argument at all.
        """
        if self.calibrated or threshold is not None:
            asked = {"threshold": threshold, "min_trust": min_trust}
            given = {name: value for name, value in asked.items() if value is not None}
            return decide(self.table, **(self._thresholds() | given))
        if min_trust is None:
            return self.table
        flagged = self.table.assign(p_noisy=self.table["is_label_issue"].astype(float))
        return decide(flagged, 0.5, min_trust).assign(p_noisy=self.table["p_noisy"])

    def _thresholds(self) -> dict[str, float]:
        """Those that an audit was given, or that of a run, in whose settings `threshold` is another
        one."""
        settings = self.config.get("settings")
        if self.kind != "audit":
            return {"threshold": THRESHOLD}
        if not isinstance(settings, dict):
            return {}
        known = {name: settings.get(name) for name in ("threshold", "min_trust")}
        return {name: value for name, value in known.items() if isinstance(value, int | float)}


def open_labels(path: str | Path, read: Callable[[Path], pd.DataFrame] = read_labels) -> LabelSet:
    """Open the folder of a run (finished, or with a table already) or of an audit.

    Args:
        path: the folder.
        read: reads the label table in the folder.
    """
    folder = as_path(path, "run")
    if not folder.exists():
        raise InputError(f"{path}: no such run")
    config = _json(folder / "config.json")
    if config is None:
        raise InputError(f"{path}: neither a run folder nor an audit (it has no config.json)")
    summary = _json(folder / "summary.json")
    kind: Literal["train", "audit"] = "audit" if config.get("kind") == "audit" else "train"
    if not (folder / "labels.csv").exists() or (kind == "audit" and summary is None):
        again = "pseudoloss train --resume" if kind == "train" else "pseudoloss audit"
        raise InputError(f"{path}: has no label table yet; continue it with {again}")
    try:
        table = read(folder)
        missing = [name for name in NEEDED if name not in table]
        if missing:
            raise ValueError(f"no column {missing[0]}")
        if not is_integer_dtype(table["index"]):
            raise ValueError("index must be whole numbers")
        source = config["source"]
        classes = config["classes"] if "classes" in config else config["data"]["classes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: the label table cannot be read ({reason(error)})") from None
    calibrated = "candidate_label" in table
    return LabelSet(
        path=folder,
        table=_with_all_columns(table),
        kind=kind,
        epoch=_epoch(folder, summary) if kind == "train" else None,
        finished=summary is not None,
        classes=tuple(map(str, classes)) or tuple(in_order(table["given_label"])),
        source=None if config.get("from_python") or source is None else str(source),
        config=config,
        summary=summary or {},
        calibrated=calibrated,
    )


def _with_all_columns(table: pd.DataFrame) -> pd.DataFrame:
    if "path" not in table:
        table["path"] = np.full(len(table), np.nan, dtype=object)
    if "candidate_label" in table:
        return table
    given, predicted = table["given_label"], table["predicted_label"]
    suggested = table["suggested_label"].where(table["suggested_label"] != given)
    candidate = suggested.where(suggested.notna(), predicted.where(predicted != given))
    table.insert(list(table.columns).index("trust"), "candidate_label", candidate)
    return table


def _epoch(folder: Path, summary: dict[str, Any] | None) -> int | None:
    """The epoch of a table: the last one of a finished run; else the one in labels.json, which is
    missing if the run was killed while it wrote the table."""
    record = summary or _json(folder / "labels.json") or {}
    found = record.get("epochs") if summary else record.get("epoch")
    return found if isinstance(found, int) else None


def _json(path: Path) -> dict[str, Any] | None:
    """The content of a file of JSON; None if there is no such file."""
    try:
        return read_checked(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({reason(error)})") from None
