"""Settings of PLS with additions."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pseudoloss.config.limits import ALPHA, SHARE, above, within
from pseudoloss.config.methods.pls import PLSSettings


@dataclass(frozen=True, kw_only=True)
class PLSPlusSettings(PLSSettings):
    """PLS with additions. With the defaults, all of them are off, and it is PLS."""

    # Strong view
    strong_loss: Annotated[float, within(0, 1000)] = 0.0
    """Weight of a cross-entropy on the strong view, weighted by trust. 0: none."""
    strong_loss_ramp: Annotated[int, within(0, 1_000_000)] = 0
    """Epochs after the warm-up over which that weight rises from 0."""
    strong_view: Literal["simclr", "trivial", "rand"] = "simclr"
    """Strong view: random crop and colour jitter (the paper), TrivialAugment or RandAugment."""
    strong_cutout: Annotated[float, SHARE] = 0.0
    """Side of a square that is cut out of the strong view, as a share of the image. 0: none."""

    # How images are mixed
    mixup_alpha: Annotated[float, ALPHA] = 1.0
    """λ ~ Beta(α, α). 1: uniform. Larger values mix every pair more evenly, which delays the
    memorisation of wrong labels."""
    cutmix: Annotated[float, within(0, 1)] = 0.0
    """Share of the batches after the warm-up that are mixed by CutMix instead of mixup."""

    # Trust and pseudo-labels
    first_epoch_trust: bool = True
    """Trust all pseudo-labels in the first epoch after the warm-up, when stage 2 has seen none
    (the paper). Off: none of them."""
    debias: Annotated[float, within(0, 1)] = 0.0
    """Exponent τ of class-debiased pseudo-labels: predictions are divided by (mean prediction)^τ.
    0: off; 1: fully."""
    debias_momentum: Annotated[float, SHARE] = 0.99
    """How much of that mean stays when the predictions of a batch are added to it."""

    pseudo_label_views: Annotated[int, within(1, 2)] = 2
    """Weak views that a pseudo-label is made of. One is faster."""
    opposite_flips: bool = False
    """Mirror exactly one of these two views, where images are mirrored at all."""

    # Averaged weights (EMA)
    ema_decay: Annotated[float, SHARE] = 0.0
    """How much of the averaged weights stays in a step, such as 0.999. Their accuracy is recorded;
    the switches below use them. 0: none."""
    ema_pseudo_labels: bool = False
    """Make pseudo-labels with averaged weights."""
    ema_scoring: bool = False
    """Compute losses and pseudo-losses for both stages with averaged weights."""
    ema_prediction: bool = False
    """Predict with averaged weights."""

    # Stage 1
    loss_momentum: Annotated[float, SHARE] = 0.0
    """Flag labels by a moving average of the loss over the epochs: how much of it stays in an
    epoch. 0: by the loss of the last epoch."""
    warmup_trend: bool = False
    """Keep labels whose margin rose over the warm-up. Scores the images in every epoch of it."""
    mode_gate: Annotated[float, within(0, 100)] = 0.0
    """Flag no label while the two modes are fewer than this many standard deviations apart (d′): on
    clean data there is one mode. 0: off."""
    selection: Literal["mixture", "neighbours"] = "mixture"
    """What flags labels: a mixture of two modes, or a vote of the nearest images in the
    contrastive space."""
    neighbours: Annotated[int, within(1, 10_000)] = 200
    """Number of neighbours that vote."""
    neighbour_share: Annotated[float, above(0, 1)] = 1.0
    """A label is flagged if its votes are fewer than this share of those of the class with the
    most. 1: unless it has the most."""
    relabel: Annotated[float, above(0, 1)] = 1.0
    """An image votes for its predicted class if that has a higher probability than this. 1: all
    vote for their given label."""
