"""Settings of mixup."""

from dataclasses import dataclass
from typing import Annotated

from pseudoloss.config.limits import ALPHA
from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class MixupSettings(DetectionSettings):
    """mixup on the given labels."""

    # Mixup
    mixup_alpha: Annotated[float, ALPHA] = 1.0
    """λ ~ Beta(α, α). 1: uniform. Larger values mix every pair more evenly, which delays the
    memorisation of wrong labels."""
