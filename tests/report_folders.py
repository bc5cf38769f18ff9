"""Folders of audits for the report."""

import json

import numpy as np

from conftest import save_images
from pseudoloss.labels.table import score_rows, write_labels

HOSTILE = (
    "<script>alert(1)</script>",
    "\"onload='alert(2)' x=\"",
    "=cmd|' /C calc'!A0",
    "-- ]]> &amp; {{ 7*7 }} ${x}",
    "\u202egnp.exe\u202c \u05e9\u05dc\u05d5\u05dd",
    "tab\tbell\x07del\x7fnel\x85",
)


def write_audit(
    tmp_path, name="audit", n=60, classes=("ant", "bee", "cat"), images=True, truth=False, seed=0,
    size=12, summary=None, settings=None, names=None, **config,
):  # fmt: skip
    """The folder of an audit, with its image files. Every fifth label is wrong."""
    random = np.random.default_rng(seed)
    folder = tmp_path / name
    folder.mkdir()
    given = np.arange(n) % len(classes)
    true = np.where(np.arange(n) % 5 == 0, (given + 1) % len(classes), given)
    pixels = random.integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    root = tmp_path / f"{name}-photos"
    folders = [f"class {c}" for c in range(len(classes))]
    paths = [str(path.relative_to(root)) for path in save_images(root, pixels, given, folders)]
    if not images:
        root = tmp_path / "gone"
    table = score_rows(
        "train",
        classes,
        index=np.arange(n),
        paths=names or paths,
        given=given,
        predicted=true,
        candidate=(given + 1) % len(classes),
        label_score=random.uniform(0, 1, n),
        p_noisy=random.uniform(0, 1, n),
        trust=random.uniform(0, 1, n),
        true=true if truth else None,
    )
    table["part"] = np.where(np.arange(n) < 0.8 * n, "train", "test")
    table["outlier_score"] = random.uniform(0, 1, n)
    write_labels(table, folder)
    np.save(folder / "pred_probs.npy", random.dirichlet(np.ones(len(classes)), n).astype("f4"))
    rows = np.flatnonzero(table["is_label_issue"])
    given_MK = np.tile([0, 1, -1], (len(rows), 1))
    np.savez(folder / "examples.npz", row_M=rows, given_MK=given_MK, candidate_MK=given_MK + 3)
    groups = table.iloc[[0, 1, 2, n - 3]]  # 0 and 1 contradict; 2 and n - 3 are in two splits
    groups = groups.assign(group=[0, 0, 1, 1], similarity=0.99)
    if n % len(classes) == 0:
        groups.loc[groups.index[3], "given_label"] = groups["given_label"].iloc[2]
    columns = ["group", "index", "path", "part", "given_label", "similarity"]
    groups[columns].to_csv(folder / "duplicates.csv", index=False)
    content = {
        "kind": "audit", "pseudoloss": "1", "source": str(root), "reading": {},
        "classes": list(classes),
        "settings": {"threshold": 0.5, "min_trust": 0.5, "seed": 1} | (settings or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content | config))
    by_class = {
        name: {"rate": 0.1 * c, "low": 0.05 * c, "high": 0.2 * c, "images": n // len(classes)}
        for c, name in enumerate(classes)
    }
    noise = {"rate": 0.2, "low": 0.15, "high": 0.25, "known": True, "reasons": []}
    content = {
        "estimated_noise": noise | {"by_class": by_class},
        "notices": [{"kind": "cache", "text": "the cache is full"}],
        "seconds": 61.0,
    }
    (folder / "summary.json").write_text(json.dumps(content | (summary or {})))
    return folder
