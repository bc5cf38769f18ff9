"""Files of older versions."""

import json
from pathlib import Path
from typing import Literal

import pytest

from pseudoloss.experiments import old_files
from pseudoloss.experiments.matching import preset_settings, recorded_settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_settings_are_renamed(monkeypatch):
    known = {
        "pseudo_label_norm": Literal["sum", "max"],
        "weighting": Literal["separate", "interpolated", "first"],
        "gamma": float,
    }
    monkeypatch.setattr(old_files, "setting_types", lambda: known)
    old = {"guess_norm": "max", "weighting": "together", "gamma": 2.0}
    new = {"pseudo_label_norm": "max", "weighting": "interpolated", "gamma": 2.0}
    assert old_files.upgrade_settings(old) == new
    assert old_files.upgrade_settings(new) == new


@pytest.mark.parametrize(
    ("name", "preset", "changes"),
    [
        ("cifar100-id50-h200", "cifar100-id50", {}),
        ("cifar100-id0-mixup-h200", "cifar100-id0", {"method": "mixup"}),
        ("cifar100-inet-40-20-ce-h200", "cifar100-inet-40-20", {"method": "ce"}),
        ("cifar100-id80-again-h200", "cifar100-id80", {"noise_metric": "loss"}),
    ],
)
def test_committed_settings_are_those_of_their_cells(name, preset, changes):
    settings = json.loads((RESULTS / f"{name}.json").read_text())["settings"]
    assert recorded_settings(settings) == preset_settings(preset, changes)


def test_metrics_are_renamed():
    auc = {"entropy": 0.8}
    old = {"epoch": 3, "guesses": {"auc": 0.7}, "metrics": {"noise": {}, "guesses": auc}}
    new = {
        "epoch": 3,
        "pseudo_labels": {"auc": 0.7},
        "metrics": {"noise": {}, "pseudo_labels": auc},
    }
    assert old_files.upgrade_metrics(old) == new
    assert old_files.upgrade_metrics(new) == new
    assert old_files.upgrade_metrics({"epoch": 1, "metrics": None}) == {"epoch": 1, "metrics": None}
