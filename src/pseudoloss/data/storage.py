"""Where the images of a set lie while it is trained on: on the device, in the host's memory, or in
their files.

Shapes: N images, B of them at a time.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pseudoloss.data.decoding import UnreadableError
from pseudoloss.data.images import ImageFiles
from pseudoloss.errors import TrainingError

ALL = slice(None)
MOST_WORKERS = 16  # processes that decode, for one set
SLOTS = 3  # batches on their way to the device
MOST_OF_THE_DEVICE = 0.4  # share of its free memory that images may take; the rest is for training


class ImageParts(Protocol):
    """Images to look at, in their order."""

    def parts(self, size: int) -> Iterator[Tensor]: ...


class DeviceImages:
    """All on the device: a batch is picked there, inside a step."""

    streamed = False
    lost: frozenset[int] = frozenset()  # images whose files could not be read any more

    def __init__(self, images_NCHW: Tensor, device: torch.device) -> None:
        self.images_NCHW = images_NCHW.to(device)

    def __len__(self) -> int:
        return len(self.images_NCHW)

    def batches(self, order_SB: Tensor) -> Iterator[None]:
        """One step after another, when its images are at hand."""
        yield from [None] * len(order_SB)

    def batch(self, index_B: Tensor, rows: slice = ALL) -> Tensor:
        """Images of a step, the last one that came from `batches`: some of its rows."""
        return self.images_NCHW[index_B[rows]]

    def parts(self, size: int) -> Iterator[Tensor]:
        """All images in their order."""
        yield from self.images_NCHW.split(size)


class HostImages(DeviceImages):
    """In the host's memory: batches are copied to the device while those before are trained on."""

    streamed = True

    def __init__(self, images_NCHW: Tensor, device: torch.device) -> None:
        self.images_NCHW = images_NCHW
        self.device = device
        self.ways: dict[int, PinnedRing] = {}
        self.now_BCHW: Tensor | None = None

    def batches(self, order_SB: Tensor) -> Iterator[None]:
        way = self._way(order_SB.shape[1])
        if self.now_BCHW is None:  # one tensor for all steps, so that a step can be captured
            self.now_BCHW = torch.empty_like(way.there[0])
        for images_BCHW in self._carried(way, list(order_SB.cpu())):
            self.now_BCHW.copy_(images_BCHW)
            yield

    def batch(self, index_B: Tensor, rows: slice = ALL) -> Tensor:
        assert self.now_BCHW is not None
        return self.now_BCHW[rows]

    def parts(self, size: int) -> Iterator[Tensor]:
        N = len(self)
        slices = [slice(start, min(start + size, N)) for start in range(0, N, size)]
        yield from self._carried(self._way(min(size, N)), slices)

    def _carried(self, way: "PinnedRing", places: Sequence[Tensor | slice]) -> Iterator[Tensor]:
        return way.carry(self.images_NCHW, places)

    def _way(self, size: int) -> "PinnedRing":
        if size not in self.ways:
            self.ways[size] = PinnedRing((size, *self.images_NCHW.shape[1:]), self.device)
        return self.ways[size]


class FileImages(HostImages):
    """In their files: worker processes decode batches ahead, and the copies go as in `HostImages`.

    A file that cannot be read any more (all were, when the run began) gives a black image; `lost`
    has its index.
    """

    def __init__(self, images: ImageFiles, device: torch.device) -> None:
        super().__init__(torch.empty(0, *images.shape[1:], dtype=torch.uint8), device)
        self.images = images
        self.places: list[list[int]] = []  # the loader goes through these, whatever they are then
        self.loader: DataLoader[Any] = DataLoader(
            _Files(images),
            batch_sampler=_Places(self.places),
            num_workers=min(max(1, cores() - 1), MOST_WORKERS),
            collate_fn=_together,
            pin_memory=device.type == "cuda",
            prefetch_factor=2,
            persistent_workers=True,
            worker_init_fn=_hush,
        )

    def __len__(self) -> int:
        return len(self.images)

    def _carried(self, way: "PinnedRing", places: Sequence[Tensor | slice]) -> Iterator[Tensor]:
        self.places[:] = [
            list(range(place.start, place.stop)) if isinstance(place, slice) else place.tolist()
            for place in places
        ]
        return way.forward(self._decoded())

    def _decoded(self) -> Iterator[Tensor]:
        try:
            for images_BCHW, lost in self.loader:
                self.lost |= set(lost)
                yield images_BCHW
        except RuntimeError as error:  # so a loader says that the system has killed a worker
            reason = str(error).partition("\n")[0]
            raise TrainingError(
                f"decoding images failed ({reason}); --resume goes on from the last checkpoint"
            ) from None


