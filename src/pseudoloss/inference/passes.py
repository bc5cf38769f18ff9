"""Passes over many images without gradients, chunk by chunk, in evaluation mode.

Shapes: N images, B of them in a chunk, C classes, D dimensions of the contrastive space.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.data.storage import ImageParts, chunks
from pseudoloss.inference.ensemble import AnyNetwork, networks_of
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import Views

PIXELS_AT_ONCE = 2**21  # pixels of a chunk, per channel
LARGE = 2**35  # bytes of GPU memory from which on chunks are twice as large


@torch.no_grad()
def predict(network: AnyNetwork, views: Views, pixels: ImageParts) -> Iterator[Tensor]:
    """Logits (B,C) of the plain views of one chunk after another.

    A single image is passed twice: libraries use other kernels for a batch of one, which round
    differently, and a prediction must not depend on the other images.
    """
    with network.frozen():
        for _, images_BCHW, whole in chunks(pixels, images_at_once(views)):
            yield whole(network(_plain(views, images_BCHW))[0][: len(images_BCHW)])


@torch.no_grad()
def predict_each(network: AnyNetwork, views: Views, pixels: ImageParts) -> Iterator[list[Tensor]]:
    """The same of each network of an ensemble."""
    with network.frozen():
        for _, images_BCHW, whole in chunks(pixels, images_at_once(views)):
            shown = _plain(views, images_BCHW)
            found = [member(shown)[0][: len(images_BCHW)] for member in networks_of(network)]
            yield [whole(logits_BC) for logits_BC in found]


def _plain(views: Views, images_BCHW: Tensor) -> Tensor:
    single = len(images_BCHW) == 1
    return views.plain(images_BCHW.expand(2, -1, -1, -1) if single else images_BCHW)


@torch.no_grad()
def project(network: AnyNetwork, views: Views, pixels: ImageParts) -> Tensor:
    """Normalised projections (N,D) of the plain views of all images."""
    with network.frozen():
        return torch.cat(
            [
                whole(F.normalize(network(views.plain(images_BCHW))[1].float()))
                for _, images_BCHW, whole in chunks(pixels, images_at_once(views))
            ]
        )


@torch.no_grad()
def backbone_features(network: Network, views: Views, pixels: ImageParts) -> Iterator[Tensor]:
    """Features of the plain views of one chunk after another, in float32."""
    with network.frozen():
        for _, images_BCHW, whole in chunks(pixels, images_at_once(views)):
            yield whole(network.backbone(views.plain(images_BCHW)).float())


def with_rows(chunks: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Chunks, each with its rows among all images. Chunks may differ in size."""
    start = 0
    for chunk in chunks:
        rows = slice(start, start + len(chunk))
        start = rows.stop
        yield rows, chunk


def images_at_once(views: Views) -> int:
    """Number of images in a chunk. Larger chunks keep a large GPU busier."""
    device = views.mean_C.device
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > LARGE
    times = 2 if large else 1
    return max(1, times * min(2048, PIXELS_AT_ONCE // (views.size[0] * views.size[1])))
