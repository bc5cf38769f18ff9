"""Passes over images without gradients, one chunk after another.

Shapes: N images, B of them at a time, C classes, D dimensions of the contrastive space.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.data.storage import ImageParts
from pseudoloss.nn.views import Views

PIXELS_AT_ONCE = 2**21  # of a channel, in one pass without gradients
LARGE = 2**35  # bytes of memory of a large GPU


@torch.no_grad()
def predict(network: Any, views: Views, images: ImageParts) -> Iterator[Tensor]:
    """Logits of the plain views, in evaluation mode, for one chunk of images after another.

    A single image is shown twice: libraries compute a batch of one with other kernels, which round
    differently, and a prediction must not depend on what else is predicted.
    """
    with network.frozen():
        for images_BCHW in images.parts(images_at_once(views)):
            alone = len(images_BCHW) == 1
            shown_BCHW = images_BCHW.expand(2, -1, -1, -1) if alone else images_BCHW
            yield network(views.plain(shown_BCHW))[0][: len(images_BCHW)]


@torch.no_grad()
def project(network: Any, views: Views, images: ImageParts) -> Tensor:
    """All images in the contrastive space, by their plain views, L2-normalised: (N,D)."""
    with network.frozen():
        return torch.cat(
            [
                F.normalize(network(views.plain(images_BCHW))[1].float())
                for images_BCHW in images.parts(images_at_once(views))
            ]
        )


def with_rows(chunks: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of something, each with its rows. Chunks may differ in size."""
    start = 0
    for chunk in chunks:
        rows = slice(start, start + len(chunk))
        start = rows.stop
        yield rows, chunk


def images_at_once(views: Views) -> int:
    """Images in a pass without gradients; twice as many keep a large GPU busier."""
    device = views.mean_C.device
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > LARGE
    times = 2 if large else 1
    return max(1, times * min(2048, PIXELS_AT_ONCE // (views.size[0] * views.size[1])))
