"""Settings of Co-teaching."""

from dataclasses import dataclass
from typing import Annotated

from pseudoloss.config.limits import SHARE, within
from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class CoTeachingSettings(DetectionSettings):
    """Co-teaching."""

    # Co-teaching
    forget_rate: Annotated[float, SHARE] = 0.2
    """Share of every batch that is dropped in the end: the noise rate, if it is known."""
    forget_epochs: Annotated[int, within(1, 1_000_000)] = 10
    """Epochs over which the dropped share grows from 0 to forget_rate."""
    ensemble: bool = False
    """Predict with the mean of both networks, instead of the first one (the paper)."""
