"""Settings of ELR+."""

from dataclasses import dataclass
from typing import Annotated

from pseudoloss.config.limits import ALPHA, SHARE, within
from pseudoloss.config.methods.elr import ELRSettings


@dataclass(frozen=True, kw_only=True)
class ELRPlusSettings(ELRSettings):
    """ELR+: early-learning regularisation with two networks, averaged weights and mixup."""

    # ELR+
    mixup_alpha: Annotated[float, ALPHA] = 1.0
    """λ ~ Beta(α, α), folded: the first of two mixed images dominates."""
    ema_decay: Annotated[float, SHARE] = 0.997
    """How much of the averaged weights stays in a step, in the end."""
    ramp_steps: Annotated[int | None, within(1, 1_000_000_000)] = None
    """Steps of each network over which elr_lambda and ema_decay rise from almost 0. None: 41% of
    the run, as in the authors' run on CIFAR-100."""
