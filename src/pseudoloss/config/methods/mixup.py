"""Settings of mixup."""

from dataclasses import dataclass

from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class MixupSettings(DetectionSettings):
    """mixup on the given labels."""
