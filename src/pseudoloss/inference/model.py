"""A trained classifier: its file, and its predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pseudoloss.data import Reader, Source, to_pixels
from pseudoloss.data.decoding import Fit
from pseudoloss.data.storage import place
from pseudoloss.engine.capture import using
from pseudoloss.engine.tracking import predict
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.inference import evaluation, predictions
from pseudoloss.nn import networks
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import Views, make_views


@dataclass(frozen=True)
class Description:
    """What must be known to build a network again and to show it images as in training."""

    network: str
    classes: tuple[str, ...]
    channels: int
    stored: tuple[int, int]  # pixels of an image
    size: tuple[int, int]  # ... of which the network sees
    mean: tuple[float, ...]
    std: tuple[float, ...]
    projection: int
    fit: Fit = "stretch"  # how files of other shapes become such images


@dataclass(frozen=True)
class Model:
    """A network with its views and the names of its classes."""

    description: Description
    network: Network
    views: Views

    @property
    def classes(self) -> tuple[str, ...]:
        return self.description.classes

    @property
    def reader(self) -> Reader:
        """How image files are read for it, as in training."""
        return Reader(self.description.channels, self.description.stored, self.description.fit)

    def predict_proba(self, images: Any) -> np.ndarray:
        """Probability of each class (N,C) for new images, given as they were to training."""
        pixels = to_pixels(images, "images")
        wanted = (self.description.channels, *self.description.stored)
        if pixels.shape[1:] != wanted:
            shapes = [f"{c} channels, {h}×{w} pixels" for c, h, w in (pixels.shape[1:], wanted)]
            raise InputError(f"images of {shapes[0]}: the model was trained on {shapes[1]}")
        if not len(pixels):
            return np.empty((0, len(self.classes)))
        device = self.views.mean_C.device
        with using(device):
            there = place(pixels, device, "host")
            logits = [part.cpu().double() for part in predict(self.network, self.views, there)]
        return np.asarray(torch.cat(logits).softmax(1))

    def predict(self, images: Any) -> np.ndarray:
        """Name of the most likely class of each image."""
        names = np.array(self.classes, dtype=object)
        return np.asarray(names[self.predict_proba(images).argmax(1)])

    def predict_files(
        self, images: str | Path | Sequence[str | Path], top: int = 1, probabilities: bool = False
    ) -> pd.DataFrame:
        """What it says of image files and of the files in folders, a row each: `path`, `label`,
        `probability`. Files that cannot be read are left out, with a warning.

        Args:
            images: a file or a folder, or several of them.
            top: how many of the most likely classes to name (`label_2`, `probability_2`, …).
            probabilities: add a column `p_CLASS` for every class.
        """
        several = [images] if isinstance(images, str | Path) else images
        return predictions.predict_files(self, several, top, probabilities)

    def evaluate(
        self, source: Source, part: evaluation.Part | None = None
    ) -> evaluation.Evaluation:
        """How right it is on a source with labels, as `pseudoloss evaluate` says it."""
        return evaluation.evaluate(self, source, part)

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the model; with `weights`, as it was when they were copied."""
        current = self.network.state_dict() if weights is None else weights
        write_safetensors(path, current, vars(self.description))


def load_model(path: Path, device: str | torch.device = "cpu") -> Model:
    """The model in a safetensors file of a run folder; it computes in float32."""
    try:
        tensors, record = from_safetensors(path)
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in dict(record).items()
        }
        description = Description(**fields)
        network = networks.build(
            description.network,
            channels=description.channels,
            size=description.size,
            classes=len(description.classes),
            projection=description.projection,
        )
        network.load_state_dict(tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a model of pseudoloss ({reason})") from None
    network.to(device).eval()
    views = make_views(description.mean, description.std, description.size, device=device)
    return Model(description, network, views)
