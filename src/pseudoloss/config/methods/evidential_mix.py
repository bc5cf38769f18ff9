"""Settings of EvidentialMix."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pseudoloss.config.limits import BETWEEN_0_AND_1, within
from pseudoloss.config.methods.mixmatch import MixMatchSettings


@dataclass(frozen=True, kw_only=True)
class EvidentialMixSettings(MixMatchSettings):
    """EvidentialMix. The threshold decides what the label table flags; training compares the
    probabilities of three groups."""

    threshold: Annotated[float, BETWEEN_0_AND_1] = 0.5
    threshold_on: Literal["noisy", "clean"] = "clean"

    # EvidentialMix
    classifier_warmup: Annotated[int, within(1, 1_000_000)] = 10
    """Epochs at the start in which the classifier is trained on the given labels. The network that
    judges labels is trained on them for the whole warm-up."""
    as_released: bool = False
    """As the authors' program: 20 components, grouped by their means, instead of the paper's 3."""

    needs_warmup: ClassVar[str] = "the first groups need the losses of a trained network"
