"""Settings of Pseudo-Loss Selection."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pseudoloss.config.limits import SHARE, above, within
from pseudoloss.config.methods.detection import DetectionSettings


@dataclass(frozen=True, kw_only=True)
class PLSSettings(DetectionSettings):
    """Pseudo-Loss Selection. The defaults follow the released program."""

    # Pseudo-labels and trust
    gamma: Annotated[float, above(0, 100)] = 2.0
    """Exponent that sharpens a pseudo-label; 1 leaves the mean of the two predictions."""
    pseudo_label_norm: Literal["sum", "max"] = "sum"
    """What a pseudo-label is divided by: its sum or its maximum (the paper)."""
    pseudo_label_mode: Literal["train", "eval"] = "train"
    """Mode of the network that makes pseudo-labels: batch statistics or running statistics."""
    weighting: Literal["separate", "interpolated", "first"] = "separate"
    """Trust under mixup: two terms with a normaliser each, one interpolated trust (the paper), or
    the trust of the first image for both."""
    trust_metric: Literal["pseudo-loss", "confidence", "entropy", "threshold"] = "pseudo-loss"
    """What trust comes from: a mixture of the pseudo-loss, of the confidence of the pseudo-label or
    of its entropy; threshold: 1 where the confidence exceeds trust_threshold, else 0."""
    trust_threshold: Annotated[float, SHARE] = 0.95
    """Confidence above which a pseudo-label is trusted, with trust_metric threshold."""
    initial_trust: bool = False
    """Compute trust before the first epoch after the warm-up (the paper's Algorithm 1), instead of
    after it."""

    # Terms of the loss
    mu: Annotated[float, within(0.001, 1000)] = 0.2
    """Temperature of the contrastive loss."""
    contrast_class: Literal["mixed", "own"] = "mixed"
    """Class of an image in the contrastive loss: of its mixed target, or of its own target (the
    paper)."""
    contrast_labels: Literal["rows", "mixed"] = "rows"
    """Label similarity of mixed images: the rows of Y Yᵀ mixed, or Y_mix Y_mixᵀ (the paper)."""
    contrast_mix: Literal["shared", "separate"] = "shared"
    """Mixing in the contrastive loss: as in the classification loss, or with a λ, partners and a
    forward pass of its own (the paper; slower)."""
    balance: Annotated[float, within(0, 1000)] = 1.0
    """Weight of the class-balance term; 0 turns it off."""
    balance_prior: Literal["uniform", "given"] = "uniform"
    """Class shares it aims at: uniform, or those of the given labels (imbalanced datasets)."""
    mixup_lambda: Literal["folded", "uniform"] = "folded"
    """λ of mixup: uniform and then max(λ, 1 - λ), or just uniform (the paper)."""

    # Parts that can be switched off
    correct: bool = True
    """Replace the labels of noisy images by pseudo-labels."""
    contrast: bool = True
    """Train the contrastive loss too."""
    trust_in_classification: bool = True
    """Weight the classification loss by trust."""
    trust_in_contrast: bool = True
    """Let trust decide between class and image in the contrastive loss."""
    mixup: bool = True
    """Mix images, during the warm-up and afterwards."""

    needs_warmup: ClassVar[str] = "stage 1 needs the losses of a trained network"
