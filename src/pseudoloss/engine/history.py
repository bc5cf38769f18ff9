"""Predictions for all images, averaged over the epochs.

Early in training a network predicts the right class of images with wrong labels; later it may learn
their labels by heart. The mean over epochs keeps what it knew (benchmarks/train_table.py).

Shapes: N images, B of them in a chunk, C classes.
"""

import torch
from torch import Tensor

MOST_BYTES = 2**30  # with more predictions than fit, only those of the last epoch are used
POWER = 8  # an epoch counts by this power of its accuracy on held-out images


class History:
    """Logarithms of the probabilities of all classes: the latest, and a weighted sum."""

    def __init__(self, images: int, classes: int, device: torch.device) -> None:
        self.sum_NC = torch.zeros(images, classes, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.latest_NC = torch.zeros(images, classes, device=device)
        self.stored = False  # `latest_NC` was filled since this was set to False

    @staticmethod
    def fits(images: int, classes: int) -> bool:
        return 2 * 4 * images * classes <= MOST_BYTES

    def store(self, rows: slice, logits_BC: Tensor) -> None:
        """Keep the latest predictions. May be captured: then only the tensors change."""
        self.latest_NC[rows] = logits_BC.float().log_softmax(1)
        self.stored = True

    def add(self, accuracy: float | None) -> None:
        """Add the latest predictions. `accuracy`: of this epoch on held-out images, in percent, if
        there are any."""
        weight = 1.0 if accuracy is None else max(accuracy / 100, 0.01) ** POWER
        self.sum_NC += weight * self.latest_NC
        self.weight += weight

    def mean(self, rows: slice) -> Tensor:
        return self.sum_NC[rows] / self.weight.float()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"sum_NC": self.sum_NC, "weight": self.weight}
