"""An audit of the training images by the features of the network that is trained.

Shapes: N images, D features.
"""

from typing import Any

import numpy as np
import torch

from pseudoloss.auditing.scoring import LabelScores, score_labels
from pseudoloss.engine.trainer import Trainer
from pseudoloss.inference.passes import backbone_features, with_rows


def training_features(trainer: Trainer) -> np.ndarray:
    """What the backbone of the first network makes of the training images: float32 (N,D)."""
    network = trainer.networks[trainer.method.networks[0]]
    found = []
    for rows, features_BD in with_rows(backbone_features(network, trainer.views, trainer.images)):
        found.append(features_BD.cpu().numpy())
        trainer.reporter.progress("features", rows.stop, len(trainer.images))
    return np.concatenate(found)


def audit_device(trainer: Trainer) -> torch.device:
    """The CPU where the device has no float64."""
    return trainer.device if trainer.device.type == "cuda" else torch.device("cpu")


def self_audit(trainer: Trainer, features_ND: np.ndarray, **options: Any) -> LabelScores:
    """Scores of the training labels, by cross-validated heads on these features. `options` are
    those of `score_labels`."""
    return score_labels(
        features_ND,
        trainer.given_N.cpu().numpy(),
        trainer.classes,
        seed=trainer.settings.seed,
        device=audit_device(trainer),
        progress=trainer.reporter.progress,
        **options,
    )
