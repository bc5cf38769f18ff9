"""Evaluation of a model on a labelled source: accuracy by class, confusions, calibration.

Shapes: N images, B images in a batch, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unicodedata import normalize

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pseudoloss import scores
from pseudoloss.data import Data, ImageFiles, ImageSet, ReadOptions, Skipped, Source, arrays
from pseudoloss.data.decoding import Entry, Limits
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.data.scanning import LabelledFiles, limits_of
from pseudoloss.data.sources import open_arrays, open_files
from pseudoloss.errors import InputError, did_you_mean
from pseudoloss.files import write_json
from pseudoloss.inference.predictions import Batch, predict_batches, refuse_if_none
from pseudoloss.spreadsheets import safe_for_spreadsheets

if TYPE_CHECKING:
    from pseudoloss.inference.model import Model

Part = Literal["train", "val", "test"]
AT_ONCE = 2048  # images of an array in a batch
CONFUSIONS = 10  # number of confusions in evaluation.json


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        source: name of the source.
        part: split of the source: "train", "val" or "test"; "all" if it has no splits.
        accuracy: percentage of the images whose label is predicted.
        balanced_accuracy: mean of the accuracies of the classes.
        negative_log_likelihood: mean over the images.
        calibration: see `pseudoloss.scores.calibration`.
        classes: one row per class: `class`, `accuracy`, `precision`, `recall`, `support`,
            `predicted`.
        confusion: number of images, one row per label, one column per prediction.
        predictions: one row per image: `index` (in the split), `path`, `label`, `predicted_label`,
            `probability` (of the prediction), `label_probability`.
        skipped: files that could not be read.
    """

    source: str
    part: str
    accuracy: float
    balanced_accuracy: float
    negative_log_likelihood: float
    calibration: scores.Calibration
    classes: pd.DataFrame
    confusion: pd.DataFrame
    predictions: pd.DataFrame
    skipped: tuple[Skipped, ...]

    @property
    def confusions(self) -> pd.DataFrame:
        """Pairs of label and wrong prediction, the most frequent first."""
        counts = self.confusion.to_numpy(copy=True)
        np.fill_diagonal(counts, 0)
        names = self.confusion.columns.to_numpy()
        label, predicted = np.nonzero(counts)
        order = np.argsort(-counts[label, predicted], kind="stable")
        label, predicted = label[order], predicted[order]
        return pd.DataFrame(
            {
                "label": names[label],
                "predicted_label": names[predicted],
                "images": counts[label, predicted],
            }
        )

    def summary(self) -> dict[str, Any]:
        """The content of evaluation.json."""
        rows = self.classes.astype(object).to_dict("records")
        return {
            "source": self.source,
            "part": self.part,
            "images": len(self.predictions),
            "skipped": len(self.skipped),
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "negative_log_likelihood": self.negative_log_likelihood,
            "calibration": self.calibration,
            "by_class": {str(row.pop("class")): row for row in rows},
            "confusions": self.confusions.head(CONFUSIONS).astype(object).to_dict("records"),
        }

    def write(self, folder: Path, safe_csv: bool = False) -> None:
        """Write evaluation.json and three tables to an existing folder; with `safe_csv` without
        names that a spreadsheet would evaluate."""
        write_json(folder / "evaluation.json", self.summary())
        tables = (self.classes, self.confusion, self.predictions)
        classes, confusion, predictions = map(safe_for_spreadsheets, tables) if safe_csv else tables
        classes.to_csv(folder / "classes.csv", index=False, float_format="%.6g")
        confusion.to_csv(folder / "confusion.csv", index_label="label")
        predictions.to_csv(folder / "predictions.csv", index=False, float_format="%.6g")


class Labelled(NamedTuple):
    """Images with labels."""

    source: str
    part: str
    images: Tensor | Sequence[Entry]
    names: Sequence[str] | None
    labels: Sequence[str]
    links: Sequence[Skipped] = ()  # that are not followed


