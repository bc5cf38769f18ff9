"""Several networks that predict together.

Shapes: B images, C classes, D dimensions of the contrastive space.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from pseudoloss.nn.networks import Network


class Ensemble(nn.Module):
    """Networks whose logits are averaged. It is called like a `Network`.

    The names of its parameters are those of the networks behind "0.", "1." and so on.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        for i, network in enumerate(networks):
            self.add_module(str(i), network)

    @property
    def networks(self) -> list[Network]:
        return cast(list[Network], list(self.children()))

    def forward(self, x_BChw: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of the logits (B,C), and the projection (B,D) of the first network."""
        logits, projections = zip(*(network(x_BChw) for network in self.networks), strict=True)
        return torch.stack(logits).mean(0), projections[0]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """As `Network.frozen`, for all networks."""
        with ExitStack() as stack:
            for network in self.networks:
                stack.enter_context(network.frozen())
            yield

    @property
    def fused(self) -> bool:
        return self.networks[0].fused

    @fused.setter
    def fused(self, fused: bool) -> None:
        for network in self.networks:
            network.fused = fused

    @property
    def precision(self) -> torch.dtype:
        return self.networks[0].precision

    @precision.setter
    def precision(self, precision: torch.dtype) -> None:
        for network in self.networks:
            network.precision = precision


AnyNetwork = Network | Ensemble


def networks_of(network: AnyNetwork) -> list[Network]:
    """The networks of an ensemble; the network itself otherwise."""
    return network.networks if isinstance(network, Ensemble) else [network]
