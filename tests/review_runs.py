"""Runs to review, with image files whose names are hostile."""

import json

import numpy as np
import pandas as pd
from PIL import Image

from label_folders import write_audit
from pseudoloss.labels.table import score_rows

ATTACK = "<img src=x onerror=\"document.title='attacked'\">"
CLASSES = ("ant", "bee", "cat & dog", ATTACK)


def write_review(root, n=60, classes=CLASSES):
    """An audit of n image files. In order of doubt: the rows with even index from the last one
    down, which are issues (every second one of them without a trusted suggestion), then the others.
    """
    source = root / "photos"
    given = np.arange(n) // 2 % len(classes)
    names = [f"{i:03} <b onclick=alert(1)>.png" for i in range(n)]
    source.mkdir(parents=True)
    for i, name in enumerate(names):
        Image.new("RGB", (60, 90), (i * 4 % 256, 90, 200)).save(source / name)
    issue = np.arange(n) % 2 == 0
    doubt = np.where(issue, 0.6 + np.arange(n) / n / 3, np.arange(n) / n / 3)
    table = score_rows(
        "train",
        classes,
        index=np.arange(n),
        paths=names,
        given=given,
        predicted=given,
        candidate=(given + 1) % len(classes),
        label_score=1 - doubt,
        p_noisy=doubt,
        trust=np.where(np.arange(n) % 4 == 0, 0.9, 0.2),
    )
    listed = pd.DataFrame({"path": names, "label": [classes[i] for i in given]})
    listed.to_csv(source / "photos.csv", index=False)
    return write_audit(root / "audit", table, classes=classes, source=source / "photos.csv")


def lines_of(audit):
    """The decisions on disk."""
    text = (audit / "decisions.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
