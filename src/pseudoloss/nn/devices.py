"""Devices and the precision of computation on them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from pseudoloss.errors import InputError


def choose_device(name: str) -> torch.device:
    """The device with this name; "auto" is the first of CUDA, MPS and CPU that is available."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name}: must be auto, cpu, cuda, cuda:N or mps") from None
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type, 0)
    if (device.index or 0) >= available:
        raise InputError(f"--device {name}: there is no such device on this machine")
    return device


def reset_peak_memory(device: torch.device) -> None:
    """`peak_memory` counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes of the device that tensors took at a time; None if it does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """The data type with this name; "auto" is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "float32": torch.float32}[name]


def can_fuse(device: torch.device) -> bool:
    """Whether the fused kernels run on a CUDA device: they need Triton, an NVIDIA GPU with bfloat16
    and cuDNN."""
    if find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and torch.backends.cudnn.enabled


def using(device: torch.device) -> AbstractContextManager[Any]:
    """Make this GPU the current one, for streams, graphs and kernels. Does nothing for others."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute on the CPU with this many threads.

    Operations of less than a millisecond are better done by one: where the cores are shared with
    other programs, several threads wait for each other longer than they work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """How the device is called in messages and results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU ({threads} thread{'s' if threads > 1 else ''})"
    return device.type
