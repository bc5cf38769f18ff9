"""Writing an epoch down while the next one trains.

A snapshot is taken between two epochs, and one thread serialises and writes it. At most one epoch
is in the air. The thread touches host memory and files, and never the device: a step that is being
captured there would not bear it.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor


class Writer:
    """One thread that writes. Leaving its `with` waits for it, whatever the reason for leaving.

    An error of the thread is raised where the next epoch is handed over, or on leaving: there it
    takes the place of any other error, which may be speaking of a checkpoint that is not there.
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
        finally:  # also where Ctrl-C breaks the waiting off
            self._thread.shutdown()

    def snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, complete on return. They lie where those of the snapshot before
        did, so that one must be written first."""
        self.wait()
        on_gpu = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        for name, tensor in tensors.items():
            if name not in self._copies:  # only pinned memory is copied to without a stop each
                self._copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in set(on_gpu):
            torch.cuda.current_stream(device).synchronize()
        return {name: self._copies[name] for name in tensors}

    def start(self, write: Callable[[], None]) -> None:
        """Let the thread do the writing, once it has done the one before."""
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Return when nothing is in the air; raise what went wrong in it."""
        pending = self._pending
        if pending is not None:
            pending.result()
            self._pending = None
