"""What is remembered of every image: a few device tensors as long as the image set.

The one mutable thing in the middle of a run. A method reads and writes it, the tracking pass
fills it, and checkpoints and the label table are views of it.

Shapes: N images, B of them in a batch, C classes.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """N images long. The tensors are filled in place and never replaced, so a captured step
    keeps seeing them."""

    loss_N: Tensor  # cross-entropy of the plain view and the given label
    predicted_N: Tensor  # class of the plain view
    p_noisy_N: Tensor  # stage 1: P(high mode) of the loss
    noisy_N: Tensor  # stage 1: the given label is taken for wrong
    guess_NC: Tensor  # the last guess
    pseudo_loss_N: Tensor  # cross-entropy of the plain view and the guess
    trust_N: Tensor  # stage 2: w, P(low mode) of the pseudo-loss; 1 where not noisy

    @classmethod
    def of(cls, given_N: Tensor, classes: int) -> "Memory":
        """Before anything is known: no image is noisy, and its guess is its given label."""
        N = len(given_N)
        zero = torch.zeros(N, device=given_N.device)
        return cls(
            loss_N=zero,
            predicted_N=given_N.clone(),
            p_noisy_N=zero.clone(),
            noisy_N=torch.zeros(N, dtype=torch.bool, device=given_N.device),
            guess_NC=F.one_hot(given_N, classes).float(),
            pseudo_loss_N=zero.clone(),
            trust_N=torch.ones(N, device=given_N.device),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
