"""Settings of Early-Learning Regularisation."""

from dataclasses import dataclass
from typing import Annotated

from pseudoloss.config.limits import SHARE, within
from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class ELRSettings(DetectionSettings):
    """Early-Learning Regularisation."""

    # Early-learning regularisation
    elr_lambda: Annotated[float, within(0, 1000)] = 7.0
    """Weight of the regularisation term. 7 is the authors' value for CIFAR-100, 3 for CIFAR-10."""
    elr_beta: Annotated[float, SHARE] = 0.9
    """How much of the old target stays when a prediction is added to it. The authors use 0.9 for
    CIFAR-100, 0.7 for CIFAR-10."""
