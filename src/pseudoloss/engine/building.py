"""Networks and the model of a run, built from its settings."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pseudoloss.config import Settings
from pseudoloss.data import Data
from pseudoloss.engine.choices import choose_normalisation, choose_padding, choose_size
from pseudoloss.engine.randomness import stream_seed
from pseudoloss.inference.ensemble import Ensemble
from pseudoloss.inference.model import Description, Model
from pseudoloss.methods.base import Ema, Method
from pseudoloss.nn import networks
from pseudoloss.nn.devices import choose_precision
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import Views, make_views


def build_views(data: Data, settings: Settings, device: torch.device) -> Views:
    size = choose_size(data.train.size, settings, data.image_size)
    mean, std = choose_normalisation(data, settings)
    return make_views(mean, std, size, choose_padding(size, settings), settings.flip, device)


def build_networks(
    method: Method, data: Data, settings: Settings, device: torch.device, resumed: bool
) -> dict[str, Network]:
    """A new network for every role. Built on the CPU, so that a seed gives the same network on
    every device; `resumed`: a checkpoint will replace the initial weights."""
    images = data.train
    built = {}
    for i, role in enumerate((*method.networks, *method.ema)):
        followed = method.ema[role].of if role in method.ema else role
        number = method.networks.index(followed) if role in method.ema else i
        stream = "network" if number == 0 else f"network {number + 1}"
        torch.manual_seed(stream_seed(settings.seed, stream))
        built[role] = networks.build(
            settings.network,
            channels=images.channels,
            size=choose_size(images.size, settings, data.image_size),
            classes=len(images.classes),
            projection=settings.projection,
            weights=None if resumed else settings.weights,
            precision=choose_precision(settings.precision, device),
            decoder=method.decoder,
        ).to(device)
        built[role].keep_norms = settings.head_start
    for role in method.ema:
        built[role].requires_grad_(False)
    return built


def build_model(
    method: Method, built: Mapping[str, Network], views: Views, data: Data, settings: Settings
) -> Model:
    """What predicts, with its description."""
    images = data.train
    mean, std = choose_normalisation(data, settings)
    members = [built[role] for role in method.predicts]
    description = Description(
        network=settings.network,
        classes=images.classes,
        channels=images.channels,
        stored=images.size,
        size=views.size,
        mean=mean,
        std=std,
        projection=settings.projection,
        fit=data.fit,
        members=len(members),
        label_type=data.label_type,
    )
    return Model(description, members[0] if len(members) == 1 else Ensemble(members), views)


@torch.no_grad()
def follow(network: Network, followed: Network, ema: Ema, state: object, skip: Tensor) -> None:
    """One step of an exponential moving average; none if `skip` is true. A few kernels for all
    parameters together."""
    decay = ema.decay(state) if callable(ema.decay) else ema.decay
    own: list[Tensor] = list(network.parameters())
    other: list[Tensor] = list(followed.parameters())
    way = list(torch._foreach_sub(other, own))
    torch._foreach_mul_(way, ~skip * (1 - decay))
    torch._foreach_add_(own, way)
    if ema.copy_buffers:
        pairs = list(zip(network.buffers(), followed.buffers(), strict=True))
        for floating in (True, False):  # one kernel copies tensors of one type
            same = [pair for pair in pairs if pair[0].is_floating_point() == floating]
            if same:
                torch._foreach_copy_([b for b, _ in same], [b for _, b in same])


@torch.no_grad()
def reset_head(network: Network, seed: int) -> None:
    """A new classifier, in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = nn.Linear(network.classifier.in_features, network.classifier.out_features)
    for old, new in zip(network.classifier.parameters(), fresh.parameters(), strict=True):
        old.copy_(new)
