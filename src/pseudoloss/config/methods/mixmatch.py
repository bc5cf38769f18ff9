"""Settings of methods that keep some labels and train by MixMatch."""

from dataclasses import dataclass
from typing import Annotated

from pseudoloss.config.limits import ALPHA, above, within
from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class MixMatchSettings(DetectionSettings):
    """MixMatch."""

    # MixMatch
    mixup_alpha: Annotated[float, ALPHA] = 4.0
    """λ ~ Beta(α, α), folded: the first of two mixed images dominates. Larger values mix every pair
    more evenly."""
    temperature: Annotated[float, above(0, 100)] = 0.5
    """Labels and predictions are sharpened: raised to the power of 1 / temperature."""
    lambda_u: Annotated[float, within(0, 10_000)] = 25.0
    """Weight of the squared error of images without a label. The more wrong labels, the larger."""
    ramp_epochs: Annotated[int, within(1, 1_000_000)] = 16
    """Epochs after the warm-up in which lambda_u rises from 0."""
