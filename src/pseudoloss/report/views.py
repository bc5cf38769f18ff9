"""What the page of one run shows: texts, rows and charts for the template."""

import shlex
from collections.abc import Iterable
from typing import Any

from pseudoloss.config import flag
from pseudoloss.reading import READ_OPTIONS
from pseudoloss.report import findings, score_views
from pseudoloss.report.charts import (
    matrix,
    rate_bar,
)
from pseudoloss.report.reading import ClassNoise, Noise, Record
from pseudoloss.report.svg import axis_ticks, percent
from pseudoloss.report.texts import between, duration, plural, tile, value_text
from pseudoloss.report.thumbnails import Thumbnails

MATRIX = 14  # classes: with more, pairs are listed instead of a matrix
PAIRS = 12  # in the list
CLASSES = 15  # in the table of noise by class; up to MORE_CLASSES can be unfolded
MORE_CLASSES = 200
SMALL_CLASSES = 40  # named, of those that are too small to judge


def report(record: Record, top: int) -> dict[str, Any]:
    """The values of report.html, except those of `pictures`."""
    truth = findings.against_truth(record.table)
    values: dict[str, Any] = {
        "kind": "Label audit" if record.is_audit else "Training with noisy labels",
        "title": record.source_name,
        "subtitle": _subtitle(record),
        "tiles": _tiles(record),
        "relabels": _relabels(record, top),
        "reviews": _reviews(record, top),
        "duplicates": _duplicates(record, top),
        "outliers": _outliers(record, top),
        "noise": _noise(record),
        "small": _small(record),
        "confusions": _confusions(record),
        "scores": score_views.scores(record),
        "training": score_views.training(record),
        "truth": truth and score_views.truth_section(truth, record),
        "decide": _decide(record),
        "command": command(record),
        "command_note": _command_note(record),
        "facts": _facts(record),
        "settings": [(name, value_text(value)) for name, value in record.settings.items()],
    }
    titles = {
        "relabel": "Replace",
        "review": "Review",
        "duplicates": "Duplicates",
        "outliers": "Outliers",
        "noise": "Noise",
        "confusions": "Confusions",
        "scores": "Scores",
        "training": "Training",
        "truth": "Truth",
        "settings": "Settings",
    }
    values["navigation"] = [
        (name, title) for name, title in titles.items() if values.get(name, True)
    ]
    return values


# ------------------------------------------------------------------------------------- the header


def _subtitle(record: Record) -> str:
    table, classes = record.table, len(record.labels.classes)
    parts = [f"{len(table):,} images", f"{classes:,} classes"]
    splits = table["part"].value_counts(sort=False)
    if len(splits) > 1:
        parts[0] += f" ({', '.join(f'{count:,} {name}' for name, count in splits.items())})"
    if record.is_audit:
        features = record.labels.config.get("features") or record.settings.get("features")
        name = features.get("name") if isinstance(features, dict) else features
        parts += [f"features: {value_text(name)}"] if name else []
    else:
        parts += [
            str(record.settings[key]) for key in ("method", "network") if key in record.settings
        ]
    return " · ".join(parts)


def _tiles(record: Record) -> list[dict[str, str]]:
    actions = record.table["action"].value_counts()
    total = max(1, len(record.table))
    tiles = [_noise_tile(record.noise)]
    for action, label, note in (
        ("relabel", "Labels to replace", "with a trusted suggestion"),
        ("review", "Images to review", "flagged, no trusted suggestion"),
        ("keep", "Labels to keep", ""),
    ):
        count = int(actions.get(action, 0))
        tiles.append(tile(label, f"{count:,}", note or f"{percent(count / total)} of all"))
    accuracy = (record.summary.get("accuracy") or {}).get("last")
    if isinstance(accuracy, float | int):
        on = value_text(record.summary["accuracy"].get("on") or "test images")
        tiles.append(tile("Accuracy", f"{accuracy:.1f}%", f"on {on}"))
    return tiles


def _noise_tile(noise: Noise) -> dict[str, str]:
    label = "Wrong labels (estimate)"
    if not noise.known:
        reason = f": {noise.reasons[0]}" if noise.reasons else ""
        if noise.wide:
            return tile(label, "not known", reason.removeprefix(": "))
        return tile(label, f"about {percent(noise.rate, 0)}", f"uncertain{reason}")
    interval = between(noise.low, noise.high)
    return tile(
        label, percent(noise.rate), f"likely {interval}" if interval else "share of flagged labels"
    )


