"""Settings of Jo-SRC."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pseudoloss.config.limits import BETWEEN_0_AND_1, SHARE, above, within
from pseudoloss.config.methods.base import MethodSettings


@dataclass(frozen=True, kw_only=True)
class JoSRCSettings(MethodSettings):
    """Jo-SRC. The defaults are the authors' for CIFAR-100; they warm up for 10 of 200 epochs."""

    # Jo-SRC
    label_smoothing: Annotated[float, SHARE] = 0.6
    """Share of a label that is spread over the other classes; the given class must keep the largest
    share. A prediction is compared with this soft label, so it also says how sure the network
    should be."""
    clean_threshold: Annotated[float, BETWEEN_0_AND_1] = 0.75
    """A label is clean if the divergence of prediction and label, in bits, is at most 1 minus a
    threshold. This is the threshold at the end of the warm-up, in which it rises from 0."""
    last_clean_threshold: Annotated[float, BETWEEN_0_AND_1] = 0.95
    """The threshold at the end of the run. It rises linearly after the warm-up."""
    consistency: Annotated[float, within(0, 1)] = 0.5
    """Weight of the divergence of two views; the classification loss has the rest."""
    ema_decay: Annotated[float, SHARE] = 0.99
    """How much of the averaged weights, which correct labels, stays in a step."""
    largest_divergence: Annotated[float, above(0, 1_000_000)] = 10.0
    """Bits up to which the two views of an out-of-distribution image are pushed apart. Not in the
    paper, where nothing bounds them."""

    needs_warmup: ClassVar[str] = "the first decisions need a trained network"
