"""Where images are stored during training: on the device, in host memory, or in their files.

Shapes: N images, B in a batch, S steps.
"""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pseudoloss import distributed
from pseudoloss.data.decoding import UnreadableError
from pseudoloss.data.images import ImageFiles
from pseudoloss.errors import TrainingError, first_line
from pseudoloss.interrupts import SIGNALS

ALL = slice(None)
MAX_WORKERS = 16  # decoding processes for one image set
SLOTS = 3  # batches that are being copied to the device
MAX_DEVICE_SHARE = 0.4  # of the free device memory, for images; the rest is for training


class ImageParts(Protocol):
    """Images that can be iterated in order, in chunks of a given size."""

    def parts(self, size: int) -> Iterator[Tensor]: ...


class Chunk(NamedTuple):
    """Images of a pass over all images. If several processes share the pass, they are the share of
    this process, and `whole` makes results for them those of the whole chunk."""

    rows: slice  # of `images_BCHW`, among all images
    images_BCHW: Tensor
    whole: Callable[[Tensor], Tensor]


def chunks(images: "DeviceImages | ImageParts", size: int) -> Iterator[Chunk]:
    """All images in order, in chunks of `size` for each process."""
    if not isinstance(images, DeviceImages) or not images.shared:
        start = 0
        for images_BCHW in images.parts(size):
            rows = slice(start, start + len(images_BCHW))
            start = rows.stop
            yield Chunk(rows, images_BCHW, lambda found: found)
        return
    counts = [rows.stop - rows.start for rows in images.slices(size * distributed.size())]
    for rows, count, images_BCHW in zip(
        images.shares(size), counts, images.parts(size), strict=True
    ):
        yield Chunk(rows, images_BCHW, partial(distributed.whole, rows=count))


class DeviceImages:
    """All images on the device. A batch is selected there, as part of the step.

    If they are `shared`, the processes of a run take a share of each pass over them, and the share
    of each batch that has to be copied or decoded.
    """

    streamed = False
    shared = False
    lost: frozenset[int] = frozenset()  # images whose files can no longer be read

    def __init__(self, images_NCHW: Tensor, device: torch.device) -> None:
        self.images_NCHW = images_NCHW.to(device)

    def __len__(self) -> int:
        return len(self.images_NCHW)

    def batches(self, order_SB: Tensor) -> Iterator[None]:
        """Iterate over the steps of an epoch; yields when the images of the step are ready."""
        yield from [None] * len(order_SB)

    def batch(self, index_B: Tensor, rows: slice = ALL) -> Tensor:
        """The images of the current step of `batches`: all of them, or some rows."""
        return self.images_NCHW[index_B[rows]]

    def slices(self, size: int) -> list[slice]:
        N = len(self)
        return [slice(start, min(start + size, N)) for start in range(0, N, size)]

    def shares(self, size: int) -> list[slice]:
        """The rows of each chunk of `parts`."""
        if not self.shared:
            return self.slices(size)
        found = []
        for rows in self.slices(size * distributed.size()):
            part = distributed.share(rows.stop - rows.start)
            found.append(slice(rows.start + part.start, rows.start + part.stop))
        return found

    def parts(self, size: int) -> Iterator[Tensor]:
        """All images in order, in chunks of `size`; if shared, the share of this process."""
        yield from (self.images_NCHW[rows] for rows in self.shares(size))


class HostImages(DeviceImages):
    """Images in host memory. Batches are copied to the device while the device trains on earlier
    ones."""

    streamed = True

    def __init__(self, images_NCHW: Tensor, device: torch.device) -> None:
        self.images_NCHW = images_NCHW
        self.device = device
        self.rings: dict[int, PinnedRing] = {}
        self.current: dict[int, Tensor] = {}  # the batch of a step, by batch size

    def batches(self, order_SB: Tensor) -> Iterator[None]:
        size = order_SB.shape[1]
        own = distributed.own(size) if self.shared else ALL
        order_SB = order_SB[:, own]
        ring = self._ring(order_SB.shape[1])
        if size not in self.current:  # one tensor for all steps, so that a step can be captured
            self.current[size] = ring.on_device[0].new_empty((size, *self.shape))
        for images_BCHW in self._copied(ring, list(order_SB.cpu())):
            gathered = distributed.gather(images_BCHW) if self.shared else images_BCHW
            self.current[size].copy_(gathered)
            yield

    def batch(self, index_B: Tensor, rows: slice = ALL) -> Tensor:
        return self.current[len(index_B)][rows]

    def parts(self, size: int) -> Iterator[Tensor]:
        yield from self._copied(self._ring(min(size, len(self))), self.shares(size))

    def _copied(self, ring: "PinnedRing", indices: Sequence[Tensor | slice]) -> Iterator[Tensor]:
        """The images of one index after another, on the device."""
        return ring.copy_selected(self.images_NCHW, indices)

    def _ring(self, size: int) -> "PinnedRing":
        if size not in self.rings:
            self.rings[size] = PinnedRing((size, *self.shape), self.device)
        return self.rings[size]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return tuple(self.images_NCHW.shape[1:])


