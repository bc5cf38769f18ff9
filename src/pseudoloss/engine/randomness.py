"""Random numbers: one seed, many streams.

Every stream is a function of the seed of the run and of the epoch, so an epoch that was interrupted
starts again with the same numbers, and no stream depends on how many numbers another one has used.
Within an epoch, a checkpoint holds the state of its streams.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch


def stream_seed(seed: int, stream: str, epoch: int = 0) -> int:
    """The seed of one stream."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(stream.encode()), epoch])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def generator(device: torch.device, seed: int, stream: str, epoch: int = 0) -> torch.Generator:
    """A generator for one stream, on a device."""
    return torch.Generator(device).manual_seed(stream_seed(seed, stream, epoch))


def layer_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random numbers inside networks (dropout in timm's), by device."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_layer_states(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def isolated_torch() -> Iterator[None]:
    """Restore torch's global random state and settings afterwards."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    benchmark, tf32 = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark = True  # shapes are fixed, so searching for algorithms pays
    cudnn.allow_tf32 = False  # float32 means float32
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
        torch.set_num_threads(threads)