class ConcatImages:
    """Several sets, one after another, to look at."""

    def __init__(self, *sets: ImageParts) -> None:
        self.sets = sets

    def parts(self, size: int) -> Iterator[Tensor]:
        for pixels in self.sets:
            yield from pixels.parts(size)


def _hush(worker: int) -> None:
    """What PIL has to say about odd files was passed over when they were read first."""
    warnings.simplefilter("ignore")


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Places:
    """The sampler of a loader whose workers stay: what is to come next, filled from outside."""

    def __init__(self, places: list[list[int]]) -> None:
        self.places = places

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.places

    def __len__(self) -> int:
        return len(self.places)


class _Files(Dataset[tuple[Tensor, int | None]]):
    """In a worker: one image, and its index if it could not be read."""

    def __init__(self, images: ImageFiles) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int | None]:
        try:
            return torch.from_numpy(self.images.reader.read(self.images.paths[i])), None
        except UnreadableError:
            return torch.zeros(self.images.shape[1:], dtype=torch.uint8), i


def _together(items: list[tuple[Tensor, int | None]]) -> tuple[Tensor, list[int]]:
    return torch.stack([image for image, _ in items]), [i for _, i in items if i is not None]


class PinnedRing:
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

    def forward(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Batches that come from elsewhere, each until the next is asked for."""
        if not self.on_cuda:
            yield from batches
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        waiting: list[tuple[int, Tensor]] = []  # their pinned memory must stay until they are sent
        k = 0
        for here in batches:
            there = self.there[k][: len(here)]
            with torch.cuda.stream(self.stream):
                self.freed[k].wait()
                there.copy_(here, non_blocking=True)
                self.sent[k].record()
            self.counts[k] = len(here)
            waiting.append((k, here))
            k = (k + 1) % SLOTS
            if len(waiting) == SLOTS:
                yield from self._next(waiting)
        while waiting:
            yield from self._next(waiting)

    def _next(self, waiting: list[tuple[int, Tensor]]) -> Iterator[Tensor]:
        k, _ = waiting[0]
        yield self._receive(k)
        self.freed[k].record()
        waiting.pop(0)

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
    images_NCHW: Tensor | ImageFiles,
    device: torch.device,
    where: Literal["auto", "device", "host", "files"] = "auto",
) -> DeviceImages:
    """The images where they are to lie; "auto": on the device if they leave room for training."""
    if isinstance(images_NCHW, ImageFiles):
        return FileImages(images_NCHW, device)
    where = choose_place(images_NCHW.nbytes, device, where)
    return (DeviceImages if where == "device" else HostImages)(images_NCHW, device)


def choose_place(
    nbytes: int, device: torch.device, where: Literal["auto", "device", "host", "files"]
) -> Literal["device", "host"]:
    """Where images of so many bytes lie."""
    if where in ("device", "host"):
        return where
    return "device" if nbytes <= room_for_images(device) else "host"


def room_for_images(device: torch.device) -> float:
    """Bytes that images may take on a device; without limit where its memory is the host's."""
    if device.type != "cuda":
        return float("inf")
    return MOST_OF_THE_DEVICE * torch.cuda.mem_get_info(device)[0]