def pictures(record: Record, thumbnails: Thumbnails | None, notice: str = "") -> dict[str, Any]:
    """The values of report.html that depend on the thumbnails. Without them, galleries have text
    only."""
    if thumbnails is None and not notice:
        notice = "No pictures: the data were passed in Python, so images cannot be found again."
    notices = [*_notices(record), notice] if notice else _notices(record)
    return {"thumbnails": thumbnails, "notices": notices}


def _notices(record: Record) -> list[str]:
    notices = []
    if not record.labels.finished:
        epochs = record.settings.get("epochs")
        of = f" of {epochs}" if isinstance(epochs, int) else ""
        notices.append(
            f"The run is not finished: the labels are as of epoch {record.labels.epoch}{of}."
        )
    if not record.labels.calibrated:
        notices.append(
            "This run was made by an older version: its scores are not calibrated probabilities."
        )
    notices += record.notices
    if record.skipped and not record.summary.get("skipped"):  # else it is among the notices
        files = "file" if record.skipped == 1 else "files"
        notices.append(f"{record.skipped:,} {files} could not be read: see skipped.csv.")
    return notices


def missing_notice(thumbnails: Thumbnails) -> str:
    """What to say about thumbnails that are not shown."""
    texts = []
    reason = next(iter(thumbnails.missing.values()), "")
    if reason and not thumbnails.shown:
        return f"No pictures: {reason}."
    if reason:
        count = len(thumbnails.missing)
        texts.append(f"{count:,} {plural(count, 'picture')} cannot be read ({reason}).")
    if thumbnails.left_out:
        count = thumbnails.left_out
        texts.append(f"{count:,} {plural(count, 'picture')} left out to keep this file small.")
    return " ".join(texts)


# -------------------------------------------------------------------------------------- galleries


def _relabels(record: Record, top: int) -> dict[str, Any]:
    cards, total = findings.relabels(record, top), int((record.table["action"] == "relabel").sum())
    return {
        "cards": cards,
        "text": f"{_first(len(cards), total, 'the most trusted first')}: given label → suggested "
        "label. “Wrong” is the probability that the given label is wrong, “trust” that the "
        "suggestion is right.",
    }


def _reviews(record: Record, top: int) -> dict[str, Any]:
    cards, total = findings.reviews(record, top), int((record.table["action"] == "review").sum())
    return {
        "cards": cards,
        "text": f"{_first(len(cards), total, 'the most doubtful first')}. The given label is "
        "probably wrong, but no other class is trusted: often the image shows several classes, "
        "or none.",
    }


def _decide(record: Record) -> str:
    """The command to decide on labels; empty if the images cannot be found again."""
    if record.labels.source is None or not record.table["is_label_issue"].any():
        return ""
    return f"pseudoloss review {shlex.quote(record.name)}"


def _first(shown: int, total: int, order: str = "") -> str:
    if total == 1:
        return "One image"
    text = f"All {total:,}" if shown == total else f"The first {shown:,} of {total:,}"
    return f"{text}, {order}" if order else text