def evaluate(
    model: "Model",
    source: Source,
    part: Part | None = None,
    options: ReadOptions | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """Compare the predictions of a model with the labels of a source.

    Args:
        model: a trained classifier.
        source: see `find_source`. All its classes must be classes of the model.
        part: split of the source. None: "test", else "val", else all images.
        options: the columns of a table.
        progress: called with the progress.
    """
    options = options or ReadOptions()
    labelled = open_split(source, part, options)
    if not labelled.labels:
        raise InputError(f"{labelled.source}: has no images")
    label_N = _class_indices(labelled, model.classes)
    kept: list[int] = []
    skipped: list[Skipped] = []
    limits = limits_of(options)
    predicted, confidence, of_label = [], [], []
    for batch in _batches(model, labelled.images, progress, limits):
        skipped += batch.skipped
        kept += batch.indices
        p_BC = batch.probabilities_BC
        rows = np.arange(len(p_BC))
        predicted.append(p_BC.argmax(1))
        confidence.append(p_BC.max(1))
        of_label.append(p_BC[rows, label_N[batch.indices]])
    refuse_if_none(len(labelled.images), skipped)
    label_N = label_N[kept]
    predicted_N, confidence_N, of_label_N = map(np.concatenate, (predicted, confidence, of_label))

    confusion_CC = scores.confusion(
        torch.from_numpy(label_N), torch.from_numpy(predicted_N), len(model.classes)
    )
    right_N = label_N == predicted_N
    classes = pd.DataFrame({"class": model.classes, **_columns(scores.by_class(confusion_CC))})
    names = np.array(model.classes, dtype=object)
    paths = [np.nan] * len(kept) if labelled.names is None else [labelled.names[i] for i in kept]
    return Evaluation(
        source=labelled.source,
        part=labelled.part,
        accuracy=100 * float(right_N.mean()),
        balanced_accuracy=float(classes["accuracy"].mean()),  # of the classes that have images
        negative_log_likelihood=scores.negative_log_likelihood(torch.from_numpy(of_label_N)),
        calibration=scores.calibration(torch.from_numpy(confidence_N), torch.from_numpy(right_N)),
        classes=classes,
        confusion=pd.DataFrame(confusion_CC.numpy(), index=names, columns=names),
        predictions=pd.DataFrame(
            {
                "index": kept,
                "path": np.array(paths, dtype=object),
                "label": names[label_N],
                "predicted_label": names[predicted_N],
                "probability": confidence_N,
                "label_probability": of_label_N,
            }
        ),
        skipped=(*labelled.links, *skipped),
    )


def open_split(source: Source, part: Part | None, options: ReadOptions) -> Labelled:
    """One split of a source. None: "test", else "val", else all images."""
    in_files = open_files(source, options)
    parts: dict[str, Any]
    if in_files is not None:
        name, parts = in_files.name, in_files.splits
    else:
        if isinstance(source, Data):
            data = source
        elif isinstance(source, str | Path):
            data = open_arrays(str(source))
        else:
            data = arrays(*_pair(source))
        parts = {"train": data.train} | ({} if data.test is None else {"test": data.test})
        name = data.name
    if part is not None and part not in parts:
        raise InputError(f"--part {part}: {name} has no such split (it has {', '.join(parts)})")
    chosen: str = part or next(split for split in ("test", "val", "train") if split in parts)
    found: LabelledFiles | ImageSet = parts[chosen]
    shown = "all" if list(parts) == ["train"] else chosen
    if isinstance(found, LabelledFiles):
        return Labelled(name, shown, found.paths, found.names, found.labels, found.links)
    images = found.images_NCHW
    labels = [found.classes[c] for c in found.given_N.tolist()]
    pixels = images.paths if isinstance(images, ImageFiles) else images
    return Labelled(name, shown, pixels, found.paths, labels)


def _pair(source: Any) -> tuple[Any, Any]:
    if isinstance(source, tuple) and len(source) == 2:
        return source
    raise InputError(
        f"source must be text, a path or a pair (images, labels), not {type(source).__name__}"
    )


def _class_indices(labelled: Labelled, classes: Sequence[str]) -> np.ndarray:
    """The labels as class indices of the model."""
    index = {name: c for c, name in enumerate(classes)}
    composed = {normalize("NFC", name): c for name, c in index.items()}  # ä may be two characters
    for label in set(labelled.labels) - set(index):
        if normalize("NFC", label) in composed:
            index[label] = composed[normalize("NFC", label)]
    for i, label in enumerate(labelled.labels):
        if label not in index:
            where = f"image {i}" if labelled.names is None else labelled.names[i]
            raise InputError(
                f"{labelled.source}: {where} has the class {label}, which the model does not have"
                f"{did_you_mean(label, classes)}"
            )
    return np.array([index[label] for label in labelled.labels], dtype=np.int64)


def _batches(
    model: "Model", images: Tensor | Sequence[Entry], progress: Progress, limits: Limits
) -> Iterator[Batch]:
    if not isinstance(images, Tensor):
        yield from predict_batches(model, images, progress, limits)
        return
    for start in range(0, len(images), AT_ONCE):
        part = images[start : start + AT_ONCE]
        rows = range(start, start + len(part))
        p_BC = model.predict_proba(part, [f"image {row}" for row in rows].__getitem__)
        yield Batch(list(rows), p_BC, [])
        progress("images", start + len(part), len(images))


def _columns(rows: Sequence[scores.ClassScores]) -> dict[str, list[Any]]:
    """One list per score. None becomes NaN, so that columns are numeric."""
    names = scores.ClassScores.__annotations__
    found: list[dict[str, Any]] = [dict(row) for row in rows]
    return {name: [np.nan if row[name] is None else row[name] for row in found] for name in names}
