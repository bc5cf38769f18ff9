"""What several methods compute their losses with.

Shapes: B images in a batch, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_BC: Tensor, target_BC: Tensor) -> Tensor:
    """-Σ target·log softmax(logits) of each image; in float32, whatever the logits are in."""
    return -(target_BC * F.log_softmax(logits_BC.float(), dim=1)).sum(1)  # row 10


def mean_over(loss_B: Tensor, chosen_B: Tensor) -> Tensor:
    """The mean over the chosen images; 0 if there are none."""
    return torch.where(chosen_B, loss_B, 0).sum() / chosen_B.sum().clamp(min=1)
