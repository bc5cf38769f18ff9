"""Write an epoch to disk while the next one trains.

A snapshot is taken between two epochs, and one thread serialises and writes it. At most one epoch
is pending. The thread uses host memory and files and never the device, where a step may be being
captured.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor


class Writer:
    """One thread that writes. Leaving its `with` block waits for it.

    An error of the thread is raised when the next epoch is handed over, or on leaving. There it
    replaces any other error, whose message may refer to a checkpoint that was not written.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._pending: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        finally:  # also if Ctrl-C interrupts the waiting
            self._thread.shutdown()

    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, complete on return. They reuse the memory of the snapshot before,
        which must have been written."""
        self.wait()
        on_gpu = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                # pinned memory: copies do not wait for each other
                self._copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in set(on_gpu):
            torch.cuda.current_stream(device).synchronize()
        return {name: self._copies[name] for name in tensors}

    def start(self, write: Callable[[], None]) -> None:
        """Let the thread write, after it has finished the write before."""
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Return when nothing is pending; raise the error of a failed write."""
        pending = self._pending
        if pending is not None:
            pending.result()
            self._pending = None
