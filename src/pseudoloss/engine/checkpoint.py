"""A checkpoint: everything a run needs to resume, in one pickle-free file that is replaced at once.

It holds the networks, their momentum, the state of the method and the record of the run so far
(epochs done, best epoch, time, notices). Two things are not in it because they follow from the
epoch: the learning rate, and the random streams (randomness.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.methods.base import tensors_of


def checkpoint_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name: the ones that training changes, not copies."""
    found = {
        f"networks.{role}.{name}": tensor
        for role, network in trainer.networks.items()
        for name, tensor in network.state_dict().items()
    }
    found |= {
        f"momentum.{role}.{name}": optimiser.state[parameter]["momentum_buffer"]
        for role, optimiser in trainer.optimisers.items()
        for name, parameter in trainer.networks[role].named_parameters()
    }
    return found | {f"state.{name}": tensor for name, tensor in tensors_of(trainer.state).items()}


def model_weights(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model among the tensors of a checkpoint, under the model's own names."""
    roles = trainer.method.predicts
    if len(roles) == 1:
        return _below(tensors, f"networks.{roles[0]}.")
    return {
        f"{i}.{name}": tensor
        for i, role in enumerate(roles)
        for name, tensor in _below(tensors, f"networks.{role}.").items()
    }


def save(path: Path, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """Write a checkpoint in the place of the one before."""
    write_safetensors(path, tensors, record)


@torch.no_grad()
def restore(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a checkpoint back in place, tensor by tensor, and return its record."""
    try:
        saved, record = from_safetensors(path)
        current = checkpoint_tensors(trainer)
        if current.keys() != saved.keys():
            raise ValueError(f"it has other tensors: {sorted(current.keys() ^ saved.keys())[:3]}")
        for name, tensor in current.items():
            if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
                raise ValueError(f"{name} has another shape or type")
        for name, tensor in current.items():
            tensor.copy_(saved[name])
        return dict(record)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: not a checkpoint of this run ({error})") from None


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
