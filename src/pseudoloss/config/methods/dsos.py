"""Settings of Dynamic Softening of Out-of-distribution Samples."""

from dataclasses import dataclass
from typing import Annotated

from pseudoloss.config.limits import BETWEEN_0_AND_1, above, within
from pseudoloss.config.methods.base import MethodSettings


@dataclass(frozen=True, kw_only=True)
class DSOSSettings(MethodSettings):
    """Dynamic Softening of Out-of-distribution Samples. The authors warm up for half of the
    epochs."""

    # Dynamic softening
    entropy_weight: Annotated[float, within(0, 1000)] = 0.4
    """Weight of the entropy of the predictions, which is minimised."""
    as_released: bool = False
    """The same entropy weight for every image, as in the released program, instead of a smaller one
    for images that are out-of-distribution."""
    softening_temperature: Annotated[float, above(0, 100)] = 0.05
    """Temperature of the softened targets."""
    correct_above: Annotated[float, BETWEEN_0_AND_1] = 0.9
    """Probability of being in-distribution above which a noisy label is replaced by the prediction
    of the last epoch."""
    warmup_mixup: bool = True
    """Mix images during the warm-up too. The authors turn it off where most labels are noisy."""
    main_batch_size: Annotated[int | None, within(2, 1_048_576)] = None
    """Images per step after the warm-up. None: half of batch_size, as the authors chose."""
