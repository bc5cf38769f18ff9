"""A trained classifier: its file, and its predictions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from pseudoloss import networks
from pseudoloss.data import to_pixels
from pseudoloss.errors import InputError
from pseudoloss.files import write_bytes
from pseudoloss.networks import Network
from pseudoloss.tracking import predict
from pseudoloss.views import Views

KEY = "pseudoloss"  # one entry, so that the same model gives the same bytes


@dataclass(frozen=True)
class Description:
    """What must be known to build a network again and to show it images as in training."""

    network: str
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    projection: int


@dataclass(frozen=True)
class Model:
    """A network with its views and the names of its classes."""

    description: Description
    network: Network
    views: Views

    @property
    def classes(self) -> tuple[str, ...]:
        return self.description.classes

    def predict_proba(self, images: Any) -> np.ndarray:
        """Probability of each class (N,C) for new images, given as they were to training."""
        pixels = to_pixels(images, "images")
        (height, width), channels = self.views.size, self.description.channels
        fits = (
            pixels.shape[1] == channels and pixels.shape[2] >= height and pixels.shape[3] >= width
        )
        if not fits:
            raise InputError(
                f"images of {pixels.shape[1]} channels, {pixels.shape[2]}×{pixels.shape[3]}: "
                f"the model was trained on {channels} channels, {height}×{width}"
            )
        logits_NC = predict(self.network, self.views, pixels)
        return np.asarray(logits_NC.cpu().double().softmax(1))

    def predict(self, images: Any) -> np.ndarray:
        """Name of the most likely class of each image."""
        names = np.array(self.classes, dtype=object)
        return np.asarray(names[self.predict_proba(images).argmax(1)])

    def save(self, path: Path) -> None:
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self.network.state_dict().items()
        }
        text = json.dumps(vars(self.description), sort_keys=True)
        write_bytes(path, to_bytes(tensors, {KEY: text}))


def load_model(path: Path, device: str = "cpu") -> Model:
    """The model in a safetensors file of a run folder."""
    try:
        with safe_open(path, "pt", device="cpu") as file:
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                raise InputError(f"{path}: not a model of pseudoloss")
            fields: dict[str, Any] = json.loads(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    description = Description(**fields)
    network = networks.build(
        description.network,
        channels=description.channels,
        size=description.size,
        classes=len(description.classes),
        projection=description.projection,
    )
    network.load_state_dict(tensors)
    network.to(device).eval()
    views = Views(
        mean_C=torch.tensor(description.mean, device=device),
        std_C=torch.tensor(description.std, device=device),
        size=description.size,
        pad=0,
        flip=False,
    )
    return Model(description, network, views)
