"""Settings of Dynamic Bootstrapping."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pseudoloss.config.limits import ALPHA, BETWEEN_0_AND_1, within
from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class DynamicBootstrappingSettings(DetectionSettings):
    """Dynamic Bootstrapping (M-correction)."""

    # Detecting noisy labels
    threshold: Annotated[float, BETWEEN_0_AND_1] = 0.5
    """Probability above which a label is flagged. Above 0.5 the prediction counts more than the
    label."""

    # Dynamic bootstrapping
    bootstrapping: Literal["hard", "soft-to-hard"] = "hard"
    """hard: correct labels by the predicted class, under mixup (M-DYR-H); soft-to-hard: by the
    prediction, sharpened more and more, and mix images by how clean their labels are
    (MD-DYR-SH)."""
    mixup_alpha: Annotated[float, ALPHA] = 32.0
    """λ ~ Beta(α, α) of mixup. 32 mixes every pair almost evenly."""
    balance: Annotated[float, within(0, 1000)] = 1.0
    """Weight of the class-balance term; 0 turns it off."""
    guided_epochs: Annotated[int, within(0, 1_000_000)] = 5
    """With soft-to-hard: epochs of mixup by how clean the labels are, before labels are
    corrected."""

    needs_warmup: ClassVar[str] = "its mixture needs the losses of a trained network"
