"""Label tables with known truth, compared: that of a training run beside that of an audit.

    python benchmarks/label_tables.py RUN AUDIT ... --out FILE.json

Each argument is a folder of `pseudoloss train` or `pseudoloss audit`, or a copy of its labels.csv,
summary.json and, for the settings, config.json. Only training images whose true label is known
count.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import machine
from pseudoloss.scores import auc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tables = [read(folder) for folder in args.folders]
    for table in tables:
        print(table["name"], {k: v for k, v in table.items() if k not in ("name", "settings")})
    names = {str(folder): folder.name for folder in args.folders}
    machine.write(args.out, {"tables": tables}, names)


def read(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    config_file = folder / "config.json"
    settings = json.loads(config_file.read_text())["settings"] if config_file.exists() else {}
    text = dict.fromkeys(("given_label", "true_label", "candidate_label", "truth"), str)
    labels = pd.read_csv(folder / "labels.csv", dtype=text, keep_default_na=False)
    known = labels[(labels["part"] == "train") & (labels["true_label"] != "")]
    kept = ("method", "seed", "epochs", "network", "corrupt", "features")
    noise = summary["estimated_noise"]
    return {
        "name": folder.name,
        "settings": {name: settings[name] for name in kept if name in settings},
        "estimated_noise": {k: noise[k] for k in ("rate", "low", "high", "known", "reasons")},
        **measure(known),
    }


def measure(known: pd.DataFrame) -> dict[str, Any]:
    given, true, candidate = (
        known[name].to_numpy() for name in ("given_label", "true_label", "candidate_label")
    )
    wrong, flagged = given != true, known["is_label_issue"].to_numpy(dtype=bool, copy=True)
    relabelled = (known["action"] == "relabel").to_numpy()
    p_noisy, trust = (known[name].to_numpy(dtype=float, copy=True) for name in ("p_noisy", "trust"))
    doubt = torch.from_numpy(-known["label_score"].to_numpy(dtype=float))
    right = candidate == true
    numbers = {
        "images": len(known),
        "wrong": float(wrong.mean()),
        "f1": 2 * float((flagged & wrong).sum()) / max(1, int(flagged.sum() + wrong.sum())),
        "auc": auc(doubt, torch.from_numpy(wrong)),
        "auc_p_noisy": auc(torch.from_numpy(p_noisy), torch.from_numpy(wrong)),
        "flagged": float(flagged.mean()),
        "suggestions": int(relabelled.sum()),
        "suggestions_right": float(right[relabelled].mean()) if relabelled.any() else None,
        "labels_right_before": float((given == true).mean()),
        "labels_right_after": float((np.where(relabelled, candidate, given) == true).mean()),
        "calibration_error_p_noisy": calibration_error(p_noisy, wrong),
        "calibration_error_trust": calibration_error(trust, right),
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}


def calibration_error(p_N: np.ndarray, event_N: np.ndarray, bins: int = 10) -> float:
    bin_N = np.minimum((p_N * bins).astype(int), bins - 1)
    sums = [np.bincount(bin_N, values, minlength=bins) for values in (p_N, event_N.astype(float))]
    return float(np.abs(sums[0] - sums[1]).sum() / len(p_N))


if __name__ == "__main__":
    main()
