"""The label table: what was learnt about every label, a row an image."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pseudoloss.data import OUT, ImageSet
from pseudoloss.files import write_atomically
from pseudoloss.methods.memory import Memory

TRAIN, HELD_OUT = "train", "held-out"  # parts of the images
TRUTH = ("true_label", "truth")  # columns
TRUSTED = 0.5  # a guess is offered as a new label from this trust on


def label_table(
    images: ImageSet,
    memory: Memory,
    judged: bool,
    held_out: tuple[ImageSet, Memory] | None = None,
) -> pd.DataFrame:
    """One row an image; the columns that cleanlab has too bear its names. Where the truth of some
    is known, two columns hold it.

    `action` is what we would do: `keep` the label; `relabel` it (noisy, and the guess is trusted);
    or `look` at the image (noisy, and no guess is trusted: often it belongs to no class at all).
    A noisy label that a trusted guess confirms is kept, and is no issue.

    Args:
        images: the set that was trained on.
        memory: what was remembered of it.
        judged: whether stage 2 has judged guesses; without, there is no trust and no suggestion.
        held_out: images of the same source that were not trained on, and what was made of them.
    """
    rows = [_rows(TRAIN, images, memory, judged)]
    if held_out is not None:
        rows.append(_rows(HELD_OUT, *held_out, judged))
    table = pd.concat(rows, ignore_index=True)
    known = images.true_N is not None or (held_out is not None and held_out[0].true_N is not None)
    return table if known else table.drop(columns=list(TRUTH))


def _rows(part: str, images: ImageSet, memory: Memory, judged: bool) -> pd.DataFrame:
    names = np.array(images.classes, dtype=object)
    given = images.given_N.numpy()
    noisy = memory.noisy_N.cpu().numpy()
    guess = memory.guess_N.cpu().numpy()
    trust = memory.trust_N.cpu().numpy() if judged else np.full(len(images), np.nan)
    trusted = trust >= TRUSTED  # False where there is none
    issue = noisy & ~(trusted & (guess == given))
    action = np.select([issue & trusted, issue], ["relabel", "look"], "keep")
    suggested = names[np.where(action == "relabel", guess, given)]
    suggested[action == "look"] = np.nan
    true_label, truth = _truth(images, names, given)
    return pd.DataFrame(
        {
            "index": images.in_source_N.numpy(),
            "path": np.array(images.paths or [np.nan] * len(images), dtype=object),
            "part": part,
            "given_label": names[given],
            "predicted_label": names[memory.predicted_N.cpu().numpy()],
            "suggested_label": suggested,
            "is_label_issue": issue,
            "label_score": np.exp(-memory.loss_N.cpu().numpy()),
            "p_noisy": memory.p_noisy_N.cpu().numpy(),
            "trust": trust,
            "action": action,
            "true_label": true_label,
            "truth": truth,
        }
    )


def _truth(images: ImageSet, names: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True labels, and of what kind the given ones are; NaN where that is not known."""
    unknown = np.full(len(images), np.nan, dtype=object)
    if images.true_N is None:
        return unknown, unknown
    true = images.true_N.numpy()
    label = np.where(true == OUT, np.nan, names[true])
    kind = np.select([true == OUT, true != given], ["out", "wrong"], "clean")
    return label, kind.astype(object)


def estimated_noise(table: pd.DataFrame) -> dict[str, Any]:
    """How many of the labels that were trained on seem to be wrong: of all, and of each class."""
    table = table[table["part"] == TRAIN]
    by_class = table.groupby("given_label", sort=False)["is_label_issue"].mean()
    return {
        "rate": float(table["is_label_issue"].mean()),
        "by_class": {str(name): float(by_class[name]) for name in sorted(by_class.index)},
    }


def write_labels(table: pd.DataFrame, folder: Path) -> None:
    """labels.csv and, where pyarrow is installed, labels.parquet."""
    write_atomically(
        folder / "labels.csv",
        lambda draft: table.to_csv(draft, index=False, float_format="%.6g"),
    )
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return
    write_atomically(folder / "labels.parquet", lambda draft: table.to_parquet(draft, index=False))


def read_labels(folder: Path) -> pd.DataFrame:
    """The label table of a run folder; labels and paths are text, as they were written. Where it
    was written without parts, only images that were trained on have a row."""
    text = ["path", "part", "given_label", "predicted_label", "suggested_label", "action", *TRUTH]
    numbers = ["label_score", "p_noisy", "trust"]
    table = pd.read_csv(
        folder / "labels.csv",
        dtype=dict.fromkeys(text, object) | dict.fromkeys(numbers, float),
        keep_default_na=False,
        na_values={
            name: [""] for name in ("path", "suggested_label", "trust", "label_score", *TRUTH)
        },
    )
    if "part" not in table:
        table.insert(list(table).index("path") + 1, "part", TRAIN)
    return table
