"""The tracking pass: what the network makes of every image, once an epoch (`look`); then both
stages (`judge`). And what other metrics (metrics.py) make of it, where they are asked for.

Shapes: N images, B of them at a time, C classes, D dimensions of the contrastive space, K random
numbers an image.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.data.storage import ImageParts
from pseudoloss.methods import metrics
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import Mixture, fit_two_modes
from pseudoloss.methods.pls import pseudo_loss, trust_guesses
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import WEAK_DRAWS, Views

PIXELS_AT_ONCE = 2**21  # of a channel, in one pass without gradients
LARGE = 2**35  # bytes of a GPU's memory
SHARES_AT_ONCE = 2**22  # of guesses, a number a class

# What is compared (capped-loss orders images as the loss does, but for ties), and what `look` has
# found already.
NOISE_METRICS = ("loss", "agreement", "disagreement", "js", "kl")
NEEDS_NO_PASS = ("loss", "capped-loss")


class Stages(NamedTuple):
    """The mixtures of both stages, of the loss and the pseudo-loss or of what was chosen in their
    place; the second is None before there are guesses to judge, and where a threshold judges."""

    loss: Mixture
    pseudo_loss: Mixture | None


@torch.no_grad()
def predict(network: Network, views: Views, pixels: ImageParts) -> Iterator[Tensor]:
    """Logits of the plain views, in evaluation mode, of one part of the images after another.

    A lone image is shown twice: libraries compute a batch of one by other kernels, which round
    otherwise, and a prediction is not to depend on what else is predicted.
    """
    with network.frozen():
        for images_BCHW in pixels.parts(images_at_once(views)):
            alone = len(images_BCHW) == 1
            shown_BCHW = images_BCHW.expand(2, -1, -1, -1) if alone else images_BCHW
            yield network(views.plain(shown_BCHW))[0][: len(images_BCHW)]


def the_loss(memory: Memory) -> Tensor:
    """What stage 1 looks at, by default."""
    return memory.loss_N


def trust_by_pseudo_loss(memory: Memory) -> tuple[Tensor, Mixture | None]:
    """Stage 2, by default."""
    return trust_guesses(memory.pseudo_loss_N, memory.noisy_N)


@torch.no_grad()
def look(
    network: Network, views: Views, pixels: ImageParts, given_N: Tensor, memory: Memory
) -> None:
    """Fill the memory with losses, pseudo-losses and predictions of all images."""
    for part, logits_BC in _placed(predict(network, views, pixels)):
        memory.loss_N[part] = F.cross_entropy(logits_BC, given_N[part], reduction="none")
        memory.pseudo_loss_N[part] = pseudo_loss(memory.guesses(part), logits_BC)
        memory.predicted_N[part] = logits_BC.argmax(1)


@torch.no_grad()
def judge(
    memory: Memory,
    *,
    is_noisy: Callable[[Mixture], Tensor],
    judge_guesses: bool,
    noise_metric: Callable[[Memory], Tensor] = the_loss,
    trust: Callable[[Memory], tuple[Tensor, Mixture | None]] = trust_by_pseudo_loss,
) -> Stages:
    """Fill the memory with `noisy`, then with `trust`.

    Stage 1 fits its mixture to `noise_metric`; `is_noisy` is its rule. Stage 2 (`trust`) waits
    until an epoch has left guesses (`judge_guesses`); until then trust is 1 (row 11).
    """
    stage1 = fit_two_modes(noise_metric(memory))
    memory.p_noisy_N.copy_(1 - stage1.low_N)
    memory.noisy_N.copy_(is_noisy(stage1))
    if not judge_guesses:
        return Stages(stage1, None)
    trust_N, stage2 = trust(memory)
    memory.trust_N.copy_(trust_N)
    return Stages(stage1, stage2)


@torch.no_grad()
def guess(
    network: Network,
    views: Views,
    pixels: ImageParts,
    memory: Memory,
    draws_NK: Tensor,
    guess_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Leave guesses in the memory as an epoch does, but of images that are not trained on: from two
    weak views, and in evaluation mode, since they are to change nothing. `draws_NK` are for both.
    """
    with network.frozen():
        for part, images_BCHW in _parts(views, pixels):
            first_BC, second_BC = (
                network(views.weak(images_BCHW, draws_BK))[0]
                for draws_BK in draws_NK[part].split(WEAK_DRAWS, dim=1)
            )
            index_B = torch.arange(part.start, part.stop, device=images_BCHW.device)
            memory.remember_guesses(index_B, guess_of(first_BC, second_BC))


