"""What a method may ask about all images: implements `methods.base.Scorer`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pseudoloss.data.storage import ImageParts, chunks
from pseudoloss.engine.history import History
from pseudoloss.inference.passes import images_at_once, predict, predict_each, project, with_rows
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import WEAK_DRAWS, Views


class ImageScorer:
    """Shows all images to the networks, without gradients.

    `predictor` is the network or ensemble that predicts, `networks` are all of them by role.
    `draws` gives so many uniform random numbers per image, for weak views. Predictions for plain
    views are stored in `history`, if there is one.
    """

    def __init__(
        self,
        predictor: Any,
        networks: Mapping[str, Network],
        views: Views,
        images: ImageParts,
        given_N: Tensor,
        classes: int,
        weak_is_plain: bool,
        draws: Callable[[int], Tensor],
        history: History | None = None,
    ) -> None:
        self.predictor, self.networks, self.views = predictor, networks, views
        self.images, self.given_N, self.classes = images, given_N, classes
        self.weak_is_plain = weak_is_plain
        self.draws, self.history = draws, history

    @torch.no_grad()
    def logits(
        self, *, plain: bool = True, weak: int = 0, role: str | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        network = self.predictor if role is None else self.networks[role]
        if plain and not weak:
            for rows, logits_BC in with_rows(predict(network, self.views, self.images)):
                if role is None and self.history is not None:
                    self.history.store(rows, logits_BC)
                yield rows, [logits_BC]
            return
        draws_NK = self.draws(weak * WEAK_DRAWS)
        with network.frozen():
            end = 0
            for own, images_BCHW, whole in chunks(self.images, images_at_once(self.views)):
                found = [network(self.views.plain(images_BCHW))[0]] if plain else []
                for draws_BK in draws_NK[own].split(WEAK_DRAWS, dim=1):
                    found.append(network(self.views.weak(images_BCHW, draws_BK))[0])
                found = [whole(logits_BC) for logits_BC in found]
                start, end = end, end + len(found[0])
                yield slice(start, end), found

    def members(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """The mean is stored in `history`, as `logits` does."""
        end = 0
        for found in predict_each(self.predictor, self.views, self.images):
            start, end = end, end + len(found[0])
            rows = slice(start, end)
            if self.history is not None:
                self.history.store(rows, torch.stack(found).mean(0))
            yield rows, found

    def projections(self, *, role: str | None = None) -> Tensor:
        network = self.predictor if role is None else self.networks[role]
        return project(network, self.views, self.images)
