"""What the page of one run shows about scores, training and truth."""

import math
from typing import Any

import numpy as np
from markupsafe import Markup

from pseudoloss.report import findings
from pseudoloss.report.charts import Bars, Line, histogram, line_chart, reliability
from pseudoloss.report.reading import Record, given_losses
from pseudoloss.report.svg import axis_ticks, percent
from pseudoloss.report.texts import tile, value_text

HISTOGRAM = 25  # bins
PERCENT = "%"

# ----------------------------------------------------------------------------------------- scores


def scores(record: Record) -> dict[str, Any]:
    known_N, _ = findings.known_truth(record.table)
    charts = [_p_noisy_chart(record), _loss_chart(record), _trust_chart(record)]
    text = "Each chart counts images."
    if known_N.any():
        text += " Colours show the truth, where it is known; no score has used it."
    return {"charts": [chart for chart in charts if chart is not None], "text": text}


def _label_groups(
    record: Record, value_N: np.ndarray, low: float, high: float, rows_N: np.ndarray
) -> list[Bars]:
    """Counts of all labels by truth, or else by action."""
    known_N, wrong_N = findings.known_truth(record.table)
    if known_N.any():
        masks = {("label right", "right-bar"): known_N & ~wrong_N}
        masks |= {("label wrong", "wrong-bar"): wrong_N}
        if not known_N.all():
            masks |= {("not known", "unknown-bar"): ~known_N}
    else:
        action = record.table["action"].to_numpy()
        masks = {(name, f"{name}-bar"): action == name for name in ("keep", "relabel", "review")}
    return [
        Bars(name, style, _counts(value_N[mask_N & rows_N], low, high))
        for (name, style), mask_N in masks.items()
    ]


