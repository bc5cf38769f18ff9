"""How right a model is on a source with labels: by class, what it confuses, how sure it may be.

Shapes: N images, B of them at a time, C classes.
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

from pseudoloss import scores as figures
from pseudoloss.data import Data, ImageFiles, ImageSet, ReadOptions, Skipped, Source, arrays
from pseudoloss.data.decoding import Entry
from pseudoloss.data.scanning import LabelledFiles, Progress, no_progress
from pseudoloss.data.sources import image_parts, open_words
from pseudoloss.errors import InputError, did_you_mean
from pseudoloss.files import write_json
from pseudoloss.inference.predictions import Batch, predict_batches, refuse_if_none

if TYPE_CHECKING:
    from pseudoloss.inference.model import Model

Part = Literal["train", "val", "test"]
AT_ONCE = 2048  # images of an array
CONFUSIONS = 10  # the most frequent ones, in evaluation.json


@dataclass(frozen=True)
class Evaluation:
    """How right a model is.

    Attributes:
        source: what it was asked about.
        part: of the source: "train", "val", "test", or "all" where it has no parts.
        accuracy: percentage of the images whose label it says.
        balanced_accuracy: the mean of the accuracies of the classes.
        negative_log_likelihood: of the labels.
        calibration: see `pseudoloss.evaluate.calibration`.
        classes: a row a class: `class`, `accuracy`, `precision`, `recall`, `support`, `predicted`.
        confusion: a row a label, a column a prediction: how many images.
        predictions: a row an image: `index` (in the part), `path`, `label`, `predicted_label`,
            `probability` (of what was predicted), `label_probability`.
        skipped: files that could not be read.
    """

    source: str
    part: str
    accuracy: float
    balanced_accuracy: float
    negative_log_likelihood: float
    calibration: figures.Calibration
    classes: pd.DataFrame
    confusion: pd.DataFrame
    predictions: pd.DataFrame
    skipped: tuple[Skipped, ...]

    @property
    def confusions(self) -> pd.DataFrame:
        """Which class is taken for which other, the most frequent first."""
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
        """All figures, for JSON."""
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

    def write(self, folder: Path) -> None:
        """evaluation.json and three tables, into a folder that is there."""
        write_json(folder / "evaluation.json", self.summary())
        self.classes.to_csv(folder / "classes.csv", index=False, float_format="%.6g")
        self.confusion.to_csv(folder / "confusion.csv", index_label="label")
        self.predictions.to_csv(folder / "predictions.csv", index=False, float_format="%.6g")


class Labelled(NamedTuple):
    """Images with the labels to measure against."""

    source: str
    part: str
    images: Tensor | Sequence[Entry]
    names: Sequence[str] | None
    labels: Sequence[str]


def evaluate(
    model: "Model",
    source: Source,
    part: Part | None = None,
    options: ReadOptions | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """Compare what a model says with the labels of a source.

    Args:
        model: a trained classifier.
        source: see `find_source`. It may have fewer classes than the model, and no others.
        part: of the source; without, what is for testing: "test", else "val", else all of it.
        options: the columns of a table.
        progress: is told how far it has come.
    """
    asked = open_part(source, part, options or ReadOptions())
    if not asked.labels:
        raise InputError(f"{asked.source}: has no images")
    label_N = _places(asked, model.classes)
    kept: list[int] = []
    skipped: list[Skipped] = []
    predicted, confidence, own = [], [], []
    for batch in _batches(model, asked.images, progress):
        skipped += batch.skipped
        kept += batch.places
        p_BC = batch.probabilities_BC
        rows = np.arange(len(p_BC))
        predicted.append(p_BC.argmax(1))
        confidence.append(p_BC.max(1))
        own.append(p_BC[rows, label_N[batch.places]])
    refuse_if_none(len(asked.images), skipped)
    label_N = label_N[kept]
    predicted_N, confidence_N, own_N = map(np.concatenate, (predicted, confidence, own))

    confusion_CC = figures.confusion(
        torch.from_numpy(label_N), torch.from_numpy(predicted_N), len(model.classes)
    )
    right_N = label_N == predicted_N
    classes = pd.DataFrame({"class": model.classes, **_columns(figures.by_class(confusion_CC))})
    names = np.array(model.classes, dtype=object)
    paths = [np.nan] * len(kept) if asked.names is None else [asked.names[i] for i in kept]
    return Evaluation(
        source=asked.source,
        part=asked.part,
        accuracy=100 * float(right_N.mean()),
        balanced_accuracy=float(classes["accuracy"].mean()),  # of the classes that have images
        negative_log_likelihood=figures.negative_log_likelihood(torch.from_numpy(own_N)),
        calibration=figures.calibration(torch.from_numpy(confidence_N), torch.from_numpy(right_N)),
        classes=classes,
        confusion=pd.DataFrame(confusion_CC.numpy(), index=names, columns=names),
        predictions=pd.DataFrame(
            {
                "index": kept,
                "path": np.array(paths, dtype=object),
                "label": names[label_N],
                "predicted_label": names[predicted_N],
                "probability": confidence_N,
                "label_probability": own_N,
            }
        ),
        skipped=tuple(skipped),
    )


def open_part(source: Source, part: Part | None, options: ReadOptions) -> Labelled:
    """A part of a source; without its name the one for testing, or all where there is none."""
    in_files = image_parts(source, options)
    parts: dict[str, Any]
    if in_files is not None:
        words, parts = in_files.name, in_files.listed
    else:
        if isinstance(source, Data):
            data = source
        elif isinstance(source, str | Path):
            data = open_words(str(source))
        else:
            data = arrays(*_pair(source))
        parts = {"train": data.train} | ({} if data.test is None else {"test": data.test})
        words = data.name
    if part is not None and part not in parts:
        raise InputError(f"--part {part}: {words} has no such part (it has {', '.join(parts)})")
    chosen: str = part or next(name for name in ("test", "val", "train") if name in parts)
    found: LabelledFiles | ImageSet = parts[chosen]
    shown = "all" if list(parts) == ["train"] else chosen
    if isinstance(found, LabelledFiles):
        return Labelled(words, shown, found.paths, found.names, found.labels)
    images = found.images_NCHW
    labels = [found.classes[c] for c in found.given_N.tolist()]
    pixels = images.paths if isinstance(images, ImageFiles) else images
    return Labelled(words, shown, pixels, found.paths, labels)


def _pair(source: Any) -> tuple[Any, Any]:
    if isinstance(source, tuple) and len(source) == 2:
        return source
    raise InputError(
        f"source must be words, a path or a pair (images, labels), not {type(source).__name__}"
    )


def _places(asked: Labelled, classes: Sequence[str]) -> np.ndarray:
    """The labels as places among the classes of the model."""
    place = {name: c for c, name in enumerate(classes)}
    composed = {normalize("NFC", name): c for name, c in place.items()}  # ä may be two signs
    for label in set(asked.labels) - set(place):
        if normalize("NFC", label) in composed:
            place[label] = composed[normalize("NFC", label)]
    for i, label in enumerate(asked.labels):
        if label not in place:
            where = f"image {i}" if asked.names is None else asked.names[i]
            hint = did_you_mean(label, classes)
            raise InputError(
                f"{asked.source}: {where} has the class {label}, which the model does not know"
                f"{hint if hint.startswith('; did') else ''}"
            )
    return np.array([place[label] for label in asked.labels], dtype=np.int64)


def _batches(
    model: "Model", images: Tensor | Sequence[Entry], progress: Progress
) -> Iterator[Batch]:
    if not isinstance(images, Tensor):
        yield from predict_batches(model, images, progress)
        return
    for start in range(0, len(images), AT_ONCE):
        part = images[start : start + AT_ONCE]
        yield Batch(list(range(start, start + len(part))), model.predict_proba(part), [])
        progress("images", start + len(part), len(images))


def _columns(rows: Sequence[figures.ClassFigures]) -> dict[str, list[Any]]:
    """None becomes NaN, so that a column stays one of numbers."""
    names = figures.ClassFigures.__annotations__
    found: list[dict[str, Any]] = [dict(row) for row in rows]
    return {name: [np.nan if row[name] is None else row[name] for row in found] for name in names}
