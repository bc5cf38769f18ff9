"""How right a label table is, where true labels are known: for summary.json and the terminal."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from pseudoloss.scores import auc, calibration


def against_truth(table: pd.DataFrame) -> dict[str, Any] | None:
    """Scores over the rows whose truth is known; None if there are none."""
    if "truth" not in table or not table["truth"].notna().any():
        return None
    known = table[table["truth"].notna()]
    wrong = (known["truth"] != "clean").to_numpy()
    flagged = known["is_label_issue"].to_numpy(dtype=bool)
    true, given = known["true_label"].to_numpy(), known["given_label"].to_numpy()
    relabel = (known["action"] == "relabel").to_numpy()
    right = known["suggested_label"].to_numpy() == true
    hits = int((wrong & flagged).sum())
    p_noisy_N, score_N, wrong_N = (  # copies: pandas' own arrays may be read-only
        torch.from_numpy(np.array(values))
        for values in (known["p_noisy"].to_numpy(), known["label_score"].to_numpy(), wrong)
    )
    return {
        "images": len(known),
        "wrong": float(wrong.mean()),
        "precision": hits / int(flagged.sum()) if flagged.any() else None,
        "recall": hits / int(wrong.sum()) if wrong.any() else None,
        "f1": 2 * hits / int(flagged.sum() + wrong.sum()) if flagged.any() or wrong.any() else None,
        "auc": auc(-score_N, wrong_N),
        "calibration_error": calibration(p_noisy_N, wrong_N)["error"],
        "relabelled": int(relabel.sum()),
        "relabelled_right": float(right[relabel].mean()) if relabel.any() else None,
        "labels_right": float((given == true).mean()),
        "labels_right_applied": float(np.where(relabel, right, given == true).mean()),
    }


def truth_lines(truth: dict[str, Any] | None) -> list[str]:
    """The same, as text: the numbers of the report, under its names."""
    if truth is None:
        return []
    scores = ", ".join(
        f"{name} {truth[key]:.3f}"
        for name, key in (
            ("F1", "f1"),
            ("precision", "precision"),
            ("recall", "recall"),
            ("AUC of the ranking", "auc"),
        )
        if truth[key] is not None
    )
    applied = f"right labels {truth['labels_right']:.1%}"
    if truth["relabelled"]:
        applied = (
            f"{truth['relabelled_right']:.1%} of {truth['relabelled']:,} suggestions are right: "
            f"{applied}, after relabelling {truth['labels_right_applied']:.1%}"
        )
    flagged = f"; flagged labels: {scores}" if scores else ""
    return [f"{truth['wrong']:.1%} of {truth['images']:,} labels are wrong{flagged}", applied]
