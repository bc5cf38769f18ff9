"""Settings of cross-entropy."""

from dataclasses import dataclass

from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class CESettings(DetectionSettings):
    """Cross-entropy on the given labels."""
