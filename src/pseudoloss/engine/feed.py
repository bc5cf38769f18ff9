"""What changes from step to step: the order of the images and the random numbers.

They are kept in tensors that are filled in place, so that a step can be captured as one graph: it
reads the batch whose number is in `Feed.step`.

Shapes: N images, S steps, B images in a batch (in P parts of b each), K random numbers per image.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.data.storage import DeviceImages
from pseudoloss.engine.shares import check_batch
from pseudoloss.errors import InputError
from pseudoloss.methods.base import Batch, Mix, Step, Stream

BLOCK = 64  # steps whose random numbers are drawn at once


class Place(NamedTuple):
    """How far an epoch has come."""

    step: int  # steps that are done
    order_SB: Tensor  # of the images
    random: Tensor  # state of the generator before it drew the present block


def set_state(random: torch.Generator, state: Tensor) -> None:
    """Continue a generator. Another kind of device has another kind of state; there it continues
    with numbers of its own."""
    with suppress(RuntimeError):
        random.set_state(state)


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
            if distributed.active():  # of each stream, since a view may be of one stream alone
                check_batch(size, parts)
        B = sum(self.sizes)
        most = max(len(images) // self.sizes[0], 1)
        self.order_SB = torch.zeros(most, B, dtype=torch.long, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.present_order_SB = self.order_SB[:0]  # the part of it that the epoch has
        self.taken = 0  # batches of the epoch
        self.block_random = torch.empty(0, dtype=torch.uint8)
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
        self.present_order_SB = order_SB
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
        self,
        step: Step,
        state: Any,
        random: torch.Generator,
        limit: int | None = None,
        place: Place | None = None,
    ) -> Iterator[None]:
        """One after another, each batch of an epoch, ready for `batch`; or the first `limit`. With
        the `place` that an earlier process has come to, those that are left."""
        start = 0 if place is None else place.step
        if place is None:
            order_SB = self.shuffle(state, random)[:limit]
        else:
            order_SB = self.back_to(place, step, random)
        for i, _ in enumerate(self.images.batches(order_SB[start:]), start):
            if i % BLOCK == 0:
                self.block_random = random.get_state()
                self.draw(step, random)
            self.taken = i + 1
            yield

    def place(self, random: torch.Generator) -> Place:
        """The place in the epoch, after a step."""
        is_new_block = self.taken % BLOCK == 0
        state = random.get_state() if is_new_block else self.block_random
        return Place(self.taken, self.present_order_SB, state)

    def back_to(self, place: Place, step: Step, random: torch.Generator) -> Tensor:
        """Go to a place in the epoch, and return the order of its images; ValueError if the place
        is one of another run."""
        S, B = place.order_SB.shape
        if self.order_SB.shape[1] != B or not 0 <= place.step <= S <= len(self.order_SB):
            raise ValueError("its epoch has another number of steps or images")
        self.present_order_SB = self.order_SB[:S].copy_(place.order_SB)
        self.step.fill_(place.step)
        self.taken, self.block_random = place.step, place.random
        set_state(random, place.random)
        if place.step % BLOCK:
            self.draw(step, random)
        return self.present_order_SB

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
