"""A checkpoint: everything a run needs to resume, in one pickle-free file that is replaced at once.

It holds the networks, their momentum, the state of the method, the sum of the predictions over the
epochs, the description of the model and the record of the run so far (epochs done, best epoch,
time, notices). Two things are not in it because they follow from the
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
from pseudoloss.runs import NETWORKS


def checkpoint_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name: the ones that training changes, not copies."""
    found = {
        f"{NETWORKS}{role}.{name}": tensor
        for role, network in trainer.networks.items()
        for name, tensor in network.state_dict().items()
    }
    found |= {
        f"momentum.{role}.{name}": optimiser.state[parameter]["momentum_buffer"]
        for role, optimiser in trainer.optimisers.items()
        for name, parameter in trainer.networks[role].named_parameters()
    }
    histories = {"train": trainer.history, "held-out": trainer.held_out_history}
    found |= {
        f"history.{part}.{name}": tensor
        for part, history in histories.items()
        if history is not None
        for name, tensor in history.tensors().items()
    }
    return found | {f"state.{name}": tensor for name, tensor in tensors_of(trainer.state).items()}


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
