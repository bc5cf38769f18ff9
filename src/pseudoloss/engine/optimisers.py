"""Optimisers whose learning rate and memory are tensors that exist from the start, so that a
captured step and a checkpoint find them."""

import torch
from torch import Tensor

from pseudoloss.config import Settings
from pseudoloss.engine.muon import Muon
from pseudoloss.nn.networks import Network

ADAM_MEMORY = {"exp_avg": "momentum", "exp_avg_sq": "second_moment", "step": "updates"}
SGD_MEMORY = {"momentum_buffer": "momentum"}


def build_optimiser(network: Network, settings: Settings, lr: Tensor) -> torch.optim.Optimizer:
    """The optimiser of the settings.

    A head whose first gradient comes after the warm-up needs its memory too: zeros make the same
    first step as none.
    """
    fused = lr.device.type != "mps"
    parameters, decay = list(network.parameters()), settings.weight_decay
    if settings.optimiser == "adam":
        adam = torch.optim.Adam(
            parameters, lr=lr, betas=(settings.momentum, 0.999), weight_decay=decay, fused=fused
        )
        for parameter in parameters:
            adam.state[parameter]["step"] = torch.zeros((), device=lr.device)
            for name in ("exp_avg", "exp_avg_sq"):
                adam.state[parameter][name] = torch.zeros_like(parameter)
        return adam
    if settings.optimiser == "muon":
        return Muon(parameters, lr, settings.momentum, decay, fused)
    sgd = torch.optim.SGD(
        parameters,
        lr=lr,
        momentum=settings.momentum,
        weight_decay=decay,
        nesterov=settings.optimiser == "nesterov",
        fused=fused,
    )
    for parameter in parameters:
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def memory(optimiser: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What an optimiser remembers of a parameter, by the name in a checkpoint."""
    names = ADAM_MEMORY if isinstance(optimiser, torch.optim.Adam) else SGD_MEMORY
    return {name: optimiser.state[parameter][own] for own, name in names.items()}


def reset(optimiser: torch.optim.Optimizer) -> None:
    """Forget all of it."""
    for values in optimiser.state.values():
        for tensor in values.values():
            tensor.zero_()
