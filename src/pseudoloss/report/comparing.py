"""Write the report that compares several runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from pseudoloss.errors import InputError
from pseudoloss.labels.images import SPLIT_OF, RunImages, source_root
from pseudoloss.report import findings
from pseudoloss.report.charts import Line, line_chart, rate_bar
from pseudoloss.report.page import (
    MAX_BYTES,
    TOP,
    check_output,
    render,
    with_largest,
    write_page,
)
from pseudoloss.report.reading import NO_EXAMPLES, ClassNoise, Record, read_record
from pseudoloss.report.score_views import accuracy_points
from pseudoloss.report.svg import clean, percent
from pseudoloss.report.texts import between, duration, value_text
from pseudoloss.report.thumbnails import Thumbnails
from pseudoloss.report.views import CLASSES, MORE_CLASSES, bar_scale

MAX_RUNS = 6  # colours of lines
COMPARE_NAME = "report-compare.html"


@dataclass(frozen=True)
class Agreement:
    """How far the flags of two runs agree, over the images that both have."""

    first: str
    second: str
    common: int
    both: int  # flagged by both
    only_first: int
    only_second: int
    same: int  # flagged by both, with the same most likely other label

    @property
    def overlap(self) -> float | None:
        """Flagged by both, as a share of those flagged by any."""
        flagged = self.both + self.only_first + self.only_second
        return self.both / flagged if flagged else None


def write_comparison(
    folders: Sequence[str | Path], out: str | Path = COMPARE_NAME, top: int = TOP
) -> Path:
    """Write a report that compares two to six runs or audits: one HTML file.

    Args:
        folders: of the runs.
        out: the file to write. An existing file is replaced only if it is a report.
        top: images in each gallery.

    Returns:
        The path of the file.
    """
    if not 2 <= len(folders) <= MAX_RUNS:
        raise InputError(f"a comparison needs 2 to {MAX_RUNS} runs, not {len(folders)}")
    check_output(Path(out), top)
    records = with_unique_names([read_record(folder) for folder in folders])
    return write_page(Path(out), comparison_html(records, top))


def comparison_html(records: Sequence[Record], top: int = TOP) -> str:
    """The comparison as HTML."""
    images = RunImages(records[0].labels)
    while True:

        def draw(thumbnails: Thumbnails | None, top: int = top) -> str:
            return render("compare.html", **_values(records, top, thumbnails))

        page = with_largest(images, draw)[0] if images.available else draw(None)
        if len(page.encode()) < MAX_BYTES or top == 1:
            return page
        top = max(1, top // 2)


def with_unique_names(records: Sequence[Record]) -> list[Record]:
    """Records of folders with the same name are called parent/name, or else name (2)."""
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        paths = [record.labels.path.resolve() for record in records]
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    unique = [
        f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name
        for i, name in enumerate(names)
    ]
    return [replace(record, name=name) for record, name in zip(records, unique, strict=True)]


# ------------------------------------------------------------------------------------- agreement


def join_rows(a: Record, b: Record) -> pd.DataFrame:
    """Rows of the images that both runs have: columns `a` and `b`. Images are matched by split and
    path (with the folder of the source, if no path alone matches: a table that `apply` wrote has
    whole paths) or, for the same source without paths, by split and index."""
    by_path = all(record.table["path"].notna().all() for record in (a, b))
    if not by_path and a.labels.config.get("source") != b.labels.config.get("source"):
        return pd.DataFrame({"a": [], "b": []}, dtype="int64")
    column = "path" if by_path else "index"

    def keys(record: Record, name: str, whole: bool) -> pd.DataFrame:
        split = record.table["part"].map(lambda part: SPLIT_OF.get(part, part))
        key = record.table[column]
        if whole:
            root = source_root(record.labels.source) or Path()
            key = key.map(lambda path: os.path.normpath(root / path))
        rows = pd.DataFrame({"split": split, "key": key, name: record.table.index})
        return rows.drop_duplicates(["split", "key"])

    def matches(whole: bool) -> pd.DataFrame:
        found = keys(a, "a", whole).merge(keys(b, "b", whole), on=["split", "key"])
        return found[["a", "b"]]

    found = matches(whole=False)
    return matches(whole=True) if by_path and found.empty else found


def agreement(a: Record, b: Record) -> Agreement:
    rows = join_rows(a, b)
    first, second = (
        record.table.loc[rows[name], ["is_label_issue", "candidate_label"]].reset_index(drop=True)
        for record, name in ((a, "a"), (b, "b"))
    )
    flagged_a, flagged_b = (part["is_label_issue"].astype(bool) for part in (first, second))
    same = first["candidate_label"] == second["candidate_label"]
    return Agreement(
        first=a.name,
        second=b.name,
        common=len(rows),
        both=int((flagged_a & flagged_b).sum()),
        only_first=int((flagged_a & ~flagged_b).sum()),
        only_second=int((~flagged_a & flagged_b).sum()),
        same=int((flagged_a & flagged_b & same).sum()),
    )


def disagreements(a: Record, b: Record, top: int) -> list[dict[str, Any]]:
    """For two runs: images that only one of them flags, the most certain first. The cards show the
    scores of the run that flags, in the rows of `a`."""
    rows = join_rows(a, b)
    found = []
    for record, other, mine, theirs in ((a, b, "a", "b"), (b, a, "b", "a")):
        flagged = record.table.loc[rows[mine], "is_label_issue"].to_numpy(dtype=bool)
        kept = ~other.table.loc[rows[theirs], "is_label_issue"].to_numpy(dtype=bool)
        only = rows[flagged & kept]
        scores = record.table.loc[only[mine], "p_noisy"].to_numpy(dtype=float)
        only = only.assign(score=scores).sort_values("score", ascending=False, kind="stable")
        chosen = only.head(top)
        cards = findings.cards(record, chosen[mine].tolist())
        shown = [
            replace(card, row=int(row), examples=NO_EXAMPLES)
            for card, row in zip(cards, chosen["a"], strict=True)
        ]
        found.append({"name": record.name, "cards": shown, "total": len(only)})
    return found


# ------------------------------------------------------------------------------------------- page


def _values(records: Sequence[Record], top: int, thumbnails: Thumbnails | None) -> dict[str, Any]:
    pairs = [agreement(a, b) for a, b in combinations(records, 2)]
    galleries = []
    if len(records) == 2 and pairs[0].common:
        galleries = disagreements(records[0], records[1], max(1, top // 2))
    styles = [(f"line-{i + 1}", record.name) for i, record in enumerate(records)]
    values: dict[str, Any] = {
        "title": " · ".join(record.name for record in records),
        "names": [record.name for record in records],
        "numbers": _numbers(records),
        "pairs": [pair for pair in pairs if pair.common],
        "strangers": sum(not pair.common for pair in pairs),
        "galleries": [gallery for gallery in galleries if gallery["cards"]],
        "thumbnails": thumbnails,
        "styles": styles,
        "noise": _noise(records),
        "accuracy": _accuracy(records, styles),
    }
    titles = {
        "numbers": "Numbers",
        "agreement": "Agreement",
        "galleries": "Disagreement",
        "noise": "Noise by class",
        "accuracy": "Accuracy",
    }
    values["navigation"] = [
        (name, title) for name, title in titles.items() if values.get(name, True)
    ]
    return values


def _numbers(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Rows of the table of key numbers: a name and one text per run. Empty rows are left out."""
    columns = [_column(record) for record in records]
    rows = [(name, [column.get(name) or "–" for column in columns]) for name in columns[0]]
    return [(name, texts) for name, texts in rows if set(texts) != {"–"}]


