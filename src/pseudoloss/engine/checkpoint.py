"""A checkpoint: everything a run needs to resume, in one pickle-free file that is replaced at once.

It holds the networks, the memory of their optimisers, the state of the method, the sum of the
predictions over the epochs, the audit of a head start, the description of the model and the record
of the run so far (epochs done, best epoch, time, notices, metrics). Two things are not in it
because they follow from the epoch: the learning rate, and the random streams (randomness.py).

A checkpoint in the middle of an epoch also holds the order of its images, the state of the random
streams and what the steps have added up (`Inside`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.engine.feed import Place
from pseudoloss.engine.optimisers import memory
from pseudoloss.engine.steps import Tally
from pseudoloss.engine.trainer import Inside, Trainer
from pseudoloss.errors import InputError, reason
from pseudoloss.files import from_safetensors, keep_as, write_safetensors
from pseudoloss.methods.base import tensors_of
from pseudoloss.runs import NETWORKS

INSIDE = "inside."  # the names of tensors that describe the middle of an epoch start with this


def checkpoint_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name: the ones that training changes, not copies."""
    found = {
        f"{NETWORKS}{role}.{name}": tensor
        for role, network in trainer.networks.items()
        for name, tensor in network.state_dict().items()
    }
    found |= {
        f"{kind}.{role}.{name}": tensor
        for role, optimiser in trainer.optimisers.items()
        for name, parameter in trainer.networks[role].named_parameters()
        for kind, tensor in memory(optimiser, parameter).items()
    }
    histories = {"train": trainer.history, "held-out": trainer.held_out_history}
    found |= {
        f"history.{part}.{name}": tensor
        for part, history in histories.items()
        if history is not None
        for name, tensor in history.tensors().items()
    }
    if trainer.first_audit is not None:
        found |= {f"audit.{name}": t for name, t in trainer.first_audit._asdict().items()}
    return found | {f"state.{name}": tensor for name, tensor in tensors_of(trainer.state).items()}


def inside_tensors(inside: Inside) -> dict[str, Tensor]:
    """The tensors that a checkpoint in the middle of an epoch has on top."""
    found = {"order_SB": inside.place.order_SB, "random": inside.place.random}
    found |= {f"tally.{name}": tensor for name, tensor in inside.tally._asdict().items()}
    found |= {f"layers.{device}": state for device, state in inside.layers.items()}
    return {INSIDE + name: tensor for name, tensor in found.items()}


def inside_record(inside: Inside, seconds: float) -> dict[str, Any]:
    """... and its numbers; `seconds`: that the steps of the epoch took."""
    return {
        "entry": inside.entry,
        "done": inside.done,
        "step": inside.place.step,
        "seconds": seconds,
    }


def _read_inside(saved: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Inside:
    tensors = {n.removeprefix(INSIDE): t for n, t in saved.items() if n.startswith(INSIDE)}
    tally = Tally(**{name: tensors[f"tally.{name}"] for name in Tally._fields})
    place = Place(int(numbers["step"]), tensors["order_SB"], tensors["random"])
    layers = {
        name.removeprefix("layers."): state
        for name, state in tensors.items()
        if name.startswith("layers.")
    }
    return Inside(int(numbers["entry"]), int(numbers["done"]), place, tally, layers)


def spread_inside(trainer: Trainer, numbers: Mapping[str, Any] | None) -> None:
    """With several processes, the first one has read a checkpoint: where in an epoch it is."""
    if numbers is None:
        return
    tensors = {} if trainer.inside is None else inside_tensors(trainer.inside)
    kinds = {name: [list(t.shape), str(t.dtype)[6:]] for name, t in tensors.items()}
    for name, (shape, dtype) in distributed.from_main(kinds).items():
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    distributed.spread(tensors.values())
    trainer.inside = _read_inside(tensors, numbers)


def save(path: Path, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """Write a checkpoint. The one before is kept as `previous_of(path)`."""
    if path.exists():
        keep_as(path, previous_of(path))
    write_safetensors(path, tensors, record)


def previous_of(path: Path) -> Path:
    return path.with_name(f"previous{path.suffix}")


@torch.no_grad()
def restore(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put a checkpoint back in place, tensor by tensor, and return its record."""
    try:
        saved, record = from_safetensors(path)
        if not isinstance(record, dict) or "epochs" not in record:
            raise ValueError("its record is not as expected")
        numbers = record.get("inside")
        inside = None if numbers is None else _read_inside(saved, numbers)
        saved = {n: tensor for n, tensor in saved.items() if not n.startswith(INSIDE)}
        current = checkpoint_tensors(trainer)
        if current.keys() != saved.keys():
            raise ValueError(f"it has other tensors: {sorted(current.keys() ^ saved.keys())[:3]}")
        for name, tensor in current.items():
            if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
                raise ValueError(f"{name} has another shape or type")
        for name, tensor in current.items():
            tensor.copy_(saved[name])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = reason(error)
        raise InputError(f"{path}: not a checkpoint of this run ({why})") from None
    trainer.inside = inside
    return record
