"""The result of an audit, and its folder.

The folder holds config.json (written first), labels.csv, pred_probs.npy, duplicates.csv,
examples.npz, skipped.csv and, written last, summary.json.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pseudoloss import claims, runs
from pseudoloss.claims import lock_folder
from pseudoloss.data import Skipped
from pseudoloss.errors import InputError, TrainingError, reason
from pseudoloss.files import (
    as_path,
    open_npy,
    read_checked,
    read_json,
    read_npz,
    write_atomically,
    write_checked,
)
from pseudoloss.labels.table import read_labels, write_labels
from pseudoloss.runs import Run, contents, refuse_other_files

KIND = "audit"
DUPLICATE_COLUMNS = ["group", "index", "path", "part", "given_label", "similarity"]
BEGUN = ("pseudoloss", "kind", "source", "from_python", "reading", "settings")  # known at the start
FILES = {
    "config.json",
    "labels.csv",
    "labels.parquet",
    "pred_probs.npy",
    "duplicates.csv",
    "examples.npz",
    "skipped.csv",
}


@dataclass(frozen=True)
class Audit:
    """The results of an audit. Rows of all arrays are in the order of `labels`.

    Attributes:
        labels: the label table, one row per image (see docs/audit.md).
        summary: the content of summary.json.
        pred_probs: float32 N×C, out-of-fold predictions; columns in the order of `classes`.
        classes: names of the classes.
        duplicates: groups of duplicates, one row per image in a group.
        examples: `row_M` (flagged rows of `labels`), `given_MK` and `candidate_MK`: rows of the
            nearest confidently labelled images of the given class and of the candidate class.
        path: its folder, if it has one.
    """

    labels: pd.DataFrame = field(repr=False)
    summary: dict[str, Any] = field(repr=False)
    pred_probs: np.ndarray = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    duplicates: pd.DataFrame = field(repr=False)
    examples: dict[str, np.ndarray] = field(repr=False)
    path: Path | None = None


@dataclass(frozen=True)
class AuditFolder:
    """The files of an audit."""

    path: Path

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def finished(self) -> bool:
        """The summary is written last of all."""
        return self.summary.exists()

    @property
    def is_audit(self) -> bool:
        """Whether config.json is that of an audit."""
        try:
            return bool(read_json(self.config)["kind"] == KIND)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def recorded(self) -> dict[str, Any] | None:
        """The content of config.json, if there is one."""
        if not self.config.exists():
            return None
        try:
            config = read_checked(self.config)
            if config["kind"] != KIND:
                raise ValueError("it is of another kind")
            return config
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{self.config}: not the config.json of an audit ({reason(error)})"
            ) from None

    def refuse_if_taken(self, begun: dict[str, Any]) -> bool:
        """A new audit needs a new or empty folder, or one with the same audit, unfinished. Whether
        it is the latter."""
        found = contents(self.path)
        if not found:
            return False
        if "config.json" not in found:
            refuse_other_files(self.path)
        if self.finished:
            raise InputError(f"--out {self.path}: already contains results; choose another folder")
        try:
            config = self.recorded() or {}
        except InputError:
            raise InputError(
                f"--out {self.path}: contains another run; choose another folder"
            ) from None
        if found - FILES or any(config.get(name) != begun[name] for name in BEGUN):
            raise InputError(
                f"--out {self.path}: contains an unfinished audit with other settings or another "
                "source; choose another folder"
            )
        return True

    def lock(self) -> AbstractContextManager[None]:
        return lock_folder(self.path, self.path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes: a full or missing disk ends the audit with one line, and so does another
        process that has taken over."""
        claims.check(self.path)
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"--out {self.path}: cannot be written ({error.strerror or error}); the same "
                "command continues from the cached features"
            ) from error

    def write(self, audit: Audit, config: dict[str, Any], skipped: Sequence[Skipped]) -> None:
        """Write all results, summary.json last."""
        with self.writing():
            write_checked(self.config, config)
            write_labels(audit.labels, self.path)
            _write_array(self.file("pred_probs.npy"), audit.pred_probs)
            write_atomically(
                self.file("duplicates.csv"),
                lambda draft: audit.duplicates.to_csv(draft, index=False, float_format="%.6g"),
            )
            _write_arrays(self.file("examples.npz"), audit.examples)
            if skipped:
                table = pd.DataFrame([vars(entry) for entry in skipped])
                write_atomically(
                    self.file("skipped.csv"), lambda draft: table.to_csv(draft, index=False)
                )
            else:
                self.file("skipped.csv").unlink(missing_ok=True)
            write_checked(self.summary, audit.summary)


def load(path: str | Path, device: str = "cpu") -> Run | Audit:
    """Load a finished run or a finished audit from its folder. The model of a run is on `device`,
    in float32; an audit has none."""
    folder = AuditFolder(as_path(path, "run"))
    return load_audit(path) if folder.is_audit else runs.load(path, device)


def load_audit(path: str | Path) -> Audit:
    """Load a finished audit from its folder."""
    folder = AuditFolder(as_path(path, "audit"))
    config = folder.recorded()
    if config is None:
        raise InputError(f"{path}: not the folder of an audit (it has no config.json)")
    if not folder.finished:
        raise InputError(f"{path}: the audit is not finished; run the same command again")
    try:
        summary = read_checked(folder.summary)
        labels = read_labels(folder.path)
        pred_probs = open_npy(folder.file("pred_probs.npy"))
        classes = tuple(config["classes"])
        if pred_probs.shape != (len(labels), len(classes)) or summary["images"] != len(labels):
            raise ValueError(
                f"labels.csv has {len(labels)} rows, pred_probs.npy the shape {pred_probs.shape}"
            )
        duplicates = pd.read_csv(
            folder.file("duplicates.csv"),
            dtype={"path": object, "part": object, "given_label": object},
            keep_default_na=False,
            na_values={"path": [""]},
        )
        examples = read_npz(folder.file("examples.npz"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: the folder of the audit is damaged ({error})") from None
    return Audit(labels, summary, pred_probs, classes, duplicates, examples, folder.path)


def _write_array(path: Path, array: np.ndarray) -> None:
    def write(draft: Path) -> None:
        with draft.open("wb") as file:  # np.save would add a suffix to the name
            np.save(file, array, allow_pickle=False)

    write_atomically(path, write)


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    write_atomically(path, write)