def noise_metrics(
    names: Collection[str],
    network: Network,
    views: Views,
    pixels: ImageParts,
    given_N: Tensor,
    memory: Memory,
    draws_NK: Tensor,
) -> dict[str, Tensor]:
    """Metrics of stage 1, of all images. `draws_NK` are for weak views, which kl looks at."""
    found: dict[str, Tensor] = {}
    if "loss" in names:
        found["loss"] = memory.loss_N
    if "capped-loss" in names:
        found["capped-loss"] = metrics.capped(memory.loss_N, memory.classes)
    if "agreement" in names or "disagreement" in names:
        near = metrics.neighbours(project(network, views, pixels))
        if "agreement" in names:
            found["agreement"] = metrics.agreement(near, given_N)
        if "disagreement" in names:
            found["disagreement"] = metrics.disagreement(near, given_N, memory.classes)
    if "js" in names:
        found["js"] = torch.cat(
            [
                metrics.label_divergence(logits_BC, given_N[part])
                for part, logits_BC in _placed(predict(network, views, pixels))
            ]
        )
    if "kl" in names:
        found["kl"] = diverge(network, views, pixels, draws_NK)
    return found


@torch.no_grad()
def project(network: Network, views: Views, pixels: ImageParts) -> Tensor:
    """All images in the contrastive space, by their plain views: (N, D)."""
    with network.frozen():
        return torch.cat(
            [
                metrics.normalise(network(views.plain(images_BCHW))[1])
                for images_BCHW in pixels.parts(images_at_once(views))
            ]
        )


@torch.no_grad()
def diverge(network: Network, views: Views, pixels: ImageParts, draws_NK: Tensor) -> Tensor:
    """How far the predictions of the plain view and of a weak one differ, for all images; NaN where
    the two views are the same by the settings."""
    found = []
    with network.frozen():
        for part, images_BCHW in _parts(views, pixels):
            plain_BC, _ = network(views.plain(images_BCHW))
            weak_BC, _ = network(views.weak(images_BCHW, draws_NK[part]))
            found_B = metrics.view_divergence(plain_BC, weak_BC)
            same = views.weak_is_plain(images_BCHW.shape[2:])
            found.append(torch.full_like(found_B, torch.nan) if same else found_B)
    return torch.cat(found)


def of_guesses(metric: Callable[[Tensor], Tensor], memory: Memory) -> Tensor:
    """A metric of the remembered guesses of all images."""
    size = max(1, SHARES_AT_ONCE // memory.classes)
    parts = [slice(start, start + size) for start in range(0, len(memory.trust_N), size)]
    return torch.cat([metric(memory.guesses(part)) for part in parts])


def _parts(views: Views, pixels: ImageParts) -> Iterator[tuple[slice, Tensor]]:
    """All images, and the places of those that come together."""
    return _placed(pixels.parts(images_at_once(views)))


def _placed(parts: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """What comes of some images after others, with their places. Parts need not be of one size."""
    start = 0
    for values_B in parts:
        part = slice(start, start + len(values_B))
        start = part.stop
        yield part, values_B


def images_at_once(views: Views) -> int:
    """Images in a pass without gradients. Twice as many keep a large GPU busier."""
    device = views.mean_C.device
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > LARGE
    times = 2 if large else 1
    return max(1, times * min(2048, PIXELS_AT_ONCE // (views.size[0] * views.size[1])))
