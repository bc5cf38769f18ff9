"""Folders with label tables that were not trained."""

import json

import numpy as np

from pseudoloss.labels.table import score_rows, write_labels


def scored_table(n=6, classes=("ant", "bee"), paths=None, part="train"):
    """Rows whose p_noisy and trust rise with the row, given `ant` and `bee` in turn."""
    given = np.arange(n) % len(classes)
    rising = np.linspace(0, 1, n)
    return score_rows(
        part,
        classes,
        index=np.arange(n),
        paths=paths,
        given=given,
        predicted=given,
        candidate=(given + 1) % len(classes),
        label_score=1 - rising,
        p_noisy=rising,
        trust=rising,
    )


def write_audit(folder, table, classes=("ant", "bee"), source="digits", **config):
    """The folder of an audit, as far as label tables need it."""
    folder.mkdir(parents=True)
    config = {"kind": "audit", "source": str(source), "classes": list(classes)} | config
    config = {"settings": {"threshold": 0.5, "min_trust": 0.5}} | config
    (folder / "config.json").write_text(json.dumps(config))
    write_labels(table, folder)
    (folder / "summary.json").write_text("{}")
    return folder
