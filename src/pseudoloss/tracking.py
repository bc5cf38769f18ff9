"""The tracking pass: what the network makes of every image, once an epoch; then both stages.

Shapes: N images, B of them at a time, C classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.memory import Memory
from pseudoloss.methods.pls import pseudo_loss, trust_guesses
from pseudoloss.mixture import Mixture, fit_two_modes
from pseudoloss.networks import Network
from pseudoloss.views import Views

PIXELS_AT_ONCE = 2**21  # of a channel, in one pass without gradients


class Stages(NamedTuple):
    """The mixtures of both stages; the second is None before there are guesses to judge."""

    loss: Mixture
    pseudo_loss: Mixture | None


@torch.no_grad()
def predict(network: Network, views: Views, images_NCHW: Tensor) -> Tensor:
    """Logits of the plain views, in evaluation mode; the images may lie on another device."""
    network.eval()
    device = views.mean_C.device
    parts = images_NCHW.split(images_at_once(views))
    return torch.cat([network(views.plain(part.to(device)))[0] for part in parts])


@torch.no_grad()
def track(
    network: Network,
    views: Views,
    images_NCHW: Tensor,
    given_N: Tensor,
    memory: Memory,
    *,
    is_noisy: Callable[[Mixture], Tensor],
    judge_guesses: bool,
) -> Stages:
    """Fill the memory: losses and predictions of all images, then `noisy`, then `trust`.

    `is_noisy` is stage 1's rule. Stage 2 waits until an epoch has left guesses (`judge_guesses`);
    until then trust is 1 (row 11).
    """
    network.eval()
    at_once = images_at_once(views)
    for start in range(0, len(images_NCHW), at_once):
        part = slice(start, start + at_once)
        logits_BC, _ = network(views.plain(images_NCHW[part]))
        memory.loss_N[part] = F.cross_entropy(logits_BC, given_N[part], reduction="none")
        memory.pseudo_loss_N[part] = pseudo_loss(memory.guesses(part), logits_BC)
        memory.predicted_N[part] = logits_BC.argmax(1)

    stage1 = fit_two_modes(memory.loss_N)
    memory.p_noisy_N.copy_(1 - stage1.low_N)
    memory.noisy_N.copy_(is_noisy(stage1))
    if not judge_guesses:
        return Stages(stage1, None)
    trust_N, stage2 = trust_guesses(memory.pseudo_loss_N, memory.noisy_N)
    memory.trust_N.copy_(trust_N)
    return Stages(stage1, stage2)


def images_at_once(views: Views) -> int:
    """Images in a pass without gradients."""
    return max(1, min(2048, PIXELS_AT_ONCE // (views.size[0] * views.size[1])))
