"""The summary of an audit (summary.json), from its label table and scores."""

from typing import Any

import numpy as np
import pandas as pd

from pseudoloss.auditing.estimate import SMALL_CLASS, NoiseEstimate
from pseudoloss.auditing.images import AuditImages
from pseudoloss.auditing.neighbours import Duplicates
from pseudoloss.auditing.outliers import OUTLIER
from pseudoloss.auditing.scoring import LabelScores
from pseudoloss.labels.decisions import ACTIONS, best_threshold
from pseudoloss.labels.truth import against_truth

PAIRS = 20  # confused pairs and similar classes that are listed
SIMILAR = 0.2  # share of the images of two classes that are predicted as the other class
MIN_CONFUSED = 4  # images


def summarise(
    images: AuditImages,
    table: pd.DataFrame,
    scores: LabelScores,
    duplicates: Duplicates,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What summary.json says about the labels."""
    names, counts_C = images.classes, images.counts_C
    actions = table["action"].value_counts()
    small = np.flatnonzero((counts_C > 0) & (counts_C < SMALL_CLASS))
    return {
        "kind": "audit",
        "images": len(images),
        "parts": images.parts,
        "classes": len(names),
        "method": settings["method"],
        "seed": settings["seed"],
        "threshold": _threshold(table, settings["threshold"]),
        "min_trust": settings["min_trust"],
        "estimated_noise": noise_json(scores.noise, names),
        "actions": {action: int(actions.get(action, 0)) for action in ACTIONS},
        "confused_pairs": _confused_pairs(table),
        "similar_classes": _similar_classes(images, scores),
        "small_classes": {names[c]: int(counts_C[c]) for c in small},
        "duplicates": _duplicates(table, duplicates),
        "outliers": {
            "images": int((table["outlier_score"] >= OUTLIER).sum()),
            "min_score": OUTLIER,
        },
        "truth": against_truth(table),
        "details": scores.details,
    }


def noise_json(noise: NoiseEstimate, names: tuple[str, ...]) -> dict[str, Any]:
    """The estimated share of wrong labels, of all and of each class."""
    return {
        "rate": float(noise.rate),
        "low": float(noise.low),
        "high": float(noise.high),
        "known": bool(noise.known),
        "reasons": list(noise.reasons),
        "by_class": {
            name: {"rate": rate, "low": low, "high": high, "images": int(count)}
            for name, (rate, low, high), count in zip(
                names, noise.by_class_C.tolist(), noise.images_C.tolist(), strict=True
            )
        },
    }


def _threshold(table: pd.DataFrame, given: float | None) -> float:
    """The one that was used."""
    return best_threshold(table["p_noisy"].to_numpy(dtype=float)) if given is None else given


def _confused_pairs(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Given label and candidate of the flagged labels: the most frequent pairs."""
    issues = table[table["is_label_issue"]]
    names = ["given_label", "candidate_label"]
    pairs = issues.groupby(names).size().rename("images").reset_index()
    pairs = pairs.sort_values("images", ascending=False, kind="stable").head(PAIRS)
    return [
        {"given": given, "candidate": candidate, "images": int(images)}
        for given, candidate, images in pairs.itertuples(index=False)
    ]


def _similar_classes(images: AuditImages, scores: LabelScores) -> list[dict[str, Any]]:
    """Pairs of classes that are rarely told apart: many images with the label of one are predicted
    as the other."""
    given_N, predicted_N = images.given_N, scores.pred_probs_NC.argmax(1)
    wrong = np.flatnonzero(given_N != predicted_N)
    low, high = (
        function(given_N[wrong], predicted_N[wrong]) for function in (np.minimum, np.maximum)
    )
    C = len(images.classes)
    pair, count = np.unique(low.astype(np.int64) * C + high, return_counts=True)
    a, b = pair // C, pair % C
    share = count / np.maximum(images.counts_C[a] + images.counts_C[b], 1)
    found = np.flatnonzero((share >= SIMILAR) & (count >= MIN_CONFUSED))
    found = found[np.argsort(-share[found], kind="stable")][:PAIRS]
    return [
        {
            "classes": [images.classes[a[i]], images.classes[b[i]]],
            "share": float(share[i]),
            "images": int(count[i]),
        }
        for i in found
    ]


def _duplicates(table: pd.DataFrame, duplicates: Duplicates) -> dict[str, Any]:
    grouped = table[table["duplicate_group"].notna()].groupby("duplicate_group")
    labels, parts = (grouped[name].nunique() for name in ("given_label", "part"))
    return {
        "groups": len(labels),
        "images": int((duplicates.group_N >= 0).sum()),
        "contradicting": int((labels > 1).sum()),
        "across_parts": int((parts > 1).sum()),
        "min_similarity": duplicates.min_similarity,
    }
