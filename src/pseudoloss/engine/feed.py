"""What changes from step to step: the order of the images and the random numbers.

They are kept in tensors that are filled in place, so that a step can be captured as one graph: it
reads the batch whose number is in `Feed.step`.

Shapes: N images, S steps, B images in a batch (in P parts of b each), K random numbers per image.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.data.storage import DeviceImages
from pseudoloss.engine.shares import check_batch
from pseudoloss.errors import InputError
from pseudoloss.methods.base import Batch, Mix, Step, Stream

BLOCK = 64  # steps whose random numbers are drawn at once


class Feed:
    """Batches for all steps of a method that have the same batch size and streams."""

    def __init__(
        self,
        images: DeviceImages,
        given_N: Tensor,
        streams: Sequence[Stream],
        batch_size: int,
        parts: int,
        draws: int,
        mixes: int,
    ) -> None:
        device = given_N.device
        self.images, self.given_N, self.streams, self.parts = images, given_N, streams, parts
        self.sizes = [stream.size or batch_size for stream in streams]
        for size in self.sizes:
            if size % parts:
                raise InputError(f"--accumulate {parts} must divide batches of {size} images")
        B = sum(self.sizes)
        if distributed.active():
            check_batch(B, parts)
        most = max(len(images) // self.sizes[0], 1)
        self.order_SB = torch.zeros(most, B, dtype=torch.long, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.draws_SBK = torch.zeros(BLOCK, B, draws, device=device)
        self.partners = [
            torch.zeros(BLOCK, parts, B // parts, dtype=torch.long, device=device)
            for _ in range(mixes)
        ]
        self.lambdas = [torch.ones(BLOCK, parts, device=device) for _ in range(mixes)]

    def steps(self, state: Any) -> int:
        """Steps in an epoch. The images of the last, incomplete batch are left out; the order is
        another one in every epoch."""
        mask = self.streams[0].mask
        count = len(self.images) if mask is None else int(mask(state).sum())
        return max((count or len(self.images)) // self.sizes[0], 1)

    def shuffle(self, state: Any, random: torch.Generator) -> Tensor:
        """Draw the order of an epoch: (S,B) for its S steps."""
        S = self.steps(state)
        rows = [
            self._order(stream, S * size, state, random).view(S, self.parts, size // self.parts)
            for stream, size in zip(self.streams, self.sizes, strict=True)
        ]
        order_SB = self.order_SB[:S]
        order_SB.copy_(torch.cat(rows, dim=2).view(S, -1))
        self.step.zero_()
        return order_SB

    def _order(self, stream: Stream, length: int, state: Any, random: torch.Generator) -> Tensor:
        """Images of a stream in random order, repeated where they are too few."""
        device = self.given_N.device
        chosen = None
        if stream.mask is not None:
            chosen = stream.mask(state).nonzero().flatten()
            chosen = chosen if len(chosen) else None
        count = len(self.images) if chosen is None else len(chosen)
        rounds = -(-length // count)
        orders = [torch.randperm(count, generator=random, device=device) for _ in range(rounds)]
        order = (orders[0] if rounds == 1 else torch.cat(orders))[:length]
        return order if chosen is None else chosen[order]

    def draw(self, step: Step, random: torch.Generator) -> None:
        """Random numbers for the next BLOCK steps."""
        self.draws_SBK.uniform_(generator=random)
        device = self.given_N.device
        for i, (partner_SPb, lam_SP) in enumerate(zip(self.partners, self.lambdas, strict=True)):
            keys_SPb = torch.rand(partner_SPb.shape, generator=random, device=device)
            partner_SPb.copy_(keys_SPb.argsort(2))
            lam_SP.uniform_(generator=random)
            if i < len(step.lambdas):  # other steps of the method may need more
                lam_SP.copy_(step.lambdas[i](lam_SP))

    def batches(
        self, step: Step, state: Any, random: torch.Generator, limit: int | None = None
    ) -> Iterator[None]:
        """One after another, each batch of an epoch, ready for `batch`; or the first `limit`."""
        order_SB = self.shuffle(state, random)[:limit]
        for i, _ in enumerate(self.images.batches(order_SB)):
            if i % BLOCK == 0:
                self.draw(step, random)
            yield

    def batch(self, part: int) -> Batch:
        """The images of the present step: one of the parts in which it is computed."""
        index_B = self.order_SB.index_select(0, self.step).squeeze(0)
        now = self.step % BLOCK
        size = len(index_B) // self.parts
        rows = slice(part * size, (part + 1) * size)
        return Batch(
            index_B=index_B[rows],
            images_BCHW=self.images.batch(index_B, rows),
            given_B=self.given_N[index_B[rows]],
            mixes=tuple(
                Mix(
                    partner_SPb.index_select(0, now)[0, part],
                    lam_SP.index_select(0, now)[0, part],
                )
                for partner_SPb, lam_SP in zip(self.partners, self.lambdas, strict=True)
            ),
            draws_BK=self.draws_SBK.index_select(0, now)[0, rows],
        )
