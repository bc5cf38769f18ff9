"""A checkpoint: everything a run needs to go on, in one pickle-free file that is replaced at once.

It holds the network, the momentum, the memory and the record of the run so far (epochs done, best
epoch, time, notices). Two things need no place in it. The schedule is a function of the epoch.
And the random streams of an epoch are a function of the seed and the epoch (`trainer.stream_seed`),
so an epoch that was broken off begins again with the very same numbers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.methods.memory import Memory
from pseudoloss.nn.networks import Network


def tensors_of(network: Network, optimiser: torch.optim.SGD, memory: Memory) -> dict[str, Tensor]:
    """All that goes into a checkpoint, by name: the tensors themselves, which training changes."""
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    tensors |= {
        f"momentum.{name}": buffer for name, buffer in _momentum(network, optimiser).items()
    }
    tensors |= {f"memory.{name}": tensor for name, tensor in memory.tensors().items()}
    return tensors


def weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the network among them, under its own names."""
    return _part(tensors, "network.")


def save(path: Path, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """Write a checkpoint in the place of the one before."""
    write_safetensors(path, tensors, record)


def restore(
    path: Path, network: Network, optimiser: torch.optim.SGD, memory: Memory
) -> dict[str, Any]:
    """Put a checkpoint back in place, tensor by tensor, and return its record."""
    try:
        tensors, record = from_safetensors(path)
        _fill(network.state_dict(), weights(tensors))
        _fill(_momentum(network, optimiser), _part(tensors, "momentum."))
        _fill(memory.tensors(), _part(tensors, "memory."))
        return dict(record)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: not a checkpoint of this run ({error})") from None


def _momentum(network: Network, optimiser: torch.optim.SGD) -> dict[str, Tensor]:
    return {
        name: optimiser.state[parameter]["momentum_buffer"]
        for name, parameter in network.named_parameters()
    }


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


@torch.no_grad()
def _fill(into: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    if into.keys() != saved.keys():
        raise ValueError(f"it holds other tensors: {sorted(into.keys() ^ saved.keys())[:3]}")
    for name, tensor in into.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(f"{name} has another shape")
        tensor.copy_(saved[name])