class FileImages(HostImages):
    """Images in their files. Worker processes decode batches ahead, which are then copied as in
    `HostImages`.

    All files could be read when the run began. One that can no longer be read gives a black image,
    and its index is added to `lost`.
    """

    def __init__(self, images: ImageFiles, device: torch.device) -> None:
        super().__init__(torch.empty(0, *images.shape[1:], dtype=torch.uint8), device)
        self.images = images
        self.indices: list[list[int]] = []  # of the batches that the loader loads next
        self.loader: DataLoader[Any] = DataLoader(
            _Files(images),
            batch_sampler=_BatchIndices(self.indices),
            num_workers=min(max(1, cores() // distributed.processes_here() - 1), MAX_WORKERS),
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            prefetch_factor=2,
            persistent_workers=True,
            worker_init_fn=_prepare_worker,
        )

    def __len__(self) -> int:
        return len(self.images)

    def _copied(self, ring: "PinnedRing", indices: Sequence[Tensor | slice]) -> Iterator[Tensor]:
        self.indices[:] = [
            list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()
            for index in indices
        ]
        return ring.copy_batches(self._decoded())

    def _decoded(self) -> Iterator[Tensor]:
        try:
            for images_BCHW, lost in self.loader:
                self.lost |= set(lost)
                yield images_BCHW
        except RuntimeError as error:  # raised when the system has killed a worker
            raise TrainingError(
                f"decoding images failed ({first_line(error)}); "
                "--resume continues from the last checkpoint"
            ) from None


def _prepare_worker(worker: int) -> None:
    """PIL's warnings about unusual files were hidden when the files were first read, too. A signal
    to the whole job is for the process that trains, which still needs the next batches."""
    warnings.simplefilter("ignore")
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def cores() -> int:
    """The number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _BatchIndices:
    """A batch sampler for persistent workers: a list that is refilled from outside."""

    def __init__(self, indices: list[list[int]]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.indices

    def __len__(self) -> int:
        return len(self.indices)


class _Files(Dataset[tuple[Tensor, int | None]]):
    """Used by the workers: one image, and its index if it cannot be read."""

    def __init__(self, images: ImageFiles) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int | None]:
        try:
            return torch.from_numpy(self.images.reader.read(self.images.paths[i])), None
        except UnreadableError:
            return torch.zeros(self.images.shape[1:], dtype=torch.uint8), i


def _collate(items: list[tuple[Tensor, int | None]]) -> tuple[Tensor, list[int]]:
    return torch.stack([image for image, _ in items]), [i for _, i in items if i is not None]


class PinnedRing:
    """A few slots that are used in turn. Each has a tensor in pinned host memory and one on the
    device."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.on_host = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=self.on_cuda) for _ in range(SLOTS)
        ]
        self.on_device = [
            torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(SLOTS)
        ]
        self.counts = [0] * SLOTS
        if self.on_cuda:
            self.stream = torch.cuda.Stream(device)
            self.sent = [torch.cuda.Event() for _ in range(SLOTS)]
            self.freed = [torch.cuda.Event() for _ in range(SLOTS)]

    def copy_selected(
        self, images_NCHW: Tensor, indices: Sequence[Tensor | slice]
    ) -> Iterator[Tensor]:
        """The images of one index after another. A batch is valid until the next is requested."""
        if self.on_cuda:  # earlier work may still use the memory that the slots got
            self.stream.wait_stream(torch.cuda.current_stream())
        for i in range(1 - SLOTS, len(indices)):
            ahead = i + SLOTS - 1
            if ahead < len(indices):
                self._send(ahead % SLOTS, images_NCHW, indices[ahead])
            if i >= 0:
                yield self._receive(i % SLOTS)
                if self.on_cuda:
                    self.freed[i % SLOTS].record()

    def copy_batches(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Batches that are ready on the host. Each is valid until the next is requested."""
        if not self.on_cuda:
            yield from batches
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        waiting: list[tuple[int, Tensor]] = []  # keeps the pinned memory until it has been copied
        k = 0
        for batch in batches:
            with torch.cuda.stream(self.stream):
                self.freed[k].wait()
                self.on_device[k][: len(batch)].copy_(batch, non_blocking=True)
                self.sent[k].record()
            self.counts[k] = len(batch)
            waiting.append((k, batch))
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

    def _send(self, k: int, images_NCHW: Tensor, index: Tensor | slice) -> None:
        """Select images into slot k and start to copy them to the device."""
        if self.on_cuda:
            self.sent[k].synchronize()  # the earlier images of the slot have been copied
        if isinstance(index, slice):
            self.counts[k] = index.stop - index.start
            self.on_host[k][: self.counts[k]].copy_(images_NCHW[index])
        else:
            self.counts[k] = len(index)
            torch.index_select(images_NCHW, 0, index, out=self.on_host[k])
        source, target = self.on_host[k][: self.counts[k]], self.on_device[k][: self.counts[k]]
        if not self.on_cuda:
            target.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            self.freed[k].wait()
            target.copy_(source, non_blocking=True)
            self.sent[k].record()

    def _receive(self, k: int) -> Tensor:
        if self.on_cuda:
            self.sent[k].wait()
        return self.on_device[k][: self.counts[k]]


def place(
    images_NCHW: Tensor | ImageFiles,
    device: torch.device,
    where: Literal["auto", "device", "host", "files"] = "auto",
) -> DeviceImages:
    """Store images as asked; "auto": on the device if that leaves enough memory for training."""
    if isinstance(images_NCHW, ImageFiles):
        return FileImages(images_NCHW, device)
    where = choose_place(images_NCHW.nbytes, device, where)
    return (DeviceImages if where == "device" else HostImages)(images_NCHW, device)


def choose_place(
    nbytes: int, device: torch.device, where: Literal["auto", "device", "host", "files"]
) -> Literal["device", "host"]:
    """Where images of this many bytes are stored."""
    if where in ("device", "host"):
        return where
    return "device" if nbytes <= room_for_images(device) else "host"


def room_for_images(device: torch.device) -> float:
    """The bytes that images may take on a device; no limit on the CPU."""
    if device.type != "cuda":
        return float("inf")
    return MAX_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
