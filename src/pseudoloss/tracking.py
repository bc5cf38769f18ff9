"""The tracking pass: what the network makes of every image, once an epoch; then both stages.

Shapes: N images, B of them at a time, C classes.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.memory import Memory
from pseudoloss.methods.pls import pseudo_loss, trust_guesses
from pseudoloss.mixture import Mixture, fit_two_modes
from pseudoloss.networks import Network
from pseudoloss.pixels import Resident
from pseudoloss.views import Views

PIXELS_AT_ONCE = 2**21  # of a channel, in one pass without gradients


class Stages(NamedTuple):
    """The mixtures of both stages; the second is None before there are guesses to judge."""

    loss: Mixture
    pseudo_loss: Mixture | None


@torch.no_grad()
def predict(network: Network, views: Views, pixels: Resident) -> Iterator[Tensor]:
    """Logits of the plain views, in evaluation mode, of one part of the images after another."""
    network.eval()
    for images_BCHW in pixels.parts(images_at_once(views)):
        yield network(views.plain(images_BCHW))[0]


@torch.no_grad()
def track(
    network: Network,
    views: Views,
    pixels: Resident,
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
    start = 0
    for logits_BC in predict(network, views, pixels):
        part = slice(start, start + len(logits_BC))
        start = part.stop
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
