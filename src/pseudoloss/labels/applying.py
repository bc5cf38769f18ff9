"""Apply what was found and decided: a corrected copy of a source. The source is never changed."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from pseudoloss.data import Data
from pseudoloss.errors import InputError, name_hint
from pseudoloss.files import as_path, refuse_existing
from pseudoloss.labels.copies import TABLES, write_arrays, write_files
from pseudoloss.labels.exports import write_table
from pseudoloss.labels.images import SPLIT_OF, RunImages, open_source_of
from pseudoloss.labels.opening import LabelSet, open_labels
from pseudoloss.labels.reviewed import NumberedDecision, read_decisions

DROPS = ("junk", "review")


@dataclass(frozen=True)
class Applied:
    """What `apply` wrote.

    Attributes:
        out: the file or folder.
        images: number of images in it.
        changed: number of labels that were changed.
        by_score, by_person: how many of them the scores and people decided.
        pairs: given label, new label and how often, the most frequent first.
        for_review: number of images with a doubtful label that keep it.
        left_out: `path`, `given_label` and `reason` of images that are left out.
        left_out_file: where they are listed, if there are any.
        links: whether it is a folder of links, which `train` follows with --follow-links.
        notices: what else to know.
    """

    out: Path
    images: int
    changed: int
    by_score: int
    by_person: int
    pairs: list[tuple[str, str, int]] = field(repr=False)
    for_review: int
    left_out: pd.DataFrame = field(repr=False)
    left_out_file: Path | None = None
    links: bool = False
    notices: tuple[str, ...] = ()


def apply(
    run: str | Path,
    out: str | Path,
    *,
    decisions: str | Path | None = None,
    threshold: float | None = None,
    min_trust: float | None = None,
    drop: Sequence[str] = (),
    reviewed_only: bool = False,
    copy: bool = False,
) -> Applied:
    """Write a corrected copy of the source of a run or an audit.

    Decisions of people win over scores. Images marked as junk are left out.

    Args:
        run: the folder of the run or audit.
        out: what to write, must not exist: a table (`.csv`, `.parquet`), a folder of links to the
            images with one folder per class, or, for a source of arrays, an `.npz` file.
        decisions: the decisions of people; by default decisions.jsonl in `run`, if it exists.
        threshold: a label is flagged if `p_noisy` is at least this; None: as in the label table.
        min_trust: an issue is relabelled from this `trust` on, if the candidate is more
            probable than the given label.
        drop: "review" also leaves out images whose label is doubtful and was not decided.
        reviewed_only: change only what people decided.
        copy: copy the images into the folder, instead of linking to them.
    """
    path = as_path(out, "--out")
    ending = "-left-out.csv" if _is_folder(path) else ".left-out.csv"
    listed = path.with_name(f"{path.name.removesuffix(path.suffix)}{ending}")
    for name in drop:
        if name not in DROPS:
            raise InputError(f"--drop {name}: must be {' or '.join(DROPS)}")
    refuse_existing(path)
    refuse_existing(listed)
    if not path.absolute().parent.is_dir():
        raise InputError(f"--out {path}: no such folder: {path.parent}")
    labels = open_labels(run)
    notices = [labels.state] if labels.state else []
    table = labels.decided(threshold, min_trust)
    found, damaged = _decisions(labels, decisions, reviewed_only)
    if damaged:
        notices.append(f"decisions: {damaged} damaged line{'s' * (damaged > 1)} ignored")
    rows = corrected(table, found, labels.classes, "review" in drop, reviewed_only)
    images = RunImages(labels)
    _refuse_source(labels, images, path, copy)
    source = open_source_of(labels)
    if isinstance(source, Data):
        rows = write_arrays(labels, rows, source, path)
    else:
        rows = write_files(labels, rows, source, images, path, copy)
    left_out = rows[rows["left_out"] != ""].rename(columns={"left_out": "reason"})
    left_out = left_out[["path", "part", "index", "given_label", "reason"]]
    if len(left_out):
        write_table(left_out, listed, "csv")
    kept = rows[rows["left_out"] == ""]
    changed = kept[kept["changed"]]
    by_score = int((changed["decided_by"] == "score").sum())
    pairs = Counter(zip(changed["given_label"], changed["label"], strict=True)).most_common()
    notices += _small_classes(kept, labels.classes)
    if by_score and labels.kind == "audit" and not _knows_noise(labels):
        notices.append(
            "the audit does not know how many labels are wrong, so many of these changes may be "
            f"wrong. Look at them: pseudoloss review {shlex.quote(str(labels.path))}"
        )
    if labels.reading.get("test"):
        notices.append(f"the test images of --test {labels.reading['test']} are not included")
    return Applied(
        out=path,
        images=len(kept),
        changed=len(changed),
        by_score=by_score,
        by_person=int((changed["decided_by"] == "person").sum()),
        pairs=[(given, new, count) for (given, new), count in pairs],
        for_review=int(kept["for_review"].sum()),
        left_out=left_out,
        left_out_file=listed if len(left_out) else None,
        links=_is_folder(path) and not copy,
        notices=tuple(notices),
    )


def corrected(
    table: pd.DataFrame,
    decisions: dict[tuple[int, str], NumberedDecision],
    classes: Sequence[str],
    drop_review: bool = False,
    reviewed_only: bool = False,
) -> pd.DataFrame:
    """The label table with the new `label` of every image; whether it has `changed`, and
    `decided_by` score or person; whether it is left `for_review`; and why it is `left_out`."""
    given = table["given_label"].to_numpy(dtype=object)
    action = table["action"].to_numpy(dtype=object)
    label, by = given.copy(), np.full(len(table), "", dtype=object)
    review = action != "keep" if reviewed_only else action == "review"
    if not reviewed_only:
        relabelled = action == "relabel"
        label[relabelled] = table["suggested_label"].to_numpy(dtype=object)[relabelled]
        by[relabelled] = "score"
    left_out = np.full(len(table), "", dtype=object)
    position = (
        {key: i for i, key in enumerate(zip(table["index"], table["part"], strict=True))}
        if decisions
        else {}
    )
    for (index, part), made in decisions.items():
        where = f"decisions, line {made.line}"
        i = position.get((index, part))
        if i is None:
            raise InputError(f"{where}: the label table has no image {index} of {part}")
        if made.given_label != given[i]:
            raise InputError(
                f"{where}: is about the label {made.given_label}, but image {index} of {part} has "
                f"the label {given[i]}"
            )
        if made.decision == "relabel" and made.label not in classes:
            raise InputError(
                f"{where}: no such class: {made.label}{name_hint(str(made.label), classes)}"
            )
        label[i] = made.label if made.decision == "relabel" else given[i]
        by[i] = "" if made.decision == "skip" else "person"
        review[i] = made.decision == "skip"
        left_out[i] = "junk" if made.decision == "junk" else ""
    if drop_review:
        left_out[review & (left_out == "")] = "review"
    return table.assign(
        label=label, changed=label != given, decided_by=by, for_review=review, left_out=left_out
    )


def _knows_noise(labels: LabelSet) -> bool:
    noise = labels.summary.get("estimated_noise")
    return not isinstance(noise, dict) or noise.get("known") is not False


def _decisions(
    labels: LabelSet, path: str | Path | None, reviewed_only: bool
) -> tuple[dict[tuple[int, str], NumberedDecision], int]:
    if path is not None:
        found, damaged = read_decisions(as_path(path, "--decisions"))
        if damaged and not found:
            raise InputError(
                f"--decisions {path}: holds no decision; pseudoloss review writes them"
            )
        return found, damaged
    usual = labels.path / "decisions.jsonl"
    if usual.exists():
        return read_decisions(usual)
    if reviewed_only:
        raise InputError(
            f"--reviewed-only: {labels.path} has no decisions.jsonl; pseudoloss review writes it"
        )
    return {}, 0


def _is_folder(out: Path) -> bool:
    """Whether a folder is to be written: the name does not end like that of a file (.csv, .cvs)."""
    return re.fullmatch(r"\.[a-z]{2,7}", out.suffix.lower()) is None


def _refuse_source(labels: LabelSet, images: RunImages, out: Path, copy: bool) -> None:
    """Refuse outputs that the source cannot be written to."""
    suffix, is_folder = out.suffix.lower(), _is_folder(out)
    if not images.available:
        raise InputError(
            f"{labels.path}: is of data that were passed in Python, which cannot be opened again; "
            "pseudoloss labels writes the table of its labels"
        )
    if images.replaced_N.any():
        raise InputError(f"{labels.path}: is an experiment with --pool: its images are elsewhere")
    kind = (labels.source or "").partition(":")[0]
    is_hub = kind in ("hf", "wds")
    if images.root is None and not is_hub:
        if suffix != ".npz":
            raise InputError(f"--out {out}: {labels.source} holds arrays; write a file.npz")
    elif suffix == ".npz" or not (is_folder or suffix in TABLES):
        raise InputError(f"--out {out}: must be a .csv or .parquet file, or a folder")
    elif is_hub and not (is_folder and copy):
        raise InputError(
            f"--out {out}: the images of {labels.source} are not files; write a folder, with "
            f"--copy, or use pseudoloss labels --format {'hf' if kind == 'hf' else 'csv'}"
        )
    source = Path(labels.source or "")
    if images.root == source and out.resolve().is_relative_to(source.resolve()):
        raise InputError(f"--out {out}: is inside {source}; choose a place outside of it")
    if copy and not is_folder:
        raise InputError("--copy is for folders")


def _small_classes(kept: pd.DataFrame, classes: Sequence[str]) -> list[str]:
    """A notice if classes are too small to train on."""
    counts = kept[kept["part"].map(SPLIT_OF) == "train"]["label"].value_counts()
    small = [name for name in classes if counts.get(name, 0) < 2]
    if not small:
        return []
    return [f"fewer than 2 images are left of: {', '.join(small[:5])}{' …' * (len(small) > 5)}"]