def _counts(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.histogram(np.clip(values, low, high), bins=HISTOGRAM, range=(low, high))[0]


def _chart(
    title: str, svg: Markup, groups: list[Bars] | None = None, note: str = ""
) -> dict[str, Any]:
    legend = [(one.style, one.name) for one in groups or () if one.counts.any()]
    return {"title": title, "svg": svg, "legend": legend, "note": note}


def _p_noisy_chart(record: Record) -> dict[str, Any]:
    value_N = 100 * record.table["p_noisy"].to_numpy(dtype=float)
    groups = _label_groups(record, value_N, 0, 100, ~np.isnan(value_N))
    threshold = record.thresholds[0]
    svg = histogram(
        groups, 0, 100, unit=PERCENT, mark=(100 * threshold, f"flagged from {threshold:.0%}"),
        x_label="probability that the given label is wrong",
        label="Histogram of the probability that the given label is wrong",
    )  # fmt: skip
    return _chart("Is the given label wrong?", svg, groups)


def _loss_chart(record: Record) -> dict[str, Any] | None:
    """The first mixture: the losses of right labels, and those of wrong ones."""
    loss_N = given_losses(record)
    there_N = np.isfinite(loss_N)
    if not there_N.any():
        return None
    high = axis_ticks(0, max(0.5, float(np.quantile(loss_N[there_N], 0.995))), 5)[-1]
    groups = _label_groups(record, loss_N, 0, high, there_N)
    svg = histogram(
        groups, 0, high, x_label="loss of the given label",
        label="Histogram of the loss of the given label",
    )  # fmt: skip
    note = "Right labels have a low loss, wrong ones a high loss."
    if not there_N.all():
        note += f" Of a sample of {int(there_N.sum()):,} images."
    return _chart("How badly does it fit?", svg, groups, note)


def _trust_chart(record: Record) -> dict[str, Any] | None:
    """The second mixture: suggestions that are right, and those that are wrong."""
    table = record.table[record.table["is_label_issue"] & record.table["trust"].notna()]
    if table.empty:
        return None
    value_M = 100 * table["trust"].to_numpy(dtype=float)
    known_M, _ = findings.known_truth(table)
    if known_M.any():
        right_M = (table["candidate_label"] == table["true_label"]).to_numpy()
        masks = {("suggestion right", "right-bar"): known_M & right_M}
        masks |= {("suggestion wrong", "wrong-bar"): known_M & ~right_M}
        if not known_M.all():
            masks |= {("not known", "unknown-bar"): ~known_M}
    else:
        relabel_M = (table["action"] == "relabel").to_numpy()
        masks = {("relabel", "relabel-bar"): relabel_M, ("review", "review-bar"): ~relabel_M}
    groups = [
        Bars(name, style, _counts(value_M[mask_M], 0, 100))
        for (name, style), mask_M in masks.items()
    ]
    min_trust = record.thresholds[1]
    svg = histogram(
        groups, 0, 100, unit=PERCENT, mark=(100 * min_trust, f"replaced from {min_trust:.0%}"),
        x_label="trust in the suggested label",
        label="Histogram of the trust in the suggested label, over flagged images",
    )  # fmt: skip
    return _chart("Is the suggestion right?", svg, groups, "Flagged images only.")


# --------------------------------------------------------------------------------------- training


def accuracy_points(record: Record) -> list[tuple[float, float]]:
    """Epoch and accuracy, where there is one."""
    return [
        (float(line["epoch"]), float(line["accuracy"]))
        for line in record.metrics
        if isinstance(line.get("accuracy"), float | int) and math.isfinite(line["accuracy"])
    ]


def warmup_epochs(record: Record) -> int:
    return sum(str(line.get("phase")).startswith("warm-up") for line in record.metrics)


def training(record: Record) -> dict[str, Any] | None:
    if not record.metrics:
        return None
    warmup = warmup_epochs(record)
    mark = (warmup + 0.5, "end of warm-up") if 0 < warmup < len(record.metrics) else None
    charts = []
    points = accuracy_points(record)
    if points:
        svg = line_chart(
            [Line("accuracy", "line-1", points)], x_label="epoch", y_label="accuracy", mark=mark,
            unit=PERCENT, limits=(0, 100), label="Accuracy over epochs",
        )  # fmt: skip
        charts.append(_chart("Accuracy", svg))
    shares = [
        (float(line["epoch"]), 100 * float(line["noisy"]))
        for line in record.metrics
        if isinstance(line.get("noisy"), float | int)
    ]
    if shares:
        svg = line_chart(
            [Line("flagged", "line-2", shares)], x_label="epoch", y_label="flagged labels",
            mark=mark, unit=PERCENT, limits=(0, 100), label="Share of flagged labels over epochs",
        )  # fmt: skip
        charts.append(_chart("Labels flagged in each epoch", svg))
    return {"charts": charts, "text": _training_text(record, points)} if charts else None


def _training_text(record: Record, points: list[tuple[float, float]]) -> str:
    if not points:
        return "There were no images to test on."
    epoch, best = max(points, key=lambda point: (point[1], -point[0]))
    accuracy = record.summary.get("accuracy") or {}
    on = f" on {value_text(accuracy['on'])}" if accuracy.get("on") else ""
    text = f"{points[-1][1]:.1f}%{on} after epoch {points[-1][0]:g}; "
    text += f"the best is {best:.1f}% in epoch {epoch:g}."
    if accuracy.get("noisy_labels"):
        text += " The test labels may be wrong too, so the true accuracy can be higher."
    return text


# ------------------------------------------------------------------------------------------ truth


def truth_section(truth: findings.Truth, record: Record) -> dict[str, Any]:
    suggestions = f"of {truth.suggestions:,} suggestions"
    whole = truth.images == len(record.table)
    estimate = f"estimated {percent(record.noise.rate if whole else truth.estimate)}"
    charts = [
        _chart(
            "Probability that a label is wrong",
            reliability(
                truth.bins, x_label="predicted", y_label="observed",
                label="Reliability of the probability that a label is wrong",
            ),
            note=f"Calibration error {truth.calibration_error:.3f}. On the dashed line, the "
            "probabilities are exactly right. A larger circle is more images; empty: under 20.",
        )
    ]  # fmt: skip
    if truth.trust_error is not None:
        charts.append(
            _chart(
                "Trust in suggestions",
                reliability(
                    truth.trust_bins, x_label="trust", y_label="suggestion right",
                    label="Reliability of the trust in suggested labels",
                ),
                note=f"Calibration error {truth.trust_error:.3f}, over flagged images.",
            )
        )  # fmt: skip
    return {
        "text": f"The true labels of {truth.images:,} images are known. They were used for this "
        "section and for colours, and for nothing else.",
        "tiles": [
            tile("Wrong labels", percent(truth.noise), estimate),
            tile("F1 of flagged labels", _score(truth.f1),
                  f"precision {_score(truth.precision)}, recall {_score(truth.recall)}"),
            tile("AUC of the ranking", _score(truth.auc)),
            tile("Suggestions right", percent(truth.right_suggestions), suggestions),
            tile("Right labels", percent(truth.right_after),
                  f"after replacing; {percent(truth.right_before)} before"),
        ],
        "charts": charts,
    }  # fmt: skip


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