def _column(record: Record) -> dict[str, str | None]:
    actions = record.table["action"].value_counts()
    noise, summary = record.noise, record.summary
    interval = between(noise.low, noise.high)
    accuracy = summary.get("accuracy") or {}
    truth = findings.against_truth(record.table)

    def score(name: str, digits: int = 3) -> str | None:
        value = getattr(truth, name) if truth is not None else None
        return None if value is None else f"{value:.{digits}f}"

    def share(name: str) -> str | None:
        value = getattr(truth, name) if truth is not None else None
        return None if value is None else percent(value)

    def points(value: Any) -> str | None:
        return f"{value:.2f}%" if isinstance(value, float | int) else None

    state = "" if record.labels.finished else f", not finished (epoch {record.labels.epoch})"
    return {
        "kind": ("audit" if record.is_audit else "training") + state,
        "source": clean(record.source_name),
        "method": _text(record.settings.get("method") or summary.get("method")),
        "network": _text(record.settings.get("network")),
        "seed": _text(record.settings.get("seed")),
        "images": f"{len(record.table):,}",
        "estimated wrong labels": percent(noise.rate)
        if noise.known
        else "not known"
        if noise.wide
        else f"about {percent(noise.rate, 0)}",
        "… likely": interval if noise.known else None,
        "labels to replace": f"{int(actions.get('relabel', 0)):,}",
        "images to review": f"{int(actions.get('review', 0)):,}",
        "accuracy, last epoch": points(accuracy.get("last")),
        "accuracy, best epoch": points(accuracy.get("best")),
        "true share of wrong labels": share("noise"),
        "F1 of flagged labels": score("f1"),
        "precision": score("precision"),
        "recall": score("recall"),
        "AUC of the ranking": score("auc"),
        "suggestions right": share("right_suggestions"),
        "right labels after replacing": share("right_after"),
        "calibration error": score("calibration_error"),
        "time": duration(summary.get("seconds")),
        "pseudoloss": _text(record.labels.config.get("pseudoloss")),
    }


def _text(value: Any) -> str | None:
    return None if value is None else value_text(value)


def _noise(records: Sequence[Record]) -> dict[str, Any] | None:
    """Noise by class, side by side: the classes with the highest rate in any run first."""
    by_class = [{one.name: one for one in record.noise.by_class} for record in records]
    highest: dict[str, float] = {}
    for classes in by_class:
        for name, one in classes.items():
            highest[name] = max(one.rate, highest.get(name, 0.0))
    names = sorted(highest, key=lambda name: (-highest[name], name))[:MORE_CLASSES]
    if not names:
        return None
    scale = bar_scale(highest.values())
    rows = [
        {"name": name, "cells": [_cell(classes.get(name), scale) for classes in by_class]}
        for name in names
    ]
    return {"rows": rows[:CLASSES], "more": rows[CLASSES:]}


def _cell(one: ClassNoise | None, scale: float) -> dict[str, Any] | None:
    if one is None:
        return None
    bar = rate_bar(one.rate, one.low, one.high, scale)
    return {"bar": bar, "rate": percent(one.rate)}


def _accuracy(records: Sequence[Record], styles: list[tuple[str, str]]) -> dict[str, Any] | None:
    lines = [
        Line(record.name, style, points)
        for record, (style, _) in zip(records, styles, strict=True)
        if (points := accuracy_points(record))
    ]
    if not lines:
        return None
    svg = line_chart(
        lines,
        x_label="epoch",
        y_label="accuracy",
        unit="%",
        limits=(0, 100),
        label="Accuracy over epochs of all runs",
    )
    legend = [(line.style, line.name) for line in lines]
    return {"title": "Accuracy over epochs", "svg": svg, "legend": legend, "note": ""}
