"""Settings of DivideMix."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pseudoloss.config.limits import BETWEEN_0_AND_1, within
from pseudoloss.config.methods.mixmatch import MixMatchSettings


@dataclass(frozen=True, kw_only=True)
class DivideMixSettings(MixMatchSettings):
    """DivideMix. A network drops the labels that it flags."""

    threshold: Annotated[float, BETWEEN_0_AND_1] = 0.5
    threshold_on: Literal["noisy", "clean"] = "clean"

    # DivideMix
    loss_epochs: Annotated[int, within(1, 100)] = 1
    """Epochs whose losses are averaged before labels are split by them. The authors use 5 at 90%
    noise."""
    warmup_penalty: Annotated[float, within(0, 1000)] = 0.0
    """Weight of a penalty for confident predictions in the warm-up. The authors use 1 on asymmetric
    noise, else 0."""

    needs_warmup: ClassVar[str] = "the first split needs the losses of a trained network"