def _duplicates(record: Record, top: int) -> dict[str, Any] | None:
    if record.duplicates is None:
        return None
    contradicting, across = findings.duplicate_groups(record)
    most = max(1, top // 2)
    return {
        "contradicting": contradicting[:most],
        "text": f"{_groups(most, len(contradicting))} that look the same but have different "
        "labels. At most one of the labels can be right.",
        "across": across[:most],
        "across_text": f"{_groups(most, len(across))} that look the same, with the same label, but "
        "in different splits. They make test results look better than they are.",
    }


def _groups(most: int, total: int) -> str:
    if total == 1:
        return "A group of images"
    return f"{_first(min(most, total), total)} groups of images"


def _outliers(record: Record, top: int) -> dict[str, Any] | None:
    cards = findings.outliers(record, max(1, top // 2))
    if not cards:
        return None
    total = len(findings.outlier_rows(record))
    text = "with a doubtful label that is far from all classes."
    if total > 1:
        text = "images with a doubtful label that are far from all classes, the most certain first."
    return {"cards": cards, "text": f"{_first(len(cards), total)} {text}"}


# ------------------------------------------------------------------------------------------ noise


def _noise(record: Record) -> dict[str, Any]:
    noise = record.noise
    scale = bar_scale(one.rate for one in noise.by_class)
    rows = [class_row(one, scale, noise.rate) for one in noise.by_class[:MORE_CLASSES]]
    left_out = len(noise.by_class) - len(rows)
    many = len(rows) > CLASSES + 5
    return {
        "text": _noise_text(record),
        "reasons": noise.reasons,
        "reasons_title": "Why:" if not noise.known else "Please note:",
        "intervals": any(one.low is not None for one in noise.by_class),
        "hint": "The highest share first. The dashed line is the share of all labels.",
        "rows": rows[:CLASSES] if many else rows,
        "more": rows[CLASSES:] if many else [],
        "more_text": f"{len(rows) - CLASSES} more classes",
        "left_out": f"{left_out:,} classes with lower shares are in summary.json."
        if left_out
        else "",
    }


def _noise_text(record: Record) -> str:
    noise = record.noise
    if noise.rate is None:
        return "There is no estimate."
    interval = between(noise.low, noise.high)
    if noise.wide:
        return "How many labels are wrong is not known."
    if not noise.known:
        text = (
            f"About {percent(noise.rate, 0)} of the labels seem to be wrong, but this is uncertain"
        )
        return f"{text}; it can be from {interval}." if interval else f"{text}."
    text = f"An estimated {percent(noise.rate)} of the labels are wrong"
    if interval:
        return f"{text}; the true share is likely from {interval}."
    return f"{text}: the share of labels that are flagged."


def bar_scale(rates: Iterable[float]) -> float:
    """The end of the axis of bars that show these rates."""
    return max(0.01, min(1.0, axis_ticks(0, 1.25 * max(rates, default=0.1), 5)[-1]))


def class_row(one: ClassNoise, scale: float, overall: float | None) -> dict[str, Any]:
    return {
        "name": one.name,
        "images": f"{one.images:,}",
        "rate": percent(one.rate),
        "bar": rate_bar(one.rate, one.low, one.high, scale, overall),
        "between": between(one.low, one.high),
    }


def _small(record: Record) -> dict[str, Any] | None:
    small = findings.small_classes(record)
    if not small:
        return None
    verb = "class has" if len(small) == 1 else "classes have"
    return {
        "text": f"{len(small):,} {verb} fewer than {findings.MIN_IMAGES} images:",
        "classes": small[:SMALL_CLASSES],
        "more": max(0, len(small) - SMALL_CLASSES),
    }


def _confusions(record: Record) -> dict[str, Any]:
    found = findings.pairs(record.table)
    classes = record.labels.classes
    flagged = sum(pair.images for pair in found)
    chart = None
    if 2 <= len(classes) <= MATRIX and found:
        chart = matrix(
            findings.pair_matrix(found, classes),
            classes,
            rows="given",
            columns="looks like",
            label="Number of flagged images by given label and most likely other label",
        )
    text = f"{flagged:,} flagged images by given label and most likely other label"
    text += "." if len(found) <= PAIRS else f"; the {PAIRS} most frequent of {len(found):,} pairs."
    return {
        "pairs": found[:PAIRS],
        "matrix": chart,
        "text": text,
        "similar": _similar_classes(record),
    }


def _similar_classes(record: Record) -> list[dict[str, Any]]:
    """Pairs of classes that the audit rarely tells apart."""
    return [
        {"classes": [str(name) for name in one["classes"]], "share": one["share"]}
        for one in (record.summary.get("similar_classes") or ())[:PAIRS]
    ]


# --------------------------------------------------------------------------------------- settings


def command(record: Record) -> str:
    """A command that repeats the run in another folder."""
    config = record.labels.config
    verb = "audit" if record.is_audit else "train"
    parts = ["pseudoloss", verb, shlex.quote(str(config.get("source") or "SOURCE"))]
    options = {
        name: value
        for name, value in record.labels.reading.items()
        if name in READ_OPTIONS and value != READ_OPTIONS[name].default
    }
    if record.is_audit:
        options |= {name: value for name, value in record.settings.items() if value is not None}
    for name, value in options.items():
        if value is not False and not isinstance(value, dict | list):
            parts += [flag(name)] if value is True else [flag(name), shlex.quote(str(value))]
    if not record.is_audit:
        parts += ["--config", shlex.quote(f"{record.name}/config.json")]
    return " ".join([*parts, "--out", shlex.quote(f"{record.name}-again")])


def _command_note(record: Record) -> str:
    if record.labels.source is None:
        return "The data were passed in Python: pass them again, with the settings below."
    return ""


def _facts(record: Record) -> list[tuple[str, str]]:
    summary, config = record.summary, record.labels.config
    facts = {
        "folder": record.name,
        "source": config.get("source"),
        "pseudoloss": config.get("pseudoloss"),
        "torch": summary.get("torch"),
        "device": summary.get("device"),
        "seed": summary.get("seed"),
        "time": duration(summary.get("seconds")),
        "epochs": summary.get("epochs"),
        "fingerprint": (config.get("data") or {}).get("fingerprint"),
    }
    facts |= {
        f"reading: {name}": value
        for name, value in record.labels.reading.items()
        if name in READ_OPTIONS and value != READ_OPTIONS[name].default
    }
    return [(name, value_text(value)) for name, value in facts.items() if value is not None]
