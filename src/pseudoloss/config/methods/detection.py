"""How labels are flagged: settings of most methods."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pseudoloss.config.limits import BETWEEN_0_AND_1
from pseudoloss.config.methods.base import MethodSettings


@dataclass(frozen=True, kw_only=True)
class DetectionSettings(MethodSettings):
    """How a two-mode mixture flags labels as noisy: PLS trains on the result, others report it."""

    # Detecting noisy labels
    threshold: Annotated[float, BETWEEN_0_AND_1] = 0.95
    """Probability above which a label is flagged. The paper of PLS uses 0.5 at 80% noise."""
    threshold_on: Literal["noisy", "clean"] = "noisy"
    """noisy: flagged if P(high mode) > threshold; clean: kept only if P(low mode) > threshold."""
    noise_metric: Literal["loss", "capped-loss", "agreement", "disagreement", "js", "kl"] = "loss"
    """What the mixture is fitted to: the loss; the loss, at most that of a uniform prediction; the
    agreement or disagreement of neighbours in the contrastive space; the Jensen-Shannon divergence
    of prediction and label; or the KL divergence of two views (which hardly sees the label)."""
    protect_rare_classes: bool = True
    """Keep the labels with the lower losses of a class when all of them would be flagged while most
    labels of the other classes are kept. Not in the paper."""
