"""A new method in one file: Generalised Cross-Entropy (Zhang and Sabuncu, NeurIPS 2018).

    python examples/gce_method.py            # trains on digits with 40% wrong labels

docs/add-a-method.md explains every step. Shapes: B images in a batch, C classes.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import pseudoloss as pl
from pseudoloss.config import METHOD_SETTINGS, DetectionSettings, Settings
from pseudoloss.methods import BUILDERS, Given
from pseudoloss.methods.base import NET, Batch, Detector, Method, Outputs, Phase, Step, ViewBatch
from pseudoloss.nn.views import WEAK_DRAWS, Views


# 1. Its settings: a default, and one sentence that becomes the help text.
@dataclass(frozen=True, kw_only=True)
class GCESettings(DetectionSettings):
    # Generalised cross-entropy
    q: float = 0.7
    """Between cross-entropy (towards 0) and the mean absolute error (1)."""


# 2. Its equations: pure functions of tensors.
def generalised_cross_entropy(logits_BC: Tensor, given_B: Tensor, q: float) -> Tensor:
    """L_q = (1 - p_y^q) / q, the mean over the batch."""
    p_B = logits_BC.float().softmax(1).gather(1, given_B[:, None])[:, 0]
    return ((1 - p_B.clamp(min=1e-7) ** q) / q).mean()


# 3. The method: phases, views and the loss of a step. The base class has defaults for the rest.
class GCE(Method):
    def __init__(self, detector: Detector, epochs: int, warmup: int, q: float) -> None:
        super().__init__(detector, warmup)
        self.epochs, self.q = epochs, q

    def phases(self) -> tuple[Phase, ...]:
        step = Step(self.show, self.loss, draws=WEAK_DRAWS)
        return (
            Phase("warm-up", self.warmup, (step,)),
            Phase("gce", self.epochs - self.warmup, (step,)),
        )

    def show(self, views: Views, batch: Batch) -> dict[str, ViewBatch]:
        weak_view = views.weak(batch.images_BCHW, batch.draws_BK)
        return {NET: ViewBatch(no_grad=[], with_grad=[weak_view])}

    def loss(self, outputs: dict[str, Outputs], batch: Batch, state: Any) -> Tensor:
        ((logits_BC, _),) = outputs[NET].with_grad
        return generalised_cross_entropy(logits_BC, batch.given_B, self.q)


# 4. Its name: how it is built from the settings.
def build_gce(settings: Settings, given: Given) -> GCE:
    own = settings.method_settings
    assert isinstance(own, GCESettings)
    return GCE(given.detector, settings.epochs, settings.warmup_epochs, own.q)


METHOD_SETTINGS["gce"] = GCESettings
BUILDERS["gce"] = build_gce

if __name__ == "__main__":
    run = pl.train("digits", preset="digits-id40", method="gce", q=0.7)
    print(run.labels[run.labels.is_label_issue].head())
