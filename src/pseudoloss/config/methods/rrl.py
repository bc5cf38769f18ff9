"""Settings of Robust Representation Learning."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pseudoloss.config.limits import ALPHA, SHARE, within
from pseudoloss.config.methods.base import MethodSettings


@dataclass(frozen=True, kw_only=True)
class RRLSettings(MethodSettings):
    """Robust Representation Learning."""

    # Terms of the loss
    contrast_temperature: Annotated[float, within(0.001, 1000)] = 0.3
    """Temperature of both contrastive losses and of the weights of neighbours."""
    instance_weight: Annotated[float, within(0, 1000)] = 1.0
    """Weight of the contrastive loss between two views of an image."""
    prototype_weight: Annotated[float, within(0, 1000)] = 5.0
    """Weight of the contrastive loss between mixed images and class prototypes, after its ramp."""
    prototype_ramp: Annotated[int, within(0, 1_000_000)] = 40
    """Epochs in which the weight of the prototypes rises from 1, if it is larger. The authors use
    40 for CIFAR-100, 0 (no ramp) for CIFAR-10."""
    reconstruction_weight: Annotated[float, within(0, 1000)] = 1.0
    """Weight of the reconstruction error of the features."""
    mixup_alpha: Annotated[float, ALPHA] = 8.0
    """Images are mixed with λ ~ Beta(α, α)."""

    # Correcting labels
    neighbours: Annotated[int, within(1, 10_000)] = 200
    """Neighbours whose soft labels are averaged."""
    keep_threshold: Annotated[float | None, SHARE] = None
    """A given label is kept if its share of the soft label is above this. None: one over the number
    of classes, at least 0.02 (the authors' values: 0.02 for CIFAR-100, 0.1 for CIFAR-10)."""
    use_threshold: Annotated[float, SHARE] = 0.9
    """An image is trained on its hard label if the largest share of its soft label is above
    this."""
    as_released: bool = False
    """AugMix as in the released program: one chain of operations, which dims most images."""

    needs_warmup: ClassVar[str] = "soft labels need a trained network"
