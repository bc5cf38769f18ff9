"""Where the images of a set lie while it is trained on: on the device, or in the host's memory.

Shapes: N images, B of them at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

SLOTS = 3  # batches on their way to the device
MOST_OF_THE_DEVICE = 0.4  # share of its free memory that images may take; the rest is for training


class Resident:
    """All on the device: a batch is picked there, inside a step."""

    streamed = False

    def __init__(self, images_NCHW: Tensor, device: torch.device) -> None:
        self.images_NCHW = images_NCHW.to(device)

    def __len__(self) -> int:
        return len(self.images_NCHW)

    def batches(self, order_SB: Tensor) -> Iterator[None]:
        """One step after another, when its images are at hand."""
        yield from [None] * len(order_SB)

    def batch(self, index_B: Tensor) -> Tensor:
        """The images of a step: of the last one that came from `batches`."""
        return self.images_NCHW[index_B]

    def parts(self, size: int) -> Iterator[Tensor]:
        """All images in their order."""
        yield from self.images_NCHW.split(size)


class Streamed(Resident):
    """In the host's memory: batches are copied to the device while those before are trained on."""

    streamed = True

    def __init__(self, images_NCHW: Tensor, device: torch.device) -> None:
        self.images_NCHW = images_NCHW
        self.device = device
        self.ways: dict[int, _Way] = {}
        self.now_BCHW: Tensor | None = None

    def batches(self, order_SB: Tensor) -> Iterator[None]:
        way = self._way(order_SB.shape[1])
        if self.now_BCHW is None:  # one tensor for all steps, so that a step can be captured
            self.now_BCHW = torch.empty_like(way.there[0])
        for images_BCHW in way.carry(self.images_NCHW, list(order_SB.cpu())):
            self.now_BCHW.copy_(images_BCHW)
            yield

    def batch(self, index_B: Tensor) -> Tensor:
        assert self.now_BCHW is not None
        return self.now_BCHW

    def parts(self, size: int) -> Iterator[Tensor]:
        N = len(self)
        slices = [slice(start, min(start + size, N)) for start in range(0, N, size)]
        yield from self._way(min(size, N)).carry(self.images_NCHW, slices)

    def _way(self, size: int) -> "_Way":
        if size not in self.ways:
            self.ways[size] = _Way((size, *self.images_NCHW.shape[1:]), self.device)
        return self.ways[size]


class _Way:
    """A few slots, each a tensor here and one on the device, used in turn."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.here = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=self.on_cuda) for _ in range(SLOTS)
        ]
        self.there = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.counts = [0] * SLOTS
        if self.on_cuda:
            self.stream = torch.cuda.Stream(device)
            self.sent = [torch.cuda.Event() for _ in range(SLOTS)]
            self.freed = [torch.cuda.Event() for _ in range(SLOTS)]

    def carry(self, images_NCHW: Tensor, places: Sequence[Tensor | slice]) -> Iterator[Tensor]:
        """The images at one place after another, each until the next is asked for."""
        if self.on_cuda:  # the slots may lie where something else was until now
            self.stream.wait_stream(torch.cuda.current_stream())
        for i in range(1 - SLOTS, len(places)):
            ahead = i + SLOTS - 1
            if ahead < len(places):
                self._send(ahead % SLOTS, images_NCHW, places[ahead])
            if i >= 0:
                yield self._receive(i % SLOTS)
                if self.on_cuda:
                    self.freed[i % SLOTS].record()

    def _send(self, k: int, images_NCHW: Tensor, place: Tensor | slice) -> None:
        """Pick images into slot k, and begin to copy them to the device."""
        if self.on_cuda:
            self.sent[k].synchronize()  # the slot's earlier images have left
        if isinstance(place, slice):
            self.counts[k] = place.stop - place.start
            self.here[k][: self.counts[k]].copy_(images_NCHW[place])
        else:
            self.counts[k] = len(place)
            torch.index_select(images_NCHW, 0, place, out=self.here[k])
        here, there = self.here[k][: self.counts[k]], self.there[k][: self.counts[k]]
        if not self.on_cuda:
            there.copy_(here)
            return
        with torch.cuda.stream(self.stream):
            self.freed[k].wait()
            there.copy_(here, non_blocking=True)
            self.sent[k].record()

    def _receive(self, k: int) -> Tensor:
        if self.on_cuda:
            self.sent[k].wait()
        return self.there[k][: self.counts[k]]


def place(
    images_NCHW: Tensor,
    device: torch.device,
    where: Literal["auto", "device", "host"] = "auto",
) -> Resident:
    """The images where they are to lie; "auto": on the device if they leave room for training."""
    if where == "auto":
        where = "device" if images_NCHW.nbytes <= room_for_images(device) else "host"
    return (Resident if where == "device" else Streamed)(images_NCHW, device)


def room_for_images(device: torch.device) -> float:
    """Bytes that images may take on a device; without limit where its memory is the host's."""
    if device.type != "cuda":
        return float("inf")
    return MOST_OF_THE_DEVICE * torch.cuda.mem_get_info(device)[0]
