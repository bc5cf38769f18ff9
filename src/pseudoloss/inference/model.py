"""A trained classifier: its file, and its predictions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pseudoloss.data import Reader, Source, to_pixels
from pseudoloss.data.decoding import Fit
from pseudoloss.data.images import LabelType, typed_labels
from pseudoloss.data.storage import place
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.inference import evaluation, predictions
from pseudoloss.inference.ensemble import AnyNetwork, Ensemble
from pseudoloss.inference.header import checked_fields
from pseudoloss.inference.passes import predict
from pseudoloss.nn import networks
from pseudoloss.nn.devices import using
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import Views, make_views


@dataclass(frozen=True)
class Description:
    """What is needed to build the network again and to preprocess images as in training."""

    network: str
    classes: tuple[str, ...]
    channels: int
    stored: tuple[int, int]  # height and width of an image
    size: tuple[int, int]  # height and width of its centre crop, the input of the network
    mean: tuple[float, ...]
    std: tuple[float, ...]
    projection: int
    fit: Fit = "stretch"  # how image files of other shapes become such images
    members: int = 1  # number of networks; more than one are an `Ensemble`
    label_type: LabelType = "text"  # of the labels that the model was trained on


@dataclass(frozen=True)
class Model:
    """A network with its preprocessing and the names of its classes."""

    description: Description
    network: AnyNetwork
    views: Views

    @property
    def classes(self) -> tuple[str, ...]:
        return self.description.classes

    @property
    def reader(self) -> Reader:
        """Reads image files as in training."""
        return Reader(self.description.channels, self.description.stored, self.description.fit)

    def predict_proba(
        self, images: Any, name: Callable[[int], str] = "images: row {}".format
    ) -> np.ndarray:
        """Probability of each class (N,C), for arrays of images in any layout that training takes.

        The images must have the size and the channels of the training images. `name` is what an
        error calls the image of a row.
        """
        pixels = to_pixels(images, "images")
        wanted = (self.description.channels, *self.description.stored)
        if pixels.shape[1:] != wanted:
            shapes = [f"{c} channels, {h}×{w} pixels" for c, h, w in (pixels.shape[1:], wanted)]
            raise InputError(f"images of {shapes[0]}: the model was trained on {shapes[1]}")
        if not len(pixels):
            return np.empty((0, len(self.classes)))
        device = self.views.mean_C.device
        with using(device):
            stored = place(pixels, device, "host")
            chunks = [chunk.cpu().double() for chunk in predict(self.network, self.views, stored)]
        logits_NC = torch.cat(chunks)
        finite_N = logits_NC.isfinite().all(1)
        if not finite_N.all():
            raise InputError(
                f"{name(int(finite_N.int().argmin()))}: the model gives NaN or infinity instead of "
                "probabilities: its training failed, or its file is damaged"
            )
        return np.asarray(logits_NC.softmax(1))

    def predict(self, images: Any) -> np.ndarray:
        """The most likely label of each image (see `predict_proba`): the name of a class, or a
        whole number or a truth value where the labels in training were."""
        labels = typed_labels(self.classes, self.description.label_type)
        return np.asarray(labels[self.predict_proba(images).argmax(1)])

    def predict_files(
        self, images: str | Path | Sequence[str | Path], top: int = 1, probabilities: bool = False
    ) -> pd.DataFrame:
        """Classify image files. Files that cannot be read are skipped with a warning.

        Args:
            images: a file, a folder (searched recursively) or a table with a column `path`; or
                several of them.
            top: number of most likely classes to list (`label_2`, `probability_2`, …).
            probabilities: add a column `p_CLASS` for every class.

        Returns:
            One row per file: `path`, `label`, `probability`.
        """
        several = [images] if isinstance(images, str | Path) else images
        return predictions.predict_files(self, several, top, probabilities)

    def evaluate(
        self, source: Source, part: evaluation.Part | None = None
    ) -> evaluation.Evaluation:
        """Compare the predictions with the labels of a source, as `pseudoloss evaluate` does.

        Args:
            source: as for `train`.
            part: split of the source: "train", "val" or "test". None: test, else val, else all.
        """
        return evaluation.evaluate(self, source, part)

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the model to a file; with `weights` instead of the current ones if given."""
        current = self.network.state_dict() if weights is None else weights
        write_safetensors(path, without_decoders(current), vars(self.description))


def load_model(path: Path, device: str | torch.device = "cpu") -> Model:
    """Load a model from a safetensors file. It computes in float32."""
    try:
        return make_model(*from_safetensors(path), device)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a model of pseudoloss ({reason})") from None


def make_model(
    weights: Mapping[str, Tensor], record: Mapping[str, Any], device: str | torch.device
) -> Model:
    """A model from its weights and the fields of its description. TypeError, ValueError or
    RuntimeError if they do not fit."""
    description = Description(**checked_fields(record))
    network = build_network(description)
    network.load_state_dict(without_decoders(weights))
    network.to(device).eval()
    mean, std = description.mean, description.std
    views = make_views(mean, std, description.size, device=device)
    return Model(description, network, views)


def without_decoders(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without those of decoders, which only training needs. In an ensemble, the number
    of the network comes first in a name."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if not name.lstrip("0123456789.").startswith("decoder.")
    }


def build_network(description: Description) -> AnyNetwork:
    """The network of a description, with random weights."""

    def build() -> Network:
        return networks.build(
            description.network,
            channels=description.channels,
            size=description.size,
            classes=len(description.classes),
            projection=description.projection,
        )

    if description.members == 1:
        return build()
    if description.members < 1:
        raise ValueError(f"members is {description.members}")
    return Ensemble([build() for _ in range(description.members)])
